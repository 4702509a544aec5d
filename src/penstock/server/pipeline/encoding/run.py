"""One request's texts on their way through a worker: the lease, the line, the results."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock import wire
from penstock.errors import BadRequest, WorkerLost
from penstock.memory.admission import RequestNeed
from penstock.memory.clients.requests import TOKEN_BYTES
from penstock.server.observe.progress import Asked, Progress
from penstock.server.pipeline.front_door import FrontDoor
from penstock.server.pipeline.generation import Usage, observed
from penstock.server.pipeline.queue import LOOK_AHEAD, run_together

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from penstock.catalog import Card
    from penstock.server.pipeline.encoding.texts import EncodeText
    from penstock.server.pipeline.generation import Origin
    from penstock.server.pipeline.queue import QueuedRequest
    from penstock.server.pipeline.services import PipelineServices
    from penstock.server.processes.worker_client import ModelClient

_NO_SAMPLING = wire.Sampling()


@dataclass(frozen=True, slots=True)
class EncodeJob:
    """What to encode."""

    card: Card
    texts: list[EncodeText]
    field: str  # which the texts came from, for refusals
    result_bytes: int  # of one text, until it is sent: as it comes and as it is written
    priority: int = 0


class EncodeRun:
    """One request."""

    def __init__(self, origin: Origin, services: PipelineServices, job: EncodeJob) -> None:
        self.usage = Usage(prompt_tokens=sum(len(text.ids) for text in job.texts))
        self.load_s = 0.0  # until the model was there
        self._origin = origin
        self._services = services
        self._job = job
        self._door = FrontDoor(services, job.card, origin.memory, job.field)
        self._deadline = origin.started + services.config.server.queue_deadline_s
        self._booked = False
        self.progress = Progress(_asked(origin, job), self.usage)

    def observed(self) -> AbstractContextManager[None]:
        """Count it when it is over, however it ends, and note it for the access log."""
        return observed(self._origin, self._services, self.progress, self.usage)

    async def run(self) -> list[bytes]:
        """The results in order, float32 each; a worker lost on the way is replaced once."""
        losses = 0
        with self.progress.cancellable():
            while True:
                try:
                    return await self._attempt()
                except WorkerLost as error:
                    losses += self.progress.submitted is not None
                    # With a time to come back the model is given up for so long.
                    if losses > 1 or error.retry_after_s is not None:
                        raise

    async def _attempt(self) -> list[bytes]:
        job, services = self._job, self._services
        queue = services.queue(job.card.name)
        size = TOKEN_BYTES * self.usage.prompt_tokens
        caller, count = self._origin.caller, len(job.texts)
        with queue.request(caller, job.priority, size, count) as queued:
            self.progress.enter(queued)
            asked = time.monotonic()
            wait_s = max(self._deadline - asked, 0.0)
            async with services.residency.lease(job.card.name, wait_s) as (_, client):
                self.load_s = time.monotonic() - asked
                self.progress.has_model(client.ready.cost)
                # What the loaded model can hold may be less than its files promise.
                longest = max(len(text.ids) for text in job.texts)
                await self._door.check(RequestNeed(longest, 0, job.field, answer_tokens=0))
                await self._book_results()
                self.progress.has_memory()
                results = [b""] * count
                # A request of thousands of texts waits for places with some of them.
                waiting = min(count, queue.capacity().sequences + LOOK_AHEAD)
                numbers = iter(range(count))
                await run_together(
                    [self._some(client, queued, numbers, results) for _ in range(waiting)]
                )
                return results

    async def _book_results(self) -> None:
        """All results there will be, before anything starts: no two requests wait for each other's
        memory with half of their results."""
        job, most = self._job, self._services.requests.max_bytes
        size = job.result_bytes * len(job.texts)
        if size > most:
            raise BadRequest(
                f"The results of {len(job.texts)} texts take {size} bytes in the server, and "
                f"{most} are allowed (memory.limit, server.max_bodies); send fewer of "
                f"`{job.field}` at once.",
                param=job.field,
            )
        if not self._booked:
            await self._door.memory.grow(size)
            self._booked = True

    async def _some(
        self,
        client: ModelClient,
        queued: QueuedRequest,
        numbers: Iterator[int],
        results: list[bytes],
    ) -> None:
        """One text after another, as long as there are any."""
        for number in numbers:
            text = self._job.texts[number]
            async with queued.slot(0, len(text.ids)) as place:
                waited_s = time.monotonic() - queued.arrived
                self._services.metrics.queued(self._job.card.name, waited_s)
                submit = wire.Submit(
                    id=0,  # the client numbers its requests
                    prompt=text.ids,
                    max_tokens=0,
                    sampling=_NO_SAMPLING,
                    priority=place.priority,
                    encoding=text.encoding,
                )
                async with client.generate(submit) as outputs:
                    self.progress.begin()
                    async for output in outputs:
                        results[number] = output.vector
                place.charge(0)
            queued.progressed()
            now = time.monotonic()
            self.progress.first_token = self.progress.first_token or now
            self.progress.last_token = now


def _asked(origin: Origin, job: EncodeJob) -> Asked:
    return Asked(
        id=origin.id,
        model=job.card.name,
        key=origin.caller,
        priority=job.priority,
        prompts=len(job.texts),
        answers=len(job.texts),
        memory=origin.memory,
        started=origin.started,
        trace=origin.trace,
    )
