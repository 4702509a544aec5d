"""`/v1/plan` and `/admin/api/plan`: what would fit, with the numbers, and nothing run.

The verdict is the front door's own, over the same snapshot; a plan can therefore not say one thing
and a request get another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from penstock.errors import BadRequest
from penstock.memory.admission import Accept, ModelRoom, Refuse, RequestNeed, decide, largest_kv
from penstock.server.api import chat, completions
from penstock.server.api.errors import error_object
from penstock.server.api.exchange import decode_json

if TYPE_CHECKING:
    from penstock.catalog import Card
    from penstock.server.api.exchange import Exchange
    from penstock.server.api.generation import Job
    from penstock.server.api.services import Services


class _Kind(msgspec.Struct):
    """Tells a chat from a completion."""

    messages: msgspec.Raw = msgspec.Raw()


_kind = msgspec.json.Decoder(_Kind)


async def plan_request(exchange: Exchange, services: Services) -> None:
    """A chat or completions body in, the verdict on it out."""
    async with exchange.body() as body:
        if bytes((await decode_json(_kind, body)).messages):
            fields = await decode_json(chat.decoder, body)
            work = chat.prepare(exchange, fields, services)
        else:
            texts = await decode_json(completions.decoder, body)
            work = completions.prepare(exchange, texts, services)
        job = await exchange.while_connected(work)
    await exchange.send_json(await _verdict(job, services))


async def _verdict(job: Job, services: Services) -> dict[str, object]:
    residency = services.residency
    room = await residency.room_of(job.card)
    longest = max(map(len, job.prompts))
    policy = services.config.server.max_tokens_policy
    need = RequestNeed(
        longest, job.max_tokens, job.prompt_field, refuse_overlong_answer=policy == "refuse"
    )
    snapshot, residents = services.ledger.snapshot(), residency.room.residents()
    verdict = decide(need, snapshot, room, residents)
    result: dict[str, object] = {
        "object": "plan",
        "model": job.card.name,
        "verdict": type(verdict).__name__.lower(),
        "loaded": room.kv_now_bytes is not None,
        "prompt_tokens": longest,
        "answers": len(job.prompts) * job.n,
        "domain": room.domain,
        "window": room.window,
        **_context(room, largest_kv(snapshot, room, residents)),
    }
    if isinstance(verdict, Refuse):
        return result | error_object(verdict.error)
    if isinstance(verdict, Accept):
        needed = longest + max(verdict.granted, 1)
        result |= {"max_tokens": verdict.granted, "kv_bytes": room.bytes_for(needed)}
    else:
        result["kv_bytes"] = verdict.grow_bytes
    lane = services.lanes.get(job.card.name)
    result["waiting"] = 0 if lane is None else lane.waiting
    return result


def _context(room: ModelRoom, kv_ever_bytes: int) -> dict[str, object]:
    now = room.kv_now_bytes
    return {
        "context_now": None if now is None else room.tokens_in(now),
        "context_ever": room.tokens_in(kv_ever_bytes),
        "kv_bytes_per_token": room.kv_bytes_per_token,
    }


async def plan_model(exchange: Exchange, services: Services) -> None:
    """`?model=NAME&context=N&concurrency=N`: what a model holds or would need, and what fits."""
    query = _query(exchange)
    card = await services.generator(query.get("model"))
    context, concurrency = _number(query, "context"), _number(query, "concurrency")
    await exchange.send_json(await model_plan(card, services, context, concurrency))


async def model_plan(
    card: Card, services: Services, context: int | None, concurrency: int | None
) -> dict[str, object]:
    """The bytes of a model, and how many sequences of which length they allow."""
    residency = services.residency
    plan, room = await residency.plan(card), await residency.room_of(card)
    snapshot, residents = services.ledger.snapshot(), residency.room.residents()
    loaded = room.kv_now_bytes is not None
    ever = largest_kv(snapshot, room, residents)
    if not loaded:  # what the load itself will set aside comes off too
        ever = max(ever - plan.load_need().fixed_bytes(plan.domain) + room.fixed_bytes, 0)
    return fitting(room, ever, context, concurrency) | {
        "model": card.name,
        "loaded": loaded,
        "device": plan.device,
        "dtype": plan.dtype,
        "weight_bytes": plan.weight_bytes,
        "fixed_bytes": room.fixed_bytes,
        "limit_bytes": snapshot[room.domain].limit_bytes,
    }


def fitting(
    room: ModelRoom, kv_bytes: int, context: int | None, concurrency: int | None
) -> dict[str, object]:
    """What so much KV allows: the longest context, sequences at a length, a length at a number."""
    longest = room.tokens_in(kv_bytes)
    length = min(context or longest, room.window)
    each = max(room.bytes_for(length), 1)
    at_once = (kv_bytes - room.overhead_bytes) // each if length <= longest else 0
    result: dict[str, object] = {
        "domain": room.domain,
        "window": room.window,
        "kv_bytes_per_token": room.kv_bytes_per_token,
        "kv_bytes": kv_bytes,
        "longest_context": longest,
        "context": length,
        "concurrency_at_context": max(at_once, 0),
    }
    if concurrency:
        share = room.overhead_bytes + (kv_bytes - room.overhead_bytes) // concurrency
        result["concurrency"] = concurrency
        result["context_at_concurrency"] = room.tokens_in(share)
    if context or concurrency:
        count = concurrency or 1
        result["needed_bytes"] = room.bytes_for(length) * count
        result["fits"] = length <= longest and room.bytes_for(length) * count <= kv_bytes
    return result


def _query(exchange: Exchange) -> dict[str, str]:
    from urllib.parse import parse_qsl

    return dict(parse_qsl(exchange.scope.get("query_string", b"").decode("latin-1")))


def _number(query: dict[str, str], name: str) -> int | None:
    text = query.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and 0 < int(text) < 2**31):
        raise BadRequest(f"`{name}` is {text[:40]!r}; it is a number of at least 1.", param=name)
    return int(text)
