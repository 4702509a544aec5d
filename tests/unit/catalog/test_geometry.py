"""The served window against transformers' own rotary tables: exact up to it, and not needlessly
short."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Phi3Config, PretrainedConfig, Qwen2Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

from penstock.catalog.geometry import read_window

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 64,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
FACTORS = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES: list[tuple[str, dict[str, Any], int, bool]] = [
    ("rope_parameters", {"rope_type": "default", "rope_theta": 1e4}, 256, False),
    ("rope_scaling", {"type": "linear", "factor": 4.0}, 256, False),
    ("rope_parameters", {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}, 256, False),
    ("rope_scaling", {"rope_type": "dynamic", "factor": 4.0}, 256, True),
    ("rope_parameters", {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}, 256, True),
    (
        "rope_scaling",
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
        1024,
        False,
    ),
    (
        "rope_parameters",
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "rope_theta": 1e4,
        },
        256,
        False,
    ),
    (
        "rope_scaling",
        {**LLAMA3, "rope_type": "llama3", "original_max_position_embeddings": 64},
        256,
        False,
    ),
    (
        "rope_scaling",
        {**FACTORS, "rope_type": "longrope", "original_max_position_embeddings": 64},
        64,
        True,
    ),
    (
        "rope_parameters",
        {
            **FACTORS,
            "rope_type": "longrope",
            "original_max_position_embeddings": 64,
            "rope_theta": 1e4,
        },
        64,
        True,
    ),
]


def tables(rotary: Any, length: int) -> torch.Tensor:
    """The frequencies that a batch with a position of `length - 1` gets."""
    rotary(torch.zeros(1, 1, 8), torch.tensor([[0, length - 1]]))
    frequencies: torch.Tensor = rotary.inv_freq.clone()
    return frequencies


@pytest.mark.parametrize(("place", "rope", "window", "ends"), ROPES)
@pytest.mark.parametrize(
    ("family", "kind"),
    [(LlamaConfig, LlamaRotaryEmbedding), (Qwen2Config, Qwen2RotaryEmbedding)],
)
def test_window_of(
    family: type[PretrainedConfig],
    kind: Any,
    place: str,
    rope: dict[str, Any],
    window: int,
    ends: bool,
) -> None:
    stated = {**SMALL, "model_type": family.model_type, place: dict(rope)}
    check(stated, kind(family(**SMALL, **{place: dict(rope)})), window, ends=ends)


@pytest.mark.parametrize(
    ("rope_name", "original"), [("longrope", 64), ("yarn", 64), ("longrope", None)]
)
def test_window_of_phi3(rope_name: str, original: int | None) -> None:
    more: dict[str, Any] = {"rope_scaling": {**FACTORS, "type": rope_name}}
    if original is not None:
        more["original_max_position_embeddings"] = original
    else:  # the family's own default
        more["max_position_embeddings"] = 8192
    rotary = Phi3RotaryEmbedding(Phi3Config(**{**SMALL, **more}))
    check({**SMALL, "model_type": "phi3", **more}, rotary, original or 4096, ends=True)


def check(stated: dict[str, Any], rotary: Any, window: int, *, ends: bool) -> None:
    path = Path("config.json")
    assert read_window(stated, path) == window
    assert read_window({"model_type": "outer", "text_config": stated}, path) == window
    first = tables(rotary, 1)
    assert torch.equal(tables(rotary, window), first)
    assert torch.equal(tables(rotary, window + 1), first) is not ends
