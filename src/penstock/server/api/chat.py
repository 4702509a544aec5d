"""`/v1/chat/completions`: a conversation in, the assistant's next message out."""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from penstock.errors import BadRequest
from penstock.server.api.answers import DONE, EVENT_STREAM, KEEP_ALIVE, collect, send_stream
from penstock.server.api.conversation import Conversation
from penstock.server.api.conversation import prepare as prepare_conversation
from penstock.server.api.errors import error_object, event
from penstock.server.api.exchange import decode_json
from penstock.server.api.fields import Count, GenerationFields
from penstock.server.api.generation import Generation, Job, Piece, openai_finish
from penstock.server.api.logprobs import chat_logprobs
from penstock.server.api.messages import (
    Message,
    OpenAITools,
    openai_tool_use,
    template_messages,
)
from penstock.text.manner import Thinking
from penstock.text.parts import CallArguments, CallBegin, CallEnd, Part, ReasoningDelta, TextDelta

if TYPE_CHECKING:
    from penstock.errors import PenstockError
    from penstock.server.api.exchange import Exchange
    from penstock.server.api.generation import Usage
    from penstock.server.api.services import Services


class ChatFields(GenerationFields, kw_only=True):
    """The body of a chat request."""

    messages: list[Message]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: OpenAITools = msgspec.field(default_factory=msgspec.Raw)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    thinking_budget: Count | None = None
    modalities: list[str] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def requested_tokens(self) -> int | None:
        """The newer name wins where a client sends both."""
        if self.max_completion_tokens is not None:
            name, value = "max_completion_tokens", self.max_completion_tokens
        elif self.max_tokens is not None:
            name, value = "max_tokens", self.max_tokens
        else:
            return None
        if value == 0:
            raise BadRequest(f"`{name}` is 0; it must be at least 1.", param=name)
        return value

    def alternatives(self) -> int | None:
        """How many log-probabilities beside the chosen token's; None: none at all."""
        if self.top_logprobs and not self.logprobs:
            raise BadRequest("`top_logprobs` needs `logprobs` to be true.", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    def conversation(self) -> Conversation:
        """The same in the words of every protocol."""
        if any(kind != "text" for kind in self.modalities or []):
            raise BadRequest("`modalities` can only be text.", param="modalities")
        return Conversation(
            fields=self,
            messages=template_messages(self.messages),
            max_tokens=self.requested_tokens(),
            logprobs=self.alternatives(),
            tools=openai_tool_use(self.tools, self.tool_choice, self.parallel_tool_calls),
            format=self.format(),
            thinking=Thinking(effort=self.reasoning_effort, budget=self.thinking_budget),
            template_arguments=self.chat_template_kwargs or {},
            add_generation_prompt=self.add_generation_prompt is not False,
            continues=bool(self.continue_final_message),
        )


decoder = msgspec.json.Decoder(ChatFields)


async def chat_completions(exchange: Exchange, services: Services) -> None:
    """The endpoint."""
    async with exchange.body() as body:
        fields = await decode_json(decoder, body)
        job = await exchange.while_connected(prepare(exchange, fields, services))
    generation = Generation(exchange, services, job)
    with services.metrics.observe(exchange, generation, job.card.name):
        answer = _Answer(job, fields)
        if fields.stream:
            keepalive_after_s = services.config.server.keepalive_after_s
            await send_stream(exchange, generation, answer, keepalive_after_s)
        else:
            choices = await collect(exchange, generation, job.n)
            await exchange.send_json(answer.whole(choices, generation.usage))


async def prepare(exchange: Exchange, fields: ChatFields, services: Services) -> Job:
    """The job of a chat."""
    asked = await exchange.apart(fields.conversation)
    return await prepare_conversation(exchange, asked, services)


def call_id(begin: CallBegin) -> str:
    """The model's own name for a call, or one of ours."""
    return begin.id or f"call_{secrets.token_hex(12)}"


class _Answer:
    """Pieces as OpenAI's chat protocol writes them, whole or as events."""

    media_type = EVENT_STREAM
    keep_alive = KEEP_ALIVE

    def __init__(self, job: Job, fields: ChatFields) -> None:
        self._tokenizer = job.tokenizer
        self._logprobs = bool(fields.logprobs)
        options = fields.stream_options
        self._include_usage = bool(options is not None and options.include_usage)
        self._opened: set[int] = set()
        self._calls: dict[int, int] = {}  # begun, by choice
        self._head: dict[str, object] = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "object": "chat.completion.chunk" if fields.stream else "chat.completion",
            "created": int(time.time()),
            "model": job.card.name,
        }

    def whole(self, choices: list[list[Piece]], usage: Usage) -> dict[str, object]:
        """The answer of a request that does not stream."""
        return {
            **self._head,
            "choices": [self._choice(index, pieces) for index, pieces in enumerate(choices)],
            "usage": usage.as_openai(),
        }

    def _choice(self, index: int, pieces: list[Piece]) -> dict[str, object]:
        logprobs = None
        if self._logprobs:
            parts = [chat_logprobs(self._tokenizer, piece) for piece in pieces]
            logprobs = {"content": [entry for part in parts for entry in part], "refusal": None}
        return {
            "index": index,
            "message": _message([part for piece in pieces for part in piece.parts]),
            "logprobs": logprobs,
            "finish_reason": openai_finish(pieces[-1].finish),
        }

    def opening(self, usage: Usage) -> bytes:
        """Nothing: each choice opens with its first piece."""
        return b""

    def events(self, piece: Piece) -> bytes:
        """The events of one piece; a choice opens with its role."""
        events: list[bytes] = []
        if piece.choice not in self._opened:
            self._opened.add(piece.choice)
            events.append(self._chunk(piece.choice, {"role": "assistant", "content": ""}))
        deltas = [delta for part in piece.parts if (delta := self._delta(piece.choice, part))]
        logprobs: dict[str, object] | None = None
        if self._logprobs and piece.logprobs:
            logprobs = {"content": chat_logprobs(self._tokenizer, piece), "refusal": None}
            deltas = deltas or [{"content": ""}]
        for delta in deltas:
            events.append(self._chunk(piece.choice, delta, logprobs))
            logprobs = None
        if piece.finish is not None:
            events.append(self._chunk(piece.choice, {}, finish=openai_finish(piece.finish)))
        return b"".join(events)

    def _delta(self, choice: int, part: Part) -> dict[str, object] | None:
        match part:
            case TextDelta(text):
                return {"content": text}
            case ReasoningDelta(text):
                return {"reasoning_content": text}
            case CallBegin(name):
                index = self._calls[choice] = self._calls.get(choice, -1) + 1
                function = {"name": name, "arguments": ""}
                return {"tool_calls": [
                    {"index": index, "id": call_id(part), "type": "function", "function": function}
                ]}  # fmt: skip
            case CallArguments(text):
                index = self._calls[choice]
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
            case CallEnd():
                return None

    def _chunk(
        self,
        index: int,
        delta: dict[str, object],
        logprobs: dict[str, object] | None = None,
        finish: str | None = None,
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        chunk: dict[str, object] = {**self._head, "choices": [choice]}
        if self._include_usage:
            chunk["usage"] = None
        return event(chunk)

    async def closing(self, usage: Usage) -> bytes:
        """The usage, if asked for, and the end."""
        if not self._include_usage:
            return DONE
        return event({**self._head, "choices": [], "usage": usage.as_openai()}) + DONE

    def failing(self, error: PenstockError) -> bytes:
        """One last event."""
        return event(error_object(error))


def _message(parts: list[Part]) -> dict[str, object]:
    """The assistant's message, whole."""
    text = "".join(part.text for part in parts if isinstance(part, TextDelta))
    reasoning = "".join(part.text for part in parts if isinstance(part, ReasoningDelta))
    calls: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, CallBegin):
            function = {"name": part.name, "arguments": ""}
            calls.append({"id": call_id(part), "type": "function", "function": function})
        elif isinstance(part, CallArguments):
            calls[-1]["function"]["arguments"] += part.text
    # As OpenAI has it, a message that only calls has no content rather than an empty one.
    content = None if calls and not text else text
    message: dict[str, object] = {"role": "assistant", "content": content, "refusal": None}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message
