"""`/v1/score`, as vLLM has it: how well one text, or each of several, goes with others. A
cross-encoder reads each pair as one; of an embedder it is the cosine of the two vectors.
"""

from __future__ import annotations

import math
import secrets
import time
from functools import partial
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from penstock.catalog.encoders import EMBED, RERANK
from penstock.errors import BadRequest
from penstock.server.fields.generation import Name  # noqa: TC001 - msgspec reads it
from penstock.server.fields.whole_numbers import Limit, Priority, WholeNumbers
from penstock.server.http.threads import run_in_thread_if_large
from penstock.server.pipeline.answers import read_request
from penstock.server.pipeline.encoding.run import EncodeJob, EncodeRun
from penstock.server.pipeline.encoding.texts import MAX_TEXTS
from penstock.server.protocols.encoders.asked import asked_model, check_cut, reading
from penstock.server.protocols.encoders.embeddings import encoded
from penstock.server.protocols.encoders.rerank import SCORE_BYTES
from penstock.server.protocols.encoders.vectors import numbers_of, vector_bytes
from penstock.wire import Encoding

if TYPE_CHECKING:
    from penstock.server.http.exchange import Exchange
    from penstock.server.protocols.services import Services

Texts = str | Annotated[list[str], Meta(min_length=1, max_length=MAX_TEXTS)]


class ScoreFields(WholeNumbers, kw_only=True):
    """The body of a score request."""

    text_1: Texts
    text_2: Texts
    model: Name | None = None
    user: str | None = None
    priority: Priority | None = None
    truncate_prompt_tokens: Limit | None = None
    raw_scores: bool | None = None

    def pairs(self) -> list[tuple[str, str]]:
        """One text with each of the others, or one by one."""
        firsts, seconds = (
            [given] if isinstance(given, str) else given for given in (self.text_1, self.text_2)
        )
        if len(firsts) == 1:
            return [(firsts[0], second) for second in seconds]
        if len(firsts) != len(seconds):
            raise BadRequest(
                f"`text_1` has {len(firsts)} texts and `text_2` {len(seconds)}; there is one of "
                "the first, or as many as of the second.",
                param="text_1",
            )
        return list(zip(firsts, seconds, strict=True))


_decoder = msgspec.json.Decoder(ScoreFields)


async def score(exchange: Exchange, services: Services) -> None:
    """The endpoint."""
    _, (job, places) = await read_request(
        exchange, _decoder, lambda fields: _prepare(exchange, fields, services)
    )
    run = EncodeRun(exchange, services, job)
    with run.observed():
        results = await exchange.while_connected(run.run())
        scores = await run_in_thread_if_large(
            sum(map(len, results)), partial(_scores, results, places)
        )
        tokens = run.usage.prompt_tokens
        await exchange.send_made(
            lambda: {
                "id": f"score-{secrets.token_hex(12)}",
                "object": "list",
                "created": int(time.time()),
                "model": job.card.name,
                "data": [
                    {"index": number, "object": "score", "score": value}
                    for number, value in enumerate(scores)
                ],
                "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
            }
        )


_Places = list[tuple[int, int]]  # of the two texts of each pair, among an embedder's results


async def _prepare(
    exchange: Exchange, fields: ScoreFields, services: Services
) -> tuple[EncodeJob, _Places | None]:
    check_cut(fields.truncate_prompt_tokens, "truncate_prompt_tokens")
    card = await services.named(fields.model)
    kind = EMBED if card.kind == EMBED else RERANK
    model = await asked_model(exchange, services, fields.model, kind, fields.priority)
    reads = await reading(exchange, services, model, "text_2", fields.truncate_prompt_tokens)
    pairs = fields.pairs()
    if kind == RERANK:
        read = await reads.pairs(pairs, Encoding(raw=bool(fields.raw_scores)))
        return EncodeJob(model.card, read, "text_2", SCORE_BYTES, model.priority), None
    distinct = dict.fromkeys(text for pair in pairs for text in pair)
    places = {text: place for place, text in enumerate(distinct)}
    texts = await encoded(reads, model, list(distinct))
    size = SCORE_BYTES + vector_bytes(model.dimensions(None))
    job = EncodeJob(model.card, texts, "text_2", size, model.priority)
    return job, [(places[first], places[second]) for first, second in pairs]


def _scores(results: list[bytes], places: _Places | None) -> list[float]:
    if places is None:
        return [numbers_of(result)[0] for result in results]
    return [_cosine(numbers_of(results[a]), numbers_of(results[b])) for a, b in places]


def _cosine(first: list[float], second: list[float]) -> float:
    lengths = math.hypot(*first) * math.hypot(*second)
    product = sum(a * b for a, b in zip(first, second, strict=True))
    return product / lengths if lengths else 0.0
