"""The front door: what every request with a prompt passes before the first byte of its answer.

Text becomes token ids here, its memory booked first; what can never fit is refused with the
numbers, as early as it is known. The verdicts are `memory.admission`'s, and so are the refusals;
this brings them the snapshot and the model, and reads no gauge.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.errors import Overloaded
from penstock.memory.admission import Accept, Refuse, RequestNeed, Wait, decide, granted_now
from penstock.memory.requests import TOKEN_BYTES
from penstock.server.api.fields import check_token_ids

if TYPE_CHECKING:
    from penstock.catalog import Card
    from penstock.memory.requests import Share
    from penstock.server.api.services import Services
    from penstock.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class FrontDoor:
    """One request at the door of one model."""

    services: Services
    card: Card
    share: Share  # the request's memory in this process
    prompt_field: str  # where a refusal points

    async def encode(
        self, tokenizer: Tokenizer, text: str, *, add_special_tokens: bool
    ) -> list[int]:
        """The text's tokens; one that is certainly too long is refused without encoding it."""
        least = tokenizer.least_tokens(text)
        await self.check(RequestNeed(least, None, self.prompt_field, at_least=True))
        # A client that leaves does not stop the tokenizer.
        working = self.share.apart()
        await working.grow(tokenizer.encoding_bytes(text))
        started = time.monotonic()
        work = asyncio.ensure_future(
            tokenizer.encode_in_thread(text, add_special_tokens=add_special_tokens)
        )
        work.add_done_callback(lambda _: working.release())
        ids = await asyncio.shield(work)
        self.services.metrics.tokenised(self.card.name, time.monotonic() - started)
        # A tokenizer may know tokens, of images for one, for which the model has no embedding.
        check_token_ids(ids, self.card.vocab_size, self.prompt_field)
        await self.share.grow(TOKEN_BYTES * len(ids))
        return ids

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
            if (granted := granted_now(need, await residency.room_of(self.card))) >= 1:
                return granted
            if time.monotonic() >= deadline:
                raise Overloaded(
                    f"A prompt of {need.prompt_tokens} tokens waited for KV that other models are "
                    "using (server.queue_deadline_s).",
                    retry_after_s=10,
                )
            await residency.room.wait()

    async def _decide(self, need: RequestNeed) -> Accept | Wait | Refuse:
        residency = self.services.residency
        room = await residency.room_of(self.card)
        return decide(need, self.services.ledger.snapshot(), room, residency.room.residents())
