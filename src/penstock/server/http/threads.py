"""Threads for requests' work that is too long for the event loop, in turn between clients.

What takes longer than a thread switch runs in a thread: short work, long work and the building of
grammars each in threads of their own, so that a few large bodies never stand in front of small
ones, nor of anything else that needs a thread (the governor, loads, tokenizers). In each clients
take turns. Python's lock makes more threads useless: each that runs is one more whose turn the
event loop waits for.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.errors import Overloaded

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

Result = TypeVar("Result")

# Below this a decode takes less time than a thread switch.
INLINE_BYTES = 64 << 10
_LONG_BYTES = 1 << 20
_FILES = ThreadPoolExecutor(1, thread_name_prefix="files")

_client: ContextVar[str] = ContextVar("client", default="")  # for whom the present task works


class FairThreads:
    """So many threads; clients whose work waits for one get it in rotation. Safe to use from
    several event loops."""

    def __init__(self, count: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(count, thread_name_prefix=name)
        self._lock = threading.Lock()
        # By client, who is next comes first; none is empty.
        self._lines: dict[str, deque[tuple[Future[Any], Callable[[], Any]]]] = {}

    def submit(self, client: str, work: Callable[[], Result]) -> Future[Result]:
        """Do it when it is the client's turn."""
        future: Future[Result] = Future()
        with self._lock:
            self._lines.setdefault(client, deque()).append((future, work))
        self._threads.submit(self._do_next)
        return future

    def _do_next(self) -> None:
        with self._lock:
            client = next(iter(self._lines))
            line = self._lines.pop(client)
            future, work = line.popleft()
            if line:
                self._lines[client] = line  # behind the other clients
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - it is for whoever waits
            future.set_exception(error)
            del future, work  # which its traceback would hold, and they it
        else:
            future.set_result(result)


_SHORT = FairThreads(4, "bodies")
_LONG = FairThreads(2, "bodies-long")
_GRAMMARS = FairThreads(2, "grammars")


def work_for(client: str) -> None:
    """What the present task has done in threads from now on is done for that client."""
    _client.set(client)


_reading: dict[Hashable, Future[Any]] = {}  # by what is looked up: in line, or being read


async def read_files(
    what: Hashable, work: Callable[[], Result], *, max_waiting: int | None = None
) -> Result:
    """Look something up on disk; one after another, whoever asks. Who asks for the same meanwhile
    gets the same answer. `Overloaded` where already so many things wait."""
    future: Future[Result] | None = _reading.get(what)
    if future is None:
        if max_waiting is not None and len(_reading) >= max_waiting:
            raise Overloaded(f"{len(_reading)} look-ups on disk wait already.", retry_after_s=1)
        future = _reading[what] = _FILES.submit(work)
        future.add_done_callback(lambda _: _reading.pop(what, None))
    return await asyncio.shield(_watched(future))


async def run_in_thread_if_large(size: int, work: Callable[[], Result]) -> Result:
    """Do something with so many bytes: in a thread, if they are many."""
    return work() if size <= INLINE_BYTES else await run_in_thread(size, work)


async def run_in_thread(size: int, work: Callable[[], Result]) -> Result:
    """Do something with so many bytes in a thread."""
    return await _run(_SHORT if size <= _LONG_BYTES else _LONG, work)


async def build_grammar(work: Callable[[], Result]) -> Result:
    """Make a grammar of what a client sent, in a thread: small in bytes, it can be long work."""
    return await _run(_GRAMMARS, work)


async def _run(threads: FairThreads, work: Callable[[], Result]) -> Result:
    """Do something in one of these threads.

    Work that has begun cannot be stopped: who is cancelled meanwhile waits for its end, so that
    whatever is booked for it stays booked as long.
    """
    future = threads.submit(_client.get(), work)
    waiting = _watched(future)
    try:
        return await asyncio.shield(waiting)
    except asyncio.CancelledError:
        if not future.cancel():
            await asyncio.wait([waiting])
        raise


def _watched(future: Future[Result]) -> asyncio.Future[Result]:
    """The end of it; who is cancelled does not ask what became of it."""
    waiting = asyncio.wrap_future(future)
    waiting.add_done_callback(lambda done: done.cancelled() or done.exception())
    return waiting
