"""Admission of requests and loads: pure functions over a snapshot of the ledger.

Three answers. `Accept` says what is granted. `Wait` says what would make room; who does it, and in
which order waiters are served, is the caller's affair. `Refuse` carries the one error that every
protocol renders, with its numbers, and only for what can never fit:

    a request   prompt + 1 token is over the window, or over the KV that the limit leaves with every
                unpinned other model gone, caches shed and nothing used by other programs
    a load      weights, process, one step and the least KV are over the limit in the same sense

Nothing here reads a gauge, books a byte or awaits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.errors import BadRequest, ContextTooLong, ModelTooLarge, PenstockError
from penstock.memory.eviction import (
    choose_drained,
    choose_shed,
    choose_victims,
    pinned_bytes,
)
from penstock.memory.ledger import Purpose
from penstock.memory.limits import limit_setting

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from penstock.memory.cost import KvCost
    from penstock.memory.domains import Domain
    from penstock.memory.eviction import ModelUsage
    from penstock.memory.ledger import DomainState, Needs, Snapshot

_MODEL_OWNER = "model:"


def owner_of(model: str) -> str:
    """The name under which a model's bytes are booked; it may be unloaded, others may not."""
    return _MODEL_OWNER + model


@dataclass(frozen=True, slots=True)
class Accept:
    """It may come in with this: tokens of an answer, or KV bytes of a load."""

    granted: int


@dataclass(frozen=True, slots=True)
class Wait:
    """There is no room now; these acts would make some."""

    shed: tuple[tuple[str, int], ...] = ()  # KV bytes to ask back, by model
    unload: tuple[str, ...] = ()
    grow_bytes: int = 0  # KV that this model should have for the request
    drain: tuple[str, ...] = ()  # busy models that should take no more requests until then


@dataclass(frozen=True, slots=True)
class Refuse:
    """It can never come in."""

    error: PenstockError


# --- a request ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RequestNeed:
    """What the front door knows of a request; `prompt_field` is where to point in a refusal."""

    prompt_tokens: int  # of the longest prompt
    max_tokens: int | None  # as asked; None: as many as there is room for
    prompt_field: str = "messages"
    at_least: bool = False  # `prompt_tokens` is a lower bound, found without tokenising
    answer_tokens: int = 1  # the least that an answer adds to the sequence; none to a vector
    refuse_overlong_answer: bool = False  # server.max_tokens_policy


@dataclass(frozen=True, slots=True)
class ModelCapacity:
    """One model as admission sees it, loaded or not."""

    name: str
    domain: Domain
    window: int  # tokens, the user's own limit included
    kv: KvCost
    kv_now_bytes: int | None  # what it holds for KV; None while it is not loaded
    fixed_bytes: int  # what it holds beside KV, or is known to need
    overhead_bytes: int = 0  # of KV, for no request
    unit_bytes: int = 1  # KV takes memory in pieces of this size

    def tokens_in(self, kv_bytes: int) -> int:
        """The longest sequence that so much KV holds: whole blocks, up to the window."""
        return min(self.all_tokens_in(kv_bytes), self.window)

    def all_tokens_in(self, kv_bytes: int) -> int:
        """The same as if there were no window, which there always is where nothing is kept."""
        if not self.kv.groups:
            return self.window
        usable = kv_bytes - kv_bytes % self.unit_bytes - self.overhead_bytes
        return self.kv.tokens_within(usable)

    def kv_for(self, tokens: int) -> int:
        """The least KV that holds one sequence of that length."""
        needed = self.bytes_for(tokens) + self.overhead_bytes
        return -(-needed // self.unit_bytes) * self.unit_bytes

    def bytes_for(self, tokens: int) -> int:
        """The most KV bytes that one sequence holds, in whole blocks."""
        return self.kv.sequence(tokens)


def decide(
    need: RequestNeed,
    snapshot: Snapshot,
    capacity: ModelCapacity,
    usages: Sequence[ModelUsage] = (),
) -> Accept | Wait | Refuse:
    """The front door's answer, before the first byte of ours."""
    needed = need.prompt_tokens + need.answer_tokens
    if needed > capacity.window:
        return Refuse(_too_long(need, capacity, "window", capacity.window))
    ever_bytes = largest_kv(snapshot, capacity, usages)
    ever = capacity.tokens_in(ever_bytes)
    if capacity.kv_now_bytes is None and not ever:
        ever = capacity.window  # whether the model itself fits is the load's to say
    now = ever if capacity.kv_now_bytes is None else capacity.tokens_in(capacity.kv_now_bytes)
    if needed > max(ever, now):
        return Refuse(_too_long(need, capacity, "memory", max(ever, now)))
    asked = need.max_tokens
    most = max(ever, now) - need.prompt_tokens
    if asked is not None and asked > most and need.refuse_overlong_answer:
        return Refuse(_answer_too_long(need, most))
    least = need.answer_tokens
    wanted = need.prompt_tokens + (least if asked is None else max(min(asked, most), least))
    if wanted > now:
        return Wait(grow_bytes=min(capacity.kv_for(wanted), ever_bytes))
    left = now - need.prompt_tokens
    return Accept(left if asked is None else min(asked, left))


def granted_now(need: RequestNeed, capacity: ModelCapacity) -> int:
    """Tokens that the answer may have in the KV there is; below one the prompt does not fit."""
    left = capacity.tokens_in(capacity.kv_now_bytes or 0) - need.prompt_tokens
    return left if need.max_tokens is None else min(need.max_tokens, left)


def decide_growth(
    snapshot: Snapshot,
    capacity: ModelCapacity,
    kv_bytes: int,
    usages: Sequence[ModelUsage],
    spent: Collection[str] = (),
) -> Accept | Wait:
    """Whether a loaded model's KV may become `kv_bytes` now, at the cost of idle others."""
    free = snapshot[capacity.domain].free_bytes
    more = kv_bytes - (capacity.kv_now_bytes or 0)
    if more <= free:
        return Accept(kv_bytes)
    others = [r for r in usages if r.domain == capacity.domain and r.name != capacity.name]
    shed = choose_shed([r for r in others if r.name not in spent], more - free, keep_bytes=0)
    if shed:
        return Wait(shed=shed)
    return Wait(unload=choose_victims(others, capacity.domain, more - free))


def largest_kv(snapshot: Snapshot, capacity: ModelCapacity, usages: Sequence[ModelUsage]) -> int:
    """The most KV that this model could have: others gone, caches shed, external zero.

    While it is not loaded, the server's own share may be an estimate and counts for nothing.
    """
    state = snapshot[capacity.domain]
    left = state.limit_bytes - capacity.fixed_bytes
    if capacity.kv_now_bytes is not None:
        left -= _permanent(state)
    return max(left - pinned_bytes(usages, capacity.domain, besides=capacity.name), 0)


def _permanent(state: DomainState) -> int:
    """What no unload gives back: the server itself, the fork server, the pool for bodies."""
    return sum(
        size
        for owner, held in state.owners.items()
        if not owner.startswith(_MODEL_OWNER)
        for size in held.values()
    )


def _too_long(
    need: RequestNeed, capacity: ModelCapacity, reason: str, limit: int
) -> ContextTooLong:
    needed = need.prompt_tokens + need.answer_tokens
    what = "prompt" if need.answer_tokens else "text"
    has = f"the {what} has {'at least ' if need.at_least else ''}{need.prompt_tokens}"
    if need.answer_tokens:
        has = f"{has} and the answer needs at least one more"
    if reason == "window":
        holds = f"This model's maximum context length is {limit} tokens"
    else:
        knob = limit_setting(capacity.domain)
        holds = (
            f"The memory for this model's context holds {limit} tokens at most (the knobs are "
            f"{knob} and models.kv_tokens)"
        )
    return ContextTooLong(
        f"{holds}, but {has}.",
        param=need.prompt_field,
        numbers={
            "reason": reason,
            "domain": str(capacity.domain),
            "needed_tokens": needed,
            "limit_tokens": limit,
            "needed_bytes": capacity.bytes_for(needed),
            "limit_bytes": capacity.bytes_for(limit),
        },
    )


def _answer_too_long(need: RequestNeed, most: int) -> BadRequest:
    return BadRequest(
        f"`max_tokens` is {need.max_tokens}, but after the prompt of {need.prompt_tokens} tokens "
        f"there is room for {most} (server.max_tokens_policy is refuse).",
        param="max_tokens",
    )


# --- a load ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LoadNeed:
    """What a load takes: `fixed` in any domain, and KV in the one it computes in."""

    name: str
    domain: Domain
    fixed: Needs  # process, weights, loading and one largest step
    kv_min_bytes: int  # less than this serves no one
    kv_window_bytes: int  # one longest sequence
    kv_max_bytes: int  # more than this is of no use, or of none that the user wants

    def fixed_bytes(self, domain: Domain) -> int:
        """The part of `fixed` in one domain."""
        return sum(size for (d, _), size in self.fixed.items() if d == domain)

    def needs(self, kv_bytes: int) -> Needs:
        """What to book."""
        return {**self.fixed, (self.domain, Purpose.KV): kv_bytes}


def decide_load(
    need: LoadNeed,
    snapshot: Snapshot,
    usages: Sequence[ModelUsage],
    spent: Collection[str] = (),  # models that were asked to shed and have given what they can
) -> Accept | Wait | Refuse:
    """Room now, acts that would make room, or never."""
    for domain in {d for d, _ in need.fixed} | {need.domain}:
        least = need.fixed_bytes(domain) + (need.kv_min_bytes if domain == need.domain else 0)
        state = snapshot[domain]
        floor = _permanent(state) + pinned_bytes(usages, domain, besides=need.name)
        if least + floor > state.limit_bytes:
            return Refuse(_too_large(need, state, domain, least, floor))
        if domain != need.domain and state.free_bytes < least:
            return _room_in_other_domain(usages, domain, least - state.free_bytes, spent)
    return _room_for_kv(need, snapshot[need.domain], usages, spent)


def _room_for_kv(
    need: LoadNeed, state: DomainState, usages: Sequence[ModelUsage], spent: Collection[str]
) -> Accept | Wait:
    fixed = need.fixed_bytes(need.domain)
    free = state.free_bytes - fixed
    others = [usage for usage in usages if usage.domain == need.domain]
    # Nobody is asked for more than would leave all with equal shares, nor for a second window.
    share = max(free + sum(other.kv_bytes for other in others), 0) // (len(others) + 1)
    wanted = max(min(need.kv_window_bytes, share, need.kv_max_bytes), need.kv_min_bytes)
    if state.free_bytes > 0 and free >= wanted:
        return Accept(min(free, need.kv_max_bytes))
    willing = [other for other in others if other.name not in spent]
    shed = choose_shed(willing, wanted - free, keep_bytes=min(share, need.kv_window_bytes))
    if free + sum(size for _, size in shed) >= need.kv_min_bytes and shed:
        return Wait(shed=shed)
    if free >= need.kv_min_bytes:
        return Accept(min(free, need.kv_max_bytes))
    shed = choose_shed(willing, need.kv_min_bytes - free, keep_bytes=0)
    if free + sum(size for _, size in shed) >= need.kv_min_bytes:
        return Wait(shed=shed)
    return _make_room(others, need.domain, need.kv_min_bytes - free)


def _room_in_other_domain(
    usages: Sequence[ModelUsage], domain: Domain, wanted_bytes: int, spent: Collection[str]
) -> Wait:
    """In a domain in which the load does not compute: what others there can spare comes first."""
    willing = [r for r in usages if r.domain == domain and r.name not in spent]
    shed = choose_shed(willing, wanted_bytes, keep_bytes=0)
    if sum(size for _, size in shed) >= wanted_bytes:
        return Wait(shed=shed)
    return _make_room(usages, domain, wanted_bytes)


def _make_room(usages: Sequence[ModelUsage], domain: Domain, wanted_bytes: int) -> Wait:
    if victims := choose_victims(usages, domain, wanted_bytes):
        return Wait(unload=victims)
    return Wait(drain=choose_drained(usages, domain, wanted_bytes))


def _too_large(
    need: LoadNeed, state: DomainState, domain: Domain, least: int, floor: int
) -> ModelTooLarge:
    knob = limit_setting(domain)
    parts = ", ".join(
        f"{_mib(size)} {purpose.value}" for (d, purpose), size in need.fixed.items() if d == domain
    )
    kv = f", {_mib(need.kv_min_bytes)} for the smallest KV" if domain == need.domain else ""
    return ModelTooLarge(
        f"The model {need.name!r} does not fit into {domain}: it needs {_mib(least)} ({parts}{kv}) "
        f"and the limit of {_mib(state.limit_bytes)} leaves "
        f"{_mib(max(state.limit_bytes - floor, 0))} beside the server and pinned models. Raise "
        f"{knob}, or lower step_tokens, step_sequences or the least KV of the model.",
        numbers={
            "reason": "memory",
            "domain": str(domain),
            "needed_bytes": least + floor,
            "limit_bytes": state.limit_bytes,
        },
    )


def _mib(size: int) -> str:
    return f"{size / (1 << 20):,.0f} MiB"
