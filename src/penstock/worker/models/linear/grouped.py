"""Weights whose inputs are in groups, each with a scale, and with a zero if they are asymmetric."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from penstock.worker.models.linear.packed import PackedWeight

_COPIED_AT_ONCE = 1 << 20  # numbers


class GroupedWeight(PackedWeight):
    """(code - zero) x scale; scales and zeros are [outputs, groups].

    `order`, where there is one, says which input each column of codes belongs to: files whose
    groups are not neighbours have their columns sorted by group.
    """

    SHARED: ClassVar[frozenset[str]] = frozenset({"order", "table"})
    ZERO: ClassVar[int] = 0  # of weights that have none of their own

    def __init__(self, codes: Tensor, scales: Tensor, scratch: Tensor, **others: Tensor) -> None:
        super().__init__(codes, scales, scratch, **others)
        order = others.get("order")
        # Most files with an order have the plain one.
        self.reordered = order is not None and bool((order.diff() != 1).any())

    @abstractmethod
    def _decode(self, codes: Tensor, out: Tensor) -> None:
        """What codes [n, ...] stand for, without zeros and scales, into [n, inputs]."""

    def _scales(self, begin: int, end: int) -> Tensor:
        """In float32, of some outputs: [n, groups]."""
        return self.scales[begin:end].float()

    def dequantise(self, begin: int, end: int, out: Tensor) -> None:
        self._decode(self.codes[begin:end], out)
        scales = self._scales(begin, end)
        groups = torch.unflatten(out, 1, (scales.shape[1], -1))
        zeros = self._buffers.get("zeros")
        if zeros is not None:
            groups.sub_(zeros[begin:end, :, None])
        elif self.ZERO:
            groups.sub_(self.ZERO)
        groups.mul_(scales[:, :, None])
        if self.reordered:
            places = self.get_buffer("order").long()
            for some in torch.split(out, _rows_at_once(out)):
                some[:, places] = some.clone()


def _rows_at_once(out: Tensor) -> int:
    return max(1, _COPIED_AT_ONCE // out.shape[1])


class ByteWeight(GroupedWeight):
    """One code a byte."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def _decode(self, codes: Tensor, out: Tensor) -> None:
        out.copy_(codes)


class Fp8Weight(ByteWeight):
    """e4m3."""


class Int8Weight(ByteWeight):
    """Signed integers."""


class NibbleWeight(GroupedWeight):
    """Two codes a byte [outputs, inputs / 2]: the low four bits are the even input's."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], 2 * self.codes.shape[1]

    def _decode(self, codes: Tensor, out: Tensor) -> None:
        out[:, 0::2].copy_(codes & 15)
        out[:, 1::2].copy_(codes >> 4)


class Int4Weight(NibbleWeight):
    """Integers; 8 means zero unless groups have zeros of their own."""

    ZERO = 8


class E2m1Weight(NibbleWeight):
    """A sign, two bits of exponent and one of fraction, with a scale for each group (MXFP4)."""

    def _decode(self, codes: Tensor, out: Tensor) -> None:
        out[:, 0::2].copy_(_e2m1(codes << 4))
        out[:, 1::2].copy_(_e2m1(codes))
        # Of the exponents' biases, 1 and 7; exact.
        out.mul_(64)


def _e2m1(codes: Tensor) -> Tensor:
    """The high four bits as e4m3: the sign in front, the three others where the exponent ends."""
    return ((codes & 0x80) | ((codes & 0x70) >> 2)).view(torch.float8_e4m3fn)


class Nvfp4Weight(E2m1Weight):
    """Scales are divided by a number for each output."""

    whole: Tensor  # [outputs, 1]

    def _scales(self, begin: int, end: int) -> Tensor:
        return self.scales[begin:end].float().div_(self.whole[begin:end])


class Nvfp4ModelOptWeight(Nvfp4Weight):
    """Scales are multiplied by it."""

    def _scales(self, begin: int, end: int) -> Tensor:
        return self.scales[begin:end].float().mul_(self.whole[begin:end])


class TableWeight(NibbleWeight):
    """Each code is one of the 16 numbers of a table (NF4, FP4 of bitsandbytes)."""

    table: Tensor

    def dequantise(self, begin: int, end: int, out: Tensor) -> None:
        # Some at a time, in float32: in a narrower type the table itself would be rounded.
        for some in torch.split(out, _rows_at_once(out)):
            numbers = out.new_empty(some.shape, dtype=torch.float32)
            super().dequantise(begin, begin + len(some), numbers)
            some.copy_(numbers)
            begin += len(some)

    def _decode(self, codes: Tensor, out: Tensor) -> None:
        out[:, 0::2].copy_(self.table[(codes & 15).int()])
        out[:, 1::2].copy_(self.table[(codes >> 4).int()])


class NestedTableWeight(TableWeight):
    """Scales are in 8 bits themselves: a table's numbers times one scale for each 256 of them, plus
    a number that they have in common."""

    NESTED = 256
    # Whatever the others have in common, these are of the whole weight: nothing can be joined.
    SHARED = TableWeight.SHARED | {"nested_table", "nested_scales"}
    nested_table: Tensor
    nested_scales: Tensor
    offset: float = 0.0

    def _scales(self, begin: int, end: int) -> Tensor:
        some = self.scales[begin:end]
        groups = some.shape[1]
        places = torch.arange(begin * groups, end * groups, device=some.device) // self.NESTED
        outer = self.nested_scales[places].view(some.shape)
        return self.nested_table[some.int()].mul_(outer).add_(self.offset)

    @classmethod
    def joined(cls, parts: object) -> None:
        return None
