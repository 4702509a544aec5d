"""4-bit codes of a table: MXFP4, NVFP4, bitsandbytes' NF4."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import torch

from penstock.testing.quantised.fp8 import e4m3

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray
    from torch import Tensor

    Numbers = NDArray[np.float32]

_POSITIVE = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E2M1 = np.array([*_POSITIVE, *(-number for number in _POSITIVE)], np.float32)
_NF4 = np.array(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ],
    np.float32,
)  # fmt: skip
_BLOCK = 64
_NESTED = 256


def pack_mxfp4(weight: Tensor) -> dict[str, Tensor]:
    """Single weights, as compressed-tensors has them."""
    packed, exponents = to_mxfp4(weight.numpy())
    return {"weight_packed": torch.from_numpy(packed), "weight_scale": torch.from_numpy(exponents)}


def mxfp4_numbers(stored: Mapping[str, Tensor]) -> Tensor:
    """Times two to the power of the group's exponent."""
    numbers = from_mxfp4(stored["weight_packed"].numpy(), stored["weight_scale"].numpy())
    return torch.from_numpy(numbers)


def to_mxfp4(weight: Numbers) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """[..., inputs] as codes, two to a byte, and exponents of groups of 32."""
    groups = weight.reshape(*weight.shape[:-1], -1, 32)
    largest = np.abs(groups).max(axis=-1, keepdims=True)
    exponents = np.clip(np.ceil(np.log2(np.maximum(largest, 1e-30) / 6)), -127, 127)
    codes = _nearest(groups / np.exp2(exponents), E2M1).reshape(weight.shape)
    return _low_first(codes), (exponents[..., 0] + 127).astype(np.uint8)


def from_mxfp4(packed: NDArray[np.uint8], exponents: NDArray[np.uint8]) -> Numbers:
    """The numbers of those."""
    scales = np.ldexp(np.float32(1), exponents.astype(np.int32) - 127)
    numbers: Numbers = E2M1[_codes(packed)] * np.repeat(scales, 32, axis=-1)
    return numbers


def pack_nvfp4(weight: Tensor) -> dict[str, Tensor]:
    """compressed-tensors: the scales are divided by the number for the whole weight."""
    packed, scales, whole = _to_nvfp4(weight.numpy())
    return {
        "weight_packed": packed,
        "weight_scale": scales,
        "weight_global_scale": torch.tensor([1 / whole]),
        "input_global_scale": torch.tensor([7.0]),
    }


def nvfp4_numbers(stored: Mapping[str, Tensor]) -> Tensor:
    """Code x (scale / the whole weight's)."""
    scales = e4m3(stored["weight_scale"].view(torch.uint8).numpy())
    scales = scales / stored["weight_global_scale"].numpy()
    codes = _codes(stored["weight_packed"].numpy())
    return torch.from_numpy(E2M1[codes] * np.repeat(scales, 16, axis=1))


def pack_nvfp4_modelopt(weight: Tensor) -> dict[str, Tensor]:
    """ModelOpt: it multiplies."""
    packed, scales, whole = _to_nvfp4(weight.numpy())
    return {
        "weight": packed,
        "weight_scale": scales,
        "weight_scale_2": torch.tensor(whole),
        "input_scale": torch.tensor(7.0),
    }


def nvfp4_modelopt_numbers(stored: Mapping[str, Tensor]) -> Tensor:
    """Code x (scale x the whole weight's)."""
    scales = e4m3(stored["weight_scale"].view(torch.uint8).numpy())
    scales = scales * stored["weight_scale_2"].numpy()
    return torch.from_numpy(E2M1[_codes(stored["weight"].numpy())] * np.repeat(scales, 16, axis=1))


def _to_nvfp4(weight: Numbers) -> tuple[Tensor, Tensor, float]:
    groups = weight.reshape(len(weight), -1, 16)
    largest = np.abs(groups).max(axis=2)
    whole = np.float32(largest.max() / (6 * 448))
    scales = torch.from_numpy(np.maximum(largest / 6 / whole, 0.01)).to(torch.float8_e4m3fn)
    steps = scales.float().numpy() * whole
    codes = _nearest(groups / steps[:, :, None], E2M1).reshape(weight.shape)
    return torch.from_numpy(_low_first(codes)), scales, float(whole)


def pack_bitsandbytes(weight: Tensor, *, double: bool) -> dict[str, Tensor]:
    """Blocks of 64 in the order of the numbers, the even number's code in the high half."""
    flat = weight.numpy().reshape(-1, _BLOCK)
    absmax = np.abs(flat).max(axis=1)
    codes = _nearest(flat / absmax[:, None], _NF4).reshape(-1, 2)
    packed = (codes[:, :1] << 4 | codes[:, 1:]).astype(np.uint8)
    state = {"quant_type": "nf4", "blocksize": _BLOCK, "dtype": "float32", "shape": [*weight.shape]}
    stored = {
        "weight": torch.from_numpy(packed),
        "weight.absmax": torch.from_numpy(absmax),
        "weight.quant_map": torch.from_numpy(_NF4.copy()),
    }
    if double:
        table = np.linspace(-1, 1, 256, dtype=np.float32)
        offset = absmax.mean()
        rest = np.pad(absmax - offset, (0, -len(absmax) % _NESTED)).reshape(-1, _NESTED)
        outer = np.abs(rest).max(axis=1)
        bytes_ = _nearest(rest / outer[:, None], table).reshape(-1)[: len(absmax)]
        stored["weight.absmax"] = torch.from_numpy(bytes_.astype(np.uint8))
        stored["weight.nested_absmax"] = torch.from_numpy(outer)
        stored["weight.nested_quant_map"] = torch.from_numpy(table)
        state |= {"nested_blocksize": _NESTED, "nested_offset": float(offset)}
    text = json.dumps(state).encode()
    stored["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(text), dtype=torch.uint8)
    return stored


def bitsandbytes_numbers(stored: Mapping[str, Tensor]) -> Tensor:
    """The table's number times the block's largest, which may be a table's number itself."""
    state = json.loads(bytes(stored["weight.quant_state.bitsandbytes__nf4"].tolist()))
    absmax = stored["weight.absmax"].numpy()
    if absmax.dtype == np.uint8:
        outer = np.repeat(stored["weight.nested_absmax"].numpy(), _NESTED)[: len(absmax)]
        absmax = stored["weight.nested_quant_map"].numpy()[absmax] * outer
        absmax = absmax + np.float32(state["nested_offset"])
    packed = stored["weight"].numpy().reshape(-1)
    codes = np.stack([packed >> 4, packed & 15], axis=1).reshape(-1)
    numbers = stored["weight.quant_map"].numpy()[codes] * np.repeat(absmax, state["blocksize"])
    return torch.from_numpy(numbers.reshape(state["shape"]))


def _nearest(numbers: Numbers, table: Numbers) -> NDArray[np.int64]:
    order = np.argsort(table, kind="stable")
    between = (table[order][1:] + table[order][:-1]) / 2
    nearest: NDArray[np.int64] = order[np.searchsorted(between, numbers)]
    return nearest


def _low_first(codes: NDArray[np.int64]) -> NDArray[np.uint8]:
    return (codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8)


def _codes(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
