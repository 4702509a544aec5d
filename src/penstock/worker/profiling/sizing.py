"""How a grant is divided between the largest step and KV, and how far a model's steps go."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.errors import ModelTooLarge
from penstock.worker.core.drafts.lookup import INDEX_BYTES
from penstock.worker.core.profile import Profile
from penstock.worker.profiling.stress import ROUTED_SHARE, StepBounds, Stress

if TYPE_CHECKING:
    from penstock.memory.cost import CostModel
    from penstock.worker.core.plan import StepLimits
    from penstock.worker.profiling.context import ProfileContext

MIN_STEP_TOKENS = 64
# A step is halved while it leaves KV for fewer tokens than this, or than the window.
ENOUGH_KV_TOKENS = 1024
HOST_BYTES_PER_TOKEN = 48  # of a request: two places in lists and a number
HOST_BYTES = 4 << 20  # frames, outputs and the interpreter's own comings and goings


def leaves_enough(context: ProfileContext, limits: StepLimits, cost: CostModel) -> bool:
    """Whether the largest step leaves KV worth having; beside the smallest step any is."""
    room = kv_room(context, context.spec.memory_bytes - largest_step(context, limits, cost))
    tokens = tokens_in(context, limits, room)
    if limits.tokens <= MIN_STEP_TOKENS:
        return tokens > 0
    return tokens >= min(context.window, ENOUGH_KV_TOKENS)


def committed(context: ProfileContext, size_bytes: int) -> int:
    """What KV of that size commits at most: whole extents."""
    context.kv.set_limit(size_bytes)
    return context.kv.limit_bytes


def tokens_in(context: ProfileContext, limits: StepLimits, size_bytes: int) -> int:
    """The longest sequence that KV of that size holds."""
    context.kv.cost = context.memory.cost(limits.tokens)
    context.kv.set_limit(size_bytes)
    if size_bytes < context.kv.limit_bytes:
        return 0
    return context.kv.max_tokens()


def profile_of(
    context: ProfileContext, limits: StepLimits, cost: CostModel, size_bytes: int, spared_bytes: int
) -> Profile:
    """The profile of a model whose KV has that size."""
    kv_bytes = committed(context, size_bytes)
    tokens = kv_bytes // _lasting_token_bytes(context)
    host_bytes = HOST_BYTES + context.images.host_bytes + tokens * _host_token_bytes(context)
    return Profile(
        cost=cost,
        limits=limits,
        step_bytes=largest_step(context, limits, cost) + host_bytes + spared_bytes,
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


def largest_step(context: ProfileContext, limits: StepLimits, cost: CostModel) -> int:
    """What the largest step takes, KV aside."""
    # A stored profile may have seen a little less than there can be now.
    longest = bounds(context, limits).longest
    longest = max(longest, *(point.context for point in cost.measured))
    # Prompts with log-probabilities have what is left beside a row for every sequence, and are
    # sequences themselves.
    size = cost.step(limits.tokens, limits.sequences, longest, limits.logit_rows - 1)
    return max(size, context.images.stage_bytes)  # one after the other


def window_bytes(context: ProfileContext) -> int:
    """KV of the longest sequence that is served, with its state."""
    return context.memory.cost(context.limits.tokens).sequence(context.window)


def kv_room(context: ProfileContext, size_bytes: int) -> int:
    """What KV may have of `size_bytes`, when its tokens take their share on the host too."""
    each = _lasting_token_bytes(context)
    left = max(0, size_bytes - HOST_BYTES - context.images.host_bytes)
    return left * each // (each + _host_token_bytes(context))


def _host_token_bytes(context: ProfileContext) -> int:
    """What a token of a request takes in RAM: with drafts it is in an index."""
    return HOST_BYTES_PER_TOKEN + (INDEX_BYTES if context.drafts else 0)


def bounds(context: ProfileContext, limits: StepLimits) -> StepBounds:
    """How far trials go within limits."""
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


def open_stress(context: ProfileContext, limits: StepLimits) -> Stress:
    """What runs them."""
    routed = context.routes and context.backend.routing_changes_memory
    return Stress(
        *(context.executor, context.memory, context.kv, context.meter, limits.tokens),
        noise_share=ROUTED_SHARE if routed else context.noise_share,
    )


def too_large(
    context: ProfileContext, limits: StepLimits, cost: CostModel | None, why: str
) -> ModelTooLarge:
    """The refusal, with every knob."""
    spec, memory = context.spec, context.memory
    token_bytes = sum(group.token_bytes for group in memory.groups)
    step = largest_step(context, limits, cost) if cost is not None else spec.memory_bytes + 1
    needed = step + HOST_BYTES + context.images.host_bytes
    needed += 2 * (token_bytes * memory.block_tokens + memory.state_bytes)
    knobs = {
        "memory.limit leaves this model": f"{spec.memory_bytes} bytes",
        "models.step_tokens": f"{spec.step_tokens} (tried down to {limits.tokens})",
        "models.step_sequences": f"{spec.step_sequences} (tried down to {limits.sequences})",
        "models.max_context": spec.max_context or f"none (window {context.window})",
        "models.kv_tokens": spec.kv_tokens or "auto",
        "models.dtype": f"{spec.dtype} (in force: {context.dtype})",
        "models.kv_dtype": f"{spec.kv_dtype} (in force: {memory.format.name})",
        "models.threads": spec.threads or "auto",
    }
    if context.images.pixels:
        knobs["models.image_pixels"] = f"{spec.image_pixels} (in force: {context.images.pixels})"
        knobs["models.image_bytes"] = spec.image_bytes
    told = "; ".join(f"{name} = {value}" for name, value in knobs.items())
    measured = f"{step} bytes" if cost is not None else "more than the grant"
    state = f" and a state {memory.state_bytes}" if memory.state_bytes else ""
    return ModelTooLarge(
        f"{spec.name} does not fit its memory: {why}. A step of {limits.tokens} tokens and "
        f"{limits.sequences} sequences takes {measured}, a token of KV "
        f"{token_bytes} bytes{state}. The knobs: {told}.",
        numbers={
            "reason": "memory",
            "needed_bytes": needed,
            "limit_bytes": spec.memory_bytes,
        },
    )
