"""`/v1/chat/completions`: a conversation in, the assistant's next message out."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from penstock.errors import BadRequest
from penstock.server.fields.generation import UNLIMITED, GenerationFields
from penstock.server.fields.unsupported import Unsupported  # noqa: TC001 - msgspec reads it
from penstock.server.fields.whole_numbers import Limit, SmallCount  # noqa: TC001
from penstock.server.http.free_form import (
    MAX_ARGUMENTS_BYTES,
    MAX_SMALL_BYTES,
    check_nesting,
    decode_free_form,
    decode_small,
    kept_as_text,
)
from penstock.server.pipeline.answers import read_request, respond
from penstock.server.pipeline.conversation import Conversation
from penstock.server.pipeline.conversation import prepare as prepare_conversation
from penstock.server.protocols.chat_messages import (
    Message,
    TemplateArguments,
    refuse_two_ends,
    template_arguments,
    template_messages,
)
from penstock.server.protocols.logprobs import chat_logprobs
from penstock.server.protocols.openai.openai_answer import OpenAIAnswer, openai_finish
from penstock.server.protocols.openai.reasoning_fields import (
    Effort,
    Reasoning,
    ThinkingObject,
    shows_reasoning,
    wanted_thinking,
)
from penstock.server.protocols.tool_fields import OpenAITools, ToolChoice, openai_tool_use
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
    from penstock.server.http.exchange import Exchange
    from penstock.server.pipeline.generation import Job
    from penstock.server.pipeline.pieces import Piece
    from penstock.server.protocols.services import Services


class ChatFields(GenerationFields, kw_only=True):
    """The body of a chat request."""

    also_unsupported = ("echo", "best_of")

    messages: list[Message]
    max_completion_tokens: Limit | None = None
    logprobs: bool | None = None
    top_logprobs: SmallCount | None = None
    tools: OpenAITools = msgspec.field(default_factory=msgspec.Raw)
    tool_choice: ToolChoice = msgspec.field(default_factory=msgspec.Raw)
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    reasoning_effort: Effort | None = None
    enable_thinking: bool | None = None
    thinking: bool | ThinkingObject | None = None
    thinking_budget: Limit | None = None
    thinking_token_budget: Limit | None = None
    thinking_budget_tokens: Limit | None = None
    reasoning_budget: Limit | None = None
    include_reasoning: bool | None = None
    modalities: list[str] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateArguments = msgspec.field(default_factory=msgspec.Raw)
    documents: Annotated[msgspec.Raw, kept_as_text(list[dict[str, Any]])] = msgspec.field(
        default_factory=msgspec.Raw
    )
    echo: Unsupported = msgspec.field(default_factory=msgspec.Raw)
    best_of: Unsupported = msgspec.field(default_factory=msgspec.Raw)

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
        return None if value == UNLIMITED else value

    def alternatives(self) -> int | None:
        """How many log-probabilities beside the chosen token's; None: none at all."""
        if self.top_logprobs and not self.logprobs:
            raise BadRequest("`top_logprobs` needs `logprobs` to be true.", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    def template_arguments(self) -> dict[str, Any]:
        """What the client has the template told."""
        arguments = template_arguments(self.chat_template_kwargs)
        documents = decode_small(
            self.documents, list[dict[str, Any]], "documents", MAX_ARGUMENTS_BYTES
        )
        check_nesting(documents, "documents")
        return {**({} if documents is None else {"documents": documents}), **arguments}

    def conversation(self) -> Conversation:
        """The same in the words of every protocol."""
        if any(kind != "text" for kind in self.modalities or []):
            raise BadRequest("`modalities` can only be text.", param="modalities")
        refuse_two_ends(self.add_generation_prompt, self.continue_final_message)
        choice = decode_free_form(self.tool_choice, "tool_choice", MAX_SMALL_BYTES)
        return Conversation(
            fields=self,
            messages=template_messages(self.messages),
            max_tokens=self.requested_tokens(),
            logprobs=self.alternatives(),
            tools=openai_tool_use(self.tools, choice, self.parallel_tool_calls),
            format=self.format(),
            thinking=wanted_thinking(self),
            template_arguments=self.template_arguments(),
            add_generation_prompt=self.add_generation_prompt is not False,
            continues=bool(self.continue_final_message),
        )


decoder = msgspec.json.Decoder(ChatFields)


async def chat_completions(exchange: Exchange, services: Services) -> None:
    """The endpoint."""
    fields, job = await read_request(
        exchange, decoder, lambda fields: prepare(exchange, fields, services)
    )
    fingerprint = services.fingerprint(job.card)
    await respond(
        exchange, services, job, lambda _: _Answer(job, fields, fingerprint), stream=fields.stream
    )


async def prepare(exchange: Exchange, fields: ChatFields, services: Services) -> Job:
    """The job of a chat."""
    asked = await exchange.run_in_thread_if_large(fields.conversation)
    return await prepare_conversation(exchange, asked, services)


def call_id(begin: CallBegin) -> str:
    """The model's own name for a call, or one of ours."""
    return begin.id or f"call_{secrets.token_hex(12)}"


class _Answer(OpenAIAnswer):
    """Pieces as OpenAI's chat protocol writes them, whole or as events."""

    def __init__(self, job: Job, fields: ChatFields, fingerprint: str) -> None:
        kind = "chat.completion.chunk" if fields.stream else "chat.completion"
        super().__init__(job, fields, fingerprint, kind, "chatcmpl")
        self._tokenizer = job.tokenizer
        self._logprobs = bool(fields.logprobs)
        self._hidden = () if shows_reasoning(fields) else (ReasoningDelta,)
        self._opened: set[int] = set()
        self._calls: dict[int, int] = {}  # begun, by choice

    def _choice(self, index: int, pieces: list[Piece]) -> dict[str, object]:
        logprobs = None
        if self._logprobs:
            parts = [chat_logprobs(self._tokenizer, piece) for piece in pieces]
            logprobs = {"content": [entry for part in parts for entry in part], "refusal": None}
        return {
            "index": index,
            "message": _message([part for piece in pieces for part in self._shown(piece)]),
            "logprobs": logprobs,
            "finish_reason": openai_finish(pieces[-1].finish),
        }

    def events(self, piece: Piece) -> bytes:
        """The events of one piece; a choice opens with its role."""
        events: list[bytes] = []
        if piece.choice not in self._opened:
            self._opened.add(piece.choice)
            events.append(self._event(piece.choice, {"role": "assistant", "content": ""}))
        parts = self._shown(piece)
        deltas = [delta for part in parts if (delta := self._delta(piece.choice, part))]
        logprobs: dict[str, object] | None = None
        if self._logprobs and piece.logprobs:
            logprobs = {"content": chat_logprobs(self._tokenizer, piece), "refusal": None}
            deltas = deltas or [{"content": ""}]
        for delta in deltas:
            events.append(self._event(piece.choice, delta, logprobs))
            logprobs = None
        if piece.finish is not None:
            events.append(self._event(piece.choice, {}, finish=openai_finish(piece.finish)))
        return b"".join(events)

    def _shown(self, piece: Piece) -> list[Part]:
        """What the client wants to see of it."""
        return [part for part in piece.parts if not isinstance(part, self._hidden)]

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

    def _event(
        self,
        index: int,
        delta: dict[str, object],
        logprobs: dict[str, object] | None = None,
        finish: str | None = None,
    ) -> bytes:
        return self._chunk(
            {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        )


def _message(parts: list[Part]) -> dict[str, object]:
    """The assistant's message, whole."""
    text = "".join(part.text for part in parts if isinstance(part, TextDelta))
    reasoning = "".join(part.text for part in parts if isinstance(part, ReasoningDelta))
    calls: list[dict[str, Any]] = []
    for part in merged(parts):
        if isinstance(part, CallBegin):
            function = {"name": part.name, "arguments": ""}
            calls.append({"id": call_id(part), "type": "function", "function": function})
        elif isinstance(part, CallArguments):
            calls[-1]["function"]["arguments"] = part.text
    # As OpenAI has it, a message that only calls has no content rather than an empty one.
    content = None if calls and not text else text
    message: dict[str, object] = {"role": "assistant", "content": content, "refusal": None}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message
