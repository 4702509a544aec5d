"""Shapes with packed weights: the catalog's bytes are the worker's, the numbers are ordinary."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

import pytest
import torch

from penstock import shapes
from penstock.catalog import read_card
from penstock.errors import ModelUnusable
from penstock.testing.exactness import Mode, start_engine
from penstock.testing.rounding import mixed_rows
from penstock.wire import LoadSpec
from penstock.worker.models import attention
from penstock.worker.models.build import build_model, kept_tensors, read_config
from penstock.worker.models.linear import PackedLinear, PackedWeight

if TYPE_CHECKING:
    from pathlib import Path

SMALL = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 320,
    "max_position_embeddings": 512,
}
PACKED = ("qwen3-8b-fp8", "qwen3-8b-int4", "qwen3-8b-q4_k")


def _folder(path: Path, shape: str, **changes: object) -> Path:
    """A small model of a shape's quantisation."""
    shapes.write_folder(shape, path)
    file = path / "config.json"
    config = {**json.loads(file.read_text()), **SMALL, **changes}
    file.write_text(json.dumps(config))
    (path / "tokenizer.json").write_text(json.dumps(shapes.tokenizer(config["vocab_size"])))
    return path


@pytest.mark.parametrize("shape", PACKED)
def test_packed_shapes_are_what_is_booked_and_have_ordinary_numbers(
    tmp_path: Path, shape: str
) -> None:
    inner = 512 if shape.endswith("q4_k") else SMALL["intermediate_size"]  # whole blocks
    folder = _folder(tmp_path, shape, intermediate_size=inner)
    attention.register()
    spec = LoadSpec(name="small", path=str(folder), device="cpu", dtype="bfloat16", memory_bytes=0)
    model = build_model(
        spec, read_config(spec), torch.bfloat16, torch.device("cpu"), lambda *_: None
    )
    tables = [t for name, t in model.named_buffers() if name.endswith("inv_freq")]
    kept = sum(tensor.nbytes for tensor in kept_tensors(model)) - sum(t.nbytes for t in tables)
    assert kept == read_card(folder).bytes_in_memory("bfloat16")
    layers = [module for module in model.modules() if isinstance(module, PackedLinear)]
    assert len(layers) == 2 * 7
    for layer in layers:
        weight = layer.linear_weight
        assert isinstance(weight, PackedWeight)
        numbers = weight.dequantised().float()
        assert 0.015 < float(numbers.std()) < 0.025
        assert abs(float(numbers.mean())) < 0.01


def test_a_packed_shape_is_served(tmp_path: Path) -> None:
    engine = start_engine(_folder(tmp_path, "qwen3-8b-int4"), Mode("at once"))
    logits = mixed_rows(engine, [[1, 2, 3, 4]], random.Random(0))
    assert bool(logits.isfinite().all())


@pytest.mark.parametrize("shape", PACKED)
def test_packed_shapes_take_less_than_plain_ones(tmp_path: Path, shape: str) -> None:
    shapes.write_folder(shape, tmp_path)
    card = read_card(tmp_path)
    plain = shapes.count_parameters(shapes.shape_config("qwen3-8b"))
    assert card.parameters == plain
    assert card.bytes_in_memory("bfloat16") < 1.3 * plain


def test_other_quantisations_of_shapes_are_refused(tmp_path: Path) -> None:
    said = {"quant_method": "awq"}
    folder = _folder(tmp_path, "qwen3-8b-int4", quantization_config=said)
    with pytest.raises(ModelUnusable, match="not for 'qwen3' in 'awq'"):
        read_card(folder)
