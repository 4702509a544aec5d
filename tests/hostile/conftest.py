"""One caged server with the starter model for each module of attacks.

A module may set `SETTINGS`, environment variables of its server, `MEMORY`, its `--memory`, and
`KEY`, what honest requests need.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from penstock.testing.cage import NoCage
from penstock.testing.hostile import Target, caged, home_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MEMORY = "2GiB"
# One thread leaves a core to the attacker: what is on trial is the server, not the machine.
THREADS = {"PENSTOCK_MODELS_THREADS": "1"}


@pytest.fixture(scope="module")
def target(
    request: pytest.FixtureRequest,
    starter_folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Target]:
    """The server under attack, in a cage 10 % above its limit."""
    settings: dict[str, str] = THREADS | getattr(request.module, "SETTINGS", {})
    memory: str = getattr(request.module, "MEMORY", MEMORY)
    key: str = getattr(request.module, "KEY", "")
    home = tmp_path_factory.mktemp("home")
    folder = home_for(starter_folder, home)
    try:
        with caged(folder, memory, home / "log", key, **settings) as server:
            yield server
    except NoCage as reason:
        pytest.skip(str(reason))
