"""Packed weights from the tensors of files, one function for each format.

What lies in a file as it is computed with stays there, mapped; other layouts are brought into it,
one weight at a time.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch

from penstock.catalog.linear_formats import FP8_SCALES
from penstock.worker.models.linear import words
from penstock.worker.models.linear.block_fp8 import BlockFp8Weight
from penstock.worker.models.linear.grouped import (
    E2m1Weight,
    Fp8Weight,
    Int4Weight,
    Int8Weight,
    NestedTableWeight,
    Nvfp4ModelOptWeight,
    Nvfp4Weight,
    TableWeight,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from penstock.catalog.linear_formats import FormattedWeight
    from penstock.worker.models.linear.packed import PackedWeight

    Stored = Mapping[str, Tensor]  # by the last parts of their names

_LARGEST_INT8 = 127
_AT_ONCE = 1 << 20  # weights
_NAN_E4M3 = 0x7F  # and with the sign
_NAN_EXPONENT = 0xFF


class BrokenTensor(ValueError):  # noqa: N818 - says what was found
    """A tensor, by the last part of its name, and what is wrong with it."""

    def __init__(self, leaf: str, problem: str) -> None:
        super().__init__(f"{leaf} {problem}")
        self.leaf, self.problem = leaf, problem


def rounded_to_int8(stored: Stored, scratch: Tensor, linear: FormattedWeight) -> Int8Weight:
    """From weights of full precision: a scale for each output."""
    weight, device = stored["weight"], scratch.device
    codes = torch.empty(weight.shape, dtype=torch.int8, device=device)
    scales = torch.empty(weight.shape[0], 1, dtype=torch.float32, device=device)
    # A few outputs at a time: in float32 the whole weight would be a multiple of the result.
    some = max(1, _AT_ONCE // weight.shape[1])
    for begin in range(0, weight.shape[0], some):
        rows = slice(begin, begin + some)
        numbers = weight[rows].to(device, torch.float32)
        scale = numbers.abs().amax(dim=1, keepdim=True) / _LARGEST_INT8
        scale[scale == 0] = 1.0  # of outputs that are zero
        scales[rows] = scale
        codes[rows] = (numbers / scale).round_()
    return Int8Weight(codes, scales, scratch)


def block_fp8(stored: Stored, scratch: Tensor, linear: FormattedWeight) -> BlockFp8Weight:
    """e4m3 in blocks of 128 x 128."""
    leaf = _fp8_scales(linear)
    scales = _exponents(stored, leaf, scratch) if stored[leaf].dtype in _BYTES else stored[leaf]
    scales = scales.to(scratch.device, torch.float32)
    return BlockFp8Weight(_fp8_codes(stored, scratch), _finite(leaf, scales), scratch)


def channel_fp8(stored: Stored, scratch: Tensor, linear: FormattedWeight) -> Fp8Weight:
    """e4m3 with a scale for each output, or one for all."""
    leaf = _fp8_scales(linear)
    return Fp8Weight(
        _fp8_codes(stored, scratch), _group_scales(stored, leaf, scratch, linear), scratch
    )


def mxfp8(stored: Stored, scratch: Tensor, linear: FormattedWeight) -> Fp8Weight:
    """e4m3 in groups of 32."""
    scales = _exponents(stored, _fp8_scales(linear), scratch)
    return Fp8Weight(_fp8_codes(stored, scratch), scales, scratch)


def ct_int8(stored: Stored, scratch: Tensor, linear: FormattedWeight) -> Int8Weight:
    """compressed-tensors `int-quantized`."""
    scales = _group_scales(stored, "weight_scale", scratch, linear)
    codes = stored["weight"].to(scratch.device)
    if (zeros := stored.get("weight_zero_point")) is None:
        return Int8Weight(codes, scales, scratch)
    zeros = zeros.to(scratch.device).reshape(-1, scales.shape[1]).expand(len(scales), -1)
    return Int8Weight(codes, scales, scratch, zeros=zeros.contiguous())


def ct_packed(stored: Stored, scratch: Tensor, linear: FormattedWeight) -> PackedWeight:
    """compressed-tensors `pack-quantized`."""
    said = stored.get("weight_shape")
    if said is not None and tuple(said.tolist()) != linear.shape:
        raise BrokenTensor("weight_shape", f"is {said.tolist()} instead of {list(linear.shape)}")
    outputs, inputs = linear.shape
    packed = stored["weight_packed"].to(scratch.device)
    bits = packed.shape[1] * 32 // inputs
    scales = _group_scales(stored, "weight_scale", scratch, linear)
    zeros = stored.get("weight_zero_point")
    if zeros is not None:
        zeros = zeros.to(scratch.device)
        if zeros.dtype == torch.int8:  # signed, unlike packed ones
            zeros = (zeros.reshape(outputs, -1) + (1 << (bits - 1))).view(torch.uint8)
        else:
            zeros = words.unpack_words(zeros.t(), bits)[:, :outputs].t().contiguous()
    others = {"zeros": zeros, "order": _order(stored, "weight_g_idx", scales)}
    return _integers(packed.view(torch.uint8), bits, scales, scratch, others)


def gptq(stored: Stored, scratch: Tensor, linear: FormattedWeight) -> PackedWeight:
    """GPTQ, whose zeros are one less than they mean."""
    return _gptq(stored, scratch, linear, added=1)


def gptq_v2(stored: Stored, scratch: Tensor, linear: FormattedWeight) -> PackedWeight:
    """GPTQ with zeros as they are."""
    return _gptq(stored, scratch, linear, added=0)


def _gptq(stored: Stored, scratch: Tensor, linear: FormattedWeight, added: int) -> PackedWeight:
    inputs = linear.shape[1]
    packed = stored["qweight"].to(scratch.device).t().contiguous()  # [outputs, words]
    bits = packed.shape[1] * 32 // inputs
    scales = _transposed_scales(stored, scratch)
    zeros = words.unpack_words(stored["qzeros"].to(scratch.device), bits).t().contiguous()
    # Files are labelled wrongly. Of symmetric ones every zero is in the middle, and shows it.
    middle, first = 1 << (bits - 1), int(zeros[0, 0])
    if first in (middle - 1, middle) and bool((zeros == first).all()):
        added = middle - first
    # Up to one more than a code can be.
    zeros = zeros.add_(added) if bits == 4 else zeros.to(torch.int16).add_(added)
    others = {"zeros": zeros, "order": _order(stored, "g_idx", scales)}
    return _integers(packed.view(torch.uint8), bits, scales, scratch, others)


def awq(stored: Stored, scratch: Tensor, linear: FormattedWeight) -> Int4Weight:
    """AWQ `gemm`."""
    codes = words.awq_codes(stored["qweight"].to(scratch.device))
    zeros = words.unpack_awq(stored["qzeros"].to(scratch.device)).t().contiguous()
    return Int4Weight(codes, _transposed_scales(stored, scratch), scratch, zeros=zeros)


def mxfp4(stored: Stored, scratch: Tensor, linear: FormattedWeight) -> E2m1Weight:
    """e2m1 in groups of 32."""
    leaves = linear.tensors
    scales_leaf = next(leaf for leaf in ("_scales", "weight_scale", "scale") if leaf in leaves)
    (codes_leaf,) = leaves - {scales_leaf}
    codes = stored[codes_leaf].to(scratch.device).view(torch.uint8)
    scales = _exponents(stored, scales_leaf, scratch)
    return E2m1Weight(codes.reshape(len(scales), -1), scales, scratch)


def nvfp4(stored: Stored, scratch: Tensor, linear: FormattedWeight) -> Nvfp4Weight:
    """compressed-tensors' NVFP4."""
    return Nvfp4Weight(**_nvfp4(stored, scratch, "weight_packed", "weight_global_scale"))


def nvfp4_modelopt(stored: Stored, scratch: Tensor, linear: FormattedWeight) -> Nvfp4Weight:
    """ModelOpt's."""
    return Nvfp4ModelOptWeight(**_nvfp4(stored, scratch, "weight", "weight_scale_2"))


def _nvfp4(stored: Stored, scratch: Tensor, codes: str, whole: str) -> dict[str, Tensor]:
    scales = stored["weight_scale"].to(scratch.device)
    _refuse_nan("weight_scale", scales)
    number = _finite(whole, stored[whole].to(scratch.device, torch.float32))
    if not bool(number != 0):
        raise BrokenTensor(whole, "is zero")
    return {
        "codes": stored[codes].to(scratch.device),
        "scales": scales,
        "scratch": scratch,
        "whole": number.reshape(1, 1).repeat(len(scales), 1),
    }


def bitsandbytes(stored: Stored, scratch: Tensor, linear: FormattedWeight) -> TableWeight:
    """NF4 and FP4."""
    state_leaf = next(leaf for leaf in linear.tensors if leaf.startswith("weight.quant_state."))
    state = _json(state_leaf, stored[state_leaf])
    outputs, inputs = linear.shape
    if state.get("shape") != [outputs, inputs]:
        raise BrokenTensor(state_leaf, f"has shape {state.get('shape')}, not {list(linear.shape)}")
    block = state.get("blocksize")
    if not isinstance(block, int) or block < 2 or inputs % block:
        raise BrokenTensor(state_leaf, f"has blocks of {block}, which are not parts of {inputs}")
    absmax = stored["weight.absmax"].to(scratch.device)
    if absmax.numel() * block != outputs * inputs:
        raise BrokenTensor("weight.absmax", f"has {absmax.numel()} scales of blocks of {block}")
    codes = words.swap_nibbles(stored["weight"].to(scratch.device)).view(outputs, inputs // 2)
    scales = absmax.view(outputs, inputs // block)
    table = _finite("weight.quant_map", stored["weight.quant_map"].to(scratch.device))
    if absmax.dtype != torch.uint8:
        return TableWeight(codes, _finite("weight.absmax", scales), scratch, table=table)
    nested = NestedTableWeight(codes, scales, scratch, table=table, **_nested(stored, scratch))
    offset = state.get("nested_offset")
    if state.get("nested_blocksize") != nested.NESTED or not isinstance(offset, float | int):
        raise BrokenTensor(state_leaf, f"has other scales of scales than of {nested.NESTED}")
    if nested.nested_scales.numel() != -(-absmax.numel() // nested.NESTED):
        raise BrokenTensor("weight.nested_absmax", f"has {nested.nested_scales.numel()} numbers")
    nested.offset = float(offset)
    return nested


def _nested(stored: Stored, scratch: Tensor) -> dict[str, Tensor]:
    leaves = {"nested_scales": "weight.nested_absmax", "nested_table": "weight.nested_quant_map"}
    return {name: _finite(leaf, stored[leaf].to(scratch.device)) for name, leaf in leaves.items()}


def _json(leaf: str, tensor: Tensor) -> dict[str, Any]:
    try:
        value = json.loads(bytes(tensor.tolist()))
    except (ValueError, RecursionError) as error:
        raise BrokenTensor(leaf, f"is not JSON: {error}") from error
    return value if isinstance(value, dict) else {}


_BYTES = (torch.uint8, torch.float8_e8m0fnu)


def _fp8_scales(linear: FormattedWeight) -> str:
    return next(leaf for leaf in FP8_SCALES if leaf in linear.tensors)


def _fp8_codes(stored: Stored, scratch: Tensor) -> Tensor:
    codes = stored["weight"].to(scratch.device)
    _refuse_nan("weight", codes)
    return codes


def _refuse_nan(leaf: str, codes: Tensor) -> None:
    for some in torch.split(codes.view(torch.uint8), max(1, _AT_ONCE // max(1, codes.shape[1]))):
        if bool(((some & _NAN_E4M3) == _NAN_E4M3).any()):
            raise BrokenTensor(leaf, "has codes that are not numbers: the file is damaged")


def _finite(leaf: str, numbers: Tensor) -> Tensor:
    if not bool(numbers.isfinite().all()):
        raise BrokenTensor(leaf, "is not finite: the file is damaged")
    return numbers


def _exponents(stored: Stored, leaf: str, scratch: Tensor) -> Tensor:
    """Scales that are powers of two, in a byte."""
    exponents = stored[leaf].to(scratch.device).view(torch.uint8)
    if bool((exponents == _NAN_EXPONENT).any()):
        raise BrokenTensor(leaf, "has scales that are not numbers: the file is damaged")
    return exponents.view(torch.float8_e8m0fnu)


def _group_scales(stored: Stored, leaf: str, scratch: Tensor, linear: FormattedWeight) -> Tensor:
    """[outputs, groups] as stored, or [outputs, 1] in float32."""
    scales = _finite(leaf, stored[leaf].to(scratch.device))
    outputs = linear.shape[0]
    if scales.numel() in (1, outputs):
        return scales.to(torch.float32).reshape(-1, 1).expand(outputs, 1).contiguous()
    return scales


def _transposed_scales(stored: Stored, scratch: Tensor) -> Tensor:
    scales = _finite("scales", stored["scales"].to(scratch.device)).t().contiguous()
    return scales.float() if scales.shape[1] == 1 else scales


def _order(stored: Stored, leaf: str, scales: Tensor) -> Tensor | None:
    if (groups := stored.get(leaf)) is None:
        return None
    try:
        return words.order_of(groups.to(scales.device), scales.shape[1])
    except ValueError as error:
        raise BrokenTensor(leaf, str(error)) from error


def _integers(
    codes: Tensor, bits: int, scales: Tensor, scratch: Tensor, others: Mapping[str, Tensor | None]
) -> PackedWeight:
    """Of unsigned codes; `others` may have zeros [outputs, groups] and an order."""
    given = {name: tensor for name, tensor in others.items() if tensor is not None}
    if (order := given.get("order")) is not None:
        codes = words.reorder_columns(codes, order, bits)
    if bits == 4:
        return Int4Weight(codes, scales, scratch, **given)
    # All 8-bit integers are signed in memory.
    if (zeros := given.get("zeros")) is not None:
        signed = zeros - 128 if zeros.dtype == torch.int16 else (zeros ^ 0x80).view(torch.int8)
        given["zeros"] = signed
    return Int8Weight((codes ^ 0x80).view(torch.int8), scales, scratch, **given)
