"""Whether a request or a load may come in: pure functions over a snapshot of the books.

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
from penstock.memory.ledger import Purpose

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

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
    refuse_overlong_answer: bool = False  # server.max_tokens_policy


@dataclass(frozen=True, slots=True)
class ModelRoom:
    """One model as admission sees it, loaded or not."""

    name: str
    domain: str
    window: int  # tokens, the user's own limit included
    kv_bytes_per_token: int
    block_tokens: int
    kv_now_bytes: int | None  # what it holds for KV; None while it is not loaded
    fixed_bytes: int  # what it holds beside KV, or is known to need
    overhead_bytes: int = 0  # of the arena, for no request
    unit_bytes: int = 1  # the arena takes memory in pieces of this size

    def tokens_in(self, kv_bytes: int) -> int:
        """The longest sequence that so much KV holds: whole blocks, up to the window."""
        block_bytes = max(self.kv_bytes_per_token * self.block_tokens, 1)
        usable = kv_bytes - kv_bytes % self.unit_bytes - self.overhead_bytes
        return min(max(usable, 0) // block_bytes * self.block_tokens, self.window)

    def kv_for(self, tokens: int) -> int:
        """The least KV that holds one sequence of that length."""
        needed = self.bytes_for(tokens) + self.overhead_bytes
        return -(-needed // self.unit_bytes) * self.unit_bytes

    def bytes_for(self, tokens: int) -> int:
        """KV bytes of one sequence, in whole blocks."""
        blocks = -(-tokens // self.block_tokens)
        return blocks * self.block_tokens * self.kv_bytes_per_token


def decide(
    need: RequestNeed, snapshot: Snapshot, room: ModelRoom, residents: Sequence[Resident] = ()
) -> Accept | Wait | Refuse:
    """The front door's answer, before the first byte of ours."""
    needed = need.prompt_tokens + 1
    if needed > room.window:
        return Refuse(_too_long(need, room, "window", room.window))
    ever_bytes = largest_kv(snapshot, room, residents)
    ever = room.tokens_in(ever_bytes)
    if room.kv_now_bytes is None and not ever:
        ever = room.window  # whether the model itself fits is the load's to say
    now = ever if room.kv_now_bytes is None else room.tokens_in(room.kv_now_bytes)
    if needed > max(ever, now):
        return Refuse(_too_long(need, room, "memory", max(ever, now)))
    asked = need.max_tokens
    most = max(ever, now) - need.prompt_tokens
    if asked is not None and asked > most and need.refuse_overlong_answer:
        return Refuse(_answer_too_long(need, most))
    wanted = need.prompt_tokens + (1 if asked is None else max(min(asked, most), 1))
    if wanted > now:
        return Wait(grow_bytes=min(room.kv_for(wanted), ever_bytes))
    left = now - need.prompt_tokens
    return Accept(left if asked is None else min(asked, left))


def granted_now(need: RequestNeed, room: ModelRoom) -> int:
    """Tokens that the answer may have in the KV there is; below one the prompt does not fit."""
    left = room.tokens_in(room.kv_now_bytes or 0) - need.prompt_tokens
    return left if need.max_tokens is None else min(need.max_tokens, left)


def decide_growth(
    snapshot: Snapshot,
    room: ModelRoom,
    kv_bytes: int,
    residents: Sequence[Resident],
    spent: Collection[str] = (),
) -> Accept | Wait:
    """Whether a loaded model's KV may become `kv_bytes` now, at the cost of idle others."""
    free = snapshot[room.domain].free_bytes
    more = kv_bytes - (room.kv_now_bytes or 0)
    if more <= free:
        return Accept(kv_bytes)
    others = [r for r in residents if r.domain == room.domain and r.name != room.name]
    shed = choose_shed([r for r in others if r.name not in spent], more - free, keep_bytes=0)
    if shed:
        return Wait(shed=shed)
    return Wait(unload=choose_victims(others, room.domain, more - free))


def largest_kv(snapshot: Snapshot, room: ModelRoom, residents: Sequence[Resident]) -> int:
    """The most KV that this model could have: others gone, caches shed, external zero.

    While it is not loaded, the server's own share may be an estimate and counts for nothing.
    """
    state = snapshot[room.domain]
    left = state.limit_bytes - room.fixed_bytes
    if room.kv_now_bytes is not None:
        left -= _permanent(state)
    return max(left - _pinned(residents, room.domain, besides=room.name), 0)


def _permanent(state: DomainState) -> int:
    """What no unload gives back: the server itself, the template, the pool for bodies."""
    return sum(
        size
        for owner, held in state.owners.items()
        if not owner.startswith(_MODEL_OWNER)
        for size in held.values()
    )


def _pinned(residents: Iterable[Resident], domain: str, besides: str) -> int:
    """What other models keep even when asked for all they can spare."""
    return sum(
        resident.fixed_bytes + resident.kv_least_bytes
        for resident in residents
        if resident.pinned and resident.domain == domain and resident.name != besides
    )


def _too_long(need: RequestNeed, room: ModelRoom, reason: str, limit: int) -> ContextTooLong:
    needed = need.prompt_tokens + 1
    has = f"has {'at least ' if need.at_least else ''}{need.prompt_tokens}"
    if reason == "window":
        holds = f"This model's maximum context length is {limit} tokens"
    else:
        knob = "memory.limit" if room.domain == "ram" else "memory.gpu_limit"
        holds = (
            f"The memory for this model's context holds {limit} tokens at most (the knobs are "
            f"{knob} and models.kv_tokens)"
        )
    return ContextTooLong(
        f"{holds}, but the prompt {has} and the answer needs at least one more.",
        param=need.prompt_field,
        numbers={
            "reason": reason,
            "domain": room.domain,
            "needed_tokens": needed,
            "limit_tokens": limit,
            "needed_bytes": room.bytes_for(needed),
            "limit_bytes": limit * room.kv_bytes_per_token,
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
    domain: str
    fixed: Needs  # process, weights, loading and one largest step
    kv_least_bytes: int  # less than this serves no one
    kv_window_bytes: int  # one longest sequence
    kv_most_bytes: int  # more than this is of no use, or of none that the user wants

    def fixed_bytes(self, domain: str) -> int:
        """The part of `fixed` in one domain."""
        return sum(size for (d, _), size in self.fixed.items() if d == domain)

    def needs(self, kv_bytes: int) -> Needs:
        """What to book."""
        return {**self.fixed, (self.domain, Purpose.KV): kv_bytes}


@dataclass(frozen=True, slots=True)
class Resident:
    """A loaded model as a candidate to give something up."""

    name: str
    domain: str
    fixed_bytes: int
    kv_bytes: int
    kv_used_bytes: int  # by requests, as last reported
    kv_least_bytes: int
    idle: bool  # nobody leases it and nothing runs on it
    pinned: bool
    used_at: float
    served: bool = True  # for as long as its load took, at least

    @property
    def total_bytes(self) -> int:
        """What its unload gives back."""
        return self.fixed_bytes + self.kv_bytes


def decide_load(
    need: LoadNeed,
    snapshot: Snapshot,
    residents: Sequence[Resident],
    spent: Collection[str] = (),  # models that were asked to shed and have given what they can
) -> Accept | Wait | Refuse:
    """Room now, acts that would make room, or never."""
    for domain in {d for d, _ in need.fixed} | {need.domain}:
        least = need.fixed_bytes(domain) + (need.kv_least_bytes if domain == need.domain else 0)
        state = snapshot[domain]
        floor = _permanent(state) + _pinned(residents, domain, besides=need.name)
        if least + floor > state.limit_bytes:
            return Refuse(_too_large(need, state, domain, least, floor))
        if domain != need.domain and state.free_bytes < least:
            return _room_beside(residents, domain, least - state.free_bytes, spent)
    return _room_for_kv(need, snapshot[need.domain], residents, spent)


def _room_for_kv(
    need: LoadNeed, state: DomainState, residents: Sequence[Resident], spent: Collection[str]
) -> Accept | Wait:
    fixed = need.fixed_bytes(need.domain)
    free = state.free_bytes - fixed
    others = [resident for resident in residents if resident.domain == need.domain]
    # Nobody is asked for more than would leave all with equal shares, nor for a second window.
    share = max(free + sum(other.kv_bytes for other in others), 0) // (len(others) + 1)
    wanted = max(min(need.kv_window_bytes, share, need.kv_most_bytes), need.kv_least_bytes)
    if state.free_bytes > 0 and free >= wanted:
        return Accept(min(free, need.kv_most_bytes))
    willing = [other for other in others if other.name not in spent]
    shed = choose_shed(willing, wanted - free, keep_bytes=min(share, need.kv_window_bytes))
    if free + sum(size for _, size in shed) >= need.kv_least_bytes and shed:
        return Wait(shed=shed)
    if free >= need.kv_least_bytes:
        return Accept(min(free, need.kv_most_bytes))
    shed = choose_shed(willing, need.kv_least_bytes - free, keep_bytes=0)
    if free + sum(size for _, size in shed) >= need.kv_least_bytes:
        return Wait(shed=shed)
    return _make_room(others, need.domain, need.kv_least_bytes - free)


def _room_beside(
    residents: Sequence[Resident], domain: str, wanted_bytes: int, spent: Collection[str]
) -> Wait:
    """In a domain in which the load does not compute: what others there can spare comes first."""
    willing = [r for r in residents if r.domain == domain and r.name not in spent]
    shed = choose_shed(willing, wanted_bytes, keep_bytes=0)
    if sum(size for _, size in shed) >= wanted_bytes:
        return Wait(shed=shed)
    return _make_room(residents, domain, wanted_bytes)


def _make_room(residents: Sequence[Resident], domain: str, wanted_bytes: int) -> Wait:
    if victims := choose_victims(residents, domain, wanted_bytes):
        return Wait(unload=victims)
    return Wait(drain=choose_drained(residents, domain, wanted_bytes))


def choose_shed(
    residents: Iterable[Resident], wanted_bytes: int, keep_bytes: int
) -> tuple[tuple[str, int], ...]:
    """Who gives back how much unused KV: idle ones first, the longest unused first of these."""
    chosen: list[tuple[str, int]] = []
    for resident in sorted(residents, key=lambda r: (not r.idle, r.used_at)):
        if wanted_bytes <= 0:
            break
        keep = max(resident.kv_used_bytes, resident.kv_least_bytes, keep_bytes)
        give = min(resident.kv_bytes - keep, wanted_bytes)
        if give > 0:
            chosen.append((resident.name, give))
            wanted_bytes -= give
    return tuple(chosen)


def choose_victims(
    residents: Iterable[Resident], domain: str, wanted_bytes: int
) -> tuple[str, ...]:
    """Idle, unpinned models to unload, the longest unused first; all or none that suffice."""
    chosen: list[str] = []
    idle = [r for r in residents if r.idle and not r.pinned and r.domain == domain]
    for resident in sorted(idle, key=lambda r: r.used_at):
        if wanted_bytes <= 0:
            break
        chosen.append(resident.name)
        wanted_bytes -= resident.total_bytes
    return tuple(chosen) if wanted_bytes <= 0 else ()


def choose_drained(
    residents: Iterable[Resident], domain: str, wanted_bytes: int
) -> tuple[str, ...]:
    """Busy, unpinned models whose end is to be waited for, beside the idle ones that go with them;
    the longest unused first, all or none that suffice.

    One that was itself loaded a moment ago serves for as long as its load took: so two models that
    are both wanted all the time take turns, and most of the time is not spent on loading.
    """
    chosen: list[str] = []
    unpinned = [r for r in residents if not r.pinned and r.domain == domain]
    for resident in sorted(unpinned, key=lambda r: (not r.idle, r.used_at)):
        if wanted_bytes <= 0:
            break
        if resident.idle or resident.served:
            wanted_bytes -= resident.total_bytes
            if not resident.idle:
                chosen.append(resident.name)
    return tuple(chosen) if wanted_bytes <= 0 else ()


def _too_large(
    need: LoadNeed, state: DomainState, domain: str, least: int, floor: int
) -> ModelTooLarge:
    knob = "memory.limit" if domain == "ram" else "memory.gpu_limit"
    parts = ", ".join(
        f"{_mib(size)} {purpose.value}" for (d, purpose), size in need.fixed.items() if d == domain
    )
    kv = f", {_mib(need.kv_least_bytes)} for the smallest KV" if domain == need.domain else ""
    return ModelTooLarge(
        f"The model {need.name!r} does not fit into {domain}: it needs {_mib(least)} ({parts}{kv}) "
        f"and the limit of {_mib(state.limit_bytes)} leaves "
        f"{_mib(max(state.limit_bytes - floor, 0))} beside the server and pinned models. Raise "
        f"{knob}, or lower step_tokens, step_sequences or the least KV of the model.",
        numbers={
            "reason": "memory",
            "domain": domain,
            "needed_bytes": least + floor,
            "limit_bytes": state.limit_bytes,
        },
    )


def _mib(size: int) -> str:
    return f"{size / (1 << 20):,.0f} MiB"
