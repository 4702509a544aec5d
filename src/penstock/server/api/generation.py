"""From token ids to pieces of an answer: the lease, the turn in line, the worker's outputs.

Every protocol prepares a `Job` and chooses a `Sink`; everything between is here, the same for all
of them and for streams and whole answers. It knows neither HTTP nor how a protocol says a piece.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Protocol

import msgspec

from penstock import wire
from penstock.errors import BadRequest, ContextTooLong, Overloaded, WorkerLost
from penstock.memory.admission import RequestNeed
from penstock.memory.requests import ANSWER_TOKEN_BYTES, LOGPROB_BYTES, TOKEN_BYTES
from penstock.server.api.fields import seed_of
from penstock.server.api.front_door import FrontDoor
from penstock.text.parsing import Parsing, plain
from penstock.text.parts import CallBegin, Part, merged
from penstock.text.stream import TextStream, stop_strings

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from penstock.catalog import Card
    from penstock.memory.requests import Share
    from penstock.server.api.fields import GenerationFields
    from penstock.server.api.services import Services
    from penstock.server.client import ModelClient
    from penstock.server.queue import Visit
    from penstock.text.parsing import Parse, Source
    from penstock.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """How the answer is held to a form while it is made, and how its text is read."""

    parser: Callable[[Source], Parse[None]] = plain
    visible: frozenset[str] = frozenset()  # special tokens that the parser has to see
    grammar: str | None = None
    thinking: wire.Thinking | None = None


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
    form: AnswerForm = AnswerForm()

    @property
    def n(self) -> int:
        """Answers per prompt."""
        return self.fields.n or 1


class Finish(Enum):
    """Why an answer ended."""

    STOP = "stop"
    STOP_STRING = "stop_string"
    LENGTH = "length"
    CALLS = "calls"  # by itself, and it calls tools


def openai_finish(finish: Finish | None) -> str | None:
    """`finish_reason`, which does not tell stop strings apart."""
    if finish is None:
        return None
    return {Finish.LENGTH: "length", Finish.CALLS: "tool_calls"}.get(finish, "stop")


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
    parts: list[Part] = field(default_factory=list)  # what the text says
    finish: Finish | None = None
    stop_string: str | None = None  # which one ended it


class Sink(Protocol):
    """Where pieces go."""

    keeps: bool  # until the answer is whole

    def put(self, piece: Piece) -> None:
        """Take the next piece."""

    def restart(self) -> bool:
        """Forget all pieces, for a second attempt; False if some are with the client already."""


@dataclass(slots=True)
class Usage:
    """The tokens of a request, as it goes."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0  # the part of them that came before the answer proper
    cached_tokens: int = 0  # of the prompt, found in the KV cache
    granted_tokens: int = 0  # what max_tokens came to, the least over all prompts

    @property
    def total_tokens(self) -> int:
        """In and out."""
        return self.prompt_tokens + self.completion_tokens

    def as_openai(self) -> dict[str, object]:
        """OpenAI's `usage`, with the grant as an extension."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.total_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "penstock": {"max_tokens": self.granted_tokens},
        }


class Origin(Protocol):
    """Whose request it is: an exchange, or what is left of one in the background."""

    caller: str
    salt: bytes
    share: Share
    started: float
    record: dict[str, object]


class Generation:
    """One request on its way through a worker."""

    def __init__(self, origin: Origin, services: Services, job: Job) -> None:
        self.usage = Usage(prompt_tokens=sum(map(len, job.prompts)))
        self.submitted: float | None = None  # on the monotonic clock
        self.first_token: float | None = None
        self._services = services
        self._job = job
        self._caller = origin.caller
        self._salt = origin.salt
        self._door = FrontDoor(services, job.card, origin.share, job.prompt_field)
        self._logprob_bytes = 0  # booked
        self._reused: dict[int, int] = {}  # tokens of each prompt that were not computed for it
        self._deadline = origin.started + services.config.server.queue_deadline_s
        # Once for all answers: there may be a thousand of them, and long strings take a while.
        self._stops = stop_strings(job.fields.stops())

    async def run(self, sink: Sink) -> None:
        """Put every piece into `sink`. A worker lost before the client saw anything is retried;
        one that was lost while this request stood in line does not count."""
        longest = self._need(max(map(len, self._job.prompts)))
        await self._door.check(longest)
        losses = 0
        while True:
            self.submitted = None
            try:
                return await self._attempt(sink)
            except WorkerLost as error:
                losses += self.submitted is not None
                # With a time to come back the model is given up for so long: no use to ask again.
                if losses > 1 or error.retry_after_s is not None or not sink.restart():
                    raise
                self.usage.completion_tokens = self.usage.reasoning_tokens = 0
                self._reused.clear()
            except ContextTooLong as error:
                # The worker has less KV than when the request was let in; if that is not all there
                # can ever be, it waits for more.
                await self._door.check(longest)
                if not sink.restart() or time.monotonic() >= self._deadline:
                    raise Overloaded(error.message, retry_after_s=10) from None
                await self._services.residency.room.wait()

    def _need(self, prompt_tokens: int) -> RequestNeed:
        policy = self._services.config.server.max_tokens_policy
        return RequestNeed(
            prompt_tokens,
            self._job.max_tokens,
            self._job.prompt_field,
            refuse_overlong_answer=policy == "refuse",
        )

    async def _attempt(self, sink: Sink) -> None:
        job, services = self._job, self._services
        size = TOKEN_BYTES * self.usage.prompt_tokens
        lane = services.lane(job.card.name)
        answers = len(job.prompts) * job.n
        with lane.visit(self._caller, job.fields.priority or 0, size, answers) as visit:
            wait_s = max(self._deadline - time.monotonic(), 0.0)
            async with services.residency.lease(job.card.name, wait_s) as (_, client):
                services.follow(lane, client)
                grants = [
                    await self._door.grant(self._need(len(prompt)), self._deadline)
                    for prompt in job.prompts
                ]
                self.usage.granted_tokens = min(grants)
                await self._book_logprobs(grants, sink)
                await _together(
                    [
                        self._turn(client, visit, index, self._submit(index, grants), sink)
                        for index in range(answers)
                    ]
                )

    async def _book_logprobs(self, grants: list[int], sink: Sink) -> None:
        """Log-probabilities are many times the answer: all there may be are booked at once, before
        anything starts, so that no two requests can wait for each other's."""
        job = self._job
        entries = 0
        if job.prompt_logprobs is not None:
            entries += job.n * self.usage.prompt_tokens * (1 + job.prompt_logprobs)
        if job.sampling.logprobs is not None and sink.keeps:
            entries += job.n * sum(grants) * (1 + job.sampling.logprobs)
        size = entries * LOGPROB_BYTES
        most = self._services.requests.most_bytes
        if size > most:
            raise BadRequest(
                f"The log-probabilities of this request may come to {entries}, which take {size} "
                f"bytes in the server, and {most} are allowed; ask for fewer, lower `max_tokens` "
                "or `n`, or stream the answer (memory.limit, server.max_bodies).",
                param="logprobs",
            )
        if size > self._logprob_bytes:
            await self._door.share.grow(size - self._logprob_bytes)
            self._logprob_bytes = size

    async def _turn(
        self, client: ModelClient, visit: Visit, index: int, submit: wire.Submit, sink: Sink
    ) -> None:
        """One answer, when its turn comes."""
        tokens = len(submit.prompt) + submit.max_tokens
        async with visit.turn(client.ready.cost.sequence(tokens), tokens):
            await self._choice(client, index, submit, sink)

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
            grammar=job.form.grammar,
            thinking=job.form.thinking,
            salt=self._salt,
        )

    async def _choice(
        self, client: ModelClient, index: int, submit: wire.Submit, sink: Sink
    ) -> None:
        """Follow one answer to its end; leaving early, for whatever reason, cancels it."""
        job, fields = self._job, self._job.fields
        stream = TextStream(
            job.tokenizer,
            stop=self._stops,
            skip_special_tokens=fields.skip_special_tokens is not False,
            visible=job.form.visible,
        )
        reading = _Reading(stream, Parsing(job.form.parser))
        prompt_logprobs: list[wire.TokenLogprobs | None] = []
        last_token: float | None = None
        async with client.generate(submit) as outputs:
            self.submitted = self.submitted or time.monotonic()
            async for output in outputs:
                prompt_logprobs += output.prompt_logprobs or []
                if not output.tokens and output.finish is None:
                    continue
                if last_token is None:
                    self._count_reused(index // job.n, output.reused)
                piece = Piece(index, prompt_logprobs=prompt_logprobs or None)
                prompt_logprobs = []
                if job.max_tokens == 0:
                    piece.finish = Finish.LENGTH
                else:
                    last_token = self._count(len(output.tokens), last_token)
                    if reading.parsing.reasoning:
                        self.usage.reasoning_tokens += len(output.tokens)
                    reading.absorb(piece, output, submit.stop_token_ids)
                if sink.keeps:
                    self._door.share.grow_now(ANSWER_TOKEN_BYTES * len(output.tokens))
                sink.put(piece)
                if piece.finish is not None:
                    return

    def _count_reused(self, prompt: int, tokens: int) -> None:
        """Of several answers to one prompt, the one that found least has computed the rest."""
        self._reused[prompt] = min(tokens, self._reused.get(prompt, tokens))
        self.usage.cached_tokens = sum(self._reused.values())

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


@dataclass(slots=True)
class _Reading:
    """One answer being read: tokens to text, text to parts."""

    stream: TextStream
    parsing: Parsing
    _called: bool = False

    def absorb(self, piece: Piece, output: wire.Output, stop_token_ids: list[int]) -> None:
        """Fill `piece` with what `output` brings."""
        stream, tokens = self.stream, output.tokens
        if output.finish is wire.Finish.STOP and tokens and tokens[-1] in stop_token_ids:
            # The token that ends an answer is no part of its text.
            tokens = tokens[:-1]
        before = len(stream.offsets)
        piece.text = stream.push(tokens)
        if output.finish is not None and not stream.stopped:
            piece.text += stream.finish()
            length = output.finish is wire.Finish.LENGTH and not stream.stopped
            piece.finish = Finish.LENGTH if length else Finish.STOP
        if stream.stopped:
            piece.finish, piece.stop_string = Finish.STOP_STRING, stream.matched
        piece.offsets = stream.offsets[before:]
        # A stop string leaves the tokens behind it out.
        piece.tokens = tokens[: len(piece.offsets)]
        piece.logprobs = (output.logprobs or [])[: len(piece.offsets)]
        self._parse(piece)

    def _parse(self, piece: Piece) -> None:
        if piece.text:
            piece.parts = self.parsing.push(piece.text)
        if piece.finish is not None:
            piece.parts = merged([*piece.parts, *self.parsing.finish()])
        self._called = self._called or any(isinstance(part, CallBegin) for part in piece.parts)
        if self._called and piece.finish is Finish.STOP:
            piece.finish = Finish.CALLS


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
