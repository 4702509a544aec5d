"""Recurrent layers on a CPU in float32: row after row over states in place, without copies.

A row takes two passes over a head's matrix, which stays in the cache over the rows of a chunk: that
is quicker here than to make matrix products of a chunk, as transformers' own scans do. What has
sizes that the loops do not take goes through torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from penstock.worker.backends.cpu.kernels import state_loops
from penstock.worker.backends.cpu.kernels.vectors import LANES
from penstock.worker.models.recurrent.kernels import (
    ReferenceStates,
    activated,
    convolve_chunks,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from penstock.worker.kv.layout.layer_states import LayerStates
    from penstock.worker.models.recurrent.kernels import Convolution, DeltaRule, SelectiveScan
    from penstock.worker.models.recurrent.rows import StateRows


@dataclass(slots=True)
class CpuStates(ReferenceStates):
    """Compiled loops where they apply."""

    _flat: dict[int, _Flat] = field(default_factory=dict)

    def convolve(self, rows: Tensor, by: Convolution, states: LayerStates, of: StateRows) -> Tensor:
        if not _plain(rows) or not len(of.decodes):
            return ReferenceStates.convolve(self, rows, by, states, of)
        place, count = self._of(states.columns), len(of.decodes)
        bias = rows.new_zeros(len(by.weight)) if by.bias is None else by.bias
        given = rows[0, :, :count].t().contiguous()
        singles = torch.empty_like(given)
        state_loops.convolve(
            *(place.numbers, place.start, place.stride, of.decode_slots),
            *(given.numpy(), by.weight.contiguous().numpy(), bias.numpy(), singles.numpy()),
        )
        if not of.chunks:
            return activated(singles.t()[None], by)
        out = torch.empty_like(rows)
        out[0, :, :count] = singles.t()
        convolve_chunks(rows, by, states, of, out)
        return activated(out, by)

    def delta_rule(
        self, rows: DeltaRule, states: LayerStates, of: StateRows, chunk: Callable[..., Any]
    ) -> Tensor:
        width = rows.value.shape[2]
        if width % LANES or not _plain(rows.value):
            return ReferenceStates.delta_rule(self, rows, states, of, chunk)
        matrices = states.matrices
        assert matrices is not None
        place, out = self._of(matrices), torch.empty_like(rows.value)
        decay = rows.decay.exp()
        decay = decay if decay.dim() == 3 else decay[..., None]
        parts = (rows.query, rows.key, rows.value, decay, rows.beta)
        given = [part.contiguous().numpy() for part in parts]
        columns = LANES if width % state_loops.WIDE else state_loops.WIDE
        for segments in _segments(of, matrices):
            state_loops.delta_rule(
                *(place.numbers, place.start, place.stride, segments),
                *(*given, columns, out.numpy()),
            )
        return out

    def selective_scan(
        self, rows: SelectiveScan, states: LayerStates, of: StateRows, chunk: Callable[..., Any]
    ) -> Tensor:
        if rows.b.shape[2] % LANES or not _plain(rows.inputs):
            return ReferenceStates.selective_scan(self, rows, states, of, chunk)
        matrices = states.matrices
        assert matrices is not None
        place, out = self._of(matrices), torch.empty_like(rows.inputs)
        skip = rows.decay.new_zeros(len(rows.decay)) if rows.skip is None else rows.skip
        decay = (rows.steps * rows.decay).exp()
        parts = (rows.inputs, rows.steps, decay, rows.b, rows.c, skip)
        given = [part.float().contiguous().numpy() for part in parts]
        for segments in _segments(of, matrices):
            state_loops.selective_scan(
                *(place.numbers, place.start, place.stride, segments),
                *(*given, out.numpy()),
            )
        return out

    def _of(self, states: Tensor) -> _Flat:
        """Made once: nothing else comes to lie there, since the arena holds on to the tensors."""
        address = states.data_ptr()
        if (known := self._flat.get(address)) is None:
            known = self._flat[address] = _Flat.of(states)
        return known


@dataclass(frozen=True, slots=True)
class _Flat:
    """The memory of all slots as one array."""

    numbers: NDArray[np.float32]
    start: int  # of the layer's part in the first slot
    stride: int  # from one slot to the next

    @classmethod
    def of(cls, states: Tensor) -> _Flat:
        count = states.untyped_storage().nbytes() // states.itemsize
        numbers = states.as_strided((count,), (1,), 0).numpy()
        return cls(numbers, int(states.storage_offset()), states.stride(0))


def _plain(rows: Tensor) -> bool:
    return rows.dtype == torch.float32


def _segments(of: StateRows, matrices: Tensor) -> Iterator[NDArray[np.int64]]:
    """Rows that can be computed beside each other: decodes with the first parts of all chunks, then
    what follows behind snapshots, which are taken in between."""
    slots = of.decode_slots.tolist()
    now = [(slot, row, row + 1) for row, slot in enumerate(slots)]
    later = []
    for span in of.chunks:
        begin = 0
        parts = []
        for end in sorted({end for end, _ in span.stops}):
            parts.append((span.slot, span.row + begin, span.row + end))
            begin = end
        later.append((span, parts))
    while now or any(parts for _, parts in later):
        ended = []
        for span, parts in later:
            if parts:
                now.append(parts[0])
                ended.append((span, parts.pop(0)[2] - span.row))
        yield np.asarray(now, np.int64)
        for span, end in ended:
            for stop, slot in span.stops:
                if stop == end and slot != span.slot:
                    matrices[slot] = matrices[span.slot]
        now = []


def warm_up() -> None:
    """Compile, or load from the cache, before anybody waits and before memory is capped."""
    flat = np.zeros(2 * LANES * LANES, np.float32)
    segments = np.array([[0, 0, 1]], np.int64)
    rows = np.zeros((1, 1, LANES), np.float32)
    one = np.zeros((1, 1), np.float32)
    state_loops.delta_rule(
        flat, 0, 0, segments, rows, rows, rows, one[..., None], one, LANES, rows.copy()
    )
    state_loops.selective_scan(
        flat, 0, 0, segments, rows, one, one, rows, rows, one[0], rows.copy()
    )
    state_loops.convolve(flat, 0, 0, np.zeros(1, np.int64), one, one, one[0], one.copy())
