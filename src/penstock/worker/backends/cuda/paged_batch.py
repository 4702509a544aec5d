"""A plan as numbers on the device: laid out in pinned memory, moved in one copy that nobody awaits.

    [ ids | positions | wanted | starts | contexts | tiles | of each group: slots | counts | items
      | tables ]

All are int32 and begin at multiples of 16 bytes, so that kernels are compiled for one alignment.
A captured step reads them from where they always are; other steps bring a buffer of their own.
Layer groups differ in where KV lies, and windows in which tokens are seen at all.
The newest token of a sequence may not be known here yet: then its row holds `-1 - place`, the
place of that token among those that the step before has left on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from penstock.worker.backends.cuda.kernels.paging import Paging, decode_tiling
from penstock.worker.core.plan import UNKNOWN

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray
    from torch import Tensor

    from penstock.wire import TokenIds
    from penstock.worker.core.plan import Plan, Slice

    Numbers = NDArray[np.int32]

_ALIGNED = 4  # numbers: 16 bytes


@dataclass(frozen=True, slots=True)
class PagedGroup:
    """What attention of one layer group is told."""

    paging: Paging


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """One step's inputs on the device."""

    input_ids: Tensor  # [1, T] long
    position_ids: Tensor  # [1, T] long
    logit_rows: Tensor  # [R] long
    groups: tuple[PagedGroup, ...]
    states: None = None  # recurrent layers are not served on a GPU


@dataclass(frozen=True, slots=True)
class Cut:
    """How attention over a batch is cut into pieces."""

    block_tokens: int
    columns: int  # tokens of a work item come in multiples of this
    spread: int  # items beyond one for each decode
    tile_rows: int
    windows: tuple[int | None, ...] = (None,)  # of each layer group


@dataclass(frozen=True, slots=True)
class BufferSizes:
    """Places for each kind of number."""

    rows: int
    wanted: int
    sequences: int
    items: tuple[int, ...]  # of each group
    tiles: int
    tables: int  # of each group

    def sections(self) -> dict[str, tuple[int, int]]:
        """Begin and size of each kind, in numbers."""
        sizes = {
            "ids": self.rows,
            "positions": self.rows,
            "wanted": self.wanted,
            "starts": self.sequences,
            "contexts": self.sequences,
            "tiles": 4 * _aligned(self.tiles),
        }
        for group, items in enumerate(self.items):
            sizes[f"slots{group}"] = self.rows
            sizes[f"counts{group}"] = self.sequences
            sizes[f"items{group}"] = 4 * _aligned(items)
        # Last, so that what is used of a standing buffer is at its beginning.
        for group in range(len(self.items)):
            sizes[f"tables{group}"] = self.tables
        found, begin = {}, 0
        for name, size in sizes.items():
            found[name] = (begin, size)
            begin += _aligned(size)
        return found

    @property
    def total(self) -> int:
        """All of it."""
        begin, size = list(self.sections().values())[-1]
        return begin + _aligned(size)


@dataclass(frozen=True, slots=True)
class DescribedGroup:
    """Where one group's KV goes and lies."""

    slots: Numbers
    counts: Numbers  # of decodes only
    items: Numbers  # [4, n]
    tables: Numbers


@dataclass(frozen=True, slots=True)
class Described:
    """A plan in numbers, on the host."""

    ids: Numbers
    positions: Numbers
    wanted: Numbers
    starts: Numbers
    contexts: Numbers
    tiles: Numbers  # [4, n]
    groups: tuple[DescribedGroup, ...]
    decodes: int

    def sizes(self) -> BufferSizes:
        """Exactly enough for it."""
        return BufferSizes(
            len(self.ids),
            len(self.wanted),
            len(self.starts),
            tuple(group.items.shape[1] for group in self.groups),
            self.tiles.shape[1],
            len(self.groups[0].tables),
        )

    def sections(self) -> dict[str, Numbers]:
        """The numbers of each kind."""
        found = {
            name: getattr(self, name)
            for name in ("ids", "positions", "wanted", "starts", "contexts", "tiles")
        }
        for number, group in enumerate(self.groups):
            for name in ("slots", "counts", "items", "tables"):
                found[f"{name}{number}"] = getattr(group, name)
        return found


def describe(plan: Plan, places: Mapping[int, int], cut: Cut, padded: int = 0) -> Described:
    """Lay a plan out in rows; as many of `padded` as are missing see one token of block 0."""
    rows = max(plan.tokens, padded)
    ids, positions = (np.zeros(rows, np.int32) for _ in range(2))
    missing = rows - plan.tokens
    pieces = plan.slices
    contexts = np.asarray([piece.end for piece in pieces] + [1] * missing, np.int32)
    wanted: list[int] = []
    row = 0
    for piece in pieces:
        end = row + piece.count
        ids[row:end] = _ids(piece, places)
        positions[row:end] = np.arange(piece.start, piece.end, dtype=np.int32)
        wanted.extend(range(end - piece.logit_rows, end))
        row = end
    wanted.extend(range(row, rows))
    lengths = [-(-piece.end // cut.block_tokens) for piece in pieces] + [0] * missing
    starts = np.cumsum([0, *lengths], dtype=np.int32)[:-1]
    starts[len(pieces) :] = sum(lengths)  # all of them the one block 0 at the end
    decodes = len(plan.decodes) + missing
    # Decodes are the first rows, padded ones follow: there are chunks or padded rows, not both.
    return Described(
        ids=ids,
        positions=positions,
        wanted=np.asarray(wanted, np.int32),
        starts=starts,
        contexts=contexts,
        tiles=_tiles(plan, cut.tile_rows),
        groups=tuple(
            _describe_group(pieces, number, positions, contexts[:decodes], cut)
            for number in range(len(cut.windows))
        ),
        decodes=decodes,
    )


def _describe_group(
    pieces: list[Slice], number: int, positions: Numbers, contexts: Numbers, cut: Cut
) -> DescribedGroup:
    size = cut.block_tokens
    tables = [piece.tables[number][: -(-piece.end // size)] for piece in pieces]
    slots = np.zeros(len(positions), np.int32)
    row = 0
    for piece, table in zip(pieces, tables, strict=True):
        at = positions[row : row + piece.count]
        slots[row : row + piece.count] = table[at // size] * size + at % size
        row += piece.count
    window = cut.windows[number]
    firsts = np.zeros_like(contexts) if window is None else np.maximum(0, contexts - window)
    counts, items = _items(contexts - firsts, cut)
    items[1:3] += firsts[items[0]]
    return DescribedGroup(
        slots, counts, items, np.concatenate([*tables, np.zeros(1, np.int32)], dtype=np.int32)
    )


def _ids(piece: Slice, places: Mapping[int, int]) -> TokenIds:
    if piece.tokens[-1] == UNKNOWN:
        return [*piece.tokens[:-1], -1 - places[piece.request_id]]
    return piece.tokens


def _items(contexts: Numbers, cut: Cut) -> tuple[Numbers, Numbers]:
    """Contexts in nearly equal pieces, about as many as keep the device busy."""
    if not len(contexts):
        return contexts, np.zeros((4, 0), np.int32)
    share = max(cut.columns, -(-int(contexts.sum()) // cut.spread))
    counts = -(-contexts // share)
    step = -(-contexts // counts)
    step = -(-step // cut.columns) * cut.columns
    counts = -(-contexts // step)
    sequence = np.repeat(np.arange(len(contexts), dtype=np.int32), counts)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    number = np.arange(len(sequence)) - first
    begin = number * step[sequence]
    end = np.minimum(begin + step[sequence], contexts[sequence])
    return counts.astype(np.int32), np.stack([sequence, begin, end, number]).astype(np.int32)


def _tiles(plan: Plan, tile_rows: int) -> Numbers:
    """Tiles of rows of chunks, those that see most first."""
    found, row = [], len(plan.decodes)
    for index, piece in enumerate(plan.chunks, len(plan.decodes)):
        found += [
            (index, first, row, piece.count, piece.start + first)
            for first in range(0, piece.count, tile_rows)
        ]
        row += piece.count
    found.sort(key=lambda tile: -tile[4])
    return np.asarray([tile[:4] for tile in found], np.int32).reshape(-1, 4).T


class Inputs:
    """Brings described plans to the device; keeps two pinned buffers, used in turn.

    The step before the last is over when a third is brought, so its buffer can be written again.
    """

    def __init__(self, device: torch.device, standing: BufferSizes, max_tokens: int) -> None:
        self._device = device
        self.standing = standing  # where captured steps read
        self._fixed = torch.zeros(standing.total, dtype=torch.int32, device=device)
        # What the latest step sampled, for the rows of the next.
        self.tokens = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        self._hosts = [self._pinned(standing.total) for _ in range(2)]
        self._turn = 0

    def bring(self, described: Described) -> PagedBatch:
        """Into a buffer of its own."""
        sizes = described.sizes()
        host = self._fill(described, sizes)
        buffer = torch.empty(sizes.total, dtype=torch.int32, device=self._device)
        buffer.copy_(host[: sizes.total], non_blocking=True)
        return self._views(buffer, sizes, described.decodes)

    def refill(self, described: Described) -> None:
        """Into the standing one."""
        host = self._fill(described, self.standing)
        sections, count = self.standing.sections(), len(described.groups[0].tables)
        first, _ = sections["tables0"]
        self._fixed[: first + count].copy_(host[: first + count], non_blocking=True)
        for number in range(1, len(described.groups)):
            begin, _ = sections[f"tables{number}"]
            part = slice(begin, begin + count)
            self._fixed[part].copy_(host[part], non_blocking=True)

    def standing_batch(self, rows: int, items: int) -> PagedBatch:
        """What a captured step of so many decodes reads."""
        return self._views(self._fixed, self.standing, rows, rows, items)

    def _fill(self, described: Described, sizes: BufferSizes) -> Tensor:
        self._turn ^= 1
        if len(self._hosts[self._turn]) < sizes.total:
            self._hosts[self._turn] = self._pinned(sizes.total * 5 // 4)
        host = self._hosts[self._turn]
        numbers, sections = host.numpy(), sizes.sections()
        for name, values in described.sections().items():
            begin, size = sections[name]
            if values.ndim == 1:
                numbers[begin : begin + len(values)] = values
                continue
            at = numbers[begin : begin + size].reshape(4, -1)
            at[:, : values.shape[1]] = values
            at[0, values.shape[1] :] = -1
        return host

    def _views(
        self, buffer: Tensor, sizes: BufferSizes, decodes: int, rows: int = 0, items: int = 0
    ) -> PagedBatch:
        # Needs Triton, which the layout does not.
        from penstock.worker.backends.cuda.kernels.triton_inputs import unpack

        rows = rows or sizes.rows
        part = {
            name: buffer[begin : begin + size] for name, (begin, size) in sizes.sections().items()
        }
        wanted = min(rows, sizes.wanted)
        ids, positions, logit_rows = unpack(
            part["ids"][:rows], part["positions"][:rows], part["wanted"][:wanted], self.tokens
        )
        tiles = part["tiles"].view(4, -1)[:, : sizes.tiles]
        groups = tuple(
            PagedGroup(
                Paging(
                    tables=part[f"tables{number}"],
                    starts=part["starts"],
                    contexts=part["contexts"],
                    slots=part[f"slots{number}"],
                    items=part[f"items{number}"].view(4, -1)[:, : items or count],
                    counts=part[f"counts{number}"],
                    tiles=tiles,
                    decodes=decodes,
                )
            )
            for number, count in enumerate(sizes.items)
        )
        return PagedBatch(ids[None], positions[None], logit_rows, groups)

    def _pinned(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int32, pin_memory=self._device.type == "cuda")


def cut_for(
    device: torch.device,
    widths: tuple[int, int],
    dtype: torch.dtype,
    block_tokens: int,
    rows: int,
    windows: tuple[int | None, ...] = (None,),
) -> Cut:
    """`widths`: KV heads and the width of a head; `rows` of a chunk's tile; `windows` of groups."""
    kv_heads, width = widths
    processors = 132
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    columns = decode_tiling(width, dtype, 1).columns
    spread = max(1, -(-_PROGRAMS * processors // kv_heads))
    return Cut(block_tokens, columns, spread, rows, windows)


_PROGRAMS = 4  # of decode attention on each multiprocessor at once


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
