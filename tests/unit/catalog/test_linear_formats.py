"""Formats of packed weights, by headers alone."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from penstock.catalog.linear_formats import check_quantisation, packed_linears
from penstock.catalog.weights import Tensor, sum_weights
from penstock.errors import ModelUnusable

MODULE = "model.layers.0.mlp.up_proj"
SIZES = {"F32": 4, "I32": 4, "I64": 8, "F16": 2, "BF16": 2}
Headers = dict[str, tuple[str, tuple[int, ...]]]
W4 = {"config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 128}}}}

# 512 outputs of 1024 inputs: the file's tensors, what is read, and bytes beside the codes.
FILES: dict[str, tuple[str, Headers, dict[str, Any], int]] = {
    "channels": (
        "fp8-channel",
        {"weight": ("F8_E4M3", (512, 1024)), "weight_scale": ("BF16", (512, 1))},
        {},
        512 * 1024 + 512 * 4,
    ),
    "whole": (
        "fp8-channel",
        {
            "weight": ("F8_E4M3", (512, 1024)),
            "qscale_weight": ("F32", ()),
            "qscale_act": ("F32", ()),
        },
        {},
        512 * 1024 + 512 * 4,
    ),
    "ue8m0": (
        "fp8-block",
        {"weight": ("F8_E4M3", (512, 1024)), "scale": ("F8_E8M0", (4, 8))},
        {},
        512 * 1024 + 32 * 4,
    ),
    "mxfp8": (
        "mxfp8",
        {"weight": ("F8_E4M3", (512, 1024)), "weight_scale_inv": ("U8", (512, 32))},
        {},
        512 * 1024 + 512 * 32,
    ),
    "w8a8": (
        "ct-int8",
        {"weight": ("I8", (512, 1024)), "weight_scale": ("BF16", (512, 1))},
        {},
        512 * 1024 + 512 * 4,
    ),
    "w4a16": (
        "ct-pack",
        {
            "weight_packed": ("I32", (512, 128)),
            "weight_scale": ("BF16", (512, 8)),
            "weight_zero_point": ("I32", (64, 8)),
            "weight_shape": ("I64", (2,)),
        },
        W4,
        512 * 512 + 512 * 8 * (2 + 1),
    ),
    "gptq": (
        "gptq",
        {
            "qweight": ("I32", (128, 512)),
            "qzeros": ("I32", (8, 64)),
            "scales": ("F16", (8, 512)),
            "g_idx": ("I32", (1024,)),
        },
        {},
        512 * 512 + 512 * 8 * (2 + 1) + 1024 * 4,
    ),
    "gptq8": (
        "gptq-v2",
        {
            "qweight": ("I32", (256, 512)),
            "qzeros": ("I32", (8, 128)),
            "scales": ("F16", (8, 512)),
        },
        {"checkpoint_format": "gptq_v2"},
        512 * 1024 + 512 * 8 * (2 + 2),
    ),
    "awq": (
        "awq",
        {
            "qweight": ("I32", (1024, 64)),
            "qzeros": ("I32", (8, 64)),
            "scales": ("F16", (8, 512)),
        },
        {},
        512 * 512 + 512 * 8 * (2 + 1),
    ),
    "mxfp4": (
        "mxfp4",
        {"weight_packed": ("U8", (512, 512)), "weight_scale": ("U8", (512, 32))},
        {},
        512 * 512 + 512 * 32,
    ),
    "int8 bytes": (
        "mxfp4",
        {"weight": ("I8", (512, 512)), "scale": ("F8_E8M0", (512, 32))},
        {},
        512 * 512 + 512 * 32,
    ),
    "nvfp4": (
        "nvfp4",
        {
            "weight_packed": ("U8", (512, 512)),
            "weight_scale": ("F8_E4M3", (512, 64)),
            "weight_global_scale": ("F32", (1,)),
            "input_global_scale": ("F32", (1,)),
        },
        {},
        512 * 512 + 512 * 64 + 512 * 4,
    ),
    "modelopt": (
        "nvfp4-modelopt",
        {
            "weight": ("U8", (512, 512)),
            "weight_scale": ("F8_E4M3", (512, 64)),
            "weight_scale_2": ("F32", ()),
            "input_scale": ("F32", ()),
        },
        {},
        512 * 512 + 512 * 64 + 512 * 4,
    ),
}


def headers(parts: Headers, module: str = MODULE) -> dict[str, Tensor]:
    return {
        f"{module}.{leaf}": Tensor(dtype, shape, math.prod(shape) * SIZES.get(dtype, 1))
        for leaf, (dtype, shape) in parts.items()
    }


def find(parts: Headers, said: dict[str, Any]) -> Any:
    return packed_linears(headers(parts), "", Path("folder"), said)[MODULE]


@pytest.mark.parametrize("file", FILES)
def test_a_format_is_found_by_names_and_dtypes(file: str) -> None:
    name, parts, said, resident_bytes = FILES[file]
    linear = find(parts, said)
    assert (linear.format.name, linear.shape) == (name, (512, 1024))
    assert linear.resident_bytes == resident_bytes
    assert linear.parameters == 512 * 1024


def test_scales_of_activations_are_not_counted() -> None:
    plain = Tensor("BF16", (16, 8), 256)
    tensors = {"model.embed_tokens.weight": plain, **headers(FILES["modelopt"][1])}
    tensors[f"{MODULE}.k_scale"] = Tensor("F32", (), 4)
    weights = sum_weights(tensors, Path("folder"), {})
    assert weights.parameters == 512 * 1024 + 128
    assert weights.dtype == "bfloat16"


def test_stacked_experts() -> None:
    experts = "model.layers.0.mlp.experts"
    tensors = {
        f"{experts}.gate_up_proj_blocks": Tensor("U8", (4, 64, 3, 16), 4 * 64 * 48),
        f"{experts}.gate_up_proj_scales": Tensor("U8", (4, 64, 3), 4 * 64 * 3),
        f"{experts}.gate_up_proj_bias": Tensor("BF16", (4, 64), 512),
    }
    linear = packed_linears(tensors, "", Path("folder"), {})[f"{experts}.gate_up_proj"]
    assert (linear.format.name, linear.shape) == ("mxfp4", (4, 64, 96))
    assert linear.resident_bytes == 4 * 64 * (48 + 3)
    # The bias is a plain tensor, and nothing else is.
    assert sum_weights(tensors, Path("folder"), {}).parameters == 4 * 64 * 96 + 4 * 64


@pytest.mark.parametrize("double", [False, True])
def test_bitsandbytes_says_how_many_numbers_there_are(double: bool) -> None:
    parts: Headers = {
        "weight": ("U8", (512 * 512, 1)),
        "weight.absmax": ("U8" if double else "F32", (8192,)),
        "weight.quant_map": ("F32", (16,)),
        "weight.quant_state.bitsandbytes__nf4": ("U8", (120,)),
    }
    size = 512 * 512 + 8192 * 4 + 64
    if double:
        parts["weight.nested_absmax"] = ("F32", (32,))
        parts["weight.nested_quant_map"] = ("F32", (256,))
        size = 512 * 512 + 8192 + 64 + 32 * 4 + 1024
    linear = find(parts, {})
    assert (linear.format.name, linear.shape) == ("bnb-4bit", (512 * 1024,))
    assert linear.resident_bytes == size


def changed(file: str, leaf: str, header: tuple[str, tuple[int, ...]] | None) -> Headers:
    parts = {**FILES[file][1]}
    del parts[leaf]
    return parts if header is None else {**parts, leaf: header}


@pytest.mark.parametrize(
    ("file", "leaf", "header", "sentence"),
    [
        ("channels", "weight_scale", None, "weight (F8_E4M3 [512, 1024]) is quantised in a format"),
        ("channels", "weight_scale", ("BF16", (511, 1)), "weight_scale has shape [511, 1]; scales"),
        ("channels", "weight", ("F8_E5M2", (512, 1024)), "weight (F8_E5M2"),
        ("w8a8", "weight_scale", None, "weight (I8 [512, 1024]) is quantised"),
        ("w8a8", "weight_scale", ("BF16", (512, 7)), "weight_scale has shape [512, 7], which does"),
        ("w4a16", "weight_scale", None, "weight_packed (I32 [512, 128]) is quantised"),
        ("w4a16", "weight_scale", ("BF16", (512, 7)), "an unknown number of bits by quantization"),
        ("w4a16", "weight_scale", ("I32", (512, 8)), "weight_scale is I32 instead of BF16 or F16"),
        ("w4a16", "weight_zero_point", ("I32", (63, 8)), "has shape [63, 8] instead of [64, 8]"),
        ("gptq", "qzeros", None, "qweight (I32 [128, 512]) is quantised"),
        ("gptq", "qzeros", ("I32", (8, 48)), "codes of 3 bits by the shape [8, 48] of qzeros"),
        ("gptq", "qzeros", ("I32", (7, 64)), "qzeros has shape [7, 64] instead of [8, 64]"),
        ("gptq", "g_idx", ("I32", (1023,)), "g_idx has shape [1023] instead of [1024]"),
        ("gptq", "scales", ("F16", (0, 512)), "qzeros has shape [8, 64] instead of [0, 64]"),
        ("awq", "qzeros", ("I32", (8, 32)), "qzeros has shape [8, 32] instead of [8, 64]"),
        ("awq", "qweight", ("I16", (1024, 64)), "qweight (I16 [1024, 64]) is quantised"),
        ("mxfp4", "weight_scale", ("U8", (512, 16)), "has shape [512, 16] instead of [512, 32]"),
        ("nvfp4", "weight_global_scale", None, "weight_packed (U8 [512, 512]) is quantised"),
        ("nvfp4", "weight_scale", ("F8_E4M3", (512, 32)), "[512, 32] instead of [512, 64]"),
        ("modelopt", "weight_scale_2", ("F32", (4,)), "has shape [4] instead of [1]"),
        ("mxfp8", "weight_scale_inv", ("U8", (512, 16)), "[512, 16]; scales of blocks"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    file: str, leaf: str, header: tuple[str, tuple[int, ...]] | None, sentence: str
) -> None:
    with pytest.raises(ModelUnusable, match=re.escape(sentence)) as refused:
        find(changed(file, leaf, header), FILES[file][2])
    assert f"folder: {MODULE}." in str(refused.value)


def scheme(bits: int, group: int | None, *targets: str) -> dict[str, Any]:
    return {"targets": targets, "weights": {"num_bits": bits, "group_size": group}}


@pytest.mark.parametrize(
    ("schemes", "words", "groups", "inputs"),
    [
        ([scheme(4, 128)], 128, 8, 1024),
        ([scheme(8, 128)], 256, 8, 1024),
        ([scheme(4, None)], 128, 1, 1024),
        # Of two schemes the one that fits, or whose targets name the layer.
        ([scheme(4, 128), scheme(8, 32)], 128, 8, 1024),
        ([scheme(4, None, "re:.*up_proj"), scheme(8, None, "re:.*down_proj")], 128, 1, 1024),
        ([scheme(4, None, "re:.*(", "down_proj"), scheme(8, None, "up_proj")], 128, 1, 512),
    ],
)
def test_bits_of_packed_words_come_from_the_configuration(
    schemes: list[Any], words: int, groups: int, inputs: int
) -> None:
    said = {
        "config_groups": {str(i): {**s, "targets": [*s["targets"]]} for i, s in enumerate(schemes)}
    }
    parts: Headers = {
        "weight_packed": ("I32", (512, words)),
        "weight_scale": ("BF16", (512, groups)),
    }
    assert find(parts, said).shape == (512, inputs)


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"config_groups": {"0": {"weights": {"num_bits": 3, "group_size": 128}}}},
        {"config_groups": {"0": scheme(4, None), "1": scheme(8, None)}},
        {"config_groups": [4]},
    ],
)
def test_words_of_unknown_bits_are_refused(said: dict[str, Any]) -> None:
    parts: Headers = {"weight_packed": ("I32", (512, 96)), "weight_scale": ("BF16", (512, 1))}
    with pytest.raises(ModelUnusable, match=r"up_proj\.weight_packed.* bits"):
        find(parts, said)


@pytest.mark.parametrize(
    "said",
    [
        {"quant_method": "awq", "version": "gemv"},
        {"quant_method": "gptq", "checkpoint_format": "marlin"},
        {"quant_method": "gemma"},
        {"quant_method": "compressed-tensors", "transform_config": {"config_groups": {"a": {}}}},
    ],
)
def test_other_layouts_are_refused_by_what_the_configuration_says(said: dict[str, Any]) -> None:
    with pytest.raises(ModelUnusable, match=r"config\.json: .*quantization_config"):
        check_quantisation({"quantization_config": said}, True, Path("config.json"))
