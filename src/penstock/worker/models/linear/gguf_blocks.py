"""Weights in GGUF's blocks, as the file has them: rows of bytes, a block's scales among its codes.

The numbers are those of llama.cpp's own de-quantisation, to the last bit: float32, one operation
after the other.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

import torch

from penstock.catalog.linear_formats import GGUF_BLOCKS, GgufBlocks
from penstock.worker.models.linear.packed import PackedWeight

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from penstock.catalog.linear_formats import FormattedWeight

_AT_ONCE = 1 << 20  # weights that are de-quantised together: their parts take a multiple
# What 4-bit codes of the IQ4 types stand for.
TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


class BlockKernel(Protocol):
    """What a backend computes better for one type."""

    def multiply(self, weight: GgufWeight, rows: Tensor, out: Tensor) -> bool:
        """Put the product into `out`; False: so many rows are better multiplied by tiles."""
        ...

    def dequantise(self, weight: GgufWeight, begin: int, out: Tensor) -> None:
        """The numbers of outputs from `begin` on, into contiguous memory."""
        ...


class GgufWeight(PackedWeight):
    """Blocks [outputs, bytes of a row]."""

    format: ClassVar[GgufBlocks]
    kernel: BlockKernel | None = None

    @property
    def shape(self) -> tuple[int, int]:
        block = self.format.block
        outputs, row_bytes = self.codes.shape
        return outputs, row_bytes // block.size_bytes * block.elements

    @classmethod
    def read(
        cls, stored: Mapping[str, Tensor], scratch: Tensor, linear: FormattedWeight | None = None
    ) -> Self:
        """From the rows of a file, which stay there on a CPU and say all there is to know."""
        return cls(stored["weight"].to(scratch.device), scratch)

    def __init__(self, codes: Tensor, scratch: Tensor) -> None:
        super().__init__(codes, codes.new_empty(0), scratch)

    def rows(self, indices: Tensor) -> Tensor:
        chosen = type(self)(self.codes[indices], self.scratch)
        chosen.kernel = self.kernel
        return chosen.dequantised()

    def multiply(self, rows: Tensor, out: Tensor) -> None:
        if self.kernel is None or not self.kernel.multiply(self, rows, out):
            super().multiply(rows, out)

    def dequantise(self, begin: int, end: int, out: Tensor) -> None:
        if self.kernel is not None and out.is_contiguous():
            self.kernel.dequantise(self, begin, out)
            return
        some = max(1, _AT_ONCE // self.shape[1])
        for first in range(begin, end, some):
            last = min(first + some, end)
            blocks = self.codes[first:last].reshape(-1, self.format.block.size_bytes)
            out[first - begin : last - begin] = self.numbers(blocks).view(last - first, -1)

    @staticmethod
    @abstractmethod
    def numbers(blocks: Tensor) -> Tensor:
        """The weights [blocks, elements] of blocks [blocks, bytes], float32."""

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self | None:
        if len({part.codes.shape[1] for part in parts}) != 1:
            return None
        return cls(torch.cat([part.codes for part in parts]), parts[0].scratch)

    def view(self, begin: int, end: int) -> Self:
        return type(self)(self.codes[begin:end], self.scratch)


def _halves(blocks: Tensor, at: int, count: int = 1) -> Tensor:
    """float16 numbers of each block, as float32."""
    return blocks[:, at : at + 2 * count].contiguous().view(torch.float16).float()


def _nibbles(codes: Tensor) -> Tensor:
    """The low four bits of all bytes, then the high ones: [..., 2, bytes]."""
    return torch.stack((codes & 15, codes >> 4), dim=-2)


def _fifth_bits(blocks: Tensor, at: int) -> Tensor:
    """Of 32 codes: a bit of each in four bytes, in order; at its place."""
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    return ((blocks[:, at : at + 4, None] >> shifts) & 1).flatten(1) << 4


def _twos(device: torch.device) -> Tensor:
    """Where the pairs of bits of a byte begin."""
    return 2 * torch.arange(4, dtype=torch.uint8, device=device)


class _Q40(GgufWeight):
    @staticmethod
    def numbers(blocks: Tensor) -> Tensor:
        return _halves(blocks, 0) * (_nibbles(blocks[:, 2:]).flatten(1).to(torch.int8) - 8)


class _Q41(GgufWeight):
    @staticmethod
    def numbers(blocks: Tensor) -> Tensor:
        return _halves(blocks, 0) * _nibbles(blocks[:, 4:]).flatten(1) + _halves(blocks, 2)


class _Q50(GgufWeight):
    @staticmethod
    def numbers(blocks: Tensor) -> Tensor:
        codes = _nibbles(blocks[:, 6:]).flatten(1) | _fifth_bits(blocks, 2)
        return _halves(blocks, 0) * (codes.to(torch.int8) - 16)


class _Q51(GgufWeight):
    @staticmethod
    def numbers(blocks: Tensor) -> Tensor:
        codes = _nibbles(blocks[:, 8:]).flatten(1) | _fifth_bits(blocks, 4)
        return _halves(blocks, 0) * codes + _halves(blocks, 2)


class _Q80(GgufWeight):
    @staticmethod
    def numbers(blocks: Tensor) -> Tensor:
        return blocks[:, 2:].contiguous().view(torch.int8) * _halves(blocks, 0)


class _Q2K(GgufWeight):
    @staticmethod
    def numbers(blocks: Tensor) -> Tensor:
        steps, least = (_halves(blocks, at) for at in (80, 82))
        scales = steps * (blocks[:, :16] & 15)
        mins = least * (blocks[:, :16] >> 4)
        shifts = _twos(blocks.device)
        # Two halves of 32 bytes; each byte has a code of four groups of 32.
        codes = (blocks[:, 16:80].view(-1, 2, 1, 32) >> shifts[:, None]) & 3
        return (scales[:, :, None] * codes.view(-1, 16, 16) - mins[:, :, None]).flatten(1)


class _Q3K(GgufWeight):
    @staticmethod
    def numbers(blocks: Tensor) -> Tensor:
        low, high = blocks[:, 96:104], blocks[:, 104:108]
        twos = _twos(blocks.device)
        top = ((high[:, None] >> twos[:, None]) & 3).flatten(1) << 4
        scales = (_nibbles(low).flatten(1) | top).to(torch.int8) - 32
        scales = _halves(blocks, 108) * scales
        codes = (blocks[:, 32:96].view(-1, 2, 1, 32) >> twos[:, None]) & 3
        # A bit of each of eight groups; where it is not set, four less.
        shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)
        less = ((blocks[:, None, :32] >> shifts[:, None]) & 1) ^ 1
        numbers = codes.view(-1, 256).to(torch.int8) - (less.view(-1, 256) << 2).to(torch.int8)
        return (scales[:, :, None] * numbers.view(-1, 16, 16)).flatten(1)


def _six_bits(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Eight scales and eight mins of the twelve bytes that Q4_K and Q5_K have for them."""
    first, second, third = torch.split(packed, 4, dim=1)
    scales = torch.cat((first & 63, (third & 15) | ((first >> 6) << 4)), dim=1)
    mins = torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), dim=1)
    return scales, mins


def _with_mins(blocks: Tensor, codes: Tensor) -> Tensor:
    """Codes [blocks, 8, 32] as numbers."""
    scales, mins = _six_bits(blocks[:, 4:16])
    steps = _halves(blocks, 0) * scales
    least = _halves(blocks, 2) * mins
    return (steps[:, :, None] * codes - least[:, :, None]).flatten(1)


class _Q4K(GgufWeight):
    @staticmethod
    def numbers(blocks: Tensor) -> Tensor:
        return _with_mins(blocks, _nibbles(blocks[:, 16:].view(-1, 4, 32)).flatten(1, 2))


class _Q5K(GgufWeight):
    @staticmethod
    def numbers(blocks: Tensor) -> Tensor:
        shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)
        fifth = ((blocks[:, None, 16:48] >> shifts[:, None]) & 1) << 4
        codes = _nibbles(blocks[:, 48:].view(-1, 4, 32)).flatten(1, 2)
        return _with_mins(blocks, codes | fifth)


class _Q6K(GgufWeight):
    @staticmethod
    def numbers(blocks: Tensor) -> Tensor:
        low = _nibbles(blocks[:, :128].view(-1, 2, 64)).view(-1, 2, 4, 32)
        twos = _twos(blocks.device)
        high = (blocks[:, 128:192].view(-1, 2, 1, 32) >> twos[:, None]) & 3
        codes = (low | (high << 4)).to(torch.int8) - 32
        scales = _halves(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8)
        return (scales[:, :, None] * codes.view(-1, 16, 16)).flatten(1)


@cache  # a copy to a device would not be allowed while a graph is captured
def _table(device: torch.device) -> Tensor:
    return torch.tensor(TABLE, dtype=torch.int8, device=device)


def _looked_up(codes: Tensor) -> Tensor:
    return _table(codes.device)[codes.int()]


class _Iq4Nl(GgufWeight):
    @staticmethod
    def numbers(blocks: Tensor) -> Tensor:
        return _halves(blocks, 0) * _looked_up(_nibbles(blocks[:, 2:]).flatten(1))


class _Iq4Xs(GgufWeight):
    @staticmethod
    def numbers(blocks: Tensor) -> Tensor:
        twos = _twos(blocks.device)
        high = ((blocks[:, 2:4, None] >> twos) & 3).flatten(1) << 4
        low = _nibbles(blocks[:, 4:8, None]).flatten(1)
        scales = _halves(blocks, 0) * ((low | high).to(torch.int8) - 32)
        codes = _looked_up(_nibbles(blocks[:, 8:].view(-1, 8, 16)).flatten(2))
        return (scales[:, :, None] * codes).flatten(1)


class _F16(GgufWeight):
    @staticmethod
    def numbers(blocks: Tensor) -> Tensor:
        return blocks.contiguous().view(torch.float16).float()


class _Bf16(GgufWeight):
    @staticmethod
    def numbers(blocks: Tensor) -> Tensor:
        return blocks.contiguous().view(torch.bfloat16).float()


def _named(name: str, kind: Any) -> type[GgufWeight]:
    kind.format = GGUF_BLOCKS[name]
    return kind  # type: ignore[no-any-return]


GGUF_WEIGHTS = tuple(
    _named(name, kind)
    for name, kind in {
        "Q4_0": _Q40,
        "Q4_1": _Q41,
        "Q5_0": _Q50,
        "Q5_1": _Q51,
        "Q8_0": _Q80,
        "Q2_K": _Q2K,
        "Q3_K": _Q3K,
        "Q4_K": _Q4K,
        "Q5_K": _Q5K,
        "Q6_K": _Q6K,
        "IQ4_NL": _Iq4Nl,
        "IQ4_XS": _Iq4Xs,
        "F16": _F16,
        "BF16": _Bf16,
    }.items()
)
