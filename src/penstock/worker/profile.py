"""What a model costs on this machine, measured at load through the real code path.

    probe      a small arena; warm up, so that every library has what it keeps
    stress     shapes around the border of what a step may be; the highest point of each
    size       KV gets what the grant leaves beside the largest step
    validate   the arena full, the largest step again, under the cap

A stored profile skips the first three; on a CPU also the fourth, once a load has passed it: what
libraries take for themselves at their largest step, and what is read later, is kept free then.
What does not fit is made smaller before the model is refused: the step is halved, then the arena
shrinks. An engine cannot be made without a `Profile`.
"""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.errors import ModelTooLarge
from penstock.memory.cost import CostModel, Measured, fit
from penstock.worker import profile_store
from penstock.worker.caps import exhausted
from penstock.worker.engine.sampler import rows_at_once
from penstock.worker.models.kernels.cpu_memory import past_tokens
from penstock.worker.profile_store import StoredProfile
from penstock.worker.stress import Reach, Stress, Trial

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from penstock.wire import LoadSpec
    from penstock.worker.caps import Cap
    from penstock.worker.engine.cuda_executor import CudaExecutor
    from penstock.worker.engine.executor import Executor
    from penstock.worker.kv.arena import Arena, LayerGeometry
    from penstock.worker.kv.blocks import BlockPool
    from penstock.worker.meter import Meter
    from penstock.worker.scheduling.plan import StepLimits

log = logging.getLogger(__name__)

LEAST_STEP_TOKENS = 64
# A step is halved while it leaves KV for fewer tokens than this, or than the window.
ENOUGH_KV_TOKENS = 1024
# A stored profile is extended to contexts so much longer than those it was measured at.
UNSEEN_CONTEXT = 1.25
SHRINK = 0.95
RETRIES = 3
# A token of a request on the Python side: two places in lists and a number.
HOST_BYTES_PER_TOKEN = 48
# Below this a step in RAM is not told from another: the buffer of a product more or less is chance,
# and half of what it takes. It costs no KV, which has what the largest step leaves.
CHANCE_BYTES = 16 << 20
HOST_BYTES = 4 << 20  # frames, outputs and the interpreter's own comings and goings


@dataclass(frozen=True, slots=True)
class Profile:
    """What was measured and what follows from it."""

    cost: CostModel
    limits: StepLimits
    step_bytes: int  # the envelope of the largest step, and what requests take on the host
    host_bytes: int  # the latter
    kv_blocks: int  # blocks in use at once, the reserved one among them
    kv_bytes: int  # what the arena commits for them at most
    held_bytes: int  # on the meter, with everything in place but KV and steps
    kept_bytes: int = 0  # what libraries take for themselves at their first largest step
    shrunk: bool = False  # the arena, because it did not stand the test
    proven: bool = False  # by an earlier load


@dataclass(frozen=True, slots=True)
class Bench:
    """What a profile is measured with."""

    spec: LoadSpec
    executor: Executor | CudaExecutor
    arena: Arena
    pool: BlockPool
    meter: Meter
    cap: Cap
    limits: StepLimits  # as asked for
    window: int
    vocabulary: int
    row_bytes: int  # of a token between two layers
    routes: bool  # the model sends tokens to experts
    fingerprint: str


def profile(bench: Bench) -> Profile:
    """Measure, or apply what was measured before; raises `ModelTooLarge` with every knob."""
    # Threads are started; from now on what is held, but for KV, is for steps and libraries. What
    # loading has freed is nobody's.
    bench.meter.drop_caches()
    bench.cap.settle()
    before = _baseline(bench)
    stored = profile_store.load(bench.spec.profile_dir, bench.fingerprint)
    applies = stored is not None and _applies(bench, stored)
    if stored is not None and applies and (found := _taken_over(bench, stored)) is not None:
        return found
    bench.executor.complete()
    _warm_up(bench)
    if stored is not None and applies:
        try:
            found = _validated(bench, _limits(bench.limits, stored.step_tokens), stored.cost)
        except ModelTooLarge as error:
            log.warning("the stored profile does not hold, so it is measured anew: %s", error)
        else:
            return dataclasses.replace(found, kept_bytes=max(0, found.held_bytes - before))
    found = _validated(bench, *_stress(bench))
    return dataclasses.replace(found, kept_bytes=max(0, found.held_bytes - before))


def remember(bench: Bench, found: Profile, layers: Mapping[int, LayerGeometry]) -> None:
    """Keep a profile for later loads, once the model has passed all that a load asks of it."""
    if found.proven:
        return
    stored = profile_store.load(bench.spec.profile_dir, bench.fingerprint)
    known = stored is not None and stored.cost == found.cost
    stored = StoredProfile(
        format=profile_store.FORMAT,
        fingerprint=bench.fingerprint,
        memory_bytes=stored.memory_bytes if stored and known else bench.spec.memory_bytes,
        step_tokens=found.limits.tokens,
        step_sequences=found.limits.sequences,
        cost=found.cost,
        layers=tuple(layers.items()),
        proven=not found.shrunk,  # otherwise the next load tries again
        kept_bytes=found.kept_bytes,
    )
    profile_store.save(bench.spec.profile_dir, stored)


def _applies(bench: Bench, stored: StoredProfile) -> bool:
    """No longer contexts than were seen, room for KV, and no want of memory that is over now."""
    limits = _limits(bench.limits, stored.step_tokens)
    seen = max(point.context for point in stored.cost.measured)
    halved = stored.step_tokens < bench.limits.tokens
    return (
        _reach(bench, limits).longest <= UNSEEN_CONTEXT * seen
        and _leaves_enough(bench, limits, stored.cost)
        and not (halved and bench.spec.memory_bytes > stored.memory_bytes)
    )


def _taken_over(bench: Bench, stored: StoredProfile) -> Profile | None:
    """A profile that an earlier load has proven; None if there is none.

    The step is the same in any grant, and less or more KV beside it proves nothing new. On a CPU
    only, where the largest step takes seconds. An explicit size of the KV is always tried.
    """
    if not stored.proven or bench.spec.kv_tokens is not None or not bench.arena.in_ram:
        return None
    kept = stored.kept_bytes
    found = _sized(bench, stored, kept)
    if found is not None and bench.executor.reading_bytes > found.step_bytes:
        # Behind the cap it might not find the memory, and Rust aborts. So it is kept from now on.
        before = _baseline(bench)
        bench.executor.complete()
        bench.meter.drop_caches()
        bench.cap.settle()
        kept = max(0, kept - max(0, _baseline(bench) - before))
        found = _sized(bench, stored, kept)
    if found is None:
        return None
    bench.pool.set_limit(found.kv_blocks)
    bench.cap.move(found.kv_bytes, found.step_bytes)
    return dataclasses.replace(found, held_bytes=_baseline(bench), kept_bytes=kept, proven=True)


def _sized(bench: Bench, stored: StoredProfile, kept: int) -> Profile | None:
    """What a stored profile leaves for KV; None: nothing."""
    limits = _limits(bench.limits, stored.step_tokens)
    step_bytes = _largest_step(bench, limits, stored.cost)
    blocks = bench.arena.blocks_within(_kv_room(bench, bench.spec.memory_bytes - kept - step_bytes))
    return _profile_of(bench, limits, stored.cost, blocks, kept) if blocks > 1 else None


def _warm_up(bench: Bench) -> None:
    """Fill the caches that libraries never empty; then the cap can be set."""
    stress = _open(bench, bench.limits)
    some = min(LEAST_STEP_TOKENS, bench.limits.tokens, _reach(bench, bench.limits).longest)
    several = min(8, bench.limits.sequences)
    try:
        stress.run(Trial(chunk=some, context=some), bench.vocabulary)
        stress.run(Trial(several, some, 1, some, several, some, demanding=True), bench.vocabulary)
    finally:
        stress.close()
    bench.meter.drop_caches()
    bench.cap.settle()


def _stress(bench: Bench) -> tuple[StepLimits, CostModel]:
    """The largest step that leaves enough KV, halving from what was asked; and its cost model."""
    limits = bench.limits
    # The first step of its size also takes what libraries keep from then on: it does not count.
    _measure(bench, limits, [_reach(bench, limits).everything()])
    while True:
        cost = _measure(bench, limits, _reach(bench, limits).trials())
        if cost is not None and _leaves_enough(bench, limits, cost):
            return limits, cost
        if limits.tokens <= LEAST_STEP_TOKENS:
            raise _too_large(bench, limits, cost, "even the smallest step leaves no room for KV")
        limits = _limits(bench.limits, max(LEAST_STEP_TOKENS, limits.tokens // 2))
        log.info("steps are halved to %d tokens to leave room for KV", limits.tokens)


def _leaves_enough(bench: Bench, limits: StepLimits, cost: CostModel) -> bool:
    """Whether the largest step leaves KV worth having; beside the smallest step any is."""
    room = _kv_room(bench, bench.spec.memory_bytes - _largest_step(bench, limits, cost))
    tokens = (bench.arena.blocks_within(room) - 1) * limits.block_tokens
    if limits.tokens <= LEAST_STEP_TOKENS:
        return tokens > 0
    return tokens >= min(bench.window, ENOUGH_KV_TOKENS)


def _measure(bench: Bench, limits: StepLimits, trials: Iterable[Trial]) -> CostModel | None:
    """What trials cost; None when one of them does not fit the grant."""
    bench.cap.move(bench.arena.committed_bytes, bench.spec.memory_bytes)
    points: list[Measured] = []
    failed = False
    stress = _open(bench, limits)
    try:
        for trial in trials:
            # Twice: where a tensor comes to lie in a heap is chance.
            points += (stress.run(trial, bench.vocabulary) for _ in range(2))
            log.debug("measured %s", points[-2:])
    except (MemoryError, RuntimeError) as error:
        if not exhausted(error):
            raise
        failed = True
    finally:
        stress.close()
    bench.meter.drop_caches()
    if failed:
        return None
    layout = bench.arena.layout
    floor = CHANCE_BYTES if bench.arena.in_ram else 0
    sizes = layout.token_bytes, layout.block_tokens
    return fit(points, *sizes, floor=floor, row_bytes=bench.row_bytes)


def _validated(bench: Bench, limits: StepLimits, cost: CostModel) -> Profile:
    """Size the arena, fill it and run the largest step; shrink where that fails."""
    spec, arena = bench.spec, bench.arena
    if spec.kv_tokens is not None:
        blocks = min(1 + -(-spec.kv_tokens // limits.block_tokens), arena.blocks)
        retries = 0
    else:
        room = _kv_room(bench, spec.memory_bytes - _largest_step(bench, limits, cost))
        blocks = arena.blocks_within(room)
        retries = RETRIES
    whole_bytes = arena.bytes_for(blocks)
    for failures in range(retries + 2):
        # The first step of its size also takes what libraries keep from then on, so it has two
        # attempts before anything shrinks.
        if failures > 1:
            smaller = arena.blocks_within(int(arena.bytes_for(blocks) * SHRINK))
            blocks = min(smaller, blocks - 1)
            log.warning("the KV arena did not stand the test; it shrinks to %d blocks", blocks)
        if blocks < 2:
            break
        # What is taken from KV is the step's: it was the step that did not find its memory.
        found = _profile_of(bench, limits, cost, blocks, whole_bytes - arena.bytes_for(blocks))
        # A heap keeps addresses that it needed once. They are not memory, but the cap counts them.
        bench.cap.settle()
        if _survives(bench, found):
            # Everything is in place now; libraries have what they keep.
            return dataclasses.replace(found, held_bytes=_baseline(bench), shrunk=failures > 1)
    raise _too_large(bench, limits, cost, f"validation failed after {retries} retries")


def _survives(bench: Bench, found: Profile) -> bool:
    """Whether the largest step runs beside a full arena, within the cap."""
    pool = bench.pool
    pool.set_limit(found.kv_blocks)
    bench.cap.move(found.kv_bytes, found.step_bytes)
    survived = True
    stress = _open(bench, found.limits)
    rest: list[int] = []
    try:
        with bench.arena.untouched():  # to fetch tens of GiB takes as long as all the rest
            rest = pool.take(pool.free)
        stress.run(_reach(bench, found.limits).everything(), bench.vocabulary)
    except (MemoryError, RuntimeError) as error:
        if not exhausted(error):
            raise
        survived = False
    finally:
        pool.give(rest)
        stress.close()
    pool.return_empty_extents()
    bench.meter.drop_caches()
    return survived


def _profile_of(
    bench: Bench, limits: StepLimits, cost: CostModel, blocks: int, spared_bytes: int
) -> Profile:
    host_bytes = HOST_BYTES + (blocks - 1) * limits.block_tokens * HOST_BYTES_PER_TOKEN
    return Profile(
        cost=cost,
        limits=limits,
        step_bytes=_largest_step(bench, limits, cost) + host_bytes + spared_bytes,
        host_bytes=host_bytes,
        kv_blocks=blocks,
        kv_bytes=bench.arena.bytes_for(blocks),
        held_bytes=0,
    )


def _largest_step(bench: Bench, limits: StepLimits, cost: CostModel) -> int:
    # A stored profile may have seen a little less than there can be now.
    longest = _reach(bench, limits).longest
    context = max(longest, *(point.context for point in cost.measured))
    # Prompts with log-probabilities have what is left beside a row for every sequence, and are
    # sequences themselves.
    return cost.step(limits.tokens, limits.sequences, context, limits.logit_rows - 1)


def _kv_room(bench: Bench, size_bytes: int) -> int:
    """What the arena may have of `size_bytes`, when its tokens take their share on the host too."""
    token_bytes = bench.arena.layout.token_bytes
    return max(0, size_bytes - HOST_BYTES) * token_bytes // (token_bytes + HOST_BYTES_PER_TOKEN)


def _baseline(bench: Bench) -> int:
    held = bench.meter.held()
    return held - bench.arena.committed_bytes if bench.arena.in_ram else held


def _reach(bench: Bench, limits: StepLimits) -> Reach:
    spec = bench.spec
    # A later grant lets sequences become longer: as far as there are addresses for them.
    most_bytes = max(spec.memory_bytes, spec.largest_memory_bytes or 0)
    tokens = spec.kv_tokens or most_bytes // bench.arena.layout.token_bytes
    layers = bench.arena.layout.layers
    total = max(2, min(tokens, (bench.arena.blocks - 1) * limits.block_tokens))
    return Reach(
        limits=limits,
        longest=min(bench.window, total),
        total=total,
        routes=bench.routes,
        in_ram=bench.arena.in_ram,
        sampled=rows_at_once(bench.arena.device.type, bench.vocabulary),
        past=past_tokens(max(layer.kv_heads * layer.key_dim for layer in layers)),
    )


def _limits(asked: StepLimits, tokens: int) -> StepLimits:
    """The same with fewer tokens: never as many sequences as tokens."""
    sequences = max(1, min(asked.sequences, tokens // 2))
    return dataclasses.replace(asked, tokens=tokens, sequences=sequences, logit_rows=2 * sequences)


def _open(bench: Bench, limits: StepLimits) -> Stress:
    return Stress(
        *(bench.executor, bench.arena, bench.pool, bench.meter, limits.tokens),
        # A GPU computes experts in groups, whose memory does not depend on who goes where.
        routes=bench.routes and bench.arena.in_ram,
    )


def _too_large(bench: Bench, limits: StepLimits, cost: CostModel | None, why: str) -> ModelTooLarge:
    spec, layout = bench.spec, bench.arena.layout
    step = _largest_step(bench, limits, cost) if cost is not None else spec.memory_bytes + 1
    needed = step + HOST_BYTES + 2 * layout.block_bytes
    knobs = {
        "memory.limit leaves this model": f"{spec.memory_bytes} bytes",
        "models.step_tokens": f"{spec.step_tokens} (tried down to {limits.tokens})",
        "models.step_sequences": f"{spec.step_sequences} (tried down to {limits.sequences})",
        "models.max_context": spec.max_context or f"none (window {bench.window})",
        "models.kv_tokens": spec.kv_tokens or "auto",
        "models.dtype": f"{spec.dtype} (in force: {layout.dtype})",
        "models.threads": spec.threads or "auto",
    }
    told = "; ".join(f"{name} = {value}" for name, value in knobs.items())
    measured = f"{step} bytes" if cost is not None else "more than the grant"
    return ModelTooLarge(
        f"{spec.name} does not fit its memory: {why}. A step of {limits.tokens} tokens and "
        f"{limits.sequences} sequences takes {measured}, a token of KV "
        f"{layout.token_bytes} bytes. The knobs: {told}.",
        numbers={
            "reason": "memory",
            "needed_bytes": needed,
            "limit_bytes": spec.memory_bytes,
        },
    )
