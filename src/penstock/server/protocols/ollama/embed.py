"""Ollama's `/api/embed`, and the older `/api/embeddings`. Texts that are too long are cut unless
the client says otherwise, and a request without any only has the model loaded.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from penstock.catalog.encoders import EMBED
from penstock.errors import BadRequest
from penstock.server.fields.generation import Name  # noqa: TC001 - msgspec reads it
from penstock.server.fields.whole_numbers import Positive, WholeNumbers
from penstock.server.http.long_json import send_json_pieces
from penstock.server.pipeline.answers import read_request
from penstock.server.pipeline.encoding.run import EncodeJob, EncodeRun
from penstock.server.pipeline.encoding.texts import MAX_TEXTS
from penstock.server.protocols.encoders.asked import AskedModel, asked_model, reading
from penstock.server.protocols.encoders.embeddings import encoded
from penstock.server.protocols.encoders.vectors import json_numbers, json_vectors, vector_bytes
from penstock.server.protocols.ollama.fields import duration_s

if TYPE_CHECKING:
    from penstock.server.http.exchange import Exchange
    from penstock.server.protocols.services import Services

_Texts = str | Annotated[list[str], Meta(max_length=MAX_TEXTS)]


class _Fields(WholeNumbers, kw_only=True):
    """What both routes have. Of `options` nothing changes a vector."""

    model: Name = ""
    keep_alive: str | float | None = None
    options: dict[str, Any] | None = None

    @property
    def texts(self) -> list[str]:
        """What is to be encoded."""
        raise NotImplementedError

    truncate: bool | None = None
    dimensions: Positive | None = None

    def keep_alive_s(self) -> float | None:
        """How long the model is to stay; None: as the server has it."""
        return None if self.keep_alive is None else duration_s(self.keep_alive, "keep_alive")


class EmbedFields(_Fields, kw_only=True):
    """The body of `/api/embed`."""

    input: _Texts = ""

    @property
    def texts(self) -> list[str]:
        """The inputs; none where there is only an empty one."""
        given = [self.input] if isinstance(self.input, str) else self.input
        return [] if given == [""] else given


class OldEmbedFields(_Fields, kw_only=True):
    """The body of `/api/embeddings`."""

    prompt: str = ""

    @property
    def texts(self) -> list[str]:
        """The one text."""
        return [self.prompt] if self.prompt else []


_embed_decoder = msgspec.json.Decoder(EmbedFields)
_old_decoder = msgspec.json.Decoder(OldEmbedFields)


async def embed(exchange: Exchange, services: Services) -> None:
    """`/api/embed`."""
    started = time.monotonic()
    run, name, pieces = await _run(exchange, services, _embed_decoder)
    tokens, load_s = (0, 0.0) if run is None else (run.usage.prompt_tokens, run.load_s)
    ending = {
        "total_duration": round((time.monotonic() - started) * 1e9),
        "load_duration": round(load_s * 1e9),
        "prompt_eval_count": tokens,
    }
    parts = [b'{"model":', msgspec.json.encode(name), b',"embeddings":[', *pieces, b"],"]
    await send_json_pieces(exchange, [*parts, msgspec.json.encode(ending)[1:]])


async def old_embeddings(exchange: Exchange, services: Services) -> None:
    """`/api/embeddings`."""
    _, _, pieces = await _run(exchange, services, _old_decoder)
    await send_json_pieces(exchange, [b'{"embedding":', *(pieces or [b"[]"]), b"}"])


async def _run(
    exchange: Exchange, services: Services, decoder: msgspec.json.Decoder[Any]
) -> tuple[EncodeRun | None, str, list[bytes]]:
    """The request as it went, the model's name, and the vectors as JSON."""
    fields, (model, job) = await read_request(
        exchange, decoder, lambda fields: _prepare(exchange, fields, services)
    )
    keep_s = fields.keep_alive_s()
    try:
        if job is None:
            await exchange.while_connected(services.residency.load(model.card.name))
            return None, fields.model, []
        run = EncodeRun(exchange, services, job)
        with run.observed():
            vectors = await exchange.while_connected(run.run())
            pieces = await json_vectors(vectors, partial(_item))
        return run, fields.model, pieces
    finally:
        services.keep_alive(model.card, keep_s)


def _item(_: int, vector: bytes) -> bytes:
    return json_numbers(vector)


async def _prepare(
    exchange: Exchange, fields: _Fields, services: Services
) -> tuple[AskedModel, EncodeJob | None]:
    fields.keep_alive_s()  # refuses what is no duration
    if not fields.model:
        raise BadRequest("`model` is missing.", param="model")
    model = await asked_model(exchange, services, fields.model, EMBED, None)
    dimensions = model.dimensions(fields.dimensions)
    texts = fields.texts
    if not texts:
        return model, None
    # As much as the model's author meant to be read of a text.
    usual = min(model.encoder.usual_tokens or model.window, model.window)
    cut = None if fields.truncate is False else usual
    reads = await reading(exchange, services, model, "input", cut)
    found = await encoded(reads, model, texts, None, fields.dimensions)
    size = vector_bytes(dimensions)
    return model, EncodeJob(model.card, found, "input", size, model.priority)
