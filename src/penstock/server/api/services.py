"""What the endpoints share: settings, models, their texts, and the counters."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.catalog.scan import file_marks
from penstock.errors import BadRequest, UnknownModel
from penstock.server.queue import Capacity, Lane
from penstock.text.manner import Manner
from penstock.text.template import ChatTemplate
from penstock.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.catalog import Card, Catalog
    from penstock.catalog.scan import Marks
    from penstock.config import Config, ModelSettings
    from penstock.memory.baseline import Baseline
    from penstock.memory.governor import Governor
    from penstock.memory.ledger import Ledger
    from penstock.memory.requests import RequestPool
    from penstock.server.api.responses import Responses
    from penstock.server.client import ModelClient
    from penstock.server.metrics import Metrics
    from penstock.server.residency import Residency

_KEPT_TEXTS = 16
# Bytes at the peak of reading a tokenizer, per byte of its files: 15.4 with 49,152 entries, and
# 5.6 of them stay.
TEXT_FACTOR = 16
_CARD_S = 5.0  # a model that was just found is not looked for again


@dataclass(frozen=True, slots=True)
class Text:
    """A model's tokenizer and, if it has one, its chat template and how it converses."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    manner: Manner | None


class Texts:
    """Tokenizers and templates, read in a thread, once for each model until its files change.

    What a read takes is booked first, as a request's bytes are; then it is the server's own, and
    what was let go of leaves the books when the server is read next.
    """

    def __init__(self, requests: RequestPool, server: Baseline) -> None:
        self._requests = requests
        self._server = server
        self._loads: dict[object, tuple[object, asyncio.Future[Text]]] = {}

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
        return await asyncio.shield(load)

    async def _load(self, card: Card, dialect: str | None) -> Text:
        size = TEXT_FACTOR * await asyncio.to_thread(_file_bytes, card)
        with self._requests.share() as share:
            await share.grow(min(size, self._requests.most_bytes))
            text = await asyncio.to_thread(_read, card, dialect)
        self._server.expect(size)
        return text


def _failed(load: asyncio.Future[Text]) -> bool:
    return load.done() and (load.cancelled() or load.exception() is not None)


def _file_bytes(card: Card) -> int:
    return sum(file.stat().st_size for file in card.path.glob("*.json"))


def _read(card: Card, dialect: str | None) -> Text:
    tokenizer = Tokenizer.from_folder(card.path)
    return Text(tokenizer, ChatTemplate.from_tokenizer(tokenizer), Manner.of(tokenizer, dialect))


@dataclass(frozen=True, slots=True)
class _Found:
    """A model that was looked for."""

    at: float  # on the monotonic clock
    card: Card
    files: Marks


@dataclass(slots=True)
class Services:
    """All that an endpoint may use; made once, at start. `config` is replaced when it is read
    again."""

    config: Config
    catalog: Catalog
    residency: Residency
    metrics: Metrics
    ledger: Ledger
    requests: RequestPool
    governor: Governor
    responses: Responses
    texts: Texts
    lanes: dict[str, Lane] = field(default_factory=dict)  # by model
    rereading: asyncio.Lock = field(default_factory=asyncio.Lock)  # held while settings are read
    _found: dict[str, _Found] = field(default_factory=dict)

    async def generator(self, name: str | None) -> Card:
        """The card of the model that a request names, or of the default one."""
        name = name or self.config.models.default
        if name is None:
            raise BadRequest(
                "`model` is missing, and the server has no default (start it with --model NAME).",
                param="model",
            )
        card = await self.find(name)
        if card.kind != "generate":
            raise BadRequest(
                f"The model {name!r} is of the kind {card.kind!r}; it does not generate text.",
                param="model",
            )
        return card

    async def find(self, name: str) -> Card:
        """The card of the model that has this name or alias; every name that a client sends comes
        through here. Looking reads files, so it is done in a thread and kept a while."""
        name = self.config.models.canonical(name)
        now = time.monotonic()
        found = self._found.get(name)
        if found is None or now - found.at >= _CARD_S:
            try:
                card, files = await asyncio.to_thread(self._look, name)
            except UnknownModel as error:
                error.param = "model"
                raise
            found = self._found[name] = _Found(now, card, files)
        return found.card

    def _look(self, name: str) -> tuple[Card, Marks]:
        card = self.catalog.find(name)
        return card, file_marks(card.path)

    def reachable(self, cards: Mapping[str, Card]) -> list[Card]:
        """Those of the models on disk whose name is no alias of another."""
        hidden = self.config.models.hidden(cards)
        return [card for name, card in cards.items() if name not in hidden]

    def settings(self, card: Card) -> ModelSettings:
        """The user's settings for a model, as they are now."""
        return self.config.models.settings(card.name)

    async def text(self, card: Card) -> Text:
        """Its tokenizer and template, and how it converses as the settings have it. While it is
        loaded they are those of its load: its weights go with no others."""
        dialect = self.settings(card).tool_dialect
        files = self._found[card.name].files
        model = self.residency.tenants().get(card.name)
        if model is not None and model.card is not None and model.files is not None:
            card, files = model.card, model.files
        return await self.texts.of(card, files, None if dialect == "auto" else dialect)

    def context_now(self, name: str) -> int | None:
        """The longest sequence that the loaded model can hold; None while it is not loaded."""
        model = self.residency.tenants().get(name)
        if model is None or model.holding is None:
            return None
        return model.holding.room().tokens_in(model.holding.granted_kv_bytes)

    def lane(self, name: str) -> Lane:
        """The line in front of a model."""
        lane = self.lanes.get(name)
        if lane is None:
            settings = self.config.server
            lane = self.lanes[name] = Lane(
                name,
                most_requests=settings.queue_requests,
                most_bytes=settings.queue_bytes,
                deadline_s=settings.queue_deadline_s,
            )
        return lane

    def follow(self, lane: Lane, client: ModelClient) -> None:
        """Let the line see what this worker can take, from its latest figures."""
        model = self.residency.tenants().get(client.name)
        holding = None if model is None else model.holding
        if holding is None or client.on_step == lane.pump:
            return

        def capacity() -> Capacity:
            return Capacity(
                running=0 if client.status is None else client.status.running,
                sequences=holding.plan.step_sequences,
                kv_bytes=holding.granted_kv_bytes,
                held=self.ledger.snapshot()[holding.domain].short,
            )

        lane.capacity = capacity
        client.on_step = lane.pump
