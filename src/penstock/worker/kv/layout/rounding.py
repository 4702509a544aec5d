"""Vectors as codes of 8 bits: what each is rounded to, which depends on that vector alone.

So a token's KV is the same whatever else is computed in its step, and in whatever chunks. Kernels
of each device do the same; this is what they are tested against.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

MOST = 127  # codes are as many above zero as below
SHARE = 1.0 / MOST
LEAST_SCALE = 1e-30  # of a vector of zeros, and far below what is of any weight


def rounded(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [..., dim] int8 and scales [...] bfloat16 of `vectors` [..., dim].

    A vector that is not finite has NaN for a scale: whoever reads it gets no number.
    """
    exact = vectors.float()
    peaks = exact.abs().amax(dim=-1)
    scales = (peaks * SHARE).clamp_min(LEAST_SCALE).where(peaks.isfinite(), torch.nan).bfloat16()
    # A scale may have been rounded down: the largest number then stays at the end of the codes.
    steps = exact * scales.float().reciprocal()[..., None]
    codes = steps.round().clamp(-MOST, MOST).nan_to_num(0.0).to(torch.int8)
    return codes, scales


def restored(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """What codes stand for."""
    return (codes.float() * scales.float()[..., None]).to(dtype)
