"""float8 weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray
    from torch import Tensor

BLOCK = 128
LARGEST = 448.0
_GROUP = 32


def pack_blocks(weight: Tensor) -> dict[str, Tensor]:
    """Blocks of 128 x 128."""
    rows, columns = (-(-size // BLOCK) for size in weight.shape)
    scales = torch.empty(rows, columns)
    for row in range(rows):
        for column in range(columns):
            block = tuple(slice(BLOCK * i, BLOCK * (i + 1)) for i in (row, column))
            scales[row, column] = weight[block].abs().max() / LARGEST
    return {"weight": _codes(weight, scales, (BLOCK, BLOCK)), "weight_scale_inv": scales}


def pack_ue8m0_blocks(weight: Tensor) -> dict[str, Tensor]:
    """The same with powers of two, under another name."""
    scales = torch.exp2(torch.log2(pack_blocks(weight)["weight_scale_inv"]).ceil())
    return {
        "weight": _codes(weight, scales, (BLOCK, BLOCK)),
        "scale": scales.to(torch.float8_e8m0fnu),
    }


def pack_channels(weight: Tensor) -> dict[str, Tensor]:
    """A scale for each output, and one for activations."""
    scales = (weight.abs().amax(dim=1, keepdim=True) / LARGEST).bfloat16()
    return {
        "weight": _codes(weight, scales.float(), (1, weight.shape[1])),
        "weight_scale": scales,
        "input_scale": torch.tensor(0.5),
    }


def pack_whole(weight: Tensor) -> dict[str, Tensor]:
    """One for all of it."""
    scale = weight.abs().max() / LARGEST
    codes = _codes(weight, scale.reshape(1, 1), (weight.shape[0], weight.shape[1]))
    return {"weight": codes, "weight_scale_inv": scale, "activation_scale": torch.tensor(0.5)}


def pack_mx(weight: Tensor) -> dict[str, Tensor]:
    """A power of two for each 32 inputs."""
    largest = weight.view(len(weight), -1, _GROUP).abs().amax(dim=2)
    exponents = (torch.log2(largest / LARGEST).ceil() + 127).clamp(1, 254)
    codes = _codes(weight, torch.exp2(exponents - 127), (1, _GROUP))
    return {"weight": codes, "weight_scale": exponents.to(torch.uint8)}


def block_numbers(stored: Mapping[str, Tensor]) -> Tensor:
    """Every weight is its code times its block's scale."""
    scales = stored["weight_scale_inv"] if "weight_scale_inv" in stored else stored["scale"]
    return _times(stored["weight"], scales.float().numpy(), (BLOCK, BLOCK))


def channel_numbers(stored: Mapping[str, Tensor]) -> Tensor:
    """Times its output's scale."""
    weight = stored["weight"]
    scales = stored["weight_scale"] if "weight_scale" in stored else stored["weight_scale_inv"]
    grown = np.broadcast_to(scales.float().numpy().reshape(-1, 1), (len(weight), 1))
    return _times(weight, grown, (1, weight.shape[1]))


def mx_numbers(stored: Mapping[str, Tensor]) -> Tensor:
    """Times two to the power of its group's exponent."""
    exponents = stored["weight_scale"].numpy().astype(np.int32) - 127
    return _times(stored["weight"], np.ldexp(np.float32(1), exponents), (1, _GROUP))


def e4m3(codes: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Sign, four bits of exponent with a bias of 7, three of fraction."""
    exponent, fraction = ((codes >> 3) & 15).astype(np.int32), (codes & 7).astype(np.float32)
    normal = np.ldexp(1 + fraction / 8, exponent - 7)
    numbers = np.where(exponent == 0, np.ldexp(fraction / 8, -6), normal)
    return np.where(codes & 128, -numbers, numbers).astype(np.float32)


def _codes(weight: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    grown = torch.kron(scales, torch.ones(block))[: weight.shape[0], : weight.shape[1]]
    return (weight / grown).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)


def _times(codes: Tensor, scales: NDArray[np.float32], block: tuple[int, int]) -> Tensor:
    numbers = e4m3(codes.view(torch.uint8).numpy())
    grown = np.kron(scales, np.ones(block, np.float32))
    return torch.from_numpy(numbers * grown[: numbers.shape[0], : numbers.shape[1]])
