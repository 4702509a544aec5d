"""A client's connection up to where a request's head ends: how long that may be, and how late.

Bodies are booked before they are read. Heads come before anything is known of a request, its key
among it, and take some thirty times their bytes once they are parsed: so they have to be short.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

if TYPE_CHECKING:
    import asyncio

MOST_HEAD_BYTES = 64 << 10  # address and headers, trailers among them
HEAD_S = 30.0  # from the connection, or the first byte of a later request, to the last of the head


class HeadTooLong(Exception):  # noqa: N818 - only the parser sees it
    """Ends the parser."""


class Connection(HttpToolsProtocol):
    """uvicorn's own, with bounds on heads."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes = 0
        # Since the parser has last said something: it keeps a line until it is whole.
        self._unsaid_bytes = 0
        self._too_late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._have_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unsaid_bytes += len(data)
        super().data_received(data)
        if self._unsaid_bytes > MOST_HEAD_BYTES and not self.transport.is_closing():
            self._refuse_long()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = 0
        if self._too_late is None:
            self._await_head()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._have_head()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unsaid_bytes = 0
        super().on_body(body)

    def send_400_response(self, msg: str) -> None:
        if self._head_bytes > MOST_HEAD_BYTES:
            self._refuse_long()
        else:
            super().send_400_response(msg)

    def _count(self, size: int) -> None:
        self._unsaid_bytes = 0
        self._head_bytes += size
        if self._head_bytes > MOST_HEAD_BYTES:
            raise HeadTooLong

    def _await_head(self) -> None:
        self._too_late = self.loop.call_later(HEAD_S, self._refuse_late)

    def _have_head(self) -> None:
        self._unsaid_bytes = 0
        if self._too_late is not None:
            self._too_late.cancel()
            self._too_late = None

    def _refuse_long(self) -> None:
        why = f"The address and headers are longer than {MOST_HEAD_BYTES} bytes.\n"
        self._refuse(b"431 Request Header Fields Too Large", why)

    def _refuse_late(self) -> None:
        self._too_late = None
        why = f"No whole request head came within {HEAD_S:.0f} seconds.\n"
        self._refuse(b"408 Request Timeout", why)

    def _refuse(self, status: bytes, why: str) -> None:
        self.transport.write(
            b"HTTP/1.1 %b\r\ncontent-type: text/plain; charset=utf-8\r\ncontent-length: %d\r\n"
            b"connection: close\r\n\r\n%b" % (status, len(why), why.encode())
        )
        self.transport.close()
