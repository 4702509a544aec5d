"""From token ids to pieces of text: the front door, the lease, the worker's answers.

Chat and completions prepare a `Job` and choose a `Sink`; everything between is here, the same for
both and for streams and whole answers. It knows neither HTTP nor how a protocol renders a piece.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import msgspec

from penstock import wire
from penstock.errors import BadRequest, ContextTooLong, WorkerLost
from penstock.memory.limits import domain_of
from penstock.server.api.fields import seed_of
from penstock.text.stream import TextStream

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from penstock.catalog import Card
    from penstock.server.api.fields import GenerationFields
    from penstock.server.api.services import Services
    from penstock.server.client import ModelClient
    from penstock.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Job:
    """What to generate: every prompt is answered `n` times."""

    card: Card
    tokenizer: Tokenizer
    prompts: list[list[int]]
    fields: GenerationFields
    prompt_field: str  # which field the prompts came from, for refusals
    max_tokens: int | None  # as asked; None: as many as there is room for
    sampling: wire.Sampling
    stop_token_ids: list[int]
    prompt_logprobs: int | None = None

    @property
    def n(self) -> int:
        """Answers per prompt."""
        return self.fields.n or 1


@dataclass(slots=True)
class Piece:
    """What one step gave one choice; `text` lags behind `tokens` where a stop string may come."""

    choice: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)  # without the token that ended the answer
    offsets: list[int] = field(default_factory=list)  # where each token's text begins in the answer
    logprobs: list[wire.TokenLogprobs] = field(default_factory=list)  # one per token, if asked for
    # All of the prompt's, with the choice's first piece, if asked for.
    prompt_logprobs: list[wire.TokenLogprobs | None] | None = None
    finish: str | None = None


class Sink(Protocol):
    """Where pieces go."""

    def put(self, piece: Piece) -> None:
        """Take the next piece."""

    def restart(self) -> bool:
        """Forget all pieces, for a second attempt; False if some are with the client already."""


@dataclass(slots=True)
class Usage:
    """The tokens of a request, as it goes."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    granted_tokens: int = 0  # what max_tokens came to, the least over all prompts

    def as_dict(self) -> dict[str, object]:
        """OpenAI's `usage`, with the grant as an extension."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": 0},
            "penstock": {"max_tokens": self.granted_tokens},
        }


class Generation:
    """One request on its way through a worker."""

    def __init__(self, services: Services, job: Job) -> None:
        self.usage = Usage(prompt_tokens=sum(map(len, job.prompts)))
        self.submitted: float | None = None  # on the monotonic clock
        self.first_token: float | None = None
        self._services = services
        self._job = job
        check_window(job, services.config.models.settings(job.card.name).max_context)

    async def run(self, sink: Sink) -> None:
        """Put every piece into `sink`. A worker lost before the client saw anything is retried."""
        try:
            await self._attempt(sink)
        except WorkerLost:
            if not sink.restart():
                raise
            self.usage.completion_tokens = 0
            await self._attempt(sink)

    async def _attempt(self, sink: Sink) -> None:
        job = self._job
        async with self._services.residency.lease(job.card.name) as (_, client):
            grants = [
                grant(
                    job, len(prompt), client.ready, self._services.config.server.max_tokens_policy
                )
                for prompt in job.prompts
            ]
            self.usage.granted_tokens = min(grants)
            choices = [
                self._choice(client, index, self._submit(index, grants), sink)
                for index in range(len(job.prompts) * job.n)
            ]
            self.submitted = time.monotonic()
            await _together(choices)

    def _submit(self, index: int, grants: list[int]) -> wire.Submit:
        job = self._job
        prompt, choice = divmod(index, job.n)
        seed = seed_of(job.sampling.seed, choice)
        return wire.Submit(
            id=0,  # the client numbers its requests
            prompt=job.prompts[prompt],
            # A prompt that is only to be scored still takes a step, whose token is dropped.
            max_tokens=max(grants[prompt], 1),
            sampling=msgspec.structs.replace(job.sampling, seed=seed),
            stop_token_ids=job.stop_token_ids,
            min_tokens=min(job.fields.min_tokens or 0, grants[prompt]),
            prompt_logprobs=job.prompt_logprobs,
            priority=job.fields.priority or 0,
        )

    async def _choice(
        self, client: ModelClient, index: int, submit: wire.Submit, sink: Sink
    ) -> None:
        """Follow one answer to its end; leaving early, for whatever reason, cancels it."""
        job, fields = self._job, self._job.fields
        stream = TextStream(
            job.tokenizer,
            stop=fields.stops(),
            skip_special_tokens=fields.skip_special_tokens is not False,
        )
        prompt_logprobs: list[wire.TokenLogprobs | None] = []
        last_token: float | None = None
        async with client.generate(submit) as outputs:
            async for output in outputs:
                prompt_logprobs += output.prompt_logprobs or []
                if not output.tokens and output.finish is None:
                    continue
                piece = Piece(index, prompt_logprobs=prompt_logprobs or None)
                prompt_logprobs = []
                if job.max_tokens == 0:
                    piece.finish = "length"
                else:
                    last_token = self._count(len(output.tokens), last_token)
                    self._absorb(piece, output, stream, submit.stop_token_ids)
                sink.put(piece)
                if piece.finish is not None:
                    return

    def _absorb(
        self, piece: Piece, output: wire.Output, stream: TextStream, stop_token_ids: list[int]
    ) -> None:
        """Fill `piece` with what `output` brings."""
        tokens = output.tokens
        if output.finish is wire.Finish.STOP and tokens and tokens[-1] in stop_token_ids:
            # The token that ends an answer is no part of its text.
            tokens = tokens[:-1]
        before = len(stream.offsets)
        piece.text = stream.push(tokens)
        if output.finish is not None and not stream.stopped:
            piece.text += stream.finish()
            piece.finish = "length" if output.finish is wire.Finish.LENGTH else "stop"
        if stream.stopped:
            piece.finish = "stop"
        piece.offsets = stream.offsets[before:]
        # A stop string leaves the tokens behind it out.
        piece.tokens = tokens[: len(piece.offsets)]
        piece.logprobs = (output.logprobs or [])[: len(piece.offsets)]

    def _count(self, tokens: int, last_token: float | None) -> float | None:
        """Note new tokens of a choice; returns when its last one came."""
        if not tokens:
            return last_token
        now = time.monotonic()
        since_last_s = None if last_token is None else now - last_token
        self._services.metrics.tokens_out(self._job.card.name, tokens, since_last_s)
        self.usage.completion_tokens += tokens
        self.first_token = self.first_token or now
        return now


async def _together(work: list[Coroutine[None, None, None]]) -> None:
    """Run all; the first failure, or the end of us, ends the others."""
    if len(work) == 1:
        await work[0]
        return
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


# --- the front door ----------------------------------------------------------------------------


def check_window(job: Job, max_context: int | None) -> None:
    """Refuse a prompt that the model's window can never hold; needs no loaded model."""
    window = min(job.card.context, max_context or job.card.context)
    longest = max(map(len, job.prompts))
    if longest + 1 > window:
        raise _too_long(job, "window", longest, window)


def grant(job: Job, prompt_tokens: int, ready: wire.Ready, policy: str) -> int:
    """How many tokens the answer may have, or a refusal."""
    room = ready.context - prompt_tokens
    if room < 1:
        short_of_memory = ready.kv_tokens <= ready.context < job.card.context
        reason = "memory" if short_of_memory else "window"
        raise _too_long(job, reason, prompt_tokens, ready.context, ready)
    asked = job.max_tokens
    if asked is not None and asked > room and policy == "refuse":
        raise BadRequest(
            f"`max_tokens` is {asked}, but after the prompt of {prompt_tokens} tokens there is "
            f"room for {room} (server.max_tokens_policy is refuse).",
            param="max_tokens",
        )
    return room if asked is None else min(asked, room)


def _too_long(
    job: Job, reason: str, prompt_tokens: int, limit: int, ready: wire.Ready | None = None
) -> ContextTooLong:
    needed = prompt_tokens + 1
    numbers: dict[str, object] = {
        "reason": reason,
        "domain": None,
        "needed_tokens": needed,
        "limit_tokens": limit,
        "needed_bytes": None,
        "limit_bytes": None,
    }
    if ready is not None:
        numbers["domain"] = domain_of(ready.device)
        numbers["needed_bytes"] = needed * ready.kv_bytes_per_token
        numbers["limit_bytes"] = limit * ready.kv_bytes_per_token
    why = (
        "This model's maximum context length is"
        if reason == "window"
        else "The memory for this model's context holds"
    )
    knob = "" if reason == "window" else " (the knobs are memory.limit and models.kv_bytes)"
    return ContextTooLong(
        f"{why} {limit} tokens{knob}, but the prompt has {prompt_tokens} and the answer needs "
        "at least one more.",
        param=job.prompt_field,
        numbers=numbers,
    )
