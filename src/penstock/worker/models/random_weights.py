"""Made-up tensors of `random:` shapes with packed weights, on the device.

Weights come out as wide as those that transformers makes up, so that activations stay finite.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from penstock.catalog.linear_formats import split_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from penstock.catalog.weights import Tensor as Header

_WIDTH = 0.02  # standard deviation of weights
_NAN_E4M3 = 0x7F
_LARGEST_E4M3 = 0x7E
_Q4_K_BYTES = 144
_Q4_K_SCALES_END = 4  # of a block's bytes: what its scales and mins are multiples of
# Of random six-bit scales, six-bit mins and four-bit codes: scale x code has 7.5 times the mean of
# a min, and the deviation of scale x code - 7.5 x min is 258.
_Q4_K_MIDDLE, _Q4_K_WIDTH = 7.5, 258.0


def made_up(
    headers: Mapping[str, Header], device: torch.device, seed: int
) -> Iterator[tuple[str, Tensor]]:
    """A tensor for each header, by name."""
    chance = torch.Generator(device).manual_seed(seed)
    for name, header in headers.items():
        make = _MAKERS.get(split_name(name)[1], _MAKERS.get(header.dtype))
        yield name, (make or _numbers)(header, chance)


def _numbers(header: Header, chance: torch.Generator) -> Tensor:
    numbers = torch.empty(header.shape, dtype=torch.bfloat16, device=chance.device)
    if len(header.shape) == 1:  # of a norm
        return numbers.fill_(1)
    return numbers.normal_(0, _WIDTH, generator=chance)


def _bytes(chance: torch.Generator, *shape: int) -> Tensor:
    return torch.randint(256, shape, dtype=torch.uint8, device=chance.device, generator=chance)


def _fp8_codes(header: Header, chance: torch.Generator) -> Tensor:
    codes = _bytes(chance, *header.shape)
    codes -= ((codes & _NAN_E4M3) == _NAN_E4M3).byte()
    return codes.view(torch.float8_e4m3fn)


def _fp8_scales(header: Header, chance: torch.Generator) -> Tensor:
    codes = torch.arange(_LARGEST_E4M3 + 1, dtype=torch.uint8).view(torch.float8_e4m3fn)
    width = float(codes.float().square().mean().sqrt())
    return torch.full(header.shape, _WIDTH / width, device=chance.device)


def _int4_codes(header: Header, chance: torch.Generator) -> Tensor:
    *outer, words = header.shape
    return _bytes(chance, *outer, 4 * words).view(torch.int32)


def _int4_scales(header: Header, chance: torch.Generator) -> Tensor:
    width = float((torch.arange(16) - 8).float().square().mean().sqrt())
    scales = torch.full(header.shape, _WIDTH / width, device=chance.device)
    return scales.to(torch.bfloat16)


def _q4_k(header: Header, chance: torch.Generator) -> Tensor:
    blocks = _bytes(chance, header.size_bytes // _Q4_K_BYTES, _Q4_K_BYTES)
    step = _WIDTH / _Q4_K_WIDTH
    steps = torch.tensor([step, _Q4_K_MIDDLE * step], dtype=torch.float16, device=chance.device)
    blocks[:, :_Q4_K_SCALES_END] = steps.view(torch.uint8)
    return blocks.view(header.shape[0], -1)


# By the last part of a name, or by the dtype.
_MAKERS: dict[str, Callable[[Header, torch.Generator], Tensor]] = {
    "weight_scale_inv": _fp8_scales,
    "weight_packed": _int4_codes,
    "weight_scale": _int4_scales,
    "F8_E4M3": _fp8_codes,
    "GGUF_Q4_K": _q4_k,
}
