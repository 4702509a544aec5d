"""What uvicorn's connections lack: reading that can be held back, and answers of unknown length to
HTTP/1.0."""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

FLOW = "penstock.flow"  # in a scope's extensions: the flow control of the connection


class Flow(FlowControl):
    """Does not read on while there is something that was read and not parsed."""

    held = False

    def resume_reading(self) -> None:
        if not self.held:
            super().resume_reading()

    def abort(self) -> None:
        """Close at once; what was written and not read is lost."""
        self._transport.abort()


class UntilCloseCycle(RequestResponseCycle):
    """An answer to HTTP/1.0: where its length is not known, it ends with the connection."""

    _until_close = False

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            names = {name.lower() for name, _ in message["headers"]}
            self._until_close = b"content-length" not in names
        if not self._until_close:
            await super().send(message)
            return
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected:
            return
        if message["type"] == "http.response.start":
            self.response_started = True
            self.waiting_for_100_continue = False
            head = [STATUS_LINE[message["status"]], b"connection: close\r\n"]
            head += [b"%b: %b\r\n" % pair for pair in message["headers"]]
            self.transport.write(b"".join([*head, b"\r\n"]))
            return
        if self.scope["method"] != "HEAD":
            self.transport.write(message.get("body", b""))
        if not message.get("more_body", False):
            self.response_complete = True
            self.message_event.set()
            self.transport.close()
            self.on_response()
