"""A real grammar host and the server's side of it."""

from __future__ import annotations

import asyncio
import os
import signal
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from penstock.grammars.messages import Begin, Outcome
from penstock.memory.domains import RAM
from penstock.memory.ledger import Ledger
from penstock.server.pipeline import grammars as pipeline
from penstock.server.pipeline.grammars import Grammars, bounds_for
from penstock.server.processes import grammar_host
from penstock.server.residency.memory_arbiter import MemoryArbiter
from penstock.text.grammars.grammar import LIMITS, Format, GrammarSource, grammar_of
from penstock.wire import frame

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20
TOKENS = [bytes([value]) for value in range(256)]
CARD = cast("Any", SimpleNamespace(name="m", vocab_size=len(TOKENS)))
TOKENIZER = cast("Any", object())


def of_regex(pattern: str) -> GrammarSource:
    return GrammarSource(grammar_of(Format("regex", pattern)))


def test_a_host_that_is_stopped_is_ended_and_another_one_answers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bounds = bounds_for(64 * MIB, 2.0)
    begin = frame(Begin(TOKENS, [], LIMITS, bounds))
    monkeypatch.setattr(pipeline, "begin_frame", lambda *_: begin)
    # A host is heard at least every five seconds.
    monkeypatch.setattr(grammar_host, "SILENCE_S", 8.0)
    monkeypatch.setattr(grammar_host, "ALIVE_S", 1.0)

    async def main() -> None:
        ledger = Ledger({RAM: 1024 * MIB})
        service = Grammars(ledger, MemoryArbiter(ledger, dict, 1.0), tmp_path, bounds, 60.0)
        try:
            first = await service.verdict(CARD, TOKENIZER, of_regex("a+"), "")
            assert first.outcome is Outcome.READY
            [pid] = service.processes().values()
            await asyncio.sleep(11)  # at rest it is not silent
            assert list(service.processes().values()) == [pid]
            os.kill(pid, signal.SIGSTOP)
            second = await service.verdict(CARD, TOKENIZER, of_regex("b+"), "")
            assert second.outcome is Outcome.READY
            assert pid not in service.processes().values()
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
        finally:
            await service.close()
        assert ledger.snapshot()[RAM].booked_bytes == 0

    asyncio.run(main())
