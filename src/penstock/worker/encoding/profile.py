"""What the steps of an encoder cost on this machine, measured at load through the real code path.

    warm up    so that every library has what it keeps
    stress     steps of many texts, up to `step_tokens`, and of one text, up to the window
    validate   the largest of them again, under the cap

A text is in a step whole. So where the longest does not fit the grant, the longest text that is
served is halved, and with it the step, before the model is refused. A stored profile skips the
stress; an engine cannot be made without a `Profile`.
"""

from __future__ import annotations

import dataclasses
import logging
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.errors import ModelTooLarge
from penstock.memory.cost import KvCost, Measured, fit
from penstock.wire import Encoding
from penstock.worker.backends.caps import is_out_of_memory
from penstock.worker.core.plan import StepLimits
from penstock.worker.core.profile import Profile
from penstock.worker.encoding.packing import PackedStep, Text
from penstock.worker.profiling import store
from penstock.worker.profiling.sizing import HOST_BYTES, HOST_BYTES_PER_TOKEN, MIN_STEP_TOKENS
from penstock.worker.profiling.store import StoredProfile

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.memory.cost import CostModel
    from penstock.wire import LoadSpec
    from penstock.worker.backends.caps import Cap
    from penstock.worker.backends.meters import Meter
    from penstock.worker.encoding.executor import EncodeExecutor

log = logging.getLogger(__name__)

_NOISE_SHARE = 0.05  # measuring is about this good, beside the meter's own noise
_CHEAP_TOKENS = 2048  # a step of more is measured once
BLOCK_TOKENS = 0  # in the fingerprint: there are no blocks


@dataclass(frozen=True, slots=True)
class EncodeContext:
    """What a profile is measured with."""

    spec: LoadSpec
    executor: EncodeExecutor
    meter: Meter
    cap: Cap
    window: int
    vocabulary: int
    fingerprint: str

    @property
    def step_tokens(self) -> int:
        """Of a step of several texts, as asked for."""
        return self.spec.step_tokens


@dataclass(frozen=True, slots=True)
class EncodeProfile:
    """A profile, and the longest text that it lets in."""

    profile: Profile
    longest: int


def profile(context: EncodeContext) -> EncodeProfile:
    """Measure, or apply what was measured before; raises `ModelTooLarge` with the knobs."""
    context.meter.drop_caches()
    context.cap.set_base()
    before = context.meter.held()
    _warm_up(context)
    stored = store.load(context.spec.profile_dir, context.fingerprint)
    found = None if stored is None else _applied(context, stored)
    if found is None:
        found = _stressed(context)
    kept = max(0, found.profile.held_bytes - before)
    return dataclasses.replace(found, profile=dataclasses.replace(found.profile, kept_bytes=kept))


def remember(context: EncodeContext, found: EncodeProfile) -> None:
    """Keep a profile for later loads, once the model has passed all that a load asks of it."""
    kept = StoredProfile(
        format=store.FORMAT,
        fingerprint=context.fingerprint,
        memory_bytes=context.spec.memory_bytes,
        step_tokens=found.profile.limits.tokens,
        step_sequences=found.profile.limits.sequences,
        cost=found.profile.cost,
        layers=(),
        kept_bytes=found.profile.kept_bytes,
    )
    store.save(context.spec.profile_dir, kept)


def _applied(context: EncodeContext, stored: StoredProfile) -> EncodeProfile | None:
    """What an earlier load measured, if it still holds and was not made small by less memory."""
    longest = max(point.context for point in stored.cost.measured)
    wanted = longest >= context.window and stored.step_tokens >= context.step_tokens
    if not wanted and context.spec.memory_bytes > stored.memory_bytes:
        return None
    return _validated(context, stored.cost, stored.step_tokens, min(longest, context.window))


def _warm_up(context: EncodeContext) -> None:
    """Fill the caches that libraries never empty."""
    some = min(MIN_STEP_TOKENS, context.window)
    for lengths in ([some], [1, some, some]):
        context.executor.encode(_step(lengths, context.vocabulary))
    context.meter.drop_caches()
    context.cap.set_base()


def _stressed(context: EncodeContext) -> EncodeProfile:
    """The largest step that the grant holds, halving from what was asked."""
    size = max(context.window, context.step_tokens)
    while True:
        tokens, longest = min(context.step_tokens, size), min(context.window, size)
        cost = _measured(context, tokens, longest)
        found = None if cost is None else _validated(context, cost, tokens, longest)
        if found is not None:
            return found
        if size <= MIN_STEP_TOKENS:
            raise _too_large(context, cost, longest)
        size = max(size // 2, MIN_STEP_TOKENS)
        log.info("steps are halved to %d tokens, so that they fit the grant", size)


def _measured(context: EncodeContext, tokens: int, longest: int) -> CostModel | None:
    """What steps cost; None when one of them does not fit the grant."""
    context.cap.move(0, context.spec.memory_bytes)
    points: list[Measured] = []
    try:
        # The first step of its size also takes what libraries keep from then on.
        context.executor.encode(_step([longest], context.vocabulary))
        for lengths in _trials(tokens, min(context.spec.step_sequences, tokens), longest):
            step = _step(lengths, context.vocabulary)
            # Twice: where a tensor comes to lie in a heap is chance.
            times = 2 if step.tokens <= _CHEAP_TOKENS else 1
            points += (_measure(context, step) for _ in range(times))
            log.debug("measured %s", points[-1])
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return None
    finally:
        context.meter.drop_caches()
    return fit(points, KvCost((), 1), floor=context.meter.floor_bytes)


def _trials(tokens: int, sequences: int, longest: int) -> Iterator[list[int]]:
    """Lengths of texts around the border of what a step may be, large and small in turn.

    What a text takes grows no slower with its length than evenly, so what lies between two lengths
    that were measured lies below the line through them.
    """
    yield [longest]
    yield [1]
    packed = min(tokens, sequences * longest)
    yield _even(packed, min(sequences, packed))
    yield [min(MIN_STEP_TOKENS, longest)]
    yield [1] * sequences
    yield [max(1, longest // 2)]
    some = min(sequences, max(1, packed // 4))
    yield _even(max(some, packed // 2), some)
    yield [max(1, longest // 4)]
    whole = min(packed, longest)
    yield _even(packed, -(-packed // whole))
    # One long text among many short ones, which lie in groups of their own.
    short = min(sequences - 1, whole // 4)
    if short > 0:
        yield [1 + number % 3 for number in range(short // 3)] + [whole - short]


def _even(tokens: int, count: int) -> list[int]:
    return [(tokens + number) // count for number in range(count)]


def _validated(
    context: EncodeContext, cost: CostModel, tokens: int, longest: int
) -> EncodeProfile | None:
    """The largest step within the grant, under the cap; None if it does not fit."""
    limits = StepLimits(tokens, min(context.spec.step_sequences, tokens), 1, 0)
    # Texts that wait are held on the host: a step's worth, and as many again.
    host_bytes = HOST_BYTES + 2 * max(tokens, longest) * HOST_BYTES_PER_TOKEN
    step_bytes = host_bytes + max(
        cost.step(longest, 1, longest, 0),
        cost.step(tokens, limits.sequences, min(tokens, longest), 0),
    )
    if step_bytes > context.spec.memory_bytes:
        return None
    context.cap.move(0, step_bytes)
    try:
        context.executor.encode(_step([longest], context.vocabulary))
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return None
    finally:
        context.meter.drop_caches()
    held = context.meter.held()
    return EncodeProfile(Profile(cost, limits, step_bytes, host_bytes, 0, held), longest)


def _measure(context: EncodeContext, step: PackedStep) -> Measured:
    meter, shape = context.meter, step.shape
    meter.drop_caches()
    before = meter.held()
    meter.mark()
    context.executor.encode(step)
    took = max(0, meter.peak() - before)
    size = int(took * (1 + _NOISE_SHARE)) + meter.noise_bytes
    return Measured(shape.tokens, shape.sequences, shape.context, 0, size)


def _step(lengths: list[int], vocabulary: int) -> PackedStep:
    source = random.Random(0)
    texts = [
        Text(number, source.choices(range(vocabulary), k=length), Encoding(), (0, number))
        for number, length in enumerate(sorted(lengths))
    ]
    return PackedStep(tuple(texts))


def _too_large(context: EncodeContext, cost: CostModel | None, longest: int) -> ModelTooLarge:
    spec = context.spec
    needed = spec.memory_bytes + 1
    if cost is not None:
        needed = max(needed, HOST_BYTES + cost.step(longest, 1, longest, 0))
    knobs = {
        "memory.limit leaves this model": f"{spec.memory_bytes} bytes",
        "models.step_tokens": spec.step_tokens,
        "models.step_sequences": spec.step_sequences,
        "models.max_context": spec.max_context or f"none (window {context.window})",
    }
    told = "; ".join(f"{name} = {value}" for name, value in knobs.items())
    return ModelTooLarge(
        f"{spec.name} does not fit its memory: a step with one text of {longest} tokens takes "
        f"{needed} bytes. The knobs: {told}.",
        numbers={"reason": "memory", "needed_bytes": needed, "limit_bytes": spec.memory_bytes},
    )
