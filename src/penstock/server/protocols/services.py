"""The services that endpoints get: pipeline, residency, stores, records."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.server.http.sessions import Sessions
from penstock.server.pipeline.services import PipelineServices

if TYPE_CHECKING:
    from penstock.memory.clients.requests import RequestPool
    from penstock.memory.governor import Governor
    from penstock.server.http.connections import Connections
    from penstock.server.observe.records import Records
    from penstock.server.protocols.openai.responses import Responses


@dataclass(slots=True, kw_only=True)
class Services(PipelineServices):
    """The pipeline's, and what operators and stored responses need; made once, at start."""

    admin_requests: RequestPool  # memory of their own for the operators' requests
    connections: Connections
    governor: Governor
    responses: Responses
    sessions: Sessions = field(default_factory=Sessions)  # of browsers that have signed in
    records: Records
    url: str = ""  # where this server listens, once it does
    rereading: asyncio.Lock = field(default_factory=asyncio.Lock)  # held while settings are read
