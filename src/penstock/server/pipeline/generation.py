"""From token ids to pieces of an answer: the lease, the queue, the worker's outputs.

Every protocol prepares a `Job` and chooses a `Sink`; everything between is here, the same for all
of them and for streams and whole answers. It knows neither HTTP nor how a protocol says a piece.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import msgspec

from penstock import wire
from penstock.errors import BadRequest, ContextTooLong, Overloaded, WorkerLost
from penstock.memory.admission import RequestNeed
from penstock.memory.clients.requests import ANSWER_TOKEN_BYTES, LOGPROB_BYTES, TOKEN_BYTES
from penstock.server.fields.generation import seed_of
from penstock.server.observe.progress import Asked, Progress
from penstock.server.pipeline.front_door import FrontDoor
from penstock.server.pipeline.images import check_loaded
from penstock.server.pipeline.pieces import AnswerReading, FinishReason, Piece
from penstock.server.pipeline.queue import run_together
from penstock.text.chat_format import OutputSpec
from penstock.text.parsing import Parsing
from penstock.text.stream import TextStream, stop_strings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from penstock.catalog import Card
    from penstock.memory.clients.requests import RequestMemory
    from penstock.server.fields.generation import GenerationFields
    from penstock.server.http.long_json import JsonText
    from penstock.server.pipeline.images import Picture
    from penstock.server.pipeline.queue import QueuedRequest
    from penstock.server.pipeline.services import PipelineServices
    from penstock.server.processes.worker_client import ModelClient
    from penstock.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Job:
    """What to generate: every prompt is answered `n` times."""

    card: Card
    tokenizer: Tokenizer
    prompts: list[wire.TokenIds]
    fields: GenerationFields
    prompt_field: str  # which field the prompts came from, for refusals
    max_tokens: int | None  # as asked; None: as many as there is room for
    sampling: wire.Sampling
    stop_token_ids: list[int]
    prompt_logprobs: int | None = None
    output: OutputSpec = field(default_factory=OutputSpec)
    echoed: list[JsonText] | None = None  # the prompts, where they are part of the answer
    media: list[wire.Media] = field(default_factory=list)  # images of the one prompt
    pictures: list[Picture] = field(default_factory=list)  # the same as they were looked at

    @property
    def n(self) -> int:
        """Answers per prompt."""
        return self.fields.n or 1


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
    accepted_drafts: int = 0  # of `completion_tokens`: guessed, and right
    rejected_drafts: int = 0  # verified in vain
    granted_tokens: int = 0  # what max_tokens came to, the least over all prompts

    @property
    def total_tokens(self) -> int:
        """In and out."""
        return self.prompt_tokens + self.completion_tokens


class Origin(Protocol):
    """Whose request it is: an exchange, or what is left of one in the background."""

    id: str
    salt: bytes
    memory: RequestMemory
    started: float
    record: dict[str, object]
    trace: str

    @property
    def caller(self) -> str:
        """Between whom requests are fair."""


class Generation:
    """One request on its way through a worker."""

    def __init__(self, origin: Origin, services: PipelineServices, job: Job) -> None:
        self.usage = Usage(prompt_tokens=sum(map(len, job.prompts)))
        self.started = origin.started
        self.load_s = 0.0  # until the model was there
        self._services = services
        self._job = job
        self._origin = origin
        self.progress = Progress(_asked(origin, job), self.usage)
        self._door = FrontDoor(services, job.card, origin.memory, job.prompt_field)
        self._logprob_bytes = 0  # booked
        self._reused: dict[int, int] = {}  # tokens of each prompt that were not computed for it
        self._deadline = origin.started + services.config.server.queue_deadline_s
        # Once for all answers: there may be a thousand of them, and long strings take a while.
        self._prompts = [wire.token_ids(prompt) for prompt in job.prompts]
        self._stop_token_ids = wire.token_ids(job.stop_token_ids)
        self._stops = stop_strings(job.fields.stops())

    async def run(self, sink: Sink) -> None:
        """Put every piece into `sink`; `Cancelled` if an operator ends it."""
        with self.progress.cancellable():
            await self._run(sink)

    async def _run(self, sink: Sink) -> None:
        """A worker lost before the client saw anything is retried; losses in line do not count."""
        longest = self._need(max(map(len, self._job.prompts)))
        await self._door.check(longest)
        losses = 0
        while True:
            try:
                return await self._attempt(sink)
            except WorkerLost as error:
                losses += self.progress.submitted is not None
                # With a time to come back the model is given up for so long: no use to ask again.
                if losses > 1 or error.retry_after_s is not None or not sink.restart():
                    raise
                self.usage.completion_tokens = self.usage.reasoning_tokens = 0
                self.usage.accepted_drafts = self.usage.rejected_drafts = 0
                self._reused.clear()
            except ContextTooLong as error:
                # The worker has less KV than when the request was let in; if that is not all there
                # can ever be, it waits for more.
                await self._door.check(longest)
                if not sink.restart() or time.monotonic() >= self._deadline:
                    raise Overloaded(error.message, retry_after_s=10) from None
                await self._services.residency.arbiter.wait()

    def observed(self) -> AbstractContextManager[None]:
        """Count it when it is over, however it ends, and note it for the access log."""
        return observed(self._origin, self._services, self.progress, self.usage)

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
        queue = services.queue(job.card.name)
        answers = len(job.prompts) * job.n
        with queue.request(self._origin.caller, job.fields.priority or 0, size, answers) as queued:
            self.progress.enter(queued)
            asked = time.monotonic()
            wait_s = max(self._deadline - asked, 0.0)
            async with services.residency.lease(job.card.name, wait_s) as (_, client):
                self.load_s = time.monotonic() - asked
                check_loaded(job.pictures, client.ready)
                self.progress.has_model(client.ready.cost)
                grants = [
                    await self._door.grant(self._need(len(prompt)), self._deadline)
                    for prompt in job.prompts
                ]
                self.usage.granted_tokens = min(grants)
                await self._book_logprobs(grants, sink)
                self.progress.has_memory()
                await run_together(
                    [
                        self._answer(client, queued, index, self._submit(index, grants), sink)
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
        most = self._services.requests.max_bytes
        if size > most:
            raise BadRequest(
                f"The log-probabilities of this request may come to {entries}, which take {size} "
                f"bytes in the server, and {most} are allowed; ask for fewer, lower `max_tokens` "
                "or `n`, or stream the answer (memory.limit, server.max_bodies).",
                param="logprobs",
            )
        if size > self._logprob_bytes:
            await self._door.memory.grow(size - self._logprob_bytes)
            self._logprob_bytes = size

    async def _answer(
        self,
        client: ModelClient,
        queued: QueuedRequest,
        index: int,
        submit: wire.Submit,
        sink: Sink,
    ) -> None:
        """One answer, once it has a slot."""
        longest = len(submit.prompt) + submit.max_tokens
        kv_bytes = client.ready.cost.sequence(longest)
        async with queued.slot(kv_bytes, len(submit.prompt)) as place:
            self._services.metrics.queued(self._job.card.name, time.monotonic() - queued.arrived)
            submit.priority = place.priority
            await self._choice(client, index, submit, sink, place.charge)

    def _submit(self, index: int, grants: list[int]) -> wire.Submit:
        job = self._job
        prompt, choice = divmod(index, job.n)
        seed = seed_of(job.sampling.seed, choice)
        return wire.Submit(
            id=0,  # the client numbers its requests
            prompt=self._prompts[prompt],
            # A prompt that is only to be scored still takes a step, whose token is dropped.
            max_tokens=max(grants[prompt], 1),
            sampling=msgspec.structs.replace(job.sampling, seed=seed),
            stop_token_ids=self._stop_token_ids,
            min_tokens=min(job.fields.min_tokens or 0, grants[prompt]),
            prompt_logprobs=job.prompt_logprobs,
            grammar=None if job.output.grammar is None else job.output.grammar.key,
            thinking=job.output.thinking,
            salt=self._origin.salt,
            media=job.media,
        )

    async def _choice(
        self,
        client: ModelClient,
        index: int,
        submit: wire.Submit,
        sink: Sink,
        charge: Callable[[int], None],
    ) -> None:
        """Follow one answer to its end; leaving early, for whatever reason, cancels it."""
        job, fields = self._job, self._job.fields
        stream = TextStream(
            job.tokenizer,
            stop=self._stops,
            skip_special_tokens=fields.skip_special_tokens is not False,
            visible=job.output.visible,
        )
        reading = AnswerReading(stream, Parsing(job.output.parser))
        prompt_logprobs: list[wire.TokenLogprobs | None] = []
        last_token: float | None = None
        async with (
            client.image_files.held(submit.media) as files,
            client.generate(submit) as outputs,
        ):
            self.progress.begin()
            async for output in outputs:
                files.give()  # what has a token has been seen
                prompt_logprobs += output.prompt_logprobs or []
                if output.preempted:
                    self.progress.preemptions[index] = output.preempted
                if not output.tokens and output.finish is None:
                    continue
                charge(len(output.tokens))
                if last_token is None:
                    charge(-output.reused)  # the prompt was charged whole
                    self._count_reused(index // job.n, output.reused)
                piece = Piece(index, prompt_logprobs=prompt_logprobs or None)
                prompt_logprobs = []
                if job.max_tokens == 0:
                    piece.finish = FinishReason.LENGTH
                else:
                    reading.absorb(piece, output, submit.stop_token_ids)
                    own = len(piece.offsets) if stream.stopped else len(output.tokens)
                    last_token = self._count(own, last_token)
                    self._count_drafts(output, own)
                    self.usage.reasoning_tokens += reading.more_reasoning_tokens()
                if sink.keeps:
                    self._door.memory.grow_now(ANSWER_TOKEN_BYTES * len(output.tokens))
                sink.put(piece)
                if piece.finish is not None:
                    return

    def _count_reused(self, prompt: int, tokens: int) -> None:
        """Of several answers to one prompt, the one that found least has computed the rest."""
        self._reused[prompt] = min(tokens, self._reused.get(prompt, tokens))
        self.usage.cached_tokens = sum(self._reused.values())

    def _count_drafts(self, output: wire.Output, own: int) -> None:
        """`own`: its tokens that are part of the answer."""
        accepted = min(output.accepted, own)
        self.usage.accepted_drafts += accepted
        self.usage.rejected_drafts += output.drafts - accepted

    def _count(self, tokens: int, last_token: float | None) -> float | None:
        """Note new tokens of a choice; returns when its last one came."""
        if not tokens:
            return last_token
        now = time.monotonic()
        since_last_s = None if last_token is None else now - last_token
        self._services.metrics.tokens_out(self._job.card.name, tokens, since_last_s)
        self.usage.completion_tokens += tokens
        self.progress.first_token = self.progress.first_token or now
        self.progress.last_token = now
        return now


@contextmanager
def observed(
    origin: Origin, services: PipelineServices, progress: Progress, usage: Usage
) -> Iterator[None]:
    """Count a request when it is over, however it ends, and note it for the access log."""
    model, metrics = progress.asked.model, services.metrics
    metrics.prompt(model, usage.prompt_tokens)
    try:
        with services.live.listed(progress):
            yield
    finally:
        if progress.first_token is not None:
            metrics.first_token(model, progress.first_token - origin.started)
        origin.record.update(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            queue_ms=progress.since_start_ms(progress.submitted),
            ttft_ms=progress.since_start_ms(progress.first_token),
        )


def _asked(origin: Origin, job: Job) -> Asked:
    return Asked(
        id=origin.id,
        model=job.card.name,
        key=origin.caller,
        priority=job.fields.priority or 0,
        prompts=len(job.prompts),
        answers=len(job.prompts) * job.n,
        memory=origin.memory,
        started=origin.started,
        trace=origin.trace,
    )
