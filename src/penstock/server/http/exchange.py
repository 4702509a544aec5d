"""One HTTP exchange: body in, answer out, and what the access log says about it.

It knows HTTP and the limits on bodies; it does not know what a body means. An endpoint is a
coroutine function that takes an `Exchange` and answers through it, or raises a `PenstockError`.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from penstock.errors import BadRequest, BodyTooLarge, Overloaded
from penstock.memory.clients.json_weight import BODY_FACTOR
from penstock.server.http.bodies import ClientGone, read_body
from penstock.server.http.errors import ANTHROPIC, OPENAI, ErrorStyle
from penstock.server.http.flow_control import FLOW
from penstock.server.http.free_form import field_error
from penstock.server.http.peer import group_of
from penstock.server.http.threads import run_in_thread_if_large

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from penstock.errors import PenstockError
    from penstock.memory.clients.requests import RequestMemory
    from penstock.memory.clients.waits import ClientWait
    from penstock.server.http.bodies import BodyLimits
    from penstock.server.http.flow_control import Flow

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Result = TypeVar("Result")

_DISCARD_S = 10.0
# An answer is handed over in pieces: the rest stays in the request's books until the client reads.
_PIECE_BYTES = 16 << 10


@dataclass(frozen=True, slots=True)
class AnswerLimits:
    """How slowly a client may read its answer; only time in which it is waited for counts."""

    patience_s: float = 300.0  # without a byte, and ahead of the rate
    rate: int = 16 << 10  # bytes a second, at least

    def left_s(self, waited_s: float, moved_bytes: int) -> float:
        """How much longer it may be waited for."""
        slow = self.patience_s + moved_bytes / max(self.rate, 1) - waited_s
        return min(slow, self.patience_s)


@dataclass(slots=True)
class Exchange:
    """A request in hand, and the record of how it went."""

    scope: Scope
    receive: Receive
    _send: Send
    id: str
    memory: RequestMemory  # the memory that this request takes in the server
    limits: BodyLimits
    closing: asyncio.Event  # set when answers still running must end now
    reading: AnswerLimits = AnswerLimits()
    key: str = ""  # which API key was used
    salt: bytes = b""  # requests with another one never find this one's KV
    owner: str = ""  # of what is stored: a mark of the API key, whatever its place among them
    origin: str | None = None  # of the web page that may read the answer
    extra_headers: Mapping[str, str] = field(default_factory=dict)  # of every answer
    style: ErrorStyle = OPENAI  # the protocol in which it is refused
    # How a stream that has begun says that it failed, where the protocol needs more than an event.
    failing: Callable[[PenstockError], bytes] | None = None
    trace: str = ""  # of which it is a part, as the client's `traceparent` says it
    started: float = field(default_factory=time.monotonic)
    status: int | None = None  # of the answer, once its headers are out
    record: dict[str, object] = field(default_factory=dict)  # for the access log
    _body_read: bool = False
    _body_left: bool = True  # of it something may be on its way
    _body_bytes: int = 0
    _answered: bool = False  # to the last byte
    _wait: ClientWait | None = None  # for the client to read

    @property
    def path_params(self) -> Mapping[str, str]:
        """What the route's pattern matched."""
        params: Mapping[str, str] = self.scope.get("path_params", {})
        return params

    @property
    def caller(self) -> str:
        """Between whom requests are fair, and as whose that counts which outlives the connection:
        the key's, otherwise the address', grouped as connections are."""
        host, _ = self.scope.get("client") or ("127.0.0.1", 0)
        return self.key or group_of(host)

    def header(self, name: bytes) -> str | None:
        """The first header of that (lower-case) name."""
        for key, value in self.scope["headers"]:
            if key == name:
                text: str = value.decode("latin-1")
                return text
        return None

    @asynccontextmanager
    async def body(self) -> AsyncIterator[bytes]:
        """The whole body. What it will take once decoded is booked before it is read, or decoded;
        when the block ends the fields are left, about once its size and what is in them."""
        declared = self.header(b"content-length")
        size = int(declared) if declared is not None and declared.isdigit() else 0
        if size > self.limits.max_bytes:
            await self._discard(size)
            raise self.limits.too_large(size)
        encoding = self.header(b"content-encoding")
        try:
            content = await read_body(self._receive_body, self.memory, self.limits, size, encoding)
        except (BadRequest, BodyTooLarge):
            self.memory.release()  # nothing of it is held
            if self._body_left:
                await self._discard(0)
            raise
        self._body_read, self._body_bytes = True, len(content)
        try:
            yield content
        finally:
            # Of the texts one is left, the prompt being booked as tokens; what is in lists stays.
            self.memory.shrink((BODY_FACTOR - 1) * len(content))

    async def run_in_thread_if_large(self, work: Callable[[], Result]) -> Result:
        """Do something with the body: beside the event loop, if the body is large."""
        return await run_in_thread_if_large(self._body_bytes, work)

    async def _receive_body(self) -> Message:
        message = await self.receive()
        self._body_left = bool(message.get("more_body", False))
        return message

    async def _discard(self, expected: int) -> None:
        """Read on for a while and keep nothing.

        A connection closed with data on its way loses the answer: the client sees a reset. What
        is far larger than allowed, or waits to be told to go on, is not read all the same.
        """
        left = 2 * self.limits.max_bytes
        if expected > left or self.header(b"expect") is not None:
            return
        try:
            async with asyncio.timeout(min(_DISCARD_S, self.limits.whole_s)):
                more = True
                while more and left > 0:
                    message = await self.receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    left -= len(message.get("body", b""))
                    more = message.get("more_body", False)
        except TimeoutError:
            return

    async def while_connected(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run `work`, but cancel it as soon as the client leaves or the server must close.

        Only after `body()`: from then on `receive` has nothing to say but that the client left.
        """
        assert self._body_read
        task = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(self._disconnected())
        closing = asyncio.ensure_future(self.closing.wait())
        try:
            await asyncio.wait({task, gone, closing}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            if self._answered:  # whole; what is left is tidying up
                return await task
            if gone.done():
                raise ClientGone
            raise Overloaded("The server is shutting down.", retry_after_s=5)
        finally:
            await _end(task, gone, closing)

    async def _disconnected(self) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass

    async def refuse(self, error: PenstockError, headers: Mapping[str, str]) -> None:
        """Answer with the error: with its status, or in the stream if the head is out."""
        if self.status is None:
            body = self.style.body(error, self.id)
            await self.send_json(body, self.style.status(error), headers)
        elif not self._answered:
            said = self.style.event(error, self.id) if self.failing is None else self.failing(error)
            await self.write(said, more=False)

    async def send_json(
        self, content: object, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        """Answer with one JSON document."""
        await self.send_bytes(msgspec.json.encode(content), "application/json", status, headers)

    async def send_made(self, make: Callable[[], object]) -> None:
        """Answer with what `make` returns as JSON; beside the event loop, if it is much."""
        # An answer is booked at several times what is rendered of it.
        size = self.memory.size // 8
        await self.send_bytes(
            await run_in_thread_if_large(size, partial(_encoded, make)), "application/json"
        )

    async def send_bytes(
        self,
        content: bytes,
        media_type: str,
        status: int = 200,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Answer with `content` and end."""
        await self.begin(
            status,
            {"content-type": media_type, "content-length": str(len(content)), **(headers or {})},
        )
        await self.write(content, more=False)

    async def begin(self, status: int, headers: Mapping[str, str]) -> None:
        """Send the head of the answer."""
        self.status = status
        pairs = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        pairs += [(k.encode(), v.encode("latin-1")) for k, v in self.extra_headers.items()]
        pairs.append((b"x-request-id", self.id.encode()))
        if self.style is ANTHROPIC:
            pairs.append((b"request-id", self.id.encode()))  # where their clients look for it
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})

    async def write(self, content: bytes, *, more: bool = True) -> None:
        """Send a piece of the body; `more=False` ends the answer.

        Waits while the client does not read; one that reads too slowly is as good as gone.
        """
        flow: Flow | None = self.scope.get("extensions", {}).get(FLOW)
        end = max(len(content), 1)
        for start in range(0, end, _PIECE_BYTES):
            last = not more and start + _PIECE_BYTES >= end
            self._answered = last
            piece = content[start : start + _PIECE_BYTES] if end > _PIECE_BYTES else content
            message = {"type": "http.response.body", "body": piece, "more_body": not last}
            if flow is not None and not flow.write_paused:
                await self._send(message)  # without waiting, so without a timer for each token
            else:
                await self._send_slowly(message, flow)
            self._reads.moved_bytes += len(piece)

    @property
    def _reads(self) -> ClientWait:
        if self._wait is None:
            self._wait = self.memory.waits(self.reading)
        return self._wait

    async def _send_slowly(self, message: Message, flow: Flow | None) -> None:
        try:
            async with self._reads.waiting():
                await self._send(message)
        except TimeoutError:
            self.record["client"] = "ended for others" if self._reads.ended else "slow"
            if flow is not None:
                flow.abort()  # it would not read the rest either
            raise ClientGone from None

    @property
    def answered(self) -> bool:
        """To the last byte; what is left is tidying up."""
        return self._answered


def _encoded(make: Callable[[], object]) -> bytes:
    return msgspec.json.encode(make())


async def _end(*tasks: asyncio.Future[Any]) -> None:
    """Cancel what still runs and wait until it has cleaned up."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


# --- JSON bodies -------------------------------------------------------------------------------

_SEARCHED_BYTES = 1 << 20  # for a better word: no other thread runs meanwhile
_LONE_SURROGATE = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    rb"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F]"
)


async def decode_json(decoder: msgspec.json.Decoder[Result], body: bytes) -> Result:
    """The body as the decoder's type; a large one is decoded in a thread."""
    return await run_in_thread_if_large(len(body), partial(_decode, decoder, body))


def _decode(decoder: msgspec.json.Decoder[Result], body: bytes) -> Result:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise field_error(error) from None
    except UnicodeDecodeError:
        raise BadRequest("The body is not valid UTF-8.") from None
    except RecursionError:
        raise BadRequest("The body is nested too deeply.") from None
    except msgspec.DecodeError as error:
        raise BadRequest(f"The body is not valid JSON: {_reason(error, body)}.") from None


def _reason(error: msgspec.DecodeError, body: bytes) -> str:
    if len(body) <= _SEARCHED_BYTES and _LONE_SURROGATE.search(body):
        return "a string has half of a surrogate pair (\\ud800 to \\udfff standing alone)"
    if not body.strip():
        return "it is empty"
    return str(error).removeprefix("JSON is malformed: ")
