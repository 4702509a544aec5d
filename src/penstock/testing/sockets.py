"""Many plain connections at once, for clients that do not behave: they send what they like, read
what they like, and stay as long as the block lasts."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.testing.hostile import Target

_CONNECT_S = 10.0


@dataclass(slots=True)
class Crowd:
    """Open connections of an attacker."""

    sockets: list[socket.socket] = field(default_factory=list)
    refused: int = 0  # could not connect

    def answers(self) -> list[bytes]:
        """What each has been sent so far; empty where the server has closed without a word."""
        return [_read(sock) for sock in self.sockets]

    def still_open(self) -> int:
        """Connections that the server has not closed."""
        return sum(not _closed(sock) for sock in self.sockets)


@contextmanager
def crowd(target: Target, count: int, sources: Sequence[str] = ("",)) -> Iterator[Crowd]:
    """So many connections, from these addresses in turn; closed at the end."""
    some = Crowd()
    try:
        for number in range(count):
            try:
                sock = target.connect(sources[number % len(sources)], _CONNECT_S)
            except OSError:
                some.refused += 1
                continue
            sock.setblocking(False)
            some.sockets.append(sock)
        yield some
    finally:
        for sock in some.sockets:
            sock.close()


@contextmanager
def sending(crowd: Crowd, chunk: Callable[[int], bytes], every_s: float = 0.0) -> Iterator[None]:
    """Let every connection send `chunk(n)` again and again, as far as the server takes it."""
    stop = threading.Event()

    async def one(sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            number = 0
            while not stop.is_set():
                async with asyncio.timeout(1.0):
                    await loop.sock_sendall(sock, chunk(number))
                number += 1
                await asyncio.sleep(every_s)

    async def everyone() -> None:
        await asyncio.gather(*(one(sock) for sock in crowd.sockets))

    def run() -> None:
        with contextlib.suppress(TimeoutError):
            asyncio.run(everyone())

    thread = threading.Thread(target=run, name="attacker")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def send_all(crowd: Crowd, payload: bytes) -> int:
    """Send as much of the payload on each connection as it takes without waiting; returns bytes."""
    total = 0
    for sock in crowd.sockets:
        view = memoryview(payload)
        with contextlib.suppress(OSError):
            while view:
                sent = sock.send(view)
                total += sent
                view = view[sent:]
    return total


def _read(sock: socket.socket) -> bytes:
    said = b""
    with contextlib.suppress(OSError):
        while piece := sock.recv(65536):
            said += piece
    return said


def _closed(sock: socket.socket) -> bool:
    try:
        return sock.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
