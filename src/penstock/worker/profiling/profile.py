"""What a model costs on this machine, measured at load through the real code path.

    probe      little KV; warm up, so that every library has what it keeps
    stress     shapes around the border of what a step may be; the highest point of each. Where
               steps take long, through as many layers as show what all of them hold
    size       KV gets what the grant leaves beside the largest step
    validate   the KV full, the largest step through all layers, under the cap; if it takes more
               than was measured, everything does

Where all of it would take long, the first load measures a few steps of a smaller size (`short`),
and the rest follows while nobody asks for anything (`refining`).
A stored profile skips the first three; on a CPU also the fourth, once a load has passed it: what
libraries take for themselves at their largest step, and what is read later, is kept free then. What
does not fit is made smaller before a refusal: the step is halved, then the KV shrinks.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING

from penstock.errors import ModelTooLarge
from penstock.memory.cost import CostModel, Measured, fit
from penstock.worker.backends.caps import is_out_of_memory
from penstock.worker.profiling import short
from penstock.worker.profiling import store as profile_store
from penstock.worker.profiling.sizing import (
    MIN_STEP_TOKENS,
    bounds,
    committed,
    kv_room,
    largest_step,
    leaves_enough,
    open_stress,
    profile_of,
    tokens_in,
    too_large,
    window_bytes,
)
from penstock.worker.profiling.store import StoredProfile
from penstock.worker.profiling.stress import StepShapeTrial

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.worker.core.plan import StepLimits
    from penstock.worker.core.profile import Profile
    from penstock.worker.models.verify import Kept
    from penstock.worker.profiling.context import ProfileContext

log = logging.getLogger(__name__)

# A stored profile is extended to contexts so much longer than those it was measured at.
UNSEEN_CONTEXT = 1.25
SHRINK = 0.95
MARGIN = 1.05  # of what is predicted over the largest step, which all others get with it
RETRIES = 3


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
    step_s = _warm_up(context)
    if not applies:
        context.cap.move(context.memory.committed_bytes, context.spec.memory_bytes)
        context.images.measure(context.meter, context.spec.memory_bytes, window_bytes(context))
    if stored is not None and applies:
        limits = context.limits.within(stored.step_tokens, context.drafts)
        try:
            found = _validated(context, limits, stored.cost)
            found = dataclasses.replace(found, provisional=stored.provisional)
        except ModelTooLarge as error:
            log.warning("the stored profile does not hold, so it is measured anew: %s", error)
            found = _measured(context, step_s)
    else:
        found = _measured(context, step_s)
    return dataclasses.replace(found, kept_bytes=max(0, found.held_bytes - before))


def _measured(context: ProfileContext, step_s: float) -> Profile:
    """All of it, or what is enough to begin with."""
    limits = short.limits_of(context, step_s)
    if limits is not None and (cost := short.cost_of(context, limits)) is not None:
        return dataclasses.replace(_validated(context, limits, cost), provisional=True)
    return _validated(context, *_stress(context))


def remember(context: ProfileContext, found: Profile, kept: Kept) -> None:
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
        layers=tuple(kept.attention.items()),
        states=tuple(kept.states.items()),
        prompts_differ=kept.prompts_differ,
        times=found.times,
        proven=not found.shrunk,  # otherwise the next load tries again
        kept_bytes=found.kept_bytes,
        provisional=found.provisional,
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
        bounds(context, limits).longest <= UNSEEN_CONTEXT * seen
        and leaves_enough(context, limits, stored.cost)
        and not (halved and context.spec.memory_bytes > stored.memory_bytes)
        and context.images.applies(stored, context.spec.memory_bytes, window_bytes(context))
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
    return dataclasses.replace(
        found,
        held_bytes=context.meter.held(),
        kept_bytes=kept,
        proven=True,
        provisional=stored.provisional,
    )


def _sized(context: ProfileContext, stored: StoredProfile, kept: int) -> Profile | None:
    """What a stored profile leaves for KV; None: nothing."""
    limits = context.limits.within(stored.step_tokens, context.drafts)
    step_bytes = largest_step(context, limits, stored.cost)
    size = kv_room(context, context.spec.memory_bytes - kept - step_bytes)
    if tokens_in(context, limits, size) < limits.block_tokens:
        return None
    return profile_of(context, limits, stored.cost, size, kept)


def _warm_up(context: ProfileContext) -> float:
    """Fill the caches that libraries never empty; then the cap can be set. How many seconds
    `MIN_STEP_TOKENS` tokens take."""
    stress = open_stress(context, context.limits)
    some = min(MIN_STEP_TOKENS, context.limits.tokens, bounds(context, context.limits).longest)
    several = min(8, context.limits.sequences)
    try:
        stress.run(StepShapeTrial(chunk=some, context=some), context.vocabulary)
        stress.run(
            StepShapeTrial(several, some, 1, some, several, some, demanding=True),
            context.vocabulary,
        )
        step_s = stress.seconds(StepShapeTrial(chunk=some, context=some), context.vocabulary)
    finally:
        stress.close()
    context.meter.drop_caches()
    context.cap.set_base()
    return step_s * MIN_STEP_TOKENS / some


def _stress(context: ProfileContext) -> tuple[StepLimits, CostModel]:
    """The largest step that leaves enough KV, halving from what was asked; and its cost model."""
    limits = context.limits
    # The first step of its size also takes what libraries keep from then on: it does not count.
    _measure(context, limits, [bounds(context, limits).everything()])
    while True:
        cost = _measure(context, limits, bounds(context, limits).trials())
        if cost is not None and leaves_enough(context, limits, cost):
            return limits, cost
        if limits.tokens <= MIN_STEP_TOKENS:
            raise too_large(context, limits, cost, "even the smallest step leaves no room for KV")
        limits = limits.within(max(MIN_STEP_TOKENS, limits.tokens // 2), context.drafts)
        log.info("steps are halved to %d tokens to leave room for KV", limits.tokens)


def _measure(
    context: ProfileContext, limits: StepLimits, trials: Iterable[StepShapeTrial]
) -> CostModel | None:
    """What trials cost; None when one of them does not fit the grant."""
    context.cap.move(context.memory.committed_bytes, context.spec.memory_bytes)
    points: list[Measured] = []
    failed = False
    stress = open_stress(context, limits)
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
    # The floor costs no KV, which has what the largest step leaves.
    kv, floor = context.memory.cost(limits.tokens), context.meter.floor_bytes
    return fit(points, kv, floor=floor, row_bytes=context.row_bytes)


def _validated(context: ProfileContext, limits: StepLimits, cost: CostModel) -> Profile:
    """Size the KV, fill it and run the largest step; shrink where that fails."""
    spec, kv = context.spec, context.kv
    kv.cost = cost.kv
    if spec.kv_tokens is not None:
        size = kv.limit_for(cost.sequence(spec.kv_tokens))
        retries = 0
    else:
        size = kv_room(context, spec.memory_bytes - largest_step(context, limits, cost))
        retries = RETRIES
    whole, most = committed(context, size), 1 / MARGIN
    for failures in range(retries + 2):
        # The first step of its size also takes what libraries keep from then on, so it has two
        # attempts before anything shrinks.
        if failures > 1:
            size = int(committed(context, size) * SHRINK)
            log.warning("the KV did not stand the test; it shrinks to %d bytes", size)
        if tokens_in(context, limits, size) < limits.block_tokens:
            break
        # What is taken from KV is the step's: it was the step that did not find its memory.
        found = profile_of(context, limits, cost, size, whole - committed(context, size))
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
                left = spec.memory_bytes - largest_step(context, limits, cost)
                size = whole = committed(context, min(size, kv_room(context, left)))
    raise too_large(context, limits, cost, f"validation failed after {retries} retries")


def _share_taken(context: ProfileContext, found: Profile) -> float | None:
    """What the largest step took beside full KV, of what it may; None: not even the cap's room."""
    kv = context.kv
    kv.set_limit(found.kv_bytes)
    context.cap.move(found.kv_bytes, found.step_bytes)
    share = None
    stress = open_stress(context, found.limits)
    rest: list[list[int]] = []
    try:
        with context.memory.untouched():  # to fetch tens of GiB takes as long as all the rest
            rest = kv.lend_rest()
        largest = bounds(context, found.limits).everything()
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
