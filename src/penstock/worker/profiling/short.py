"""A first profile in about a second, for models of which the whole one takes long.

Steps are limited to what is quick on this machine, and every one of them is said to cost what the
largest did and a quarter more. So the gate's answers are right, if not fine: what a large step
leaves for KV is not known yet, and long prompts take more steps than they might. Serving under it
has the same bounds and caps; `refining` measures the rest while nobody asks for anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.memory.cost import CostModel, Measured
from penstock.worker.backends.caps import is_out_of_memory
from penstock.worker.profiling.sizing import MIN_STEP_TOKENS, bounds, leaves_enough, open_stress
from penstock.worker.profiling.stress import StepShapeTrial

if TYPE_CHECKING:
    from penstock.worker.core.plan import StepLimits
    from penstock.worker.profiling.context import ProfileContext
    from penstock.worker.profiling.stress import StepBounds

ENOUGH_S = 10.0  # a whole profile that takes no longer is measured at once
SMALL_BYTES = 32 << 20  # of weights; steps of such models are quick, however slow the moment
_FULL_STEPS = 50  # that a whole profile takes, about
_STEP_S = 0.25  # of a step's tokens, without far contexts
_MARGIN = 1.25  # beyond the most that was measured


def limits_of(context: ProfileContext, step_s: float) -> StepLimits | None:
    """The limits of a first profile, where steps of `MIN_STEP_TOKENS` take so long; None: the whole
    one takes little, too."""
    limits = context.limits
    each = step_s / MIN_STEP_TOKENS
    if context.backend.full_steps_are_cheap or context.spec.profile_dir is None:
        return None
    if context.weight_bytes < SMALL_BYTES:
        return None
    if each * limits.tokens * _FULL_STEPS <= ENOUGH_S or limits.tokens <= MIN_STEP_TOKENS:
        return None
    tokens = limits.tokens
    while tokens > MIN_STEP_TOKENS and tokens * each > _STEP_S:
        tokens = max(MIN_STEP_TOKENS, tokens // 2)
    return limits.within(tokens, context.drafts)


def cost_of(context: ProfileContext, limits: StepLimits) -> CostModel | None:
    """What steps within them cost; None where there is no room for that."""
    context.cap.move(context.memory.committed_bytes, context.spec.memory_bytes)
    stress, of = open_stress(context, limits), bounds(context, limits)
    try:
        with context.shallow():
            points = [stress.run(trial, context.vocabulary) for trial in _trials(of)]
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return None
    finally:
        stress.close()
        context.meter.drop_caches()
    largest = max(points, key=lambda point: point.bytes).bytes
    cost = _constant(context, points[0], max(largest, context.meter.floor_bytes), limits)
    return cost if leaves_enough(context, limits, cost) else None


def _trials(of: StepBounds) -> list[StepShapeTrial]:
    whole = min(of.limits.tokens, of.longest)
    alone = StepShapeTrial(chunk=whole, context=whole)
    return [of.everything(), alone, of.full_decode()]


def _constant(
    context: ProfileContext, largest: Measured, size_bytes: int, limits: StepLimits
) -> CostModel:
    """Any step costs that and a quarter more."""
    size = int(size_bytes * _MARGIN)
    plane = float(size), 0.0, 0.0, 0.0, 0.0
    point = Measured(*largest.shape, size)
    kv = context.memory.cost(limits.tokens)
    return CostModel(plane, (plane,), (), (point,), kv, floor=context.meter.floor_bytes)
