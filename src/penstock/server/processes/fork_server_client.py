"""The server's side of the fork server (`penstock.fork_server`): start it, order forks, learn of
exits.

Knows processes and file descriptors; what a worker says on its own socket is not read here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from typing import TYPE_CHECKING

from penstock.errors import InternalError
from penstock.fork_server import Exited, Fork, Forked, ForkFailed, Up, from_fork_server
from penstock.memory.readings.gauge import children_of, read_cpu_s, wants_to_run
from penstock.server.processes.child_process import ChildProcess
from penstock.server.processes.launcher import Child, LauncherLost
from penstock.wire import frame

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

log = logging.getLogger(__name__)

# Imports from a cold, slow disk; at the first start a child of it compiles kernels besides.
START_TIMEOUT_S = 300.0
START_IDLE_S = 20.0  # of them in which neither used the processor nor waited for it
FORK_TIMEOUT_S = 10.0  # a fork takes milliseconds
STOP_TIMEOUT_S = 5.0

_LOOK_S = 1.0  # how often a starting one is looked at

# The environment that every worker is born with.
WORKER_ENVIRONMENT = {
    # What a step has freed stays in the heap for the next one: it is booked for steps all the same,
    # and pages that go back to the system are faulted in anew by every layer, a quarter to a third
    # of a prompt's time. It goes back when somebody asks for it. Fixed thresholds also switch off
    # glibc's own growing ones, so that a step takes today what it took when it was measured.
    # What is larger than the buffers that MKL asks for at every product (4 to 6 MiB) has a mapping
    # of its own: it leaves no hole that a smaller tensor may settle in, and to fetch its pages anew
    # is little beside the products that fill it.
    "MALLOC_MMAP_THRESHOLD_": str(8 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    # One heap for all threads: of another's only the holes are given back, not the free end of it.
    "MALLOC_ARENA_MAX": "1",
    # Pages of the usual size: MKL touches little of its buffers, and of huge ones a quarter more
    # would be held, or not, as a tensor happens to lie. And no lists of small free pieces: torch
    # asks for aligned memory, of which glibc cuts slivers off at both ends. In those lists they do
    # not grow together again with what lies between them, so the next tensor of that size finds its
    # place too small, and a step took up to twice what it uses, never the same. It takes as long.
    "GLIBC_TUNABLES": ":".join(
        (
            "glibc.malloc.hugetlb=0",
            "glibc.malloc.tcache_count=0",
            "glibc.malloc.mxfast=0",
            # Threads that a step does without for a while leave their stacks for those that come
            # back: under a cap, OpenMP ends the process where it cannot have one.
            "glibc.pthread.stack_cache_size=4294967296",
        )
    ),
    # MKL would keep buffers of its own, of the sizes that it happened to see.
    "MKL_DISABLE_FAST_MM": "1",
    # A thread at the end of its share waits for the others: spinning for some hundred microseconds,
    # longer than the usual wait, then asleep. The default spins for milliseconds, and when anything
    # else wants a core, what it waits for cannot run: steps took ten times as long beside one busy
    # process. With a tenth of this, eight streams decode an eighth slower.
    "GOMP_SPINCOUNT": "50000",
    # numpy's BLAS would start its threads at import; torch computes with its own.
    "OPENBLAS_NUM_THREADS": "1",
    # On a GPU, freed memory is one stretch for the next step, not pieces of the sizes that earlier
    # ones had: so steps of many shapes hold no more than the largest of them.
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    # The numbering of GPUs that the driver's own library uses.
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    "TOKENIZERS_PARALLELISM": "false",
    # A worker reads model folders; only `penstock pull` talks to the hub.
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "PYTHONUNBUFFERED": "1",
}


class ForkServerProcess:
    """One fork server, from `launch` to its end; a dead one is replaced, not restarted."""

    def __init__(self, child: ChildProcess) -> None:
        self.pid = child.pid
        self.up: Up | None = None
        self.alive = True
        self._child = child
        self._order = asyncio.Lock()
        loop = asyncio.get_running_loop()
        # The answer that is waited for: `Up` at first, then one per order.
        self._answer: asyncio.Future[Up | Child | ForkFailed] = loop.create_future()
        self._exits: dict[int, asyncio.Future[int | None]] = {}
        self._reader = loop.create_task(self._read())

    @classmethod
    def launch(cls, preload: Sequence[str], log_path: Path) -> ForkServerProcess:
        """Start one, which has its imports before it."""
        return cls(
            ChildProcess.start(
                "penstock.fork_server",
                log_path,
                arguments=preload,
                environment=WORKER_ENVIRONMENT,
            )
        )

    async def wait_until_up(self) -> None:
        """Until its imports are done; it is ended if it cannot have them."""
        try:
            up = await self._imports()
        except BaseException:
            await self.stop()
            raise
        self.up = up
        if up.threads != 1:
            log.warning("the fork server has %d threads: workers may hang", up.threads)
        log.info("fork server %d is up after %.1f s", up.pid, up.import_s)

    async def _imports(self) -> Up:
        """The end of its imports. One that takes too long is refused; one that does nothing at all
        is stopped or hangs, and `LauncherLost`: another may fare better."""
        loop = asyncio.get_running_loop()
        begun = worked_at = loop.time()
        cpu_s: list[float | None] = []
        look_s = min(_LOOK_S, START_TIMEOUT_S)
        while not (await asyncio.wait([self._answer], timeout=look_s))[0]:
            now, processes = loop.time(), (self.pid, *children_of(self.pid))
            used_s = [read_cpu_s(pid) for pid in processes]
            # Where others use all processors they may wait for longer than this, ready to run.
            if used_s != cpu_s or None in used_s or any(map(wants_to_run, processes)):
                cpu_s, worked_at = used_s, now
            if now - begun >= START_TIMEOUT_S:
                raise InternalError(self._late(f"{START_TIMEOUT_S:.0f} s"))
            if now - worked_at > START_IDLE_S:
                raise LauncherLost(self._late(f"{START_IDLE_S:.0f} s in which it did nothing"))
        if (error := self._answer.exception()) is not None:
            raise InternalError(str(error)) from None
        up = self._answer.result()
        assert isinstance(up, Up)
        return up

    def _late(self, after: str) -> str:
        return (
            f"The process that workers are forked from had not finished its imports after {after}; "
            f"{self._child.last_words()}"
        )

    async def fork(self, order: Fork, fds: Sequence[int]) -> Child:
        """A new worker process, which has its own copies of `fds`; raises `LauncherLost` if there
        is no answer in time, and then the fork server is gone."""
        async with self._order:
            if not self.alive:
                raise self._death()
            loop = asyncio.get_running_loop()
            self._answer = loop.create_future()
            # Its death is the answer then: one that is stopped gives no other.
            overdue = loop.call_later(FORK_TIMEOUT_S, self._end_hung)
            try:
                # A small message into an empty socket buffer: this neither blocks nor sends a part.
                socket.send_fds(self._child.control, [frame(order)], list(fds))
                answer = await asyncio.shield(self._answer)
            except asyncio.CancelledError:
                # The answer takes milliseconds, and the next order must not get it.
                await asyncio.wait([self._answer])
                raise
            finally:
                overdue.cancel()
        if isinstance(answer, ForkFailed):
            raise InternalError(f"The system refused a process for a worker: {answer.reason}.")
        assert isinstance(answer, Child)
        return answer

    async def stop(self) -> None:
        """End it; what it forked lives on and should have been stopped before."""
        with contextlib.suppress(OSError):
            self._child.control.shutdown(socket.SHUT_RDWR)
        await self._reader
        await self._child.gone(STOP_TIMEOUT_S)
        self._child.close()

    def _end_hung(self) -> None:
        log.error("the fork server %d did not answer for %g s", self.pid, FORK_TIMEOUT_S)
        self._child.kill()

    async def _read(self) -> None:
        async for body in self._child.frames():
            self._hear(from_fork_server.decode(body))
        self.alive = False
        for exit_code in self._exits.values():
            exit_code.set_result(None)
        self._exits.clear()
        if not self._answer.done():
            self._answer.set_exception(self._death())

    def _hear(self, message: Up | Forked | ForkFailed | Exited) -> None:
        if isinstance(message, Exited):
            self._exits.pop(message.pid).set_result(message.code)
        elif isinstance(message, Forked):
            child = Child(message.pid, asyncio.get_running_loop().create_future())
            self._exits[child.pid] = child.exit_code
            self._answer.set_result(child)
        else:
            self._answer.set_result(message)

    def _death(self) -> LauncherLost:
        return LauncherLost(
            f"The process that workers are forked from has died; {self._child.last_words()}"
        )
