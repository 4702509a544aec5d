"""What is shown of a request, in each of its states, and how it is ended."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import pytest

from penstock.errors import Cancelled
from penstock.memory.clients.requests import RequestPool
from penstock.memory.cost import CostModel, GroupCost, KvCost, Measured, fit
from penstock.memory.domains import RAM
from penstock.memory.ledger import Ledger
from penstock.server.observe.live import LiveRequests
from penstock.server.observe.progress import Asked, Progress
from penstock.server.observe.rates import TokenRates

BLOCK_BYTES = 1 << 10


@dataclass
class Usage:
    prompt_tokens: int = 20
    completion_tokens: int = 0
    cached_tokens: int = 16
    granted_tokens: int = 0


def cost() -> CostModel:
    return fit([Measured(16, 1, 1 << 10, 16, 1 << 20)], KvCost((GroupCost(BLOCK_BYTES),), 16))


def made(answers: int = 1) -> tuple[Progress, Usage]:
    memory = RequestPool(Ledger({RAM: 1 << 24}), 0, 1 << 20, 1.0).request_memory()
    usage = Usage()
    asked = Asked("r", "m", "key 2", 5, 1, answers, memory, time.monotonic() - 2)
    return Progress(asked, usage), usage


def state(progress: Progress) -> tuple[object, object]:
    row = progress.row()
    return row["state"], row["waits_for"]


def test_a_request_s_states() -> None:
    progress, usage = made()
    assert state(progress) == ("checked", None)
    progress.enter(object())
    assert state(progress) == ("queued", "model")
    progress.has_model(cost())
    assert state(progress) == ("queued", "memory")
    progress.has_memory()
    assert state(progress) == ("queued", "turn")
    assert progress.row()["kv_bytes"] == 0
    progress.begin()
    assert state(progress) == ("running", None)
    usage.completion_tokens = 30
    assert progress.row()["kv_bytes"] == 4 * BLOCK_BYTES  # 50 tokens in blocks of 16
    # Its worker is lost: it waits once more.
    progress.enter(object())
    assert state(progress) == ("queued", "model")


def test_figures() -> None:
    progress, usage = made(answers=2)
    assert (progress.row()["tokens_per_s"], progress.row()["first_token_s"]) == (None, None)
    usage.completion_tokens = 11
    progress.first_token = progress.asked.started + 0.5
    progress.last_token = progress.first_token + 2
    progress.preemptions = {0: 1, 1: 2}
    row = progress.row()
    assert (row["tokens_per_s"], row["first_token_s"], row["preemptions"]) == (5.0, 0.5, 3)
    assert (row["key"], row["priority"], row["answers"]) == ("key 2", 5, 2)


def test_an_operator_s_end_is_told_apart_from_another() -> None:
    async def run(by_operator: bool) -> None:
        progress, _ = made()
        live = LiveRequests()

        async def work() -> None:
            with live.listed(progress), progress.cancellable():
                await asyncio.sleep(60)

        task = asyncio.ensure_future(work())
        await asyncio.sleep(0)
        if by_operator:
            assert live.cancel("r")
        else:
            task.cancel()
        try:
            await task
        finally:
            assert len(live) == 0
            assert not live.cancel("r")

    with pytest.raises(Cancelled):
        asyncio.run(run(True))
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(run(False))


def test_of_two_requests_with_one_id_the_later_is_listed() -> None:
    live = LiveRequests()
    first, second = made()[0], made()[0]
    with live.listed(first):
        with live.listed(second):
            assert list(live) == [second]
        assert list(live) == []


def test_rates_are_of_the_last_interval() -> None:
    rates = TokenRates()
    rates.note(1.0, {"m": 10})
    assert rates.of("m") == 0.0
    rates.note(3.0, {"m": 30, "n": 4})
    assert (rates.of("m"), rates.of("n"), rates.of("x")) == (10.0, 2.0, 0.0)
    rates.note(4.0, {"m": 30, "n": 4})
    assert rates.of("m") == 0.0
