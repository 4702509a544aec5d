"""`/v1/plan` and `/admin/api/plan`: what would fit, with the numbers, and nothing run.

The verdict is the front door's own, over the same snapshot; a plan can therefore not say one thing
and a request get another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from penstock.errors import BadRequest, ContextTooLong, shortened
from penstock.memory.admission import Accept, ModelCapacity, Refuse, RequestNeed, decide, largest_kv
from penstock.server.admin.query import query_of
from penstock.server.http.errors import error_object
from penstock.server.http.exchange import decode_json
from penstock.server.protocols.openai import chat, completions
from penstock.server.residency.load_estimate import fitting

if TYPE_CHECKING:
    from penstock.catalog import Card
    from penstock.server.http.exchange import Exchange
    from penstock.server.pipeline.generation import Job
    from penstock.server.protocols.services import Services


class _Kind(msgspec.Struct):
    """Tells a chat from a completion."""

    messages: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)


_kind = msgspec.json.Decoder(_Kind)
_MAX_DIGITS = 20


async def plan_request(exchange: Exchange, services: Services) -> None:
    """A chat or completions body in, the verdict on it out."""
    async with exchange.body() as body:
        if bytes((await decode_json(_kind, body)).messages):
            fields = await decode_json(chat.decoder, body)
            work = chat.prepare(exchange, fields, services)
        else:
            texts = await decode_json(completions.decoder, body)
            work = completions.prepare(exchange, texts, services)
        try:
            job = await exchange.while_connected(work)
        except ContextTooLong as error:  # so long that the front door did not even tokenise it
            answer = {"object": "plan", "verdict": "refuse", **error_object(error)}
        else:
            answer = await _verdict(job, services)
    await exchange.send_json(answer)


async def _verdict(job: Job, services: Services) -> dict[str, object]:
    residency = services.residency
    capacity = residency.capacity_of(job.card)
    longest = max(map(len, job.prompts))
    policy = services.config.server.max_tokens_policy
    need = RequestNeed(
        longest, job.max_tokens, job.prompt_field, refuse_overlong_answer=policy == "refuse"
    )
    snapshot, usages = services.ledger.snapshot(), residency.arbiter.usages()
    verdict = decide(need, snapshot, capacity, usages)
    result: dict[str, object] = {
        "object": "plan",
        "model": job.card.name,
        "verdict": type(verdict).__name__.lower(),
        "loaded": capacity.kv_now_bytes is not None,
        "prompt_tokens": longest,
        "answers": len(job.prompts) * job.n,
        "domain": str(capacity.domain),
        "window": capacity.window,
        "kv_dtype": residency.plan(job.card).kv_format.name,
        **_context(capacity, largest_kv(snapshot, capacity, usages)),
    }
    if job.pictures:
        result["images"] = [picture.facts() for picture in job.pictures]
    if isinstance(verdict, Refuse):
        return result | error_object(verdict.error)
    if isinstance(verdict, Accept):
        needed = longest + max(verdict.granted, 1)
        result |= {"max_tokens": verdict.granted, "kv_bytes": capacity.bytes_for(needed)}
    else:
        result["kv_bytes"] = verdict.grow_bytes
    queue = services.queues.get(job.card.name)
    result["waiting"] = 0 if queue is None else queue.waiting
    return result


def _context(capacity: ModelCapacity, kv_ever_bytes: int) -> dict[str, object]:
    now, ever = capacity.kv_now_bytes, capacity.tokens_in(kv_ever_bytes)
    return {
        "context_now": None if now is None else capacity.tokens_in(now),
        "context_ever": ever,
        **capacity.kv.figures(ever),
    }


async def plan_model(exchange: Exchange, services: Services) -> None:
    """`?model=NAME&context=N&concurrency=N`: what a model holds or would need, and what fits."""
    query = query_of(exchange)
    card = await services.served(query.get("model"))
    context, concurrency = _number(query, "context"), _number(query, "concurrency")
    await exchange.send_json(await model_plan(card, services, context, concurrency))


async def model_plan(
    card: Card, services: Services, context: int | None, concurrency: int | None
) -> dict[str, object]:
    """The bytes of a model, and how many sequences of which length they allow."""
    residency = services.residency
    plan, capacity = residency.plan(card), residency.capacity_of(card)
    snapshot, usages = services.ledger.snapshot(), residency.arbiter.usages()
    loaded = capacity.kv_now_bytes is not None
    if not loaded:
        capacity = plan.planned_capacity()
    ever = largest_kv(snapshot, capacity, usages)
    return plan.summary() | {
        **fitting(capacity, ever, context, concurrency),
        "loaded": loaded,
        "kv_now_bytes": capacity.kv_now_bytes,
        "fixed_bytes": capacity.fixed_bytes,
        "limit_bytes": snapshot[capacity.domain].limit_bytes,
    }


def _number(query: dict[str, str], name: str) -> int | None:
    text = query.get(name)
    if text is None:
        return None
    # Python refuses to make a number of thousands of digits, so their count comes first.
    sane = text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS
    if not (sane and 0 < int(text) < 2**31):
        raise BadRequest(
            f"`{name}` is {shortened(text, 40)!r}; it is a number of at least 1.", param=name
        )
    return int(text)
