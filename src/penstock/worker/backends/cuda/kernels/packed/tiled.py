"""Packed weights in the layout that the kernels of a GPU read.

A weight is brought into it when a model is adopted, as many bytes as before: codes in 16-bit words
(`triton_codes`), scales in planes of 32-bit words (`triton_scales`). It is multiplied with a few
rows as it is; for many it is de-quantised tile by tile, and the tiles are multiplied by torch.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Self, TypedDict, Unpack

import torch
import triton
from torch import Tensor, nn

from penstock.worker.backends.cuda.kernels.packed import triton_codes, triton_packed, triton_unpack
from penstock.worker.backends.cuda.kernels.packed.tiles import (
    MOST_ROWS,
    Tile,
    choose_cuts,
    choose_tile,
    padded_rows,
)
from penstock.worker.backends.cuda.kernels.packed.triton_one_row_packed import multiply_row
from penstock.worker.models.linear import LinearWeight, tile_outputs

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_PIECES = 8  # spans that a program de-quantises
_LEAST_OUTPUTS, _MOST_OUTPUTS = 16, 256  # of a program's tile


@dataclass(frozen=True, slots=True)
class Coding:
    """What the words of a weight stand for."""

    kind: int  # of `triton_codes`
    scale: int  # of `triton_scales`
    group: int  # inputs that share a scale; 0: all, and it is in `more`
    span: int  # inputs
    block: int = 1  # outputs that share a scale
    zeros: int = 0  # bits of a group's zero; 6: of scales and mins together
    whole: bool = False  # `more` has a number for each output

    @property
    def codes_of_word(self) -> int:
        """Inputs whose codes share a word."""
        return 4 if self.kind <= triton_codes.E2M1.value else 2

    def arguments(self) -> dict[str, Any]:
        """For kernels, at compile time."""
        return {
            "KIND": self.kind,
            "SCALE": self.scale,
            "GROUP": self.group,
            "SPAN": self.span,
            "BLOCK": self.block,
            "ZEROS": self.zeros,
            "WHOLE": self.whole,
        }


class Workspace:
    """Partial sums of cut products, and how many parts of a tile have arrived.

    One for all weights of a model, which are multiplied one after the other. It is as large as the
    largest product needs once all weights are made; steps find it so and take no memory.
    """

    def __init__(self, device: torch.device, tiles: int = 0, numbers: int = 0) -> None:
        self.sums = torch.empty(numbers, dtype=torch.float32, device=device)
        self.arrivals = torch.zeros(tiles, dtype=torch.int32, device=device)

    def hold(self, outputs: int, cuts: int) -> None:
        """Have room for products of a weight with so many outputs."""
        if cuts == 1:
            return
        # Each half of a gated weight may have a tile that is not full.
        numbers = cuts * (outputs + 2 * _MOST_OUTPUTS) * MOST_ROWS
        if self.sums.numel() < numbers:
            self.sums = self.sums.new_empty(numbers)
        tiles = triton.cdiv(outputs, _LEAST_OUTPUTS)
        if self.arrivals.numel() < tiles:
            self.arrivals = self.arrivals.new_zeros(tiles)


@dataclass(frozen=True, slots=True)
class Planes:
    """Words of codes [outputs, words], and planes [words, outputs]; scales [words, blocks]."""

    codes: Tensor
    scales: Tensor | None = None
    zeros: Tensor | None = None
    more: Tensor | None = None
    order: Tensor | None = None  # the input of each column; None: as they come


class Around(TypedDict, total=False):
    """What is done before a product and after it."""

    bias: Tensor | None
    norm: tuple[Tensor, float] | None  # the rows are normed: weight [inputs] and epsilon
    gated: bool  # silu of the first half of the outputs times the second
    added: bool  # to what is there already
    early: bool  # started before the kernel before it has ended
    choice: tuple[Tile, int] | None  # instead of the chosen tile and cuts


class TiledWeight(nn.Module, LinearWeight):
    """A packed weight in this layout."""

    def __init__(
        self, coding: Coding, planes: Planes, scratch: Tensor, workspace: Workspace
    ) -> None:
        super().__init__()
        for field in fields(planes):  # so that they are counted with the model's weights
            self.register_buffer(field.name, getattr(planes, field.name), persistent=False)
        self.coding = coding
        self.planes = planes
        self.scratch = scratch  # numbers of the whole model's one tile
        self.workspace = workspace
        self.pieces = self.shape[1] // coding.span
        self.cuts = choose_cuts(self.shape[0], self.pieces)
        workspace.hold(self.shape[0], self.cuts)

    @property
    def shape(self) -> tuple[int, int]:
        outputs, words = self.planes.codes.shape
        return outputs, words * self.coding.codes_of_word

    @property
    def dtype(self) -> torch.dtype:
        return self.scratch.dtype

    @property
    def device(self) -> torch.device:
        return self.planes.codes.device

    def multiply(self, rows: Tensor, out: Tensor) -> None:
        if self.takes(rows):
            self.few_rows(rows, out)
        else:
            self.by_tiles(rows, out)

    def by_tiles(self, rows: Tensor, out: Tensor) -> None:
        """The product with de-quantised numbers, some outputs at a time."""
        rows = self.ordered(rows)
        for begin, end, tile in self._tiles():
            torch.mm(rows, tile.t(), out=out[:, begin:end])

    def multiply_add(self, rows: Tensor, out: Tensor) -> None:
        if self.takes(rows):
            self.few_rows(rows, out, added=True)
            return
        rows = self.ordered(rows)
        for begin, end, tile in self._tiles():
            out[:, begin:end].addmm_(rows, tile.t())

    def product(self, rows: Tensor, bias: Tensor | None = None) -> Tensor:
        flat = rows.reshape(-1, self.shape[1])
        if not self.takes(flat):
            return super().product(rows, bias)
        out = flat.new_empty(flat.shape[0], self.shape[0])
        self.few_rows(flat, out, bias=bias)
        return out.view(*rows.shape[:-1], self.shape[0])

    def takes(self, rows: Tensor) -> bool:
        """Whether the rows are multiplied with codes."""
        return rows.shape[0] <= MOST_ROWS and self.dtype in (torch.bfloat16, torch.float16)

    def few_rows(self, rows: Tensor, out: Tensor, **around: Unpack[Around]) -> None:
        """Put the product into `out`."""
        rows = self.ordered(rows)
        bias, norm = around.get("bias"), around.get("norm")
        gated, early = around.get("gated", False), around.get("early", False)
        if around.get("choice") is None and rows.shape[0] == 1:
            multiply_row(rows, self, out, bias, norm, gated, around.get("added", False), early)
            return
        planes, count = self.planes, rows.shape[0]
        outputs = self.shape[0] // 2 if gated else self.shape[0]
        padded = padded_rows(count)
        tile, cuts = around.get("choice") or (self._tile(padded), self.cuts)
        nothing = planes.codes
        triton_packed.product[(triton.cdiv(outputs, tile.outputs), cuts)](
            rows,
            planes.codes,
            planes.scales if planes.scales is not None else nothing,
            planes.zeros if planes.zeros is not None else nothing,
            planes.more if planes.more is not None else nothing,
            bias if bias is not None else rows,
            norm[0] if norm is not None else rows,
            out,
            self.workspace.sums,
            self.workspace.arrivals,
            count,
            outputs,
            self.pieces,
            cuts,
            planes.codes.stride(0),
            rows.stride(0),
            out.stride(0),
            planes.scales.stride(0) if planes.scales is not None else 0,
            norm[1] if norm is not None else 0.0,
            **self.coding.arguments(),
            N=tile.outputs,
            M=padded,
            KP=triton.next_power_of_2(self.shape[1]) if norm is not None else 0,
            STAGES=tile.stages,
            FIRST=tile.scaled_first,
            BIAS=bias is not None,
            NORM=norm is not None,
            GATED=gated,
            RESIDUAL=around.get("added", False),
            EARLY=early,
            PTX=rows.is_cuda,
            num_warps=tile.warps,
            launch_pdl=early,
        )

    def dequantise(self, begin: int, end: int, out: Tensor) -> None:
        """The weights of some outputs, as numbers, in the order of the codes."""
        planes = self.planes
        nothing = planes.codes
        few = 8 if self.coding.codes_of_word == 4 else 16
        triton_unpack.unpack[(triton.cdiv(end - begin, few), triton.cdiv(self.pieces, _PIECES))](
            planes.codes,
            planes.scales if planes.scales is not None else nothing,
            planes.zeros if planes.zeros is not None else nothing,
            planes.more if planes.more is not None else nothing,
            out,
            begin,
            end,
            self.pieces,
            planes.codes.stride(0),
            planes.scales.stride(0) if planes.scales is not None else 0,
            **self.coding.arguments(),
            N=few,
            PIECES=_PIECES,
            num_warps=1,
            enable_fp_fusion=False,
        )

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self | None:
        first = parts[0]
        if any(part.coding != first.coding for part in parts):
            return None
        if any(part.shape[0] % first.coding.block for part in parts[:-1]):
            return None
        if any(not _same_order(part.planes.order, first.planes.order) for part in parts):
            return None

        def together(name: str, dim: int) -> Tensor | None:
            found = [getattr(part.planes, name) for part in parts]
            return None if found[0] is None else torch.cat(found, dim=dim)

        codes = together("codes", 0)
        assert codes is not None
        scales, zeros, more = (together(name, 1) for name in ("scales", "zeros", "more"))
        planes = Planes(codes, scales, zeros, more, first.planes.order)
        return cls(first.coding, planes, first.scratch, first.workspace)

    def view(self, begin: int, end: int) -> Self:
        def some(plane: Tensor | None, block: int = 1) -> Tensor | None:
            return None if plane is None else plane[:, begin // block : -(-end // block)]

        own = self.planes
        planes = Planes(
            own.codes[begin:end],
            some(own.scales, self.coding.block),
            some(own.zeros),
            some(own.more),
            own.order,
        )
        return type(self)(self.coding, planes, self.scratch, self.workspace)

    def ordered(self, rows: Tensor) -> Tensor:
        """Inputs [..., inputs] in the order of the codes."""
        return rows if self.planes.order is None else rows.index_select(-1, self.planes.order)

    def _tile(self, rows: int) -> Tile:
        return choose_tile(rows, self.coding.codes_of_word, self.coding.zeros > 0)

    def _tiles(self) -> Iterator[tuple[int, int, Tensor]]:
        outputs, inputs = self.shape
        most = tile_outputs(self.scratch.numel(), inputs)
        for begin in range(0, outputs, most):
            end = min(begin + most, outputs)
            tile = self.scratch[: (end - begin) * inputs].view(end - begin, inputs)
            self.dequantise(begin, end, tile)
            yield begin, end, tile


def _same_order(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)
