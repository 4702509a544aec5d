"""The front door: tokenising and admission of every request with a prompt, before its answer.

Text becomes token ids here, its memory booked first; what can never fit is refused with the
numbers, as early as it is known. The verdicts are `memory.admission`'s, and so are the refusals;
this brings them the snapshot and the model, and reads no gauge.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from penstock.errors import Overloaded
from penstock.memory.admission import Accept, Refuse, RequestNeed, Wait, decide, granted_now
from penstock.memory.clients.requests import TOKEN_BYTES
from penstock.server.fields.generation import check_token_ids
from penstock.server.http.threads import run_in_thread_if_large
from penstock.wire import token_ids

if TYPE_CHECKING:
    from array import array

    from penstock.catalog import Card
    from penstock.memory.clients.requests import RequestMemory
    from penstock.server.pipeline.services import PipelineServices
    from penstock.text.tokenizer import Tokenizer
    from penstock.wire import TokenIds


@dataclass(frozen=True, slots=True)
class FrontDoor:
    """One request at the door of one model."""

    services: PipelineServices
    card: Card
    memory: RequestMemory  # the request's memory in this process
    prompt_field: str  # where a refusal points

    async def encode(
        self, tokenizer: Tokenizer, text: str, *, add_special_tokens: bool, more: int = 0
    ) -> TokenIds:
        """The text's tokens; one that is certainly too long, with `more` that come behind this, is
        refused without encoding it."""
        least = tokenizer.min_tokens_of(text) + more
        await self.check(RequestNeed(least, None, self.prompt_field, at_least=True))
        return await self.tokens(tokenizer, text, add_special_tokens=add_special_tokens)

    async def tokens(
        self, tokenizer: Tokenizer, text: str, *, add_special_tokens: bool
    ) -> TokenIds:
        """The text's tokens, however many; what they take is booked."""
        # A client that leaves does not stop the tokenizer.
        working = self.memory.detached()
        await working.grow(
            await run_in_thread_if_large(len(text), partial(tokenizer.encoding_bytes, text))
        )
        started = time.monotonic()
        slices = tokenizer.encode_in_slices(text, add_special_tokens=add_special_tokens)
        ids = token_ids(())  # packed: numbers of their own leave holes in the heap when they go
        work = asyncio.ensure_future(anext(slices, None))
        try:
            while (some := await asyncio.shield(work)) is not None:
                await self.memory.grow(ids.itemsize * len(some))
                ids.extend(some)
                work = asyncio.ensure_future(anext(slices, None))
        finally:
            work.add_done_callback(lambda done: _ended(done, working))
        self.services.metrics.tokenised(self.card.name, time.monotonic() - started)
        # A tokenizer may know tokens, of images for one, for which the model has no embedding.
        size = ids.itemsize * len(ids)
        check = partial(check_token_ids, ids, self.card.vocab_size, self.prompt_field)
        await run_in_thread_if_large(size, check)
        return ids

    async def tokens_of_all(self, tokenizer: Tokenizer, texts: list[str]) -> list[array[int]]:
        """The tokens of each of some short texts, packed and without special ones; only what is
        taken meanwhile is booked."""
        working = self.memory.detached()
        lists = TOKEN_BYTES * sum(map(len, texts))
        await working.grow(max(map(tokenizer.encoding_bytes, texts)) + lists)
        started = time.monotonic()
        work = asyncio.ensure_future(
            tokenizer.encode_all_in_thread(texts, add_special_tokens=False)
        )
        work.add_done_callback(lambda _: working.release())
        found = await asyncio.shield(work)
        self.services.metrics.tokenised(self.card.name, time.monotonic() - started)
        for ids in found:
            check_token_ids(ids, self.card.vocab_size, self.prompt_field)
        return found

    async def check(self, need: RequestNeed) -> None:
        """Refuse what can never fit; the model need not be loaded."""
        verdict = await self._decide(need)
        if isinstance(verdict, Refuse):
            raise verdict.error

    async def grant(self, need: RequestNeed, deadline: float) -> int:
        """How many tokens the answer may have, on the loaded model; waits for its KV to grow."""
        residency = self.services.residency
        while True:
            match await self._decide(need):
                case Accept(granted):
                    return granted
                case Refuse(error):
                    raise error
                case Wait(grow_bytes=wanted):
                    await residency.grow(self.card, wanted)
            # What idle models could spare is there now; the answer makes do with it.
            if (granted := granted_now(need, residency.capacity_of(self.card))) >= 1:
                return granted
            if time.monotonic() >= deadline:
                raise Overloaded(
                    f"A prompt of {need.prompt_tokens} tokens waited for KV that other models are "
                    "using (server.queue_deadline_s).",
                    retry_after_s=10,
                )
            await residency.arbiter.wait()

    async def _decide(self, need: RequestNeed) -> Accept | Wait | Refuse:
        residency = self.services.residency
        capacity = residency.capacity_of(self.card)
        return decide(need, self.services.ledger.snapshot(), capacity, residency.arbiter.usages())


def _ended(work: asyncio.Future[list[int] | None], working: RequestMemory) -> None:
    """The tokenizer is done, whoever still waits for it."""
    working.release()
    if not work.cancelled():
        work.exception()
