"""Routing of outputs, merging, cancelling and the end of a worker, without a process."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from penstock.errors import ContextTooLong, WorkerLost
from penstock.server.processes.worker_client import ModelClient, WorkerStream
from penstock.wire import (
    Alive,
    Cancel,
    Candidate,
    Failure,
    Finish,
    Output,
    Probe,
    Sampling,
    Status,
    Step,
    Submit,
    TokenLogprobs,
    ToWorker,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

STATUS = Status(1, 0, 1, 0.0, 0.0, 0, 1, kv_capacity_bytes=8, kv_free_bytes=7)
REQUEST = Submit(id=0, prompt=[1, 2], max_tokens=8, sampling=Sampling())


class Wire:
    """The far end: remembers what was sent and speaks for the worker."""

    def __init__(self) -> None:
        self.sent: list[ToWorker] = []
        self.client = ModelClient("model", self.sent.append)

    def step(self, *outputs: Output) -> None:
        self.client.receive(Step(list(outputs), STATUS))


def scenario(test: Callable[[Wire], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def run() -> None:
        async def body() -> None:
            await test(Wire())

        asyncio.run(body())

    run.__name__ = test.__name__
    return run


async def read(generation: WorkerStream) -> list[Output]:
    return [output async for output in generation]


@scenario
async def test_each_request_gets_its_own_outputs_in_order(wire: Wire) -> None:
    first, second = wire.client.generate(REQUEST), wire.client.generate(REQUEST)
    readers = [asyncio.create_task(read(g)) for g in (first, second)]
    await asyncio.sleep(0)
    wire.step(Output(first.id, [10]), Output(second.id, [20]))
    await asyncio.sleep(0)
    wire.step(
        Output(second.id, [21], finish=Finish.STOP), Output(first.id, [11], finish=Finish.LENGTH)
    )
    ours, theirs = await asyncio.gather(*readers)
    assert [t for o in ours for t in o.tokens] == [10, 11]
    assert [t for o in theirs for t in o.tokens] == [20, 21]
    assert (ours[-1].finish, theirs[-1].finish) == (Finish.LENGTH, Finish.STOP)
    assert [m.id for m in wire.sent if isinstance(m, Submit)] == [first.id, second.id]
    assert not any(isinstance(m, Cancel) for m in wire.sent)
    assert wire.client.open_requests == 0
    assert wire.client.status == STATUS


@scenario
async def test_what_a_slow_reader_missed_is_one_output(wire: Wire) -> None:
    generation = wire.client.generate(REQUEST)
    known = TokenLogprobs(Candidate(5, -1.0), [])
    wire.step(Output(generation.id, prompt_logprobs=[None, known]))
    wire.step(Output(generation.id, [5], logprobs=[known]))
    wire.step(Output(generation.id, [5], logprobs=[known], finish=Finish.LENGTH))
    outputs = await read(generation)
    assert outputs == [
        Output(
            generation.id,
            [5, 5],
            logprobs=[known, known],
            prompt_logprobs=[None, known],
            finish=Finish.LENGTH,
        )
    ]


@scenario
async def test_steps_without_news_do_not_wake_the_reader(wire: Wire) -> None:
    generation = wire.client.generate(REQUEST)
    reader = asyncio.create_task(anext(generation))
    wire.step(Output(generation.id))
    await asyncio.sleep(0.01)
    assert not reader.done()
    wire.step(Output(generation.id, [7]))
    assert (await reader).tokens == [7]


@scenario
async def test_leaving_cancels_at_once_and_late_outputs_are_dropped(wire: Wire) -> None:
    async with wire.client.generate(REQUEST) as generation:
        wire.step(Output(generation.id, [1]))
        await anext(generation)
    assert wire.sent[-1] == Cancel(generation.id)
    wire.step(Output(generation.id, [2]))
    assert await read(generation) == []
    async with generation:  # left once more
        pass
    assert sum(isinstance(m, Cancel) for m in wire.sent) == 1


@scenario
async def test_a_cancelled_reader_cancels_the_request(wire: Wire) -> None:
    generation = wire.client.generate(REQUEST)
    reader = asyncio.create_task(read(generation))
    await asyncio.sleep(0)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert wire.sent[-1] == Cancel(generation.id)
    assert wire.client.open_requests == 0


@scenario
async def test_a_failure_is_raised_after_the_tokens_before_it(wire: Wire) -> None:
    generation = wire.client.generate(REQUEST)
    wire.step(Output(generation.id, [1]))
    failure = Failure(ContextTooLong.code, "too long", {"limit_tokens": 4})
    wire.step(Output(generation.id, finish=Finish.ERROR, failure=failure))
    assert (await anext(generation)).tokens == [1]
    with pytest.raises(ContextTooLong, match="too long") as caught:
        await anext(generation)
    assert caught.value.numbers == {"limit_tokens": 4}
    assert await read(generation) == []
    assert wire.client.open_requests == 0


@scenario
async def test_a_lost_worker_ends_everything(wire: Wire) -> None:
    waiting, unread = wire.client.generate(REQUEST), wire.client.generate(REQUEST)
    wire.step(Output(unread.id, [3]))
    reader = asyncio.create_task(read(waiting))
    probe = asyncio.create_task(wire.client.probe(10))
    await asyncio.sleep(0)
    wire.client.lose("it is gone")
    for task in (reader, probe):
        with pytest.raises(WorkerLost, match="it is gone"):
            await task
    assert (await anext(unread)).tokens == [3]
    with pytest.raises(WorkerLost):
        await anext(unread)
    with pytest.raises(WorkerLost, match="it is gone"):
        wire.client.generate(REQUEST)
    assert not any(isinstance(m, Cancel) for m in wire.sent)


@scenario
async def test_a_probe_is_answered_by_its_number_or_times_out(wire: Wire) -> None:
    probe = asyncio.create_task(wire.client.probe(10))
    await asyncio.sleep(0)
    sent = wire.sent[-1]
    assert isinstance(sent, Probe)
    wire.client.receive(Alive(sent.number + 1))
    await asyncio.sleep(0)
    assert not probe.done()
    wire.client.receive(Alive(sent.number))
    await probe
    with pytest.raises(TimeoutError):
        await wire.client.probe(0.01)
    wire.client.receive(Alive(sent.number + 1))
