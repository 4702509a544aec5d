"""`/v1/chat/completions`: a conversation in, the assistant's next message out."""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from penstock.errors import BadRequest
from penstock.server.api.answers import DONE, collect, event, send_stream
from penstock.server.api.exchange import decode_json
from penstock.server.api.fields import Count, GenerationFields, check_nesting
from penstock.server.api.front_door import FrontDoor
from penstock.server.api.generation import Generation, Job, Piece
from penstock.server.api.logprobs import chat_logprobs
from penstock.server.api.messages import Message, template_messages, template_tools

if TYPE_CHECKING:
    from penstock.server.api.exchange import Exchange
    from penstock.server.api.services import Services
    from penstock.text.tokenizer import Tokenizer


class ChatFields(GenerationFields, kw_only=True):
    """The body of a chat request."""

    messages: list[Message]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: msgspec.Raw = msgspec.Raw()
    tool_choice: str | dict[str, Any] | None = None
    modalities: list[str] | None = None
    add_generation_prompt: bool | None = None
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


decoder = msgspec.json.Decoder(ChatFields)


async def chat_completions(exchange: Exchange, services: Services) -> None:
    """The endpoint."""
    async with exchange.body() as body:
        fields = await decode_json(decoder, body)
        job = await exchange.while_connected(prepare(exchange, fields, services))
    generation = Generation(exchange, services, job)
    with services.metrics.observe(exchange, generation, job.card.name):
        answer = _Answer(job.card.name, job.tokenizer, fields)
        if fields.stream:
            keepalive_after_s = services.config.server.keepalive_after_s
            await send_stream(exchange, generation, answer, keepalive_after_s)
        else:
            choices = await collect(exchange, generation, job.n)
            await exchange.send_json(answer.whole(choices, generation.usage.as_dict()))


async def prepare(exchange: Exchange, fields: ChatFields, services: Services) -> Job:
    """Everything up to the token ids; refuses what needs no loaded model to be refused."""
    fields.check()
    if any(kind != "text" for kind in fields.modalities or []):
        raise BadRequest("`modalities` can only be text.", param="modalities")
    max_tokens, alternatives = fields.requested_tokens(), fields.alternatives()
    fields.check_min_tokens(max_tokens)
    messages = template_messages(fields.messages)
    tools = template_tools(fields.tools, fields.tool_choice)
    check_nesting(fields.chat_template_kwargs, "chat_template_kwargs")
    card = await services.generator(fields.model)
    text = await services.texts.of(card)
    if text.template is None:
        raise BadRequest(
            f"The model {card.name!r} has no chat template; use /v1/completions.", param="model"
        )
    sampling = fields.sampling(card.sampling_defaults, card.vocab_size, alternatives)
    stop_token_ids = fields.stop_tokens(card.eos_token_ids, card.vocab_size)
    prompt_text = await asyncio.to_thread(
        text.template.render,
        messages,
        add_generation_prompt=fields.add_generation_prompt is not False,
        tools=tools,
        arguments=fields.chat_template_kwargs,
    )
    # The template has written the special tokens already.
    door = FrontDoor(services, card, exchange.share, "messages")
    prompt = await door.encode(text.tokenizer, prompt_text, add_special_tokens=False)
    if not prompt:
        raise BadRequest("`messages` come to no token at all.", param="messages")
    return Job(
        card=card,
        tokenizer=text.tokenizer,
        prompts=[prompt],
        fields=fields,
        prompt_field="messages",
        max_tokens=max_tokens,
        sampling=sampling,
        stop_token_ids=stop_token_ids,
    )


class _Answer:
    """Pieces as OpenAI's chat protocol writes them, whole or as events."""

    def __init__(self, model: str, tokenizer: Tokenizer, fields: ChatFields) -> None:
        self._tokenizer = tokenizer
        self._logprobs = bool(fields.logprobs)
        options = fields.stream_options
        self._include_usage = bool(options is not None and options.include_usage)
        self._opened: set[int] = set()
        self._head: dict[str, object] = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "object": "chat.completion.chunk" if fields.stream else "chat.completion",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, choices: list[list[Piece]], usage: dict[str, object]) -> dict[str, object]:
        """The answer of a request that does not stream."""
        return {
            **self._head,
            "choices": [self._choice(index, pieces) for index, pieces in enumerate(choices)],
            "usage": usage,
        }

    def _choice(self, index: int, pieces: list[Piece]) -> dict[str, object]:
        logprobs = None
        if self._logprobs:
            parts = [chat_logprobs(self._tokenizer, piece) for piece in pieces]
            logprobs = {"content": [entry for part in parts for entry in part], "refusal": None}
        return {
            "index": index,
            "message": {
                "role": "assistant",
                "content": "".join(piece.text for piece in pieces),
                "refusal": None,
            },
            "logprobs": logprobs,
            "finish_reason": pieces[-1].finish,
        }

    def events(self, piece: Piece) -> bytes:
        """The events of one piece; a choice opens with its role."""
        opening = b""
        if piece.choice not in self._opened:
            self._opened.add(piece.choice)
            opening = self._chunk(piece.choice, {"role": "assistant", "content": ""})
        logprobs: dict[str, object] | None = None
        if self._logprobs and piece.logprobs:
            logprobs = {"content": chat_logprobs(self._tokenizer, piece), "refusal": None}
        if not piece.text and logprobs is None and piece.finish is None:
            return opening
        delta = {"content": piece.text} if piece.text or logprobs is not None else {}
        return opening + self._chunk(piece.choice, delta, logprobs, piece.finish)

    def _chunk(
        self,
        index: int,
        delta: dict[str, str],
        logprobs: dict[str, object] | None = None,
        finish: str | None = None,
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        chunk: dict[str, object] = {**self._head, "choices": [choice]}
        if self._include_usage:
            chunk["usage"] = None
        return event(chunk)

    def closing(self, usage: dict[str, object]) -> bytes:
        """The usage, if asked for, and the end."""
        if not self._include_usage:
            return DONE
        return event({**self._head, "choices": [], "usage": usage}) + DONE
