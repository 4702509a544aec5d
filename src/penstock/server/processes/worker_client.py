"""One loaded model as the server sees it: requests in, tokens out.

Owns the ids of requests and the tokens that have arrived and not yet been read. Knows nothing of
processes and sockets: messages go out through `send` and come in through `receive`, all on the
event loop.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from penstock.errors import Overloaded, PenstockError, WorkerLost, by_code
from penstock.server.processes.image_files import ImageFiles
from penstock.wire import (
    Alive,
    Cancel,
    Freed,
    Grant,
    Output,
    Probe,
    Ready,
    Shed,
    Status,
    Step,
    Submit,
    ToWorker,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self


_TRY_AGAIN_S = 5.0  # after a step for which there was no memory: others have ended by then


class ModelClient:
    """The requests of one worker; a new worker of the same model has a new client."""

    def __init__(self, name: str, send: Callable[[ToWorker], None]) -> None:
        self.name = name
        self.status: Status | None = None  # the worker's figures after its latest step
        self.lost: str | None = None  # why the worker is gone, in a sentence; set once
        self.longest_step_s = 0.0
        self.on_step: Callable[[], None] | None = None  # after each step
        self.on_notice: Callable[[str], None] = lambda words: None  # for people to read
        self.image_files = ImageFiles()
        self._ready: Ready | None = None
        self._send = send
        self._ids = itertools.count(1)
        self._open: dict[int, WorkerStream] = {}
        self._probes: dict[int, asyncio.Future[None]] = {}
        self._orders: deque[asyncio.Future[Freed | None]] = deque()  # answered in turn

    @property
    def ready(self) -> Ready:
        """What was loaded; known before anyone can lease the model."""
        assert self._ready is not None
        return self._ready

    @property
    def open_requests(self) -> int:
        """Requests submitted and neither finished nor cancelled."""
        return len(self._open)

    @property
    def expects(self) -> bool:
        """Whether the worker owes us a word: a step, or the answer to an order or a probe."""
        return bool(self._open or self._orders or self._probes)

    def generate(self, request: Submit) -> WorkerStream:
        """Submit the request now, under an id of ours; iterate the result for its tokens.

        Use it as an async context manager: leaving early cancels at once.
        """
        if self.lost is not None:
            raise WorkerLost(self.lost)
        request_id = next(self._ids)
        generation = WorkerStream(request_id, self._cancel)
        self._open[request_id] = generation
        self._send(msgspec.structs.replace(request, id=request_id))
        return generation

    async def probe(self, timeout_s: float) -> None:
        """Have the worker run one real step; raises `WorkerLost` or `TimeoutError`."""
        if self.lost is not None:
            raise WorkerLost(self.lost)
        number = next(self._ids)
        answer = asyncio.get_running_loop().create_future()
        self._probes[number] = answer
        try:
            self._send(Probe(number))
            await asyncio.wait_for(answer, timeout_s)
        finally:
            self._probes.pop(number, None)

    def order(self, message: Grant | Shed) -> asyncio.Future[Freed | None]:
        """Tell the worker what it may hold; the answer says what it holds then, None once lost."""
        answer: asyncio.Future[Freed | None] = asyncio.get_running_loop().create_future()
        if self.lost is not None:
            answer.set_result(None)
        else:
            self._orders.append(answer)
            self._send(message)
        return answer

    def receive(self, message: Ready | Step | Alive | Freed) -> None:
        """What the worker said."""
        if isinstance(message, Freed):
            if self._orders and not (order := self._orders.popleft()).done():
                order.set_result(message)
            return
        if isinstance(message, Ready):
            self._ready = message
            self.image_files.limit_bytes = message.image_file_bytes
            return
        if isinstance(message, Alive):
            answer = self._probes.pop(message.number, None)
            if answer is not None and not answer.done():
                answer.set_result(None)
            return
        self._stepped(message)

    def _stepped(self, message: Step) -> None:
        self.status = message.status
        self.longest_step_s = max(self.longest_step_s, message.status.step_s)
        for output in message.outputs:
            # An unknown id was cancelled while this output was on its way.
            generation = self._open.get(output.id)
            if generation is None:
                continue
            if output.finish is not None:
                del self._open[output.id]
            generation.push(output)
        for words in message.notices:
            self.on_notice(words)
        if self.on_step is not None:
            self.on_step()

    def lose(self, reason: str) -> None:
        """The worker is gone: every open request and probe raises `WorkerLost`."""
        self.lost = reason
        generations, self._open = self._open, {}
        for generation in generations.values():
            generation.fail(WorkerLost(reason))
        for answer in self._probes.values():
            if not answer.done():
                answer.set_exception(WorkerLost(reason))
        while self._orders:
            if not (order := self._orders.popleft()).done():
                order.set_result(None)

    def _cancel(self, request_id: int) -> None:
        if self._open.pop(request_id, None) is not None and self.lost is None:
            self._send(Cancel(request_id))


class WorkerStream:
    """One request's outputs, as an async iterator that ends after the one with `finish`.

    What arrives while nobody reads is merged into one pending output, so a slow reader holds at
    most the tokens of its own answer. A failure is raised, after the tokens that came before it.
    """

    def __init__(self, request_id: int, cancel: Callable[[int], None]) -> None:
        self.id = request_id
        self._cancel = cancel
        self._pending: Output | None = None
        self._error: PenstockError | None = None
        self._ended = False  # nothing more is handed out
        self._arrived = asyncio.Event()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Output:
        if self._ended:
            raise StopAsyncIteration
        if self._pending is None and self._error is None:
            self._arrived.clear()
            try:
                await self._arrived.wait()
            except asyncio.CancelledError:
                self._close()
                raise
        output, self._pending = self._pending, None
        if output is not None:
            self._ended = output.finish is not None
            return output
        self._ended = True
        if self._error is None:  # closed by another task while this one waited
            raise StopAsyncIteration
        raise self._error

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._close()

    def push(self, output: Output) -> None:
        """What one step gave."""
        if output.failure is not None:
            failure = output.failure
            kind = by_code(failure.code)
            again_s = _TRY_AGAIN_S if kind is Overloaded else None
            self._error = kind(failure.message, numbers=failure.numbers, retry_after_s=again_s)
            # The error stands for the end; the tokens that came with it are still handed out.
            output = msgspec.structs.replace(output, finish=None, failure=None)
        if output.tokens or output.prompt_logprobs or output.finish is not None:
            self._pending = output if self._pending is None else _merged(self._pending, output)
        if self._pending is not None or self._error is not None:
            self._arrived.set()

    def fail(self, error: PenstockError) -> None:
        """Nothing more will come, for this reason."""
        self._error = error
        self._arrived.set()

    def _close(self) -> None:
        self._ended = True
        self._pending = None
        self._cancel(self.id)
        self._arrived.set()


def _merged(first: Output, then: Output) -> Output:
    """Two outputs of one request as if one step had given both; takes over `first`'s lists."""
    first.tokens += then.tokens
    if then.logprobs:
        first.logprobs = [] if first.logprobs is None else first.logprobs
        first.logprobs += then.logprobs
    if then.prompt_logprobs:
        first.prompt_logprobs = [] if first.prompt_logprobs is None else first.prompt_logprobs
        first.prompt_logprobs += then.prompt_logprobs
    first.finish = then.finish
    first.reused = first.reused or then.reused
    first.preempted = max(first.preempted, then.preempted)
    first.vector = first.vector or then.vector
    first.drafts += then.drafts
    first.accepted += then.accepted
    return first
