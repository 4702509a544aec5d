"""The sockets' side of connections: little is read at once, into one buffer that all share."""

from __future__ import annotations

import asyncio
import errno
import socket
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from penstock.config import ConfigError
from penstock.server.http.connection import Connection
from penstock.server.http.connections import Connections

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# uvloop takes one new connection of each listening descriptor in a turn of the loop. With a single
# one a crowd of idle connections would stand in front of everybody for as many turns.
_DESCRIPTORS = 32
_SOCKET_BYTES = 64 << 10  # that the kernel keeps of a connection, each way; it takes twice that


class Wire(asyncio.BufferedProtocol):
    """The socket's side of a connection, which says how much is read at once."""

    def __init__(
        self,
        config: Any,
        server_state: Any,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        connections: Connections | None = None,
    ) -> None:
        self._connections = Connections() if connections is None else connections
        self._http = Connection(config, server_state, app_state, _loop)
        self._http.connections_of_all = self._connections

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has come."""
        self._http.connection_made(cast("asyncio.Transport", transport))

    def connection_lost(self, exc: Exception | None) -> None:
        """It has left."""
        self._http.connection_lost(exc)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go."""
        return memoryview(self._connections.buffer)[: self._http.wanted_bytes]

    def buffer_updated(self, nbytes: int) -> None:
        """There they are."""
        self._http.data_received(bytes(memoryview(self._connections.buffer)[:nbytes]))

    def eof_received(self) -> bool:
        """It will send no more; True keeps the connection for what it is owed."""
        return self._http.eof_received()

    def pause_writing(self) -> None:
        """It does not read what it is sent."""
        self._http.pause_writing()

    def resume_writing(self) -> None:
        """It does."""
        self._http.resume_writing()


def protocol(connections: Connections) -> Callable[..., Wire]:
    """What makes a protocol for each new connection."""

    def make(config: Any, server_state: Any, app_state: dict[str, Any], **more: Any) -> Wire:
        return Wire(config, server_state, app_state, connections=connections, **more)

    return make


def descriptors(sock: socket.socket) -> list[socket.socket]:
    """The listening socket under so many descriptors; uvicorn closes them at its end."""
    return [sock, *(sock.dup() for _ in range(_DESCRIPTORS - 1))]


@contextmanager
def listen(host: str, port: int) -> Iterator[socket.socket]:
    """A listening socket, or a sentence that says why not."""
    try:
        [family, _, _, _, address] = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.create_server((address[0], int(address[1])), family=family, backlog=2048)
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BYTES)
        # Connections inherit it. asyncio sets it only for sockets made with the protocol's number;
        # without it, every further answer on a connection waits 40 ms for a delayed ACK.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except OSError as error:
        why = error.strerror or str(error)
        if error.errno == errno.EADDRINUSE:
            why = "another program listens there already; choose another with --port"
        raise ConfigError(f"Cannot listen on {host} port {port}: {why}.") from None
    with sock:
        yield sock


def url_of(sock: socket.socket) -> str:
    """Where it listens."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
