"""Consecutive layers as tables of integers for the compiled loops, with memory for their steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numba
import numpy as np
import torch
from torch import Tensor, nn

from penstock.worker.backends.cpu.kernels.access import APART, on_threads
from penstock.worker.backends.cpu.kernels.gguf_products import CpuBlocks
from penstock.worker.backends.cpu.kernels.one_call import layer_loops as loops
from penstock.worker.backends.cpu.kernels.one_call import span_products
from penstock.worker.models import fusions
from penstock.worker.models.batch import GroupBatch
from penstock.worker.models.linear import LinearWeight, Parts, PlainWeight
from penstock.worker.models.linear.gguf_blocks import GgufWeight

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.worker.models.attention import PagedStep
    from penstock.worker.models.fusions import PackedLayer

MOST_ROWS = 16  # of a step; more are as quick with one product at a time
_LANES = 16
_BLOCK = 32  # inputs that share a min


@dataclass(frozen=True, slots=True)
class Shape:
    """What layers of one call have in common."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int

    @classmethod
    def of(cls, layer: PackedLayer) -> Shape | None:
        """None for a layer that the loops do not know."""
        if isinstance(layer.mlp, nn.Module) or layer.head_dim % 2:
            return None
        hidden, queries = layer.out.shape
        others = (layer.qkv.shape[0] - queries) // 2
        heads, kv_heads = queries // layer.head_dim, others // layer.head_dim
        if any(entry_of(weight) is None for weight in weights_of(layer)) or heads % kv_heads:
            return None
        return cls(hidden, heads, kv_heads, layer.head_dim, layer.mlp.down.shape[1])


class Scratch:
    """Memory of a model's steps, taken once at load: it is in what the process is measured to hold
    beside the weights, and in no step."""

    def __init__(self, shape: Shape, layers: int, threads: int) -> None:
        widest = max(shape.hidden, shape.heads * shape.head_dim, shape.inner)
        queries = shape.heads * shape.head_dim
        packed = queries + 2 * shape.kv_heads * shape.head_dim
        widths = packed, queries, shape.inner, shape.inner, shape.inner, shape.hidden
        head = -(-max(shape.head_dim, 64) // _LANES) * _LANES
        counters = layers, loops.STAGES, 2 * APART
        shapes = [
            (2 * int(np.prod(counters)),),
            *((MOST_ROWS, width) for width in widths),
            (threads, MOST_ROWS, shape.hidden),
            (threads, span_products.ONE_BY_ONE, -(-widest // _BLOCK)),
            (threads, span_products.TILE * widest),
            (threads, 4, head),
        ]
        # Each begins with a line of the processor's cache.
        sizes = [-(-int(np.prod(each)) // _LANES) * _LANES for each in shapes]
        # Filled, so that its pages are there when the process is measured.
        whole, at, parts = np.empty(sum(sizes), np.float32), 0, []
        whole.fill(0.0)
        for size, each in zip(sizes, shapes, strict=True):
            parts.append(whole[at : at + int(np.prod(each))].reshape(each))
            at += size
        self.counters = parts[0].view(np.int64).reshape(counters)
        self._shape, self._shared, self._own = shape, parts[1:7], parts[7:]
        self.threads = threads
        self.block_tokens = head

    def describe(self, record: NDArray[np.int64]) -> None:
        """Where all of it is, and how large."""
        shape = self._shape
        queries = shape.heads * shape.head_dim
        record[loops.HIDDEN], record[loops.HEADS_WIDTH] = shape.hidden, queries
        record[loops.PACKED_WIDTH] = queries + 2 * shape.kv_heads * shape.head_dim
        record[loops.INNER_WIDTH], record[loops.ANGLES_WIDTH] = shape.inner, shape.head_dim
        record[loops.COUNTERS], record[loops.ROOM] = self.counters.ctypes.data, MOST_ROWS
        for number, part in enumerate(self._shared):
            record[loops.SHARED + number] = part.ctypes.data
        for number, part in enumerate(self._own):
            record[loops.OWN + number] = part.ctypes.data
        _, sums, weights, heads = self._own
        record[loops.BLOCKS], record[loops.MEMORY] = sums.shape[-1], weights.shape[-1]
        record[loops.HEAD] = heads.shape[-1]


@dataclass(slots=True)
class Run:
    """Layers that are called one after the other, each with the last one's answer."""

    layers: list[PackedLayer]
    shape: Shape
    scratch: Scratch
    _table: NDArray[np.int64] = field(init=False)
    _numbers: NDArray[np.float32] = field(init=False)
    _record: NDArray[np.int64] = field(init=False)
    _memory: Any = None  # whose addresses are in the table
    _windows: Any = None
    answered: tuple[PagedStep, Tensor] | None = None

    def __post_init__(self) -> None:
        self._table = np.zeros((len(self.layers), loops.COLUMNS), np.int64)
        scales = [(layer.scaling, layer.epsilon) for layer in self.layers]
        self._numbers = np.array(scales, np.float32)
        for row, layer in zip(self._table, self.layers, strict=True):
            _describe(row, layer, self.shape)
        self._record = record = np.zeros(loops.CALL, np.int64)
        self.scratch.describe(record)
        record[loops.LAYERS] = len(self.layers)
        record[loops.TABLE], record[loops.NUMBERS] = (
            part.ctypes.data for part in (self._table, self._numbers)
        )
        record[loops.FUNCTION] = span_products.address()

    def compute(self, x: Tensor, angles: Any, step: PagedStep) -> bool:
        """`x` [rows, hidden] through all layers, in place; False: this is no step for it."""
        groups = step.batch.groups
        rows = len(x)
        if rows > MOST_ROWS or not isinstance(groups[0], GroupBatch) or groups[0].decodes != rows:
            return False
        if groups[0].decode_firsts is not None:
            return False  # rows of one sequence see each other's KV
        if not self._has_angles(angles, rows) or not self._place(step):
            return False
        tables = np.array(
            [(g.decode_tables.data_ptr(), g.decode_tables.shape[1]) for g in groups], np.int64
        )
        record, threads = self._record, min(numba.get_num_threads(), self.scratch.threads)
        record[loops.X], record[loops.ROWS], record[loops.THREADS] = x.data_ptr(), rows, threads
        record[loops.COS], record[loops.SIN] = (part.data_ptr() for part in angles)
        record[loops.CONTEXTS] = groups[0].decode_contexts.data_ptr()
        record[loops.GROUPS], record[loops.GROUP_COUNT] = tables.ctypes.data, len(tables)
        self.scratch.counters[:] = 0
        on_threads(loops.function(), record.ctypes.data, threads)
        return True

    def _has_angles(self, angles: Any, rows: int) -> bool:
        return isinstance(angles, tuple) and all(
            part.shape == (1, rows, self.shape.head_dim)
            and part.dtype == torch.float32
            and part.is_contiguous()
            for part in angles
        )

    def _place(self, step: PagedStep) -> bool:
        """Put the addresses of KV into the table; whether it lies as the loops expect."""
        if step.memory is self._memory and step.windows is self._windows:
            return True
        for row, layer in zip(self._table, self.layers, strict=True):
            blocks = step.blocks(layer.index)
            keys, values = blocks.keys, blocks.values
            own = self.shape.kv_heads, self.shape.head_dim
            for part in (keys, values):
                if part.dtype != torch.float32 or tuple(part.shape[2:]) != own:
                    return False
                if not part[0].is_contiguous() or part.stride(0) != keys.stride(0):
                    return False
            if keys.shape[1] > self.scratch.block_tokens:
                return False
            window = layer.window if layer.window is not None else step.windows[layer.index]
            row[loops.WINDOW] = window or 0
            row[loops.GROUP] = step.memory.group_of(layer.index)
            row[loops.KEYS], row[loops.VALUES] = keys.data_ptr(), values.data_ptr()
            row[loops.BLOCK_STRIDE], row[loops.BLOCK_TOKENS] = keys.stride(0), keys.shape[1]
        self._memory, self._windows = step.memory, step.windows
        return True


def weights_of(layer: PackedLayer) -> list[LinearWeight]:
    """Of queries, keys, values, what comes after attention, gate, up and down."""
    assert isinstance(layer.qkv, Parts)
    assert isinstance(layer.mlp, fusions.PackedMlp)
    assert isinstance(layer.mlp.gate_up, Parts)
    return [*layer.qkv.parts, layer.out, *layer.mlp.gate_up.parts, layer.mlp.down]


def entry_of(weight: LinearWeight) -> tuple[int, int, int] | None:
    """Address, kind and bytes of an output; None for what there are no loops for."""
    if isinstance(weight, PlainWeight):
        tensor = weight.tensor
        if tensor.dtype != torch.float32 or not tensor.is_contiguous():
            return None
        return tensor.data_ptr(), span_products.PLAIN, 4 * tensor.shape[1]
    if isinstance(weight, GgufWeight) and isinstance(weight.kernel, CpuBlocks):
        if not weight.codes.is_contiguous():
            return None
        return weight.codes.data_ptr(), weight.kernel.kind, weight.codes.shape[1]
    return None


def _describe(row: NDArray[np.int64], layer: PackedLayer, shape: Shape) -> None:
    """All of a row of the table but where KV is."""
    row[loops.HEADS], row[loops.KV_HEADS] = shape.heads, shape.kv_heads
    row[loops.HEAD_DIM], row[loops.INNER] = shape.head_dim, shape.inner
    row[loops.NORM] = layer.attention_norm.data_ptr()
    row[loops.MLP_NORM] = layer.mlp_norm.data_ptr()
    if layer.head_norms is not None:
        row[loops.QUERY_NORM], row[loops.KEY_NORM] = (n.data_ptr() for n in layer.head_norms)
    if layer.qkv_bias is not None:
        queries, others = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        for part, begin in enumerate((0, queries, queries + others)):
            row[loops.BIASES + part] = layer.qkv_bias[begin:].data_ptr()
    for number, weight in enumerate(weights_of(layer)):
        entry = entry_of(weight)
        assert entry is not None
        row[loops.WEIGHTS + 3 * number : loops.WEIGHTS + 3 * (number + 1)] = entry


def warm_up() -> None:
    """Compile, or load from the cache."""
    span_products.address()
    loops.function()
    none = np.zeros(1, np.int64)
    on_threads(0, none.ctypes.data, 0)
