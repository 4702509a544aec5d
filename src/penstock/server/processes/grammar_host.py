"""The server's side of a grammar host (`penstock.grammars.host`): start it, order compiles.

Knows a process and its socket; when there is a host, and what is made of its answers, is decided in
`pipeline.grammars`.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from penstock.errors import InternalError
from penstock.grammars.messages import (
    ALIVE_S,
    Alive,
    Begin,
    Compile,
    Compiled,
    Up,
    Wanted,
    from_host,
)
from penstock.server.processes.child_process import ChildProcess
from penstock.text.grammars.grammar import LIMITS
from penstock.wire import frame

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable
    from pathlib import Path

    from penstock.grammars.messages import Bounds
    from penstock.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
SILENCE_S = 4 * ALIVE_S  # then it is killed, and replaced where it is needed

MODULE = "penstock.grammars.host"
# One heap, whose freed memory goes back: what a matcher holds is read again and again.
ENVIRONMENT = {"MALLOC_ARENA_MAX": "1"}


class HostLost(InternalError):  # noqa: N818
    """The host has ended; another may be started."""


def begin_frame(tokenizer: Tokenizer, vocabulary: int, bounds: Bounds) -> bytes:
    """A host's first message, with the bytes of every token; blocking, some 3 µs a token."""
    special = set(tokenizer.special_ids)
    tokens: list[bytes] = []
    for number in range(vocabulary):
        content = tokenizer.token_bytes(number)
        if number in special or not content:
            special.add(number)
            content = (tokenizer.token(number) or f"<unused {number}>").encode()
        tokens.append(content)
    ids = sorted(number for number in special if number < vocabulary)
    return frame(Begin(tokens, ids, LIMITS, bounds))


class GrammarHost:
    """One host process, from its start to its end; a dead one is replaced."""

    def __init__(self, child: ChildProcess) -> None:
        loop = asyncio.get_running_loop()
        self.pid = child.pid
        self.alive = True
        self.up: asyncio.Future[int] = loop.create_future()  # its own bytes, vocabulary included
        self.on_wanted: Callable[[bytes], None] = lambda _: None
        self.on_end: Callable[[], None] = lambda: None
        self._child = child
        self._sending = asyncio.Lock()
        self._answers: dict[bytes, asyncio.Future[Compiled]] = {}
        self._silent_s = 0.0
        self._reader = loop.create_task(self._read())
        self._watch = loop.create_task(self._end_if_silent())

    @classmethod
    def launch(cls, worker: socket.socket, log_path: Path) -> GrammarHost:
        """Start one; `begin` gives it the vocabulary."""
        return cls(
            ChildProcess.start(MODULE, log_path, fds=[worker.fileno()], environment=ENVIRONMENT)
        )

    async def begin(self, frame: bytes) -> int:
        """Have it read its vocabulary; the bytes that it holds then."""
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await self._send(frame)
                return await asyncio.shield(self.up)
        except TimeoutError:
            raise HostLost(
                f"The grammar host had not started after {START_TIMEOUT_S:.0f} s; "
                f"{self._child.last_words()}"
            ) from None

    async def compile(self, key: bytes, text: str, *, quick: bool) -> Compiled:
        """Order a compile; what became of it. One order for each key at a time."""
        if not self.alive:
            raise self._death()
        answer: asyncio.Future[Compiled] = asyncio.get_running_loop().create_future()
        self._answers[key] = answer
        try:
            await self._send(frame(Compile(key, text, quick)))
            return await answer
        finally:
            if self._answers.get(key) is answer:
                del self._answers[key]

    async def stop(self) -> None:
        """End it and its matchers; returns when it is gone."""
        self.on_end = lambda: None
        self._child.kill()  # its matchers die with it
        await asyncio.gather(self._reader, return_exceptions=True)

    async def _send(self, frame: bytes) -> None:
        async with self._sending:
            try:
                await asyncio.get_running_loop().sock_sendall(self._child.control, frame)
            except OSError:
                raise self._death() from None

    async def _read(self) -> None:
        async for body in self._child.frames():
            self._silent_s = 0.0
            self._hear(from_host.decode(body))
        self.alive = False
        self._watch.cancel()
        await self._child.gone()
        waiting: list[asyncio.Future[Any]] = [self.up, *self._answers.values()]
        for answer in waiting:
            if not answer.done():
                answer.set_exception(self._death())
        if not self.up.cancelled():
            self.up.exception()  # nobody need ask
        self._child.close()
        self.on_end()

    async def _end_if_silent(self) -> None:
        """A host that is hung or stopped is as good as dead, except that it holds its matchers."""
        await asyncio.wait([self.up])
        while self._silent_s < SILENCE_S:
            await asyncio.sleep(ALIVE_S)
            self._silent_s += (
                ALIVE_S  # counted, not measured: a loop that was late has not listened
            )
        log.error("the grammar host %d has said nothing for %.0f s; killed", self.pid, SILENCE_S)
        self._child.kill()

    def _hear(self, message: Up | Alive | Compiled | Wanted) -> None:
        if isinstance(message, Alive):
            return
        if isinstance(message, Up):
            if not self.up.done():
                self.up.set_result(message.private_bytes)
        elif isinstance(message, Wanted):
            self.on_wanted(message.key)
        elif (answer := self._answers.get(message.key)) is not None and not answer.done():
            answer.set_result(message)

    def _death(self) -> HostLost:
        return HostLost(f"The process that compiles grammars has died; {self._child.last_words()}")
