"""The refusal of a model that does not fit its memory, with every knob."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.errors import ModelTooLarge

if TYPE_CHECKING:
    from penstock.worker.core.plan import StepLimits
    from penstock.worker.profiling.context import ProfileContext


def too_large(
    context: ProfileContext, limits: StepLimits, step_bytes: int | None, host_bytes: int, why: str
) -> ModelTooLarge:
    """`step_bytes` of the largest step; None: it could not be run."""
    spec, memory = context.spec, context.memory
    token_bytes = sum(group.token_bytes for group in memory.groups)
    step = spec.memory_bytes + 1 if step_bytes is None else step_bytes
    needed = step + host_bytes + 2 * token_bytes * memory.block_tokens
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
    measured = f"{step} bytes" if step_bytes is not None else "more than the grant"
    return ModelTooLarge(
        f"{spec.name} does not fit its memory: {why}. A step of {limits.tokens} tokens and "
        f"{limits.sequences} sequences takes {measured}, a token of KV "
        f"{token_bytes} bytes. The knobs: {told}.",
        numbers={
            "reason": "memory",
            "needed_bytes": needed,
            "limit_bytes": spec.memory_bytes,
        },
    )
