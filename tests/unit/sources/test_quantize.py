"""What is refused before anything is begun."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from penstock.catalog import read_card
from penstock.errors import BadRequest, ModelUnusable, QuantizeFailed
from penstock.sources.quantize import check, default_name, quantize
from penstock.testing.model_folders import LLAMA, write_model

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.catalog import Card


@pytest.fixture
def card(tmp_path: Path) -> Card:
    return read_card(write_model(tmp_path / "models" / "plain"), "org/plain")


def test_a_plain_model_may_be(card: Card) -> None:
    check(card, "int4", default_name(card, "int4"))
    assert default_name(card, "int4") == "org/plain-int4"


@pytest.mark.parametrize(
    ("wanted", "name", "sentence"),
    [
        ("int3", "m", "one of int8, int4, fp8, not to 'int3'"),
        ("int4", "../m", "cannot be a model's name"),
        ("int4", "org/plain", "org/plain is the model itself"),
    ],
)
def test_formats_and_names(card: Card, wanted: str, name: str, sentence: str) -> None:
    with pytest.raises((BadRequest, QuantizeFailed), match=sentence):
        check(card, wanted, name)


def test_models_that_cannot_be(card: Card) -> None:
    with pytest.raises(ModelUnusable, match="has random weights"):
        check(replace(card, source="random:tiny-llama"), "int4", "m")
    with pytest.raises(ModelUnusable, match="is of the kind 'embed'"):
        check(replace(card, kind="embed"), "int4", "m")
    packed = replace(card.weights, formats=("gptq",))
    with pytest.raises(ModelUnusable, match=r"is quantised already \(gptq\)"):
        check(replace(card, weights=packed), "int4", "m")
    said = LLAMA | {"quantization_config": {"quant_method": "fp8"}}
    (card.path / "config.json").write_text(json.dumps(said))
    with pytest.raises(ModelUnusable, match="is quantised already"):
        check(card, "int4", "m")
    (card.path / "model.safetensors").rename(card.path / "model.gguf")
    with pytest.raises(ModelUnusable, match="is a GGUF file, which is quantised already"):
        check(card, "int4", "m")


def test_a_name_that_is_taken(card: Card, tmp_path: Path) -> None:
    kept = write_model(tmp_path / "models" / "taken")
    with pytest.raises(QuantizeFailed, match="taken exists and came from elsewhere, not from quan"):
        quantize(card, "int4", "taken", tmp_path, lambda phase, done, total: None)
    assert read_card(kept).formats == ()
