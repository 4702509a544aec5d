"""Tokenizers, chat templates and chat formats of models: read once, kept, and booked."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.errors import Overloaded
from penstock.memory.domains import RAM
from penstock.memory.ledger import Purpose
from penstock.text.chat_format import ChatFormat
from penstock.text.content_form import ContentForm
from penstock.text.template import ChatTemplate
from penstock.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from penstock.catalog import Card
    from penstock.catalog.scan import Marks
    from penstock.memory.bookings import ProcessBooking
    from penstock.memory.ledger import Ledger
    from penstock.server.residency.memory_arbiter import MemoryArbiter

_KEPT_TEXTS = 16
# Bytes at the peak of reading a tokenizer, per byte of its files: 15.4 with 49,152 entries, and
# 5.6 of them stay.
TEXT_FACTOR = 16
_MAX_SHARE = 4  # under a small limit no more than a quarter is asked for


@dataclass(frozen=True, slots=True)
class Text:
    """A model's tokenizer and, if it has one, its chat template and how it converses."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    chat_format: ChatFormat | None
    form: ContentForm = field(default_factory=ContentForm)


class Texts:
    """Tokenizers and templates, read in a thread, once for each model until its files change.

    What a read takes is booked first; then it is the server's own, and what was let go of leaves
    the books when the server is read next. Not from the requests' pool: they hold that while they
    wait for this.
    """

    def __init__(
        self, ledger: Ledger, arbiter: MemoryArbiter, server: ProcessBooking, patience_s: float
    ) -> None:
        self._ledger = ledger
        self._arbiter = arbiter
        self._server = server
        self._patience_s = patience_s
        self._loads: dict[object, tuple[object, asyncio.Future[Text]]] = {}
        self._waiting: Counter[str] = Counter()

    async def of(self, card: Card, files: Marks, dialect: str | None = None) -> Text:
        """The text side of a model with these files; all who ask meanwhile wait for the same read.
        What was read of other files of the same model is forgotten."""
        key, version = (card.name, dialect), (card.path, files)
        known, load = self._loads.pop(key, (None, None))
        if load is None or known != version or _failed(load):
            load = asyncio.ensure_future(self._load(card, dialect))
        self._loads[key] = version, load  # the latest used is last
        while len(self._loads) > _KEPT_TEXTS:
            self._loads.pop(next(iter(self._loads)))
        if load.done():
            return load.result()
        self._waiting[card.name] += 1
        try:
            return await asyncio.shield(load)
        finally:
            self._waiting[card.name] -= 1

    @property
    def waiting(self) -> dict[str, int]:
        """How many wait for a read, by model: their prompts are not counted yet."""
        return dict(+self._waiting)

    async def _load(self, card: Card, dialect: str | None) -> Text:
        size = TEXT_FACTOR * await asyncio.to_thread(_file_bytes, card)
        size = min(size, self._ledger.snapshot()[RAM].limit_bytes // _MAX_SHARE)
        booking = self._ledger.reserve(f"tokenizer of {card.name}", {})
        try:
            async with asyncio.timeout(self._patience_s):
                await self._arbiter.book(booking, {(RAM, Purpose.PROCESS): size})
            text = await asyncio.to_thread(_read, card, dialect)
        except TimeoutError:
            raise Overloaded(
                f"There is no memory for the tokenizer of {card.name}, which takes {size} bytes "
                f"while it is read, and none came free within {self._patience_s:g} s "
                "(memory.limit, server.queue_deadline_s).",
                retry_after_s=5,
            ) from None
        finally:
            booking.release()
        self._server.expect(size)
        return text


def _failed(load: asyncio.Future[Text]) -> bool:
    return load.done() and (load.cancelled() or load.exception() is not None)


def _file_bytes(card: Card) -> int:
    return sum(file.stat().st_size for file in card.path.glob("*.json"))


def _read(card: Card, dialect: str | None) -> Text:
    tokenizer = Tokenizer.from_folder(card.path)
    template, form = ChatTemplate.from_tokenizer(tokenizer), ContentForm()
    if template is not None and card.vision is not None:
        form = ContentForm.of(template)
    return Text(tokenizer, template, ChatFormat.of(tokenizer, dialect), form)
