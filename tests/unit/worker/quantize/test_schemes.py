"""What is said of a quantised model: what compressed-tensors took and de-quantised, recorded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from penstock.catalog.weights import read_header
from penstock.worker.quantize.schemes import scheme_for

FIXTURES = Path(__file__).parents[3] / "data" / "quantised"


@pytest.mark.parametrize("name", ["int8", "int4", "fp8"])
def test_it_is_as_the_formats_own_library_has_read_it(name: str) -> None:
    """`make.py` beside the files says how; the numbers are compared in test_reading.py."""
    file = FIXTURES / f"penstock-{name}.safetensors"
    headers = read_header(file)
    numbers = headers.pop("numbers")
    scheme = scheme_for(name, [numbers.shape[1]], has_experts=False)
    assert headers == scheme.headers((numbers.shape[0], numbers.shape[1]), torch.bfloat16)
    with safe_open(file, framework="pt") as opened:
        assert json.loads(opened.metadata()["said"]) == scheme.described({"lm_head"})


def test_only_fp8_experts_have_rounded_activations() -> None:
    for name in ("int8", "int4", "fp8"):
        for has_experts in (False, True):
            scheme = scheme_for(name, [128], has_experts=has_experts)
            group = scheme.described(set())["config_groups"]["group_0"]
            assert (group["input_activations"] is not None) == (has_experts and name == "fp8")
