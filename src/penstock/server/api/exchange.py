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
from penstock.memory.requests import BODY_FACTOR, decoded_bytes
from penstock.server.api.errors import ANTHROPIC, OPENAI, ErrorStyle

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from penstock.errors import PenstockError
    from penstock.memory.requests import Share

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Result = TypeVar("Result")

_DISCARD_S = 10.0
_BODY_S = 60.0  # of silence in the middle of a body
_BELIEVED_BYTES = 1 << 20  # of what a client says that a body will have
# Below this a decode takes less time than a thread switch.
_INLINE_BYTES = 64 << 10


class ClientGone(Exception):  # noqa: N818 - not an error: the client may leave when it likes
    """The client has closed the connection; there is nobody to answer."""


@dataclass(slots=True)
class Exchange:
    """A request in hand, and the record of how it went."""

    scope: Scope
    receive: Receive
    _send: Send
    id: str
    share: Share  # the memory that this request takes in the server
    limit_bytes: int  # of the body
    closing: asyncio.Event  # set when answers still running must end now
    patience_s: float = 300.0  # with a client that takes nothing of what it is sent
    caller: str = ""  # which API key was used; requests are fair between them
    salt: bytes = b""  # requests with another one never find this one's KV
    owner: str = ""  # of what is stored: a mark of the API key, whatever its place among them
    style: ErrorStyle = OPENAI  # the protocol in which it is refused
    # How a stream that has begun says that it failed, where the protocol needs more than an event.
    failing: Callable[[PenstockError], bytes] | None = None
    started: float = field(default_factory=time.monotonic)
    status: int | None = None  # of the answer, once its headers are out
    record: dict[str, object] = field(default_factory=dict)  # for the access log
    _body_read: bool = False
    _body_bytes: int = 0
    _answered: bool = False  # to the last byte

    @property
    def path_params(self) -> Mapping[str, str]:
        """What the route's pattern matched."""
        params: Mapping[str, str] = self.scope.get("path_params", {})
        return params

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
        if size > self.limit_bytes:
            await self._discard(size)
            raise self._too_large(size)
        # What a client only announces would keep others from what it never uses.
        believed = min(size, _BELIEVED_BYTES)
        await self.share.grow(believed * BODY_FACTOR)
        content = await self._read(believed)
        needed = await self.apart(partial(decoded_bytes, content))
        await self.share.grow(max(0, needed - self.share.size))
        try:
            yield content
        finally:
            # Of the texts one is left, the prompt being booked as tokens; what is in lists stays.
            self.share.shrink((BODY_FACTOR - 1) * len(content))

    async def apart(self, work: Callable[[], Result]) -> Result:
        """Do something with the body: beside the event loop, if the body is large."""
        return await beside(self._body_bytes, work)

    async def _read(self, booked: int) -> bytes:
        """All chunks; those beyond what is booked are booked as they come."""
        chunks: list[bytes] = []
        held, more = 0, True
        while more:
            try:
                async with asyncio.timeout(min(self.patience_s, _BODY_S)):
                    message = await self.receive()
            except TimeoutError:
                raise _unfinished(held) from None
            if message["type"] == "http.disconnect":
                raise ClientGone
            chunk: bytes = message.get("body", b"")
            more = message.get("more_body", False)
            held += len(chunk)
            if held > self.limit_bytes:
                chunks.clear()
                if more:
                    await self._discard(0)
                raise self._too_large()
            if held > booked:
                await self.share.grow((held - booked) * BODY_FACTOR)
                booked = held
            chunks.append(chunk)
        self._body_read, self._body_bytes = True, held
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def _too_large(self, size: int | None = None) -> BodyTooLarge:
        known = f"has {size} bytes" if size is not None else "is longer than allowed"
        return BodyTooLarge(
            f"The request body {known}; the limit is {self.limit_bytes} bytes (server.max_body)."
        )

    async def _discard(self, expected: int) -> None:
        """Read on for a while and keep nothing.

        A connection closed with data on its way loses the answer: the client sees a reset. What
        is far larger than allowed, or waits to be told to go on, is not read all the same.
        """
        left = 2 * self.limit_bytes
        if expected > left or self.header(b"expect") is not None:
            return
        try:
            async with asyncio.timeout(_DISCARD_S):
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
        pairs.append((b"x-request-id", self.id.encode()))
        if self.style is ANTHROPIC:
            pairs.append((b"request-id", self.id.encode()))  # where their clients look for it
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})

    async def write(self, content: bytes, *, more: bool = True) -> None:
        """Send a piece of the body; `more=False` ends the answer.

        Waits while the client does not read; one that takes nothing for long is as good as gone.
        """
        self._answered = not more
        try:
            async with asyncio.timeout(self.patience_s):
                await self._send({"type": "http.response.body", "body": content, "more_body": more})
        except TimeoutError:
            raise ClientGone from None


def _unfinished(held: int) -> BadRequest:
    return BadRequest(
        f"The request body has stopped after {held} bytes: nothing came for {_BODY_S:.0f} seconds "
        "(server.slow_client_s if that is less)."
    )


async def beside(size: int, work: Callable[[], Result]) -> Result:
    """Do something with so many bytes: in a thread, if they are many."""
    return work() if size <= _INLINE_BYTES else await asyncio.to_thread(work)


async def _end(*tasks: asyncio.Future[Any]) -> None:
    """Cancel what still runs and wait until it has cleaned up."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


# --- JSON bodies -------------------------------------------------------------------------------

_LONE_SURROGATE = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    rb"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F]"
)


async def decode_json(decoder: msgspec.json.Decoder[Result], body: bytes) -> Result:
    """The body as the decoder's type; a large one is decoded in a thread."""
    return await beside(len(body), partial(_decode, decoder, body))


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


def field_error(error: msgspec.ValidationError) -> BadRequest:
    """msgspec's complaint with the field's name where OpenAI's clients look for it."""
    text, _, path = str(error).partition(" - at `")
    name = path.removesuffix("`").removeprefix("$").removeprefix(".").replace("[...]", "")
    where = f"`{name}`" if name else "The body"
    return BadRequest(f"{where}: {text[:1].lower()}{text[1:]}.", param=name or None)


def _reason(error: msgspec.DecodeError, body: bytes) -> str:
    if _LONE_SURROGATE.search(body):
        return "a string has half of a surrogate pair (\\ud800 to \\udfff standing alone)"
    if not body.strip():
        return "it is empty"
    return str(error).removeprefix("JSON is malformed: ")
