"""The server's side of the template process (`penstock.boot`): start it, order forks, hear of ends.

Knows processes and file descriptors; what a worker says on its own socket is not read here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.boot import Exited, Fork, Forked, ForkFailed, Up, from_template, pack
from penstock.errors import InternalError
from penstock.server.output_log import OutputLog
from penstock.wire import FrameReader

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

log = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0  # imports from a cold, slow disk
STOP_TIMEOUT_S = 5.0

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


@dataclass(frozen=True, slots=True)
class Child:
    """A forked worker process."""

    pid: int
    exit_code: asyncio.Future[int | None]  # negative: a signal; None: its parent died before it


class TemplateProcess:
    """One template process, from `launch` to its end; a dead one is replaced, not restarted."""

    def __init__(
        self, process: subprocess.Popen[bytes], control: socket.socket, output: OutputLog
    ) -> None:
        self.pid = process.pid
        self.up: Up | None = None
        self.alive = True
        self._process = process
        self._control = control
        self._output = output
        self._order = asyncio.Lock()
        loop = asyncio.get_running_loop()
        # The answer that is waited for: `Up` at first, then one per order.
        self._answer: asyncio.Future[Up | Child | ForkFailed] = loop.create_future()
        self._exits: dict[int, asyncio.Future[int | None]] = {}
        self._reader = loop.create_task(self._read())

    @classmethod
    def launch(cls, preload: Sequence[str], log_path: Path) -> TemplateProcess:
        """Start one, which has its imports before it."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        output = OutputLog(log_path)
        # The same code from the same places, in the same order, as the server's.
        path = os.pathsep.join(entry for entry in sys.path if entry)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "penstock.boot", str(theirs.fileno()), *preload],
                stdin=subprocess.DEVNULL,
                stdout=output.write_fd,
                stderr=output.write_fd,
                pass_fds=[theirs.fileno()],
                env={**os.environ, **WORKER_ENVIRONMENT, "PYTHONPATH": path},
                # A terminal's ^C is for the server to decide on. Not a session of its own: the
                # kernel shares cores between sessions first, and a thread of the server that has
                # made itself nice would count for as much as a whole model.
                process_group=0,
            )
        output.handed_over()
        return cls(process, ours, output)

    async def wait_until_up(self) -> None:
        """Until its imports are done; it is ended if it cannot have them."""
        try:
            up = await asyncio.wait_for(self._answer, START_TIMEOUT_S)
            assert isinstance(up, Up)
        except TimeoutError:
            await self.stop()
            raise InternalError(
                "The process that workers are forked from had not finished its imports after "
                f"{START_TIMEOUT_S:.0f} s; its last words, also in {self._output.path}:\n"
                f"{self._output.tail()}"
            ) from None
        except BaseException:
            await self.stop()
            raise
        self.up = up
        if up.threads != 1:
            log.warning("the template process has %d threads: workers may hang", up.threads)
        log.info("template process %d is up after %.1f s", up.pid, up.import_s)

    async def fork(self, order: Fork, fds: Sequence[int]) -> Child:
        """A new worker process, which has its own copies of `fds`."""
        async with self._order:
            if not self.alive:
                raise self._death()
            loop = asyncio.get_running_loop()
            self._answer = loop.create_future()
            # A small message into an empty socket buffer: this neither blocks nor sends a part.
            socket.send_fds(self._control, [pack(order)], list(fds))
            try:
                answer = await asyncio.shield(self._answer)
            except asyncio.CancelledError:
                # The answer takes milliseconds, and the next order must not get it.
                await asyncio.wait([self._answer])
                raise
        if isinstance(answer, ForkFailed):
            raise InternalError(f"The system refused a process for a worker: {answer.reason}.")
        assert isinstance(answer, Child)
        return answer

    async def stop(self) -> None:
        """End it; what it forked lives on and should have been stopped before."""
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        await self._reader
        self._control.close()
        try:
            await asyncio.to_thread(self._process.wait, STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
        self._output.close()

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        frames = FrameReader()
        while True:
            try:
                data = await loop.sock_recv(self._control, 1 << 16)
            except OSError:
                data = b""
            if not data:
                break
            for body in frames.feed(data):
                self._hear(from_template.decode(body))
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

    def _death(self) -> InternalError:
        return InternalError(
            "The process that workers are forked from has died; "
            f"its last words, also in {self._output.path}:\n{self._output.tail()}"
        )
