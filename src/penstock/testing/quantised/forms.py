"""Formats of single weights: how a weight is stored, and what the stored tensors mean."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from penstock.testing.quantised import four_bits, fp8, integers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    Stored = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Form:
    """One variant of a format."""

    format: str  # the catalog's name
    pack: Callable[[Tensor], Stored]  # by the last parts of the tensors' names
    numbers: Callable[[Mapping[str, Tensor]], Tensor]
    said: dict[str, Any] = field(default_factory=dict)  # the quantization_config


def _ct(bits: int, group: int | None = None) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "group_size": group}
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}

FORMS: dict[str, Form] = {
    "fp8-block": Form(
        "fp8-block",
        fp8.pack_blocks,
        fp8.block_numbers,
        {**_FP8, "weight_block_size": [128, 128]},
    ),
    "fp8-block-ue8m0": Form("fp8-block", fp8.pack_ue8m0_blocks, fp8.block_numbers, _FP8),
    "fp8-channel": Form("fp8-channel", fp8.pack_channels, fp8.channel_numbers, _ct(8)),
    "fp8-tensor": Form("fp8-channel", fp8.pack_whole, fp8.channel_numbers, _FP8),
    "mxfp8": Form("mxfp8", fp8.pack_mx, fp8.mx_numbers, {"quant_method": "mxfp8"}),
    "ct-int8": Form(
        "ct-int8", partial(integers.pack_ct_int8, group=0), integers.ct_int8_numbers, _ct(8)
    ),
    "ct-int8-asymmetric": Form(
        "ct-int8",
        partial(integers.pack_ct_int8, group=32, asymmetric=True),
        integers.ct_int8_numbers,
        _ct(8, 32),
    ),
    "ct-pack4": Form(
        "ct-pack", partial(integers.pack_ct, bits=4, group=32), integers.ct_numbers, _ct(4, 32)
    ),
    "ct-pack4-channel": Form(
        "ct-pack", partial(integers.pack_ct, bits=4, group=0), integers.ct_numbers, _ct(4)
    ),
    "ct-pack4-asymmetric": Form(
        "ct-pack",
        partial(integers.pack_ct, bits=4, group=32, asymmetric=True),
        integers.ct_numbers,
        _ct(4, 32),
    ),
    "ct-pack4-order": Form(
        "ct-pack",
        partial(integers.pack_ct, bits=4, group=32, asymmetric=True, ordered=True),
        integers.ct_numbers,
        _ct(4, 32),
    ),
    "ct-pack8": Form(
        "ct-pack",
        partial(integers.pack_ct, bits=8, group=32, asymmetric=True),
        integers.ct_numbers,
        _ct(8, 32),
    ),
    "gptq": Form(
        "gptq",
        partial(integers.pack_gptq, bits=4, group=32),
        partial(integers.gptq_numbers, added=1),
        _GPTQ,
    ),
    "gptq8": Form(
        "gptq",
        partial(integers.pack_gptq, bits=8, group=32),
        partial(integers.gptq_numbers, added=1),
        _GPTQ,
    ),
    "gptq-order": Form(
        "gptq",
        partial(integers.pack_gptq, bits=4, group=32, ordered=True),
        partial(integers.gptq_numbers, added=1),
        _GPTQ,
    ),
    "gptq-v2": Form(
        "gptq-v2",
        partial(integers.pack_gptq, bits=4, group=32, added=0),
        partial(integers.gptq_numbers, added=0),
        {**_GPTQ, "checkpoint_format": "gptq_v2"},
    ),
    # As some files are: labelled v1, with the zeros of v2.
    "gptq-mislabelled": Form(
        "gptq",
        partial(integers.pack_gptq, bits=4, group=32, added=0, symmetric=True),
        partial(integers.gptq_numbers, added=0),
        _GPTQ,
    ),
    "awq": Form(
        "awq",
        partial(integers.pack_awq, group=32),
        integers.awq_numbers,
        {"quant_method": "awq", "bits": 4, "version": "gemm"},
    ),
    "mxfp4": Form(
        "mxfp4",
        four_bits.pack_mxfp4,
        four_bits.mxfp4_numbers,
        {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"},
    ),
    "nvfp4": Form(
        "nvfp4",
        four_bits.pack_nvfp4,
        four_bits.nvfp4_numbers,
        {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
    ),
    "nvfp4-modelopt": Form(
        "nvfp4-modelopt",
        four_bits.pack_nvfp4_modelopt,
        four_bits.nvfp4_modelopt_numbers,
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    ),
    "nf4": Form(
        "bnb-4bit",
        partial(four_bits.pack_bitsandbytes, double=False),
        four_bits.bitsandbytes_numbers,
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
    ),
    "nf4-double": Form(
        "bnb-4bit",
        partial(four_bits.pack_bitsandbytes, double=True),
        four_bits.bitsandbytes_numbers,
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
    ),
}


def int8_numbers(weight: Tensor) -> Tensor:
    """Every weight rounded to a 127th of the largest of its output."""
    numbers = weight.float().numpy()
    scale = np.abs(numbers).max(axis=1, keepdims=True) / np.float32(127)
    scale[scale == 0] = 1
    return torch.from_numpy(np.rint(numbers / scale).astype(np.float32) * scale)
