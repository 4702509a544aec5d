"""Bytes of recurrent states from configurations: of public models, and how slots are laid out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock import shapes
from penstock.catalog.geometry import read_geometry
from penstock.catalog.states import StateLayer, slot_bytes

MIB = 1 << 20


def states(config: dict[str, Any]) -> tuple[StateLayer, ...]:
    return read_geometry(config, Path("config.json")).states


@pytest.mark.parametrize(
    ("shape", "matrices", "columns"),
    [("qwen3-next-80b-a3b", 72, 1.7), ("qwen3.5-0.8b", 18, 0.63), ("lfm2-1.2b", 0, 0.08)],
)
def test_shapes_of_public_models(shape: str, matrices: float, columns: float) -> None:
    """Matrices in float32, columns in bfloat16."""
    found = states(shapes.shape_config(shape))
    assert sum(4 * layer.recurrent for layer in found) == matrices * MIB
    assert sum(2 * layer.conv for layer in found) / MIB == pytest.approx(columns, abs=0.02)


KIMI = {
    "model_type": "kimi_linear",
    "hidden_size": 2304,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 163840,
    "model_max_length": 1048576,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_attn_config": {"num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4},
}
GRANITE = {
    "model_type": "granitemoehybrid",
    "hidden_size": 1536,
    "num_hidden_layers": 3,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "vocab_size": 49160,
    "max_position_embeddings": 131072,
    "layer_types": ["mamba", "attention", "mamba"],
    "mamba_n_heads": 48,
    "mamba_d_head": "auto",
    "mamba_expand": 2,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
}


def test_fields_of_other_families() -> None:
    assert states(KIMI) == (StateLayer(3 * 4096 * 3, 32 * 128 * 128),) * 3
    assert states(GRANITE) == (StateLayer((3072 + 256) * 3, 3072 * 128),) * 2


def test_layers_beside_attention_in_every_layer() -> None:
    falcon = {**GRANITE, "model_type": "falcon_h1", "mamba_d_ssm": 3072, "layer_types": None}
    assert len(states(falcon)) == 3


def test_an_unknown_family_has_no_figures() -> None:
    assert states({**GRANITE, "mamba_n_heads": None}) == ()
    assert states(shapes.shape_config("tiny-llama")) == ()


def test_slots_are_little_larger_than_what_is_in_them() -> None:
    for size in (1, 100, 2000, 9000, 70_000, 20 * MIB + 3):
        slot = slot_bytes([size, size // 3])
        used = size + size // 3
        assert used <= slot <= max(used + used // 16, used + 128)
        assert slot % 64 == 0
    assert slot_bytes([20 * MIB + 3]) % 4096 == 0, "whole pages, so that an extent is one slot"
    assert slot_bytes([]) == 0
