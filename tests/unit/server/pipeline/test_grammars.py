"""Verdicts on grammars: which lane, what is kept, what is booked; with a host that is played."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from penstock.errors import BadRequest, Overloaded
from penstock.grammars.messages import Compiled, Outcome
from penstock.memory.domains import RAM
from penstock.memory.ledger import Ledger, Purpose
from penstock.server.pipeline import grammars as module
from penstock.server.pipeline.grammars import Grammars, bounds_for
from penstock.server.processes.grammar_host import GrammarHost, HostLost
from penstock.server.residency.memory_arbiter import MemoryArbiter
from penstock.text.grammars.grammar import GrammarSource

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MIB = 1 << 20
CARD = cast("Any", SimpleNamespace(name="m", vocab_size=100))
TOKENIZER = cast("Any", object())


class PlayedHost:
    """Answers as it is told; `orders` are the lanes that were asked for."""

    def __init__(self, answer: Callable[[bool], Outcome | Exception]) -> None:
        self.answer = answer
        self.orders: list[bool] = []
        self.alive = True
        self.pid = 1
        self.on_wanted: Callable[[bytes], None] = lambda _: None
        self.on_end: Callable[[], None] = lambda: None

    async def begin(self, frame: bytes) -> int:
        return 5 * MIB

    async def compile(self, key: bytes, text: str, *, quick: bool) -> Compiled:
        self.orders.append(quick)
        await asyncio.sleep(0)
        outcome = self.answer(quick)
        if isinstance(outcome, Exception):
            self.alive = False
            raise outcome
        return Compiled(key, outcome, "" if outcome is Outcome.READY else "it is too much.")

    async def stop(self) -> None:
        self.alive = False


def run(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    hosts: list[PlayedHost],
    script: Callable[[Grammars, Ledger], Any],
    limit: int = 1024 * MIB,
    patience_s: float = 5.0,
) -> None:
    left = list(hosts)
    monkeypatch.setattr(GrammarHost, "launch", lambda *_: left.pop(0))
    monkeypatch.setattr(module, "begin_frame", lambda *_: b"")

    async def main() -> None:
        ledger = Ledger({RAM: limit})
        bounds = bounds_for(64 * MIB, 2.0)
        service = Grammars(ledger, MemoryArbiter(ledger, dict, 1.0), tmp_path, bounds, patience_s)
        try:
            await script(service, ledger)
        finally:
            await service.close()
        assert ledger.snapshot()[RAM].booked_bytes == 0
        ledger.check()

    asyncio.run(main())


def test_an_ordinary_grammar_is_compiled_once_and_booked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    host = PlayedHost(lambda _: Outcome.READY)

    async def script(service: Grammars, ledger: Ledger) -> None:
        source = GrammarSource("a")
        both = (service.verdict(CARD, TOKENIZER, source, key) for key in "ab")
        for verdict in await asyncio.gather(*both):
            verdict.refuse("here")
        assert (await service.verdict(CARD, TOKENIZER, source, "c")).outcome is Outcome.READY
        assert host.orders == [True]
        held = ledger.snapshot()[RAM].owners["grammars m"]
        assert held == {Purpose.PROCESS: 5 * MIB, Purpose.GRAMMARS: 64 * MIB}

    run(monkeypatch, tmp_path, [host], script)


def test_what_exceeds_the_quick_lane_is_tried_in_the_slow_one_and_its_refusal_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    host = PlayedHost(lambda _: Outcome.EXCEEDED)

    async def script(service: Grammars, ledger: Ledger) -> None:
        for _ in range(2):
            verdict = await service.verdict(CARD, TOKENIZER, GrammarSource("a"), "")
            with pytest.raises(BadRequest, match="`here` cannot be enforced: it is too much"):
                verdict.refuse("here")
        assert host.orders == [True, False]

    run(monkeypatch, tmp_path, [host], script)


def test_a_host_that_dies_is_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first = PlayedHost(lambda _: HostLost("it died"))
    second = PlayedHost(lambda _: Outcome.READY)

    async def script(service: Grammars, ledger: Ledger) -> None:
        verdict = await service.verdict(CARD, TOKENIZER, GrammarSource("a"), "")
        assert verdict.outcome is Outcome.READY
        assert (first.orders, second.orders) == ([True], [True])

    run(monkeypatch, tmp_path, [first, second], script)


def test_what_a_worker_misses_is_compiled_again_while_its_request_lives(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    host = PlayedHost(lambda _: Outcome.READY)

    async def script(service: Grammars, ledger: Ledger) -> None:
        source = GrammarSource("a")
        await service.verdict(CARD, TOKENIZER, source, "")
        host.on_wanted(source.key)
        await asyncio.sleep(0.05)
        assert host.orders == [True, True]
        key = source.key
        del source
        host.on_wanted(key)
        await asyncio.sleep(0.05)
        assert host.orders == [True, True]

    run(monkeypatch, tmp_path, [host], script)


def test_what_nobody_waits_for_any_more_is_not_compiled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    host = PlayedHost(lambda _: Outcome.READY)

    async def script(service: Grammars, ledger: Ledger) -> None:
        asked = [
            asyncio.ensure_future(service.verdict(CARD, TOKENIZER, GrammarSource(str(n)), "a"))
            for n in range(50)
        ]
        await asyncio.sleep(0)
        for leaving in asked[:-1]:
            leaving.cancel()
        assert (await asked[-1]).outcome is Outcome.READY
        assert len(host.orders) <= 3
        again = GrammarSource("10")  # one who comes back is not given what the others left
        assert (await service.verdict(CARD, TOKENIZER, again, "a")).outcome is Outcome.READY

    run(monkeypatch, tmp_path, [host], script)


def test_without_room_in_the_books_it_waits_and_then_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def script(service: Grammars, ledger: Ledger) -> None:
        with pytest.raises(Overloaded, match=r"memory\.grammars"):
            await service.verdict(CARD, TOKENIZER, GrammarSource("a"), "")

    run(monkeypatch, tmp_path, [], script, limit=32 * MIB, patience_s=0.1)


@pytest.mark.parametrize("total", [32 * MIB, 64 * MIB, 256 * MIB])
def test_one_grammar_always_fits(total: int) -> None:
    bounds = bounds_for(total, 2.0)
    assert bounds.quick_bytes <= bounds.one_bytes <= bounds.large_total_bytes < total
