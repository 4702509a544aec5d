"""`/v1/rerank`, in the shapes of Cohere and Jina: a query and documents in, the best first out."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from penstock.catalog.encoders import RERANK
from penstock.server.fields.generation import Name  # noqa: TC001 - msgspec reads it
from penstock.server.fields.unsupported import Unsupported, refuse_fields
from penstock.server.fields.whole_numbers import (
    Limit,
    Positive,
    Priority,
    WholeNumbers,
)
from penstock.server.pipeline.answers import read_request
from penstock.server.pipeline.encoding.run import EncodeJob, EncodeRun
from penstock.server.pipeline.encoding.texts import MAX_TEXTS
from penstock.server.protocols.encoders.asked import (
    WHOLE_WINDOW,
    asked_model,
    check_cut,
    reading,
)
from penstock.server.protocols.encoders.vectors import numbers_of
from penstock.wire import Encoding

if TYPE_CHECKING:
    from penstock.server.http.exchange import Exchange
    from penstock.server.protocols.services import Services

SCORE_BYTES = 400  # of one result, as it comes and as it is written


class Document(msgspec.Struct):
    """A document as an object."""

    text: str


Documents = Annotated[list[str | Document], Meta(min_length=1, max_length=MAX_TEXTS)]


class RerankFields(WholeNumbers, kw_only=True):
    """The body of a rerank request."""

    query: str
    documents: Documents
    model: Name | None = None
    top_n: Positive | None = None
    return_documents: bool | None = None
    user: str | None = None
    priority: Priority | None = None
    max_tokens_per_doc: Positive | None = None  # Cohere
    rank_fields: Unsupported = msgspec.field(default_factory=msgspec.Raw)
    truncation: bool | None = None  # Jina and others: documents are cut where pairs are too long
    truncate_prompt_tokens: Limit | None = None  # vLLM: likewise, to so many tokens
    raw_scores: bool | None = None  # as the model says them, before any activation

    def texts(self) -> list[str]:
        """The documents."""
        return [each if isinstance(each, str) else each.text for each in self.documents]

    def cut(self) -> int | None:
        """To how many tokens pairs are cut; None: they are refused."""
        check_cut(self.truncate_prompt_tokens, "truncate_prompt_tokens")
        if self.truncate_prompt_tokens is not None:
            return self.truncate_prompt_tokens
        return WHOLE_WINDOW if self.truncation else None


_decoder = msgspec.json.Decoder(RerankFields)


async def rerank(exchange: Exchange, services: Services) -> None:
    """The endpoint."""
    fields, (job, shown) = await read_request(
        exchange, _decoder, lambda fields: _prepare(exchange, fields, services)
    )
    run = EncodeRun(exchange, services, job)
    with run.observed():
        scores = [numbers_of(each)[0] for each in await exchange.while_connected(run.run())]
        results = partial(_results, scores, fields.top_n, shown)
        tokens = run.usage.prompt_tokens
        await exchange.send_made(
            lambda: {
                "id": exchange.id,
                "object": "list",
                "model": job.card.name,
                "results": results(),
                "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
                "meta": {
                    "api_version": {"version": "2"},
                    "billed_units": {"search_units": 1},
                    "tokens": {"input_tokens": tokens},
                },
            }
        )


async def _prepare(
    exchange: Exchange, fields: RerankFields, services: Services
) -> tuple[EncodeJob, list[str] | None]:
    """What is to be scored, and the documents where they are sent back."""
    refuse_fields(fields, ("rank_fields",))
    model = await asked_model(exchange, services, fields.model, RERANK, fields.priority)
    reads = await reading(exchange, services, model, "documents", fields.cut())
    documents = fields.texts()
    pairs = [(fields.query, document) for document in documents]
    encoding = Encoding(raw=bool(fields.raw_scores))
    texts = await reads.pairs(pairs, encoding, fields.max_tokens_per_doc)
    job = EncodeJob(model.card, texts, "documents", SCORE_BYTES, model.priority)
    if not fields.return_documents:
        return job, None
    # They are held as text until then, and written once more.
    await exchange.memory.grow(4 * sum(map(len, documents)))
    return job, documents


def _results(
    scores: list[float], most: int | None, shown: list[str] | None
) -> list[dict[str, object]]:
    """Best first, equal ones by their place."""
    best = sorted(range(len(scores)), key=lambda number: (-scores[number], number))
    return [
        {"index": number, "relevance_score": scores[number]}
        | ({} if shown is None else {"document": {"text": shown[number]}})
        for number in best[:most]
    ]
