"""What every request uses: settings, models and their tokenizers, queues, counters."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING

from penstock import __version__
from penstock.errors import BadRequest, UnknownModel, shortened
from penstock.server.http.peer import is_loopback
from penstock.server.observe.live import LiveRequests
from penstock.server.pipeline.backlog import Backlogs
from penstock.server.pipeline.fairness import Callers, callers
from penstock.server.pipeline.lookups import LookUps
from penstock.server.pipeline.queue import Capacity, ModelQueue

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.catalog import Card, Catalog
    from penstock.config import Config, ModelSettings
    from penstock.memory.clients.requests import RequestPool
    from penstock.memory.ledger import Ledger
    from penstock.server.metrics import Metrics
    from penstock.server.pipeline.grammars import Grammars
    from penstock.server.pipeline.model_texts import Text, Texts
    from penstock.server.residency.model import Model
    from penstock.server.residency.residency import Residency

_MAX_NAME = 1024
_LATEST = ":latest"
# What models of a kind are for.
_ROUTES = {
    "generate": "it is asked at /v1/chat/completions, /v1/completions and their like",
    "embed": "it is asked at /v1/embeddings, /api/embed or /v1/score",
    "rerank": "it is asked at /v1/rerank or /v1/score",
}


@dataclass(slots=True)
class PipelineServices:
    """All that a request uses on its way; made once, at start. `config` is replaced when it is read
    again."""

    config: Config
    catalog: Catalog
    residency: Residency
    metrics: Metrics
    ledger: Ledger
    requests: RequestPool
    texts: Texts
    grammars: Grammars
    live: LiveRequests = field(default_factory=LiveRequests)
    queues: dict[str, ModelQueue] = field(default_factory=dict)  # by model
    backlogs: Backlogs = field(init=False)  # of streams that clients do not read
    lookups: LookUps = field(init=False)

    def __post_init__(self) -> None:
        self.backlogs = Backlogs(self.requests.max_bytes)
        loaded = self.residency.loaded_models
        self.lookups = LookUps(self.catalog, lambda name: name in loaded())

    async def generator(self, name: str | None) -> Card:
        """The card of the model that a request names, or of the default one; it generates text."""
        return await self.of_kind(name, "generate")

    async def of_kind(self, name: str | None, kind: str) -> Card:
        """The same of any kind; BadRequest says which routes a model of another kind has."""
        card = await self.named(name)
        if card.kind != kind:
            routes = _ROUTES.get(card.kind, "there is no route for it")
            raise BadRequest(
                f"The model {shortened(card.name)!r} is of the kind {card.kind!r}, and this route "
                f"is for models of the kind {kind!r}; {routes}.",
                param="model",
            )
        return card

    async def served(self, name: str | None) -> Card:
        """The same of any kind that can be loaded."""
        card = await self.named(name)
        return card if card.kind in _ROUTES else await self.of_kind(name, "generate")

    async def named(self, name: str | None) -> Card:
        """The card of the model that a request names, or of the default one, of whatever kind."""
        name = name or self.config.models.default
        if name is None:
            raise BadRequest(
                "`model` is missing, and the server has no default (start it with --model NAME).",
                param="model",
            )
        return await self.find(name)

    async def find(self, name: str) -> Card:
        """The card of the model that has this name or alias; every name that a client sends comes
        through here."""
        if len(name) > _MAX_NAME:
            raise UnknownModel(f"There is no model {shortened(name)!r}.", param="model")
        return await self.lookups.card(self._canonical(name))

    async def make(self, name: str) -> None:
        """Have the model that an operator names: a `random:SHAPE` that is not there yet is made."""
        await asyncio.to_thread(self.catalog.make, self.config.models.canonical(name))
        self.lookups.expect_new()

    def _canonical(self, name: str) -> str:
        """An alias' model; Ollama's clients put `:latest` behind a name that has no tag."""
        models = self.config.models
        own = models.canonical(name)
        if own == name and name.endswith(_LATEST):
            return models.canonical(name.removesuffix(_LATEST))
        return own

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
        files = self.lookups.files(card)
        model = self.residency.loaded_models().get(card.name)
        if model is not None and model.card is not None and model.files is not None:
            card, files = model.card, model.files
        return await self.texts.of(card, files, None if dialect == "auto" else dialect)

    def fingerprint(self, card: Card) -> str:
        """A mark of the model's files, its settings and this program: while it is the same, so are
        the answers to the same request with the same seed."""
        known = (__version__, self.lookups.files(card), self.settings(card))
        return f"fp_{sha256(repr(known).encode()).hexdigest()[:12]}"

    def honours_keep_alive(self, card: Card) -> bool:
        """Whether a client may say how long the model stays: always, never, or where the server
        has one user, who needs no key."""
        wanted, server = self.settings(card).keep_alive, self.config.server
        if wanted == "auto":
            return not server.api_keys and is_loopback(server.host)
        return wanted == "on"

    def keep_alive(self, card: Card, keep_s: float | None) -> None:
        """A client would have the model stay so long once it is idle; None: it does not say."""
        model = self.residency.loaded_models().get(card.name)
        if keep_s is not None and model is not None and self.honours_keep_alive(card):
            model.keep_alive_s = keep_s

    def context_now(self, name: str) -> int | None:
        """The longest sequence that the loaded model can hold; None while it is not loaded."""
        model = self.residency.loaded_models().get(name)
        if model is None or model.grant is None:
            return None
        return model.grant.capacity().tokens_in(model.grant.granted_kv_bytes)

    def queue(self, name: str) -> ModelQueue:
        """The line in front of a model."""
        queue = self.queues.get(name)
        if queue is None:
            settings = self.config.server
            queue = self.queues[name] = ModelQueue(
                name,
                max_requests=settings.queue_requests,
                max_bytes=settings.queue_bytes,
                deadline_s=settings.queue_deadline_s,
                callers=self._callers,
            )
        return queue

    def _callers(self) -> Callers:
        settings = self.config.server
        return callers(len(settings.api_keys), local=is_loopback(settings.host))

    def connect_queue(self, model: Model) -> None:
        """A model is loaded: its queue sees what its new worker can take, from the latest
        figures."""
        client, grant, queue = model.client, model.grant, self.queue(model.name)
        assert grant is not None

        def capacity() -> Capacity:
            return Capacity(
                running=0 if client.status is None else client.status.running,
                sequences=grant.plan.at_worker,
                kv_bytes=grant.granted_kv_bytes,
                held=self.ledger.snapshot()[grant.domain].short,
            )

        self.metrics.loaded(model.name, client.ready.load_s)
        queue.capacity = capacity
        client.on_step = queue.pump
