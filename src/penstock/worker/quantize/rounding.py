"""Rows of weights as codes and scales; of several scales the one that loses the least.

What is lost is the sum of the squares of the differences. A scale is rounded to the type that it is
stored in before the codes are made, so that they are the best for the number that is stored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

_LARGEST_FP8 = 448.0
# The largest number of a group becomes the end of the range or more, which is then cut off. By
# bits; the more bits there are, the less is gained.
_DIVISORS: dict[int, Sequence[float]] = {
    4: (7, 7.5, 8, 8.5, 9, 9.5, 10, 10.5, 11, 11.5, 12, 12.5),
    8: (126, 128, 130),
}
# float8 has the same steps between any two powers of two: the scale says where numbers lie in them.
_FP8_FACTORS = (1.0, 1.3, 1.54, 1.76)


def to_integers(
    rows: Tensor, bits: int, group: int, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Codes [outputs, inputs] from 0 on, of which the middle means zero, and scales [outputs,
    groups]; ValueError if numbers are not finite.

    There is one code more below the middle than above it, so the largest number of a group is put
    there: scales are negative where that is a positive one.
    """
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    groups = torch.unflatten(rows, 1, (-1, group))
    least, most = torch.aminmax(groups, dim=2, keepdim=True)
    start = torch.where(most > -least, -most, -least)
    start = start.masked_fill_(start == 0, 1.0)
    fitted, losses = [], []
    for divisor in _DIVISORS[bits]:
        codes = (groups * (divisor / start)).round_().clamp_(low, high)
        product = torch.linalg.vecdot(groups, codes).unsqueeze(2)
        # The scale that is best for these codes; the loss is less by what it accounts for.
        fitted.append(product / torch.linalg.vecdot(codes, codes).unsqueeze(2).clamp_(min=1))
        losses.append(-product * fitted[-1])
    stored = _stored(_least(fitted, losses), scale_dtype)
    codes = (groups / stored.float()).round_().clamp_(low, high).sub_(low)
    return codes.flatten(1).to(torch.uint8), stored.squeeze(2)


def to_fp8(rows: Tensor, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes [outputs, inputs] in e4m3 and scales [outputs, 1]; ValueError if numbers are not
    finite."""
    least, most = torch.aminmax(rows, dim=1, keepdim=True)
    start = torch.maximum(most, -least) / _LARGEST_FP8
    tried = [_stored(start * factor, scale_dtype) for factor in _FP8_FACTORS]
    losses = [
        (_fp8(rows, scales).float() * scales.float()).sub_(rows).square_().sum(1, keepdim=True)
        for scales in tried
    ]
    scales = _least(tried, losses)
    return _fp8(rows, scales), scales


def to_words(codes: Tensor, bits: int) -> Tensor:
    """Codes [outputs, inputs] in words of 32 bits, the first in the lowest; whole words only."""
    if bits == 4:
        codes = codes[:, 0::2] | (codes[:, 1::2] << 4)
    return codes.contiguous().view(torch.int32)


def _fp8(rows: Tensor, scales: Tensor) -> Tensor:
    largest = _LARGEST_FP8
    return (rows / scales.float()).clamp_(-largest, largest).to(torch.float8_e4m3fn)


def _least(tried: Sequence[Tensor], losses: Sequence[Tensor]) -> Tensor:
    """For each group, of what was tried that with the least loss."""
    which = torch.cat(list(losses), dim=-1).argmin(dim=-1, keepdim=True)
    return torch.cat(list(tried), dim=-1).gather(-1, which)


def _stored(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """As they are stored: 1 for outputs that are zero, or too small for the type."""
    stored = scales.to(dtype)
    if not bool(stored.isfinite().all()):
        raise ValueError("has numbers that are not finite, or too large for its scales")
    return stored.masked_fill_(stored == 0, 1)
