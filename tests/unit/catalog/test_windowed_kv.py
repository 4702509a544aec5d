"""What sliding windows save of KV, for shapes that people run: contexts in the same bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from penstock.catalog import read_card
from penstock.catalog.kv_formats import kv_format
from penstock.testing.model_folders import write_model

if TYPE_CHECKING:
    from pathlib import Path

CONTEXT = 32_000
BLOCK_TOKENS, STEP_TOKENS = 16, 8192
MEMORY = 64 << 30
BFLOAT16 = kv_format("auto", "bfloat16")

GEMMA3_27B: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_size": 5376,
    "num_hidden_layers": 62,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "sliding_window": 1024,
    "layer_types": [
        "full_attention" if layer % 6 == 5 else "sliding_attention" for layer in range(62)
    ],
}
GPT_OSS_20B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 201088,
    "max_position_embeddings": 131072,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
}


@pytest.mark.parametrize(
    ("config", "without", "within"), [(GEMMA3_27B, 4, 22), (GPT_OSS_20B, 43, 86)]
)
def test_more_contexts_fit_where_layers_have_windows(
    tmp_path: Path, config: dict[str, Any], without: int, within: int
) -> None:
    """Each layer's KV of all tokens, and of those that the window sees."""
    card = read_card(write_model(tmp_path / "model", config))
    everything = CONTEXT * sum(layers.size_bytes(BFLOAT16) for layers in card.kv_layers)
    assert MEMORY // everything == without
    cost = card.kv_cost(BFLOAT16, BLOCK_TOKENS, card.context, STEP_TOKENS)
    assert (MEMORY - cost.chunk_bytes) // cost.sequence(CONTEXT) == within
