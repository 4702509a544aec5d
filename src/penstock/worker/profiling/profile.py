"""What a model costs on this machine, measured at load through the real code path.

    probe      little KV; warm up, so that every library has what it keeps
    stress     shapes around the border of what a step may be; the highest point of each. Where
               steps take long, through as many layers as show what all of them hold
    size       KV gets what the grant leaves beside the largest step
    validate   the KV full, the largest step through all layers, under the cap; if it takes more
               than was measured, everything does

A stored profile skips the first three; on a CPU also the fourth, once a load has passed it: what
libraries take for themselves at their largest step, and what is read later, is kept free then.
What does not fit is made smaller before the model is refused: the step is halved, then the KV
shrinks. An engine cannot be made without a `Profile`.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING

from penstock.errors import ModelTooLarge
from penstock.memory.cost import CostModel, Measured, fit
from penstock.worker.backends.caps import is_out_of_memory
from penstock.worker.core.drafts.lookup import INDEX_BYTES
from penstock.worker.core.profile import Profile
from penstock.worker.kv.groups import cost_of
from penstock.worker.profiling import store as profile_store
from penstock.worker.profiling.refusal import too_large
from penstock.worker.profiling.store import StoredProfile
from penstock.worker.profiling.stress import StepBounds, StepShapeTrial, Stress

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from penstock.worker.core.plan import StepLimits
    from penstock.worker.kv.arena import LayerGeometry
    from penstock.worker.profiling.context import ProfileContext

log = logging.getLogger(__name__)

MIN_STEP_TOKENS = 64
# A step is halved while it leaves KV for fewer tokens than this, or than the window.
ENOUGH_KV_TOKENS = 1024
# A stored profile is extended to contexts so much longer than those it was measured at.
UNSEEN_CONTEXT = 1.25
SHRINK = 0.95
MARGIN = 1.05  # of what is predicted over the largest step, which all others get with it
RETRIES = 3
HOST_BYTES_PER_TOKEN = 48  # of a request: two places in lists and a number
HOST_BYTES = 4 << 20  # frames, outputs and the interpreter's own comings and goings


def profile(context: ProfileContext) -> Profile:
    """Measure, or apply what was measured before; raises `ModelTooLarge` with every knob."""
    # Threads are started; from now on what is held, but for KV, is for steps and libraries. What
    # loading has freed is nobody's.
    context.meter.drop_caches()
    context.cap.set_base()
    before = context.meter.held()
    stored = profile_store.load(context.spec.profile_dir, context.fingerprint)
    applies = stored is not None and _applies(context, stored)
    if stored is not None and applies:
        context.images.take(stored)
        if (found := _taken_over(context, stored)) is not None:
            return found
    _warm_up(context)
    if not applies:
        context.cap.move(context.memory.committed_bytes, context.spec.memory_bytes)
        context.images.measure(context.meter, context.spec.memory_bytes, _window_bytes(context))
    if stored is not None and applies:
        limits = context.limits.within(stored.step_tokens, context.drafts)
        try:
            found = _validated(context, limits, stored.cost)
        except ModelTooLarge as error:
            log.warning("the stored profile does not hold, so it is measured anew: %s", error)
            found = _validated(context, *_stress(context))
    else:
        found = _validated(context, *_stress(context))
    return dataclasses.replace(found, kept_bytes=max(0, found.held_bytes - before))


def remember(context: ProfileContext, found: Profile, layers: Mapping[int, LayerGeometry]) -> None:
    """Keep a profile for later loads, once the model has passed all that a load asks of it."""
    if found.proven:
        return
    stored = profile_store.load(context.spec.profile_dir, context.fingerprint)
    known = stored is not None and stored.cost == found.cost
    stored = StoredProfile(
        format=profile_store.FORMAT,
        fingerprint=context.fingerprint,
        memory_bytes=stored.memory_bytes if stored and known else context.spec.memory_bytes,
        step_tokens=found.limits.tokens,
        step_sequences=found.limits.sequences,
        cost=found.cost,
        layers=tuple(layers.items()),
        times=found.times,
        proven=not found.shrunk,  # otherwise the next load tries again
        kept_bytes=found.kept_bytes,
        image_pixels=context.images.pixels,
        stage_bytes=context.images.stage_bytes,
        stage_s=context.images.stage_s,
    )
    profile_store.save(context.spec.profile_dir, stored)


def _applies(context: ProfileContext, stored: StoredProfile) -> bool:
    """No longer contexts than were seen, room for KV, and no want of memory that is over now."""
    limits = context.limits.within(stored.step_tokens, context.drafts)
    seen = max(point.context for point in stored.cost.measured)
    halved = stored.step_tokens < context.limits.tokens
    return (
        _bounds(context, limits).longest <= UNSEEN_CONTEXT * seen
        and _leaves_enough(context, limits, stored.cost)
        and not (halved and context.spec.memory_bytes > stored.memory_bytes)
        and context.images.applies(stored, context.spec.memory_bytes, _window_bytes(context))
    )


def _taken_over(context: ProfileContext, stored: StoredProfile) -> Profile | None:
    """A profile that an earlier load has proven; None if there is none.

    The step is the same in any grant, and less or more KV beside it proves nothing new. Only where
    the largest step takes seconds. An explicit size of the KV is always tried.
    """
    if (
        not stored.proven
        or context.spec.kv_tokens is not None
        or context.backend.full_steps_are_cheap
    ):
        return None
    kept = stored.kept_bytes
    found = _sized(context, stored, kept)
    if found is None:
        return None
    context.kv.set_limit(found.kv_bytes)
    context.cap.move(found.kv_bytes, found.step_bytes)
    return dataclasses.replace(found, held_bytes=context.meter.held(), kept_bytes=kept, proven=True)


def _sized(context: ProfileContext, stored: StoredProfile, kept: int) -> Profile | None:
    """What a stored profile leaves for KV; None: nothing."""
    limits = context.limits.within(stored.step_tokens, context.drafts)
    step_bytes = _largest_step(context, limits, stored.cost)
    size = _kv_room(context, context.spec.memory_bytes - kept - step_bytes)
    if _tokens_in(context, limits, size) < limits.block_tokens:
        return None
    return _profile_of(context, limits, stored.cost, size, kept)


def _warm_up(context: ProfileContext) -> None:
    """Fill the caches that libraries never empty; then the cap can be set."""
    stress = _open(context, context.limits)
    some = min(MIN_STEP_TOKENS, context.limits.tokens, _bounds(context, context.limits).longest)
    several = min(8, context.limits.sequences)
    try:
        stress.run(StepShapeTrial(chunk=some, context=some), context.vocabulary)
        stress.run(
            StepShapeTrial(several, some, 1, some, several, some, demanding=True),
            context.vocabulary,
        )
    finally:
        stress.close()
    context.meter.drop_caches()
    context.cap.set_base()


def _stress(context: ProfileContext) -> tuple[StepLimits, CostModel]:
    """The largest step that leaves enough KV, halving from what was asked; and its cost model."""
    limits = context.limits
    # The first step of its size also takes what libraries keep from then on: it does not count.
    _measure(context, limits, [_bounds(context, limits).everything()])
    while True:
        cost = _measure(context, limits, _bounds(context, limits).trials())
        if cost is not None and _leaves_enough(context, limits, cost):
            return limits, cost
        if limits.tokens <= MIN_STEP_TOKENS:
            raise _too_large(context, limits, cost, "even the smallest step leaves no room for KV")
        limits = limits.within(max(MIN_STEP_TOKENS, limits.tokens // 2), context.drafts)
        log.info("steps are halved to %d tokens to leave room for KV", limits.tokens)


def _leaves_enough(context: ProfileContext, limits: StepLimits, cost: CostModel) -> bool:
    """Whether the largest step leaves KV worth having; beside the smallest step any is."""
    room = _kv_room(context, context.spec.memory_bytes - _largest_step(context, limits, cost))
    tokens = _tokens_in(context, limits, room)
    if limits.tokens <= MIN_STEP_TOKENS:
        return tokens > 0
    return tokens >= min(context.window, ENOUGH_KV_TOKENS)


def _measure(
    context: ProfileContext, limits: StepLimits, trials: Iterable[StepShapeTrial]
) -> CostModel | None:
    """What trials cost; None when one of them does not fit the grant."""
    context.cap.move(context.memory.committed_bytes, context.spec.memory_bytes)
    points: list[Measured] = []
    failed = False
    stress = _open(context, limits)
    try:
        with context.shallow():
            for trial in trials:
                # Several times: where a tensor comes to lie in a heap is chance.
                points += (stress.run(trial, context.vocabulary) for _ in range(context.repeats))
                log.debug("measured %s", points[-context.repeats :])
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        failed = True
    finally:
        stress.close()
    context.meter.drop_caches()
    if failed:
        return None
    kv = cost_of(context.memory.groups, limits.tokens)
    # The floor costs no KV, which has what the largest step leaves.
    return fit(points, kv, floor=context.meter.floor_bytes, row_bytes=context.row_bytes)


def _validated(context: ProfileContext, limits: StepLimits, cost: CostModel) -> Profile:
    """Size the KV, fill it and run the largest step; shrink where that fails."""
    spec, kv = context.spec, context.kv
    kv.cost = cost.kv
    if spec.kv_tokens is not None:
        size = kv.limit_for(cost.sequence(spec.kv_tokens))
        retries = 0
    else:
        size = _kv_room(context, spec.memory_bytes - _largest_step(context, limits, cost))
        retries = RETRIES
    whole, most = _committed(context, size), 1 / MARGIN
    for failures in range(retries + 2):
        # The first step of its size also takes what libraries keep from then on, so it has two
        # attempts before anything shrinks.
        if failures > 1:
            size = int(_committed(context, size) * SHRINK)
            log.warning("the KV did not stand the test; it shrinks to %d bytes", size)
        if _tokens_in(context, limits, size) < limits.block_tokens:
            break
        # What is taken from KV is the step's: it was the step that did not find its memory.
        found = _profile_of(context, limits, cost, size, whole - _committed(context, size))
        # A heap keeps addresses that it needed once. They are not memory, but the cap counts them.
        context.cap.set_base()
        share = _share_taken(context, found)
        if share is not None and share <= most:
            # Everything is in place now; libraries have what they keep.
            return dataclasses.replace(found, held_bytes=context.meter.held(), shrunk=failures > 1)
        if share is not None:
            log.info("the largest step took %.2f times what was predicted: all may", share)
            cost, most = cost.raised(share * MARGIN), 1.0
            if spec.kv_tokens is None:
                left = spec.memory_bytes - _largest_step(context, limits, cost)
                size = whole = _committed(context, min(size, _kv_room(context, left)))
    raise _too_large(context, limits, cost, f"validation failed after {retries} retries")


def _committed(context: ProfileContext, size_bytes: int) -> int:
    """What KV of that size commits at most: whole extents."""
    context.kv.set_limit(size_bytes)
    return context.kv.limit_bytes


def _tokens_in(context: ProfileContext, limits: StepLimits, size_bytes: int) -> int:
    """The longest sequence that KV of that size holds."""
    context.kv.cost = cost_of(context.memory.groups, limits.tokens)
    context.kv.set_limit(size_bytes)
    if size_bytes < context.kv.limit_bytes:
        return 0
    return context.kv.max_tokens()


def _share_taken(context: ProfileContext, found: Profile) -> float | None:
    """What the largest step took beside full KV, of what it may; None: not even the cap's room."""
    kv = context.kv
    kv.set_limit(found.kv_bytes)
    context.cap.move(found.kv_bytes, found.step_bytes)
    share = None
    stress = _open(context, found.limits)
    rest: list[list[int]] = [[] for _ in kv.groups]
    try:
        with context.memory.untouched():  # to fetch tens of GiB takes as long as all the rest
            rest = kv.lend_rest()
        largest = _bounds(context, found.limits).everything()
        shape, took = stress.measure(largest, context.vocabulary)
        share = took / found.cost.step(
            shape.tokens, shape.sequences, shape.context, shape.logit_rows
        )
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
    finally:
        kv.take_back(rest)
        stress.close()
    kv.compact()
    context.meter.drop_caches()
    return share


def _profile_of(
    context: ProfileContext, limits: StepLimits, cost: CostModel, size_bytes: int, spared_bytes: int
) -> Profile:
    kv_bytes = _committed(context, size_bytes)
    tokens = kv_bytes // _lasting_token_bytes(context)
    host_bytes = HOST_BYTES + context.images.host_bytes + tokens * _host_token_bytes(context)
    return Profile(
        cost=cost,
        limits=limits,
        step_bytes=_largest_step(context, limits, cost) + host_bytes + spared_bytes,
        host_bytes=host_bytes,
        host_tokens=tokens,
        kv_bytes=kv_bytes,
        held_bytes=0,
    )


def _lasting_token_bytes(context: ProfileContext) -> int:
    """What a token holds while its sequence runs; of windows alone, what it holds at all."""
    groups = context.memory.groups
    full = sum(group.token_bytes for group in groups if group.window is None)
    return full or sum(group.token_bytes for group in groups)


def _largest_step(context: ProfileContext, limits: StepLimits, cost: CostModel) -> int:
    # A stored profile may have seen a little less than there can be now.
    longest = _bounds(context, limits).longest
    longest = max(longest, *(point.context for point in cost.measured))
    # Prompts with log-probabilities have what is left beside a row for every sequence, and are
    # sequences themselves.
    size = cost.step(limits.tokens, limits.sequences, longest, limits.logit_rows - 1)
    return max(size, context.images.stage_bytes)  # one after the other


def _window_bytes(context: ProfileContext) -> int:
    """KV of the longest sequence that is served."""
    return cost_of(context.memory.groups, context.limits.tokens).sequence(context.window)


def _kv_room(context: ProfileContext, size_bytes: int) -> int:
    """What KV may have of `size_bytes`, when its tokens take their share on the host too."""
    each = _lasting_token_bytes(context)
    left = max(0, size_bytes - HOST_BYTES - context.images.host_bytes)
    return left * each // (each + _host_token_bytes(context))


def _host_token_bytes(context: ProfileContext) -> int:
    """What a token of a request takes in RAM: with drafts it is in an index."""
    return HOST_BYTES_PER_TOKEN + (INDEX_BYTES if context.drafts else 0)


def _bounds(context: ProfileContext, limits: StepLimits) -> StepBounds:
    spec = context.spec
    # A later grant lets sequences become longer: as far as there are addresses for them.
    max_bytes = max(spec.memory_bytes, spec.largest_memory_bytes or 0)
    tokens = spec.kv_tokens or max_bytes // _lasting_token_bytes(context)
    addresses = (min(arena.blocks for arena in context.memory.arenas) - 1) * limits.block_tokens
    total = max(2, min(tokens, addresses))
    return StepBounds(
        limits=limits,
        longest=min(context.window, total),
        total=total,
        routes=context.routes,
        long_decodes=context.backend.full_steps_are_cheap,
        sampled=context.backend.sampler.rows_at_once(context.vocabulary),
        uneven_rows=context.backend.uneven_rows,
        past=context.backend.gathered_tokens(context.memory.layers),
        drafts=context.drafts,
    )


def _open(context: ProfileContext, limits: StepLimits) -> Stress:
    return Stress(
        *(context.executor, context.memory, context.kv, context.meter, limits.tokens),
        routes=context.routes and context.backend.routing_changes_memory,
    )


def _too_large(
    context: ProfileContext, limits: StepLimits, cost: CostModel | None, why: str
) -> ModelTooLarge:
    step = None if cost is None else _largest_step(context, limits, cost)
    return too_large(context, limits, step, HOST_BYTES + context.images.host_bytes, why)
