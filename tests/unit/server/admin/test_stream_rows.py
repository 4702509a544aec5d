"""The task that makes the rows of the stream."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from penstock.server.admin import stream

if TYPE_CHECKING:
    import pytest


def test_a_second_whose_rows_cannot_be_made_is_not_the_last(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ticks = 0
    third = asyncio.Event()

    def make_rows(_: object) -> None:
        nonlocal ticks
        ticks += 1
        if ticks == 1:
            raise KeyError("a model that has gone")
        if ticks == 3:
            third.set()

    monkeypatch.setattr(stream, "_make_rows", make_rows)
    monkeypatch.setattr(stream, "_TICK_S", 0.001)

    async def watched() -> None:
        services: Any = None
        task = asyncio.ensure_future(stream.watch(services))
        async with asyncio.timeout(10):
            await third.wait()
        task.cancel()

    asyncio.run(watched())
    assert "could not be made" in caplog.text
