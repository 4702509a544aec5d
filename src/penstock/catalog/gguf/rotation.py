"""How a GGUF file scales its rotary embedding, as transformers' `rope_parameters` say it.

Llama 3's scaling has no key in the metadata: the file has the divisors of the frequencies, and the
parameters are found by which of the published ones give the same divisors.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from penstock.errors import ModelUnusable

if TYPE_CHECKING:
    from penstock.catalog.gguf.configuration import Facts, Numbers

_THETA = 10000.0  # where a file has none
_LLAMA3 = (8.0, 32.0, 16.0, 4.0)  # factors, with low 1, high 4 and 8192 tokens
_LOW, _HIGH, _ORIGINAL = 1.0, 4.0, 8192
_FREQUENCIES = "rope_freqs.weight"
_TOLERANCE = 1e-4


def rope_parameters(facts: Facts, numbers: Numbers) -> dict[str, Any]:
    """For the architecture of a file."""
    theta = facts.number("rope.freq_base", _THETA)
    whole = {"rope_theta": theta, **_scaling(facts, numbers, theta)}
    if facts.architecture != "gemma3":
        return whole
    local = facts.number("rope.freq_base_swa", _THETA)
    return {
        "full_attention": whole,
        "sliding_attention": {"rope_type": "default", "rope_theta": local},
    }


def _scaling(facts: Facts, numbers: Numbers, theta: float) -> dict[str, Any]:
    if _FREQUENCIES in facts.tensors:
        return _llama3(facts, numbers(_FREQUENCIES), theta)
    if "rope_factors_long.weight" in facts.tensors:
        return _long(facts, numbers)
    kind = facts.metadata.get(f"{facts.architecture}.rope.scaling.type", "none")
    if kind == "none":
        return {"rope_type": "default"}
    if kind == "linear":
        return {"rope_type": "linear", "factor": facts.number("rope.scaling.factor")}
    if kind == "yarn":
        return _yarn(facts)
    raise ModelUnusable(
        f"{facts.path} scales its rotary embedding by {kind!r}; none, linear, yarn, and the tables "
        "of Llama 3 and Phi 3 are known. Use the model's safetensors version."
    )


def _llama3(facts: Facts, divisors: list[float], theta: float) -> dict[str, Any]:
    for factor in _LLAMA3:
        expected = llama3_divisors(factor, theta, 2 * len(divisors))
        if all(math.isclose(*pair, rel_tol=_TOLERANCE) for pair in zip(divisors, expected)):  # noqa: B905 - of one length
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": _LOW,
                "high_freq_factor": _HIGH,
                "original_max_position_embeddings": _ORIGINAL,
            }
    raise ModelUnusable(
        f"{facts.path}: {_FREQUENCIES} is not the scaling of Llama 3 by "
        f"{', '.join(f'{factor:g}' for factor in sorted(_LLAMA3))}; use the model's safetensors "
        "version."
    )


def llama3_divisors(factor: float, theta: float, dim: int) -> list[float]:
    """By what the frequencies of a head are divided: the low ones by the factor, the high ones by
    nothing, and those between smoothly."""
    divisors = []
    for pair in range(dim // 2):
        turns = _ORIGINAL / (2 * math.pi * theta ** (2 * pair / dim))  # in the original window
        smooth = min(max((turns - _LOW) / (_HIGH - _LOW), 0.0), 1.0)
        divisors.append(1 / ((1 - smooth) / factor + smooth))
    return divisors


def _yarn(facts: Facts) -> dict[str, Any]:
    known = {"type", "factor", "original_context_length", "finetuned", "attn_factor"}
    known |= {"yarn_beta_fast", "yarn_beta_slow"}
    prefix = f"{facts.architecture}.rope.scaling."
    said = {name.removeprefix(prefix) for name in facts.metadata if name.startswith(prefix)}
    if said - known or facts.number("rope.scaling.attn_factor", 1.0) != 1.0:
        raise ModelUnusable(
            f"{facts.path} scales its rotary embedding by yarn in a way that is not known "
            f"({', '.join(sorted(said))}); use the model's safetensors version."
        )
    return {
        "rope_type": "yarn",
        "factor": facts.number("rope.scaling.factor"),
        "original_max_position_embeddings": facts.count("rope.scaling.original_context_length"),
        "beta_fast": facts.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": facts.number("rope.scaling.yarn_beta_slow", 1.0),
    }


def _long(facts: Facts, numbers: Numbers) -> dict[str, Any]:
    found = {
        "rope_type": "longrope",
        "short_factor": numbers("rope_factors_short.weight"),
        "long_factor": numbers("rope_factors_long.weight"),
        "original_max_position_embeddings": facts.count("rope.scaling.original_context_length"),
    }
    if facts.has("rope.scaling.attn_factor"):
        found["attention_factor"] = facts.number("rope.scaling.attn_factor")
    return found
