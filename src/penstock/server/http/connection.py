"""A client's connection: what is read of it and when, and how a request's head may look.

Little is read at a time, and nothing that nobody wants yet: not a request behind one that is not
answered, and of a body only what was asked for. What is held is booked with `Connections`. Heads
come before anything is known of a request, its key among it, so they are short in bytes, headers
and time. Bodies are the application's affair.
"""

from __future__ import annotations

import asyncio
import time
import urllib.parse
from functools import partial
from typing import TYPE_CHECKING, Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from penstock.server.http.flow_control import FLOW, Flow, UntilCloseCycle
from penstock.server.http.peer import Peer, has_unread, look

if TYPE_CHECKING:
    from penstock.server.http.connections import Connections

MAX_HEAD_BYTES = 64 << 10  # address and headers on the wire; trailers and chunk extensions too
MAX_HEADERS = 128
HEAD_S = 30.0  # from the connection, or the first byte of a later request, to the last of the head
LINGER_S = 60.0  # for the last bytes of an answer
# In a scope's extensions: a future that is done when the client has left, and what takes the name
# of the key that a request has shown.
GONE = "penstock.gone"
SHOWN_KEY = "penstock.shown_key"
_REST_S = 15.0  # for the rest of a body that is not wanted
# Of heads so much is read at once, and of all that may hold a further request so much is parsed:
# of the smallest requests fourteen.
_HEAD_READ_BYTES = 2 << 10
_PARSED_BYTES = 256
_PROGRESS_BYTES = 64 << 10  # of a body: who has sent so much is not waited for since before
_CHUNKS = 64  # of a body that are parsed before others have their turn
_WRITE_BYTES = 16 << 10  # that may wait for a client to read them
# What a connection and its parser take, and a request with the task that answers it (measured: 6
# and 9 KiB); each header is two objects in a tuple.
CONNECTION_BYTES = 8 << 10
_REQUEST_BYTES = 12 << 10
_HEAD_FACTOR = 3
_OVERHEAD_FACTOR = 8  # bytes on the wire for each byte of a body that comes in chunks


class _Refused(Exception):  # noqa: N818 - only the parser sees it
    """Ends the parser; the client has been answered."""


class Connection(HttpToolsProtocol):
    """uvicorn's own, with bounds."""

    connections_of_all: Connections
    flow: Flow

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gone: asyncio.Future[None] = self.loop.create_future()
        self._running: RequestResponseCycle | None = None
        self._ahead = bytearray()  # read and not parsed
        self._finished = False  # the client sends no more
        self._asked = False  # whether it is still there
        self._in_body = False
        self._left_bytes: int | None = None  # of a body whose length was given
        self._head_bytes = 0  # on the wire
        self._overhead_bytes = 0  # on the wire, of a body that comes in chunks
        self._headers = 0
        self._chunks = 0  # parsed in this turn
        self._waits = False  # for its turn
        self._since = 0.0  # when the client was last seen to send or read on
        self._new_bytes = 0  # of the body since then
        self._too_late: asyncio.TimerHandle | None = None  # of what is waited for: one thing

    # --- the connection --------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = Flow(transport)
        transport.set_write_buffer_limits(high=_WRITE_BYTES)
        address = self.client[0] if self.client else "127.0.0.1"
        if self.connections_of_all.enter(self, address, CONNECTION_BYTES):
            self._await_head()
        else:
            self._refuse_crowd()

    def connection_lost(self, exc: Exception | None) -> None:
        self._in_time()
        self.connections_of_all.leave(self)
        if not self.gone.done():
            self.gone.set_result(None)
        for cycle in (self._running, *(queued for queued, _ in self.pipeline)):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self.pipeline.clear()
        self._ahead.clear()
        super().connection_lost(exc)

    def give_way(self, why: str) -> None:
        """Close for another's sake, at once."""
        if (self._head_bytes or not self._idle) and not self.transport.is_closing():
            why = f"{why} Send the whole request at once, and read the answer.\n"
            self._refuse(b"503 Service Unavailable", why, b"retry-after: 1\r\n")
        else:
            self._let_go()
        if self.transport.get_write_buffer_size():
            self.transport.abort()

    def _let_go(self) -> None:
        """Close; a client that does not read its last bytes is not waited for."""
        self.transport.close()
        self._in_time()
        self._too_late = self.loop.call_later(LINGER_S, self.transport.abort)

    def look(self) -> None:
        """See whether the client is still there, if reading does not tell."""
        closed = self._idle or self.transport.is_closing()
        if closed or not (self.flow.read_paused or self._finished):
            return
        peer = look(self.transport.get_extra_info("socket"))
        if peer is Peer.GONE:
            self.transport.abort()
        elif peer is Peer.FINISHED and self._finished and not self._asked:
            self._ask()

    def has_unread(self) -> bool:
        """Whether its client has sent something that nobody has read yet."""
        return has_unread(self.transport.get_extra_info("socket"))

    def _ask(self) -> None:
        """Have the network tell: an interim answer, which a client that has left resets. HTTP/1.0
        has none: the answer itself will tell."""
        self._asked = True
        cycle = self._running
        if cycle is None or cycle.response_started:
            return
        if cycle.scope["http_version"] == "1.1":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    @property
    def _idle(self) -> bool:
        return self._running is None and not self.pipeline

    # --- reading ---------------------------------------------------------------------------

    @property
    def wanted_bytes(self) -> int:
        """To be read at once."""
        return len(self.connections_of_all.buffer) if self._in_body else _HEAD_READ_BYTES

    def data_received(self, data: bytes) -> None:
        self._ahead += data
        self._parse()

    def eof_received(self) -> bool:  # type: ignore[override]
        self._finished = True
        unfinished = self.cycle is not None and self.cycle.more_body
        if self._idle or unfinished or self.transport.is_closing():
            return False
        # Between the FIN of a client that leaves and the end of its socket there is a moment.
        self.loop.call_later(0.02, self.look)
        return True

    def _parse(self) -> None:
        """What was read, up to the end of a request that is not answered."""
        self._chunks = 0
        while self._ahead and not self.transport.is_closing():
            if self._chunks > _CHUNKS:
                self._take_turn()
                break
            if self.pipeline or (self._running is not None and not self._in_body):
                break
            size = self._left_bytes or _PARSED_BYTES
            piece = bytes(self._ahead[:size])
            del self._ahead[:size]
            self._count(len(piece))
            if not self.transport.is_closing():
                super().data_received(piece)
        self.flow.held = bool(self._ahead)
        if self._ahead:
            self.flow.pause_reading()
        self._hold()

    def _hold(self) -> None:
        requests = len(self.pipeline) + (self._running is not None)
        heads = _HEAD_FACTOR * self._head_bytes + len(self._ahead)
        unread = self.transport.get_write_buffer_size() if self.flow.write_paused else 0
        size = CONNECTION_BYTES + requests * _REQUEST_BYTES + heads + unread
        if self.transport.is_closing() or self.connections_of_all.hold(self, size):
            return
        self._refuse_crowd()

    def _count(self, size: int) -> None:
        if not self._in_body:
            self._head_bytes += size
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse_long()
        elif self._left_bytes is None:
            self._overhead_bytes += size
            if self._overhead_bytes > MAX_HEAD_BYTES:
                self._refuse_long()

    # --- the parser's callbacks ------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._headers = 0
        if self._too_late is None:
            self._await_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers += 1
        if self._headers > MAX_HEADERS:
            self._refuse_many()
            raise _Refused
        if not self._in_body:  # trailers are not wanted
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_time()
        self._in_body, self._overhead_bytes = True, 0
        self._left_bytes = _declared(self.headers)
        shown_key = partial(self.connections_of_all.shown_key, self)
        extensions: dict[str, Any] = {GONE: self.gone, FLOW: self.flow, SHOWN_KEY: shown_key}
        self.scope["extensions"] = extensions
        path = self._read_head()
        if not (_is_operators(path) or self.connections_of_all.admits(self)):
            self._refuse_crowd()
            raise _Refused
        before, self.cycle = self.cycle, self._new_cycle()
        if before is None or before.response_complete:
            self._start_asgi_task(self.cycle, self.app)
        else:
            self.pipeline.appendleft((self.cycle, self.app))

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        if self._left_bytes is None:
            self._chunks += 1
            self._overhead_bytes -= _OVERHEAD_FACTOR * len(body)
            self._overhead_bytes = max(self._overhead_bytes, 0)
        else:
            self._left_bytes -= len(body)
        if not self.cycle.response_complete:
            self.flow.pause_reading()  # until somebody asks for it
        self._new_bytes += len(body)
        if self._new_bytes >= _PROGRESS_BYTES:
            self._note_progress()

    def on_message_complete(self) -> None:
        self._in_body, self._left_bytes, self._head_bytes = False, None, 0
        self._note_waiting()
        if self._idle:  # it was answered before its end
            self._in_time()
            self._await_head()
        super().on_message_complete()

    def _read_head(self) -> str:
        """Method and address into the scope."""
        version = self.parser.get_http_version()
        self.scope["method"] = self.parser.get_method().decode("ascii")
        self.scope["http_version"] = version
        address = httptools.parse_url(self.url)
        path = urllib.parse.unquote(address.path.decode("ascii"))
        self.scope["path"] = self.root_path + path
        self.scope["raw_path"] = self.root_path.encode("ascii") + address.path
        self.scope["query_string"] = address.query or b""
        return path

    def _new_cycle(self) -> RequestResponseCycle:
        old = self.scope["http_version"] == "1.0"
        return (UntilCloseCycle if old else RequestResponseCycle)(
            scope=self.scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=self.access_log,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=self.expect_100_continue,
            keep_alive=not old and self.parser.should_keep_alive(),
            on_response=self.on_response_complete,
        )

    # --- answers ---------------------------------------------------------------------------

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        self.connections_of_all.busy(self)
        self._note_progress()
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        self._running = None
        super().on_response_complete()
        if self.transport.is_closing():
            self._let_go()
            return
        if self._idle:
            self.connections_of_all.idle(self)
            if self._in_body:  # answered before its end; the rest is read for a while
                self._too_late = self.loop.call_later(_REST_S, self._let_go)
            if self._finished and not self._ahead:
                self._let_go()
                return
        if self._ahead:
            self._take_turn()
        else:
            self._hold()

    def _take_turn(self) -> None:
        if not self._waits:
            self._waits = True
            self.connections_of_all.in_turn(self._parse_on)

    def _parse_on(self) -> None:
        self._waits = False
        if not self.transport.is_closing():
            self._parse()
            if not self.flow.held:
                self.flow.resume_reading()

    def _note_progress(self) -> None:
        self._since, self._new_bytes = time.monotonic(), 0
        self._note_waiting()

    def _note_waiting(self) -> None:
        """Tell whether it is the client that is waited for. A body that comes behind another
        request is not waited for yet."""
        waits = self.flow.write_paused or (self._in_body and not self.pipeline)
        self.connections_of_all.awaits_client(self, self._since if waits else None)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._note_progress()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._note_progress()
        self._hold()

    def send_400_response(self, msg: str) -> None:
        if not self.transport.is_closing():  # otherwise it was refused, with a better reason
            super().send_400_response(msg)

    # --- refusals --------------------------------------------------------------------------

    def _await_head(self) -> None:
        self._too_late = self.loop.call_later(HEAD_S, self._refuse_late)

    def _in_time(self) -> None:
        if self._too_late is not None:
            self._too_late.cancel()
            self._too_late = None

    def _refuse_long(self) -> None:
        why = f"The address and headers are longer than {MAX_HEAD_BYTES} bytes.\n"
        self._refuse(b"431 Request Header Fields Too Large", why)

    def _refuse_many(self) -> None:
        why = f"There are more than {MAX_HEADERS} headers.\n"
        self._refuse(b"431 Request Header Fields Too Large", why)

    def _refuse_late(self) -> None:
        self._too_late = None
        why = f"No whole request head came within {HEAD_S:.0f} seconds.\n"
        self._refuse(b"408 Request Timeout", why)

    def _refuse_crowd(self) -> None:
        why = (
            f"The server has {len(self.connections_of_all)} connections and no room for this one "
            "(server.max_connections); try again shortly.\n"
        )
        self._refuse(b"503 Service Unavailable", why, b"retry-after: 1\r\n")

    def _refuse(self, status: bytes, why: str, header: bytes = b"") -> None:
        if self._running is None or not self._running.response_started:
            self.transport.write(
                b"HTTP/1.1 %b\r\ncontent-type: text/plain; charset=utf-8\r\ncontent-length: %d\r\n"
                b"%bconnection: close\r\n\r\n%b" % (status, len(why), header, why.encode())
            )
        self._let_go()


def _declared(headers: list[tuple[bytes, bytes]]) -> int | None:
    """How long the body will be, None if it comes in chunks; the parser has checked it."""
    names = dict(headers)
    if b"transfer-encoding" in names:
        return None
    return int(names.get(b"content-length", b"0"))


def _is_operators(path: str) -> bool:
    """Whether a request is one of those for which there is always a connection."""
    return path in {"/health", "/ready", "/metrics"} or path.startswith("/admin/")
