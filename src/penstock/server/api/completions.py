"""`/v1/completions`: a text or token ids in, what follows them out."""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from penstock.errors import BadRequest
from penstock.memory.admission import RequestNeed
from penstock.memory.requests import TOKEN_BYTES
from penstock.server.api.answers import DONE, EVENT_STREAM, KEEP_ALIVE, collect, send_stream
from penstock.server.api.errors import error_object, event
from penstock.server.api.exchange import decode_json
from penstock.server.api.fields import GenerationFields, check_token_ids, refuse_conflicts
from penstock.server.api.front_door import FrontDoor
from penstock.server.api.generation import AnswerForm, Generation, Job, Piece, openai_finish
from penstock.server.api.logprobs import CompletionLogprobs
from penstock.text.grammar import checked_grammar

if TYPE_CHECKING:
    from penstock.errors import PenstockError
    from penstock.server.api.exchange import Exchange
    from penstock.server.api.generation import Usage
    from penstock.server.api.services import Services
    from penstock.text.tokenizer import Tokenizer

# What OpenAI's own servers do when a client says nothing.
_DEFAULT_MAX_TOKENS = 16


class CompletionFields(GenerationFields, kw_only=True):
    """The body of a completions request."""

    # A text, token ids, or a list of either; msgspec cannot tell kinds of lists apart itself.
    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    suffix: str | None = None
    best_of: int | None = None

    def check(self) -> None:
        """As for all, and what only completions have."""
        super().check()
        if self.suffix:
            raise BadRequest("`suffix` is not supported.", param="suffix")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise BadRequest(
                "`best_of` is not supported; leave it out or make it equal to `n`.", param="best_of"
            )
        if self.max_tokens == 0 and not self.echo:
            raise BadRequest(
                "`max_tokens` is 0, which needs `echo` to be true.", param="max_tokens"
            )

    def prompts(self, max_choices: int) -> list[str] | list[list[int]]:
        """The prompts, all texts or all token ids."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise BadRequest("`prompt` is an empty list.", param="prompt")
        kinds = set(map(type, prompt))
        if len(kinds) > 1:
            raise BadRequest(
                "`prompt` mixes kinds; it is a text, a list of texts, token ids or lists of them.",
                param="prompt",
            )
        prompts: list[str] | list[list[int]] = [prompt] if int in kinds else prompt  # type: ignore[assignment]
        if len(prompts) * (self.n or 1) > max_choices:
            raise BadRequest(
                f"`prompt` has {len(prompts)} prompts and `n` is {self.n or 1}; "
                f"together at most {max_choices} answers are allowed (server.max_choices).",
                param="prompt",
            )
        return prompts


decoder = msgspec.json.Decoder(CompletionFields)


async def completions(exchange: Exchange, services: Services) -> None:
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
            choices = await collect(exchange, generation, len(job.prompts) * job.n)
            await exchange.send_json(answer.whole(choices, generation.usage))


async def prepare(exchange: Exchange, fields: CompletionFields, services: Services) -> Job:
    """Everything up to the token ids; refuses what needs no loaded model to be refused."""
    max_choices = services.config.server.max_choices
    fields.check()
    prompts = await asyncio.to_thread(fields.prompts, max_choices)
    card = await services.generator(fields.model)
    fields = fields.completed(services.settings(card))
    max_tokens = _DEFAULT_MAX_TOKENS if fields.max_tokens is None else fields.max_tokens
    fields.check_min_tokens(max_tokens)
    text = await services.text(card)
    sampling = fields.sampling(card.sampling_defaults, card.vocab_size, fields.logprobs)
    stop_token_ids = fields.stop_tokens(card.eos_token_ids, card.vocab_size)
    door = FrontDoor(services, card, exchange.share, "prompt")
    return Job(
        card=card,
        tokenizer=text.tokenizer,
        prompts=[await _token_ids(prompt, text.tokenizer, door) for prompt in prompts],
        fields=fields,
        prompt_field="prompt",
        max_tokens=max_tokens,
        sampling=sampling,
        stop_token_ids=stop_token_ids,
        prompt_logprobs=fields.logprobs if fields.echo else None,
        form=await asyncio.to_thread(_form, fields),
    )


def _form(fields: CompletionFields) -> AnswerForm:
    """Plain text, or what the client wants it to match."""
    wanted = fields.format()
    if wanted is None:
        return AnswerForm()
    refuse_conflicts(fields)
    return AnswerForm(grammar=checked_grammar(wanted))


async def _token_ids(prompt: str | list[int], tokenizer: Tokenizer, door: FrontDoor) -> list[int]:
    if isinstance(prompt, str):
        ids = await door.encode(tokenizer, prompt, add_special_tokens=True)
    else:
        ids = prompt
        await door.check(RequestNeed(len(ids), None, "prompt"))
        check_token_ids(ids, door.card.vocab_size, "prompt")
        await door.share.grow(TOKEN_BYTES * len(ids))
    if not ids:
        raise BadRequest("`prompt` comes to no token at all.", param="prompt")
    return ids


class _Answer:
    """Pieces as OpenAI's completions protocol writes them, whole or as events."""

    media_type = EVENT_STREAM
    keep_alive = KEEP_ALIVE

    def __init__(self, job: Job, fields: CompletionFields) -> None:
        self._job = job
        self._fields = fields
        options = fields.stream_options
        self._include_usage = bool(options is not None and options.include_usage)
        self._echoed: dict[int, int] = {}  # characters of the prompt before a choice's answer
        self._head: dict[str, object] = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": job.card.name,
        }

    def whole(self, choices: list[list[Piece]], usage: Usage) -> dict[str, object]:
        """The answer of a request that does not stream."""
        return {
            **self._head,
            "choices": [self._choice(pieces) for pieces in choices],
            "usage": usage.as_openai(),
        }

    def opening(self, usage: Usage) -> bytes:
        """Nothing: the first piece opens the stream."""
        return b""

    def events(self, piece: Piece) -> bytes:
        """The event of one piece; the first one carries the echo."""
        choice = self._choice([piece])
        if not choice["text"] and not piece.logprobs and piece.finish is None:
            return b""
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

    def _choice(self, pieces: list[Piece]) -> dict[str, object]:
        index = pieces[0].choice
        echo = self._echo(index)
        text = echo + "".join(piece.text for piece in pieces)
        return {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(index, pieces),
            "finish_reason": openai_finish(pieces[-1].finish),
        }

    def _echo(self, index: int) -> str:
        """The prompt's text, the first time a choice is rendered."""
        if not self._fields.echo or index in self._echoed:
            return ""
        prompts = self._fields.prompt
        number = index // self._job.n
        prompt: object = prompts
        if isinstance(prompts, list) and not isinstance(prompts[0], int):
            prompt = prompts[number]
        if not isinstance(prompt, str):
            prompt = self._job.tokenizer.decode(
                self._job.prompts[number], skip_special_tokens=False
            )
        self._echoed[index] = len(prompt)
        return prompt

    def _logprobs(self, index: int, pieces: list[Piece]) -> dict[str, object] | None:
        if self._fields.logprobs is None:
            return None
        logprobs = CompletionLogprobs(self._job.tokenizer, self._fields.logprobs)
        for piece in pieces:
            if piece.prompt_logprobs is not None:
                prompt = self._job.prompts[index // self._job.n]
                logprobs.add_prompt(prompt, piece.prompt_logprobs)
            logprobs.add(piece, self._echoed.get(index, 0))
        return logprobs.as_dict()
