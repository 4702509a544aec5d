"""A plan as numbers on the device: laid out in pinned memory, moved in one copy that nobody awaits.

    [ ids | positions | slots | wanted | starts | contexts | counts | items | tiles | tables ]

All are int32 and begin at multiples of 16 bytes, so that kernels are compiled for one alignment.
A captured step reads them from where they always are; other steps bring a buffer of their own.
The newest token of a sequence may not be known here yet: then its row holds `-1 - place`, the
place of that token among those that the step before has left on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from penstock.worker.models.kernels.paging import Paging, decode_tiling
from penstock.worker.scheduling.sequence import UNKNOWN

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray
    from torch import Tensor

    from penstock.worker.scheduling.plan import Plan, Slice
    from penstock.worker.scheduling.sequence import Sequence

    Numbers = NDArray[np.int32]

_ALIGNED = 4  # numbers: 16 bytes


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """One step's inputs on the device."""

    input_ids: Tensor  # [1, T] long
    position_ids: Tensor  # [1, T] long
    logit_rows: Tensor  # [R] long
    paging: Paging


@dataclass(frozen=True, slots=True)
class Cut:
    """How attention over a batch is cut into pieces."""

    block_tokens: int
    columns: int  # tokens of a work item come in multiples of this
    spread: int  # items beyond one for each decode
    tile_rows: int


@dataclass(frozen=True, slots=True)
class Room:
    """Places for each kind of number."""

    rows: int
    wanted: int
    sequences: int
    items: int
    tiles: int
    tables: int

    def sections(self) -> dict[str, tuple[int, int]]:
        """Begin and size of each kind, in numbers."""
        sizes = {
            "ids": self.rows,
            "positions": self.rows,
            "slots": self.rows,
            "wanted": self.wanted,
            "starts": self.sequences,
            "contexts": self.sequences,
            "counts": self.sequences,
            "items": 4 * _aligned(self.items),
            "tiles": 4 * _aligned(self.tiles),
            "tables": self.tables,
        }
        found, begin = {}, 0
        for name, size in sizes.items():
            found[name] = (begin, size)
            begin += _aligned(size)
        return found

    @property
    def total(self) -> int:
        """All of it."""
        begin, size = self.sections()["tables"]
        return begin + _aligned(size)


@dataclass(frozen=True, slots=True)
class Described:
    """A plan in numbers, on the host."""

    ids: Numbers
    positions: Numbers
    slots: Numbers
    wanted: Numbers
    starts: Numbers
    contexts: Numbers
    counts: Numbers  # of decodes only
    items: Numbers  # [4, n]
    tiles: Numbers  # [4, n]
    tables: Numbers
    decodes: int

    def room(self) -> Room:
        """Exactly enough for it."""
        return Room(
            len(self.ids),
            len(self.wanted),
            len(self.starts),
            self.items.shape[1],
            self.tiles.shape[1],
            len(self.tables),
        )


def describe(plan: Plan, places: Mapping[Sequence, int], cut: Cut, padded: int = 0) -> Described:
    """Lay a plan out in rows; as many of `padded` as are missing see one token of block 0."""
    rows = max(plan.tokens, padded)
    ids, positions, slots = (np.zeros(rows, np.int32) for _ in range(3))
    missing = rows - plan.tokens
    pieces = plan.slices
    tables = [np.asarray(_held(piece, cut.block_tokens), np.int32) for piece in pieces]
    contexts = np.asarray([piece.end for piece in pieces] + [1] * missing, np.int32)
    wanted: list[int] = []
    row = 0
    for piece, table in zip(pieces, tables, strict=True):
        end = row + piece.count
        ids[row:end] = _ids(piece, places)
        at = np.arange(piece.start, piece.end, dtype=np.int32)
        positions[row:end] = at
        slots[row:end] = table[at // cut.block_tokens] * cut.block_tokens + at % cut.block_tokens
        wanted.extend(range(end - piece.logit_rows, end))
        row = end
    wanted.extend(range(row, rows))
    lengths = [len(table) for table in tables] + [0] * missing
    starts = np.cumsum([0, *lengths], dtype=np.int32)[:-1]
    starts[len(pieces) :] = sum(lengths)  # all of them the one block 0 at the end
    decodes = len(plan.decodes) + missing
    counts, items = _items(contexts[:decodes], cut)
    return Described(
        ids=ids,
        positions=positions,
        slots=slots,
        wanted=np.asarray(wanted, np.int32),
        starts=starts,
        contexts=contexts,
        counts=counts,
        items=items,
        tiles=_tiles(plan, cut.tile_rows),
        tables=np.concatenate([*tables, np.zeros(1, np.int32)]),
        decodes=decodes,
    )


def _held(piece: Slice, block_tokens: int) -> list[int]:
    return piece.sequence.blocks[: -(-piece.end // block_tokens)]


def _ids(piece: Slice, places: Mapping[Sequence, int]) -> list[int]:
    ids = piece.sequence.tokens[piece.start : piece.end]
    if ids[-1] == UNKNOWN:
        return [*ids[:-1], -1 - places[piece.sequence]]
    return ids


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

    def __init__(self, device: torch.device, standing: Room, most_tokens: int) -> None:
        self._device = device
        self.standing = standing  # where captured steps read
        self._fixed = torch.zeros(standing.total, dtype=torch.int32, device=device)
        # What the latest step sampled, for the rows of the next.
        self.tokens = torch.zeros(most_tokens, dtype=torch.int64, device=device)
        self._hosts = [self._pinned(standing.total) for _ in range(2)]
        self._turn = 0

    def bring(self, described: Described) -> PagedBatch:
        """Into a buffer of its own."""
        room = described.room()
        host = self._fill(described, room)
        buffer = torch.empty(room.total, dtype=torch.int32, device=self._device)
        buffer.copy_(host[: room.total], non_blocking=True)
        return self._views(buffer, room, described.decodes)

    def refill(self, described: Described) -> None:
        """Into the standing one."""
        host = self._fill(described, self.standing)
        used = self.standing.sections()["tables"][0] + len(described.tables)
        self._fixed[:used].copy_(host[:used], non_blocking=True)

    def standing_batch(self, rows: int, items: int) -> PagedBatch:
        """What a captured step of so many decodes reads."""
        return self._views(self._fixed, self.standing, rows, rows, items)

    def _fill(self, described: Described, room: Room) -> Tensor:
        self._turn ^= 1
        if len(self._hosts[self._turn]) < room.total:
            self._hosts[self._turn] = self._pinned(room.total * 5 // 4)
        host = self._hosts[self._turn]
        numbers = host.numpy()
        for name, (begin, _) in room.sections().items():
            values: Numbers = getattr(described, name)
            if values.ndim == 1:
                numbers[begin : begin + len(values)] = values
                continue
            stride = _aligned(room.items if name == "items" else room.tiles)
            at = numbers[begin : begin + 4 * stride].reshape(4, stride)
            at[:, : values.shape[1]] = values
            at[0, values.shape[1] :] = -1
        return host

    def _views(
        self, buffer: Tensor, room: Room, decodes: int, rows: int = 0, items: int = 0
    ) -> PagedBatch:
        # Needs Triton, which the layout does not.
        from penstock.worker.models.kernels.triton_inputs import unpack

        rows = rows or room.rows
        part = {
            name: buffer[begin : begin + size] for name, (begin, size) in room.sections().items()
        }
        wanted = min(rows, room.wanted)
        ids, positions, logit_rows = unpack(
            part["ids"][:rows], part["positions"][:rows], part["wanted"][:wanted], self.tokens
        )
        return PagedBatch(
            ids[None],
            positions[None],
            logit_rows,
            Paging(
                tables=part["tables"],
                starts=part["starts"],
                contexts=part["contexts"],
                slots=part["slots"],
                items=part["items"].view(4, -1)[:, : items or room.items],
                counts=part["counts"],
                tiles=part["tiles"].view(4, -1)[:, : room.tiles],
                decodes=decodes,
            ),
        )

    def _pinned(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int32, pin_memory=self._device.type == "cuda")


def cut_for(
    device: torch.device, widths: tuple[int, int], dtype: torch.dtype, block_tokens: int, rows: int
) -> Cut:
    """`widths`: KV heads and the width of a head; `rows` of a tile of chunks."""
    kv_heads, width = widths
    processors = 132
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    columns = decode_tiling(width, dtype, 1).columns
    return Cut(block_tokens, columns, max(1, -(-_PROGRAMS * processors // kv_heads)), rows)


_PROGRAMS = 4  # of decode attention on each multiprocessor at once


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
