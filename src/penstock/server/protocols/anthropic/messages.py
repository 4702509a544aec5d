"""Anthropic's `/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.server.http.errors import ANTHROPIC, event
from penstock.server.pipeline.answers import Answer, read_request, respond
from penstock.server.pipeline.conversation import prepare
from penstock.server.pipeline.pieces import FinishReason, Piece
from penstock.server.protocols.anthropic.fields import CountFields, MessagesFields
from penstock.text.parts import (
    CallArguments,
    CallBegin,
    CallEnd,
    Part,
    ReasoningDelta,
    TextDelta,
    merged,
)

if TYPE_CHECKING:
    from penstock.errors import PenstockError
    from penstock.server.http.exchange import Exchange
    from penstock.server.pipeline.generation import Job, Usage
    from penstock.server.protocols.services import Services

decoder = msgspec.json.Decoder(MessagesFields)
_count_decoder = msgspec.json.Decoder(CountFields)

_STOP_REASONS = {
    FinishReason.STOP: "end_turn",
    FinishReason.STOP_STRING: "stop_sequence",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.CALLS: "tool_use",
}
# Their servers sign what a model thought; clients send it back unread, and so do we accept it.
_SIGNATURE = "penstock"
_UNPARSED = "unparsed_arguments"  # what a call has instead of arguments that are no object


async def messages(exchange: Exchange, services: Services) -> None:
    """The endpoint."""
    fields, job = await read_request(
        exchange, decoder, lambda fields: _prepare(exchange, fields, services)
    )
    await respond(
        exchange, services, job, lambda _: _Answer(exchange.id, job), stream=fields.stream
    )


async def count_tokens(exchange: Exchange, services: Services) -> None:
    """How many tokens a conversation comes to; nothing is run."""
    _, job = await read_request(
        exchange, _count_decoder, lambda fields: _prepare(exchange, fields, services)
    )
    await exchange.send_json({"input_tokens": sum(map(len, job.prompts))})


async def _prepare(exchange: Exchange, fields: CountFields, services: Services) -> Job:
    asked = await exchange.run_in_thread_if_large(fields.conversation)
    return await prepare(exchange, asked, services)


def _usage(usage: Usage) -> dict[str, object]:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _call_block(begin: CallBegin) -> dict[str, Any]:
    call_id = begin.id or f"toolu_{secrets.token_hex(12)}"
    return {"type": "tool_use", "id": call_id, "name": begin.name, "input": {}}


_PING = event({"type": "ping"}, "ping")


class _Answer(Answer):
    """Pieces as Anthropic's protocol writes them: a list of blocks, each opened and closed."""

    def __init__(self, request_id: str, job: Job) -> None:
        self._request_id = request_id
        self._index = -1  # of the open block, or the latest
        self._open: type[Part] | None = None
        self._ending: tuple[str | None, str | None] = (None, None)
        self._head: dict[str, object] = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": job.card.name,
        }

    @property
    def keep_alive(self) -> bytes:
        """An event that means nothing."""
        return _PING

    def document(self, choices: list[list[Piece]], usage: Usage) -> dict[str, object]:
        """The message with all of its blocks."""
        [pieces] = choices
        last = pieces[-1]
        assert last.finish is not None
        return {
            **self._head,
            "content": _blocks([part for piece in pieces for part in piece.parts]),
            "stop_reason": _STOP_REASONS[last.finish],
            "stop_sequence": last.stop_string,
            "usage": _usage(usage),
        }

    def opening(self, usage: Usage) -> bytes:
        """The message without its content."""
        message = {
            **self._head,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {**_usage(usage), "output_tokens": 0},
        }
        return _event("message_start", message=message) + _PING

    def events(self, piece: Piece) -> bytes:
        """A block is closed when another kind of part comes."""
        events = [self._part(part) for part in piece.parts]
        if piece.finish is not None:
            self._ending = (_STOP_REASONS[piece.finish], piece.stop_string)
        return b"".join(events)

    def _part(self, part: Part) -> bytes:
        match part:
            case TextDelta(text):
                opened = self._begin(TextDelta, {"type": "text", "text": ""})
                return opened + self._delta({"type": "text_delta", "text": text})
            case ReasoningDelta(text):
                thinking = {"type": "thinking", "thinking": "", "signature": ""}
                opened = self._begin(ReasoningDelta, thinking)
                return opened + self._delta({"type": "thinking_delta", "thinking": text})
            case CallBegin():
                return self._end() + self._begin(CallBegin, _call_block(part))
            case CallArguments(text):
                return self._delta({"type": "input_json_delta", "partial_json": text})
            case CallEnd():
                return self._end()

    def _begin(self, kind: type[Part], block: dict[str, Any]) -> bytes:
        if self._open is kind:
            return b""
        closed = self._end()
        self._open = kind
        self._index += 1
        return closed + _event("content_block_start", index=self._index, content_block=block)

    def _delta(self, delta: dict[str, str]) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)

    def _end(self) -> bytes:
        kind, self._open = self._open, None
        if kind is None:
            return b""
        signed = b""
        if kind is ReasoningDelta:
            signed = self._delta({"type": "signature_delta", "signature": _SIGNATURE})
        return signed + _event("content_block_stop", index=self._index)

    async def closing(self, usage: Usage) -> bytes:
        """The last block's end, why it ended, and the end."""
        reason, sequence = self._ending
        return (
            self._end()
            + _event(
                "message_delta",
                delta={"stop_reason": reason, "stop_sequence": sequence},
                usage=_usage(usage),
            )
            + _event("message_stop")
        )

    def failing(self, error: PenstockError) -> bytes:
        """One last event."""
        return ANTHROPIC.event(error, self._request_id)


def _event(kind: str, **content: object) -> bytes:
    return event({"type": kind, **content}, kind)


def _blocks(parts: list[Part]) -> list[dict[str, Any]]:
    """The content, whole."""
    blocks: list[dict[str, Any]] = []
    arguments = ""
    for part in merged(parts):
        match part:
            case TextDelta(text):
                blocks.append({"type": "text", "text": text})
            case ReasoningDelta(text):
                blocks.append({"type": "thinking", "thinking": text, "signature": _SIGNATURE})
            case CallBegin():
                arguments = ""
                blocks.append({**_call_block(part), "input": {_UNPARSED: ""}})
            case CallArguments(text):
                arguments = text
                # Unless it comes to its end, nobody must take it for a whole call.
                blocks[-1]["input"] = {_UNPARSED: arguments}
            case CallEnd():
                blocks[-1]["input"] = _input(arguments)
    return blocks


def _input(arguments: str) -> Any:
    """The arguments as an object; what is none is handed on under a name that says so."""
    try:
        decoded = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return {_UNPARSED: arguments}
    return decoded if isinstance(decoded, dict) else {_UNPARSED: arguments}
