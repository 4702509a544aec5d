"""Unit tests start no process: one that tries fails, and belongs in tests/integration."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

_STARTS = frozenset({"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn"})
_started: list[str] = []


def _hear(event: str, _: object, starts: frozenset[str] = _STARTS) -> None:
    if event in starts:  # not a global: the interpreter still calls this when it has none left
        _started.append(event)


sys.addaudithook(_hear)


@pytest.fixture(autouse=True)
def _no_process() -> Iterator[None]:
    _started.clear()
    yield
    assert not _started, f"a unit test started a process: {_started}"
