"""Products with weights in GGUF's blocks on a CPU, for the types that there are kernels for."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING

import numba
import numpy as np
import torch
from llvmlite.binding import get_host_cpu_features
from torch import Tensor, nn

from penstock.worker.backends.cpu.kernels import gguf_codes, gguf_loops
from penstock.worker.models.linear.gguf_blocks import GgufWeight

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ONE_BY_ONE = 2  # rows that are multiplied one after the other
_FEW = 48  # rows; more are multiplied by torch, with tiles of numbers
_TILE = 4  # rows and outputs that are multiplied together


class CpuBlocks:
    """What the kernels do for the weights of one type; float32 only."""

    def __init__(self, kind: int) -> None:
        self.kind = kind

    def multiply(self, weight: GgufWeight, rows: Tensor, out: Tensor) -> bool:
        """Whether `rows` were few enough to be multiplied with the codes; then they have been."""
        count, (outputs, inputs) = len(rows), weight.shape
        codes, row_bytes, threads = _bytes(weight), weight.codes.shape[1], numba.get_num_threads()
        if count <= _ONE_BY_ONE:
            rows = rows.contiguous()
            for row, answer in zip(rows, out, strict=True):
                gguf_loops.one_row(
                    self.kind, row.numpy(), codes, row_bytes, answer.numpy(), threads
                )
            return True
        if count > _FEW or outputs % _TILE:
            return False
        padded = -(-count // _TILE) * _TILE
        if padded != count or not rows.is_contiguous():
            rows = nn.functional.pad(rows, (0, 0, 0, padded - count)).contiguous()
        answer = rows.new_empty(padded, outputs)
        scratch = np.empty((threads, _TILE, inputs), np.float32)
        gguf_loops.few_rows(self.kind, rows.numpy(), codes, row_bytes, scratch, answer.numpy())
        out.copy_(answer[:count])
        return True

    def dequantise(self, weight: GgufWeight, begin: int, out: Tensor) -> None:
        """The numbers of outputs from `begin` on."""
        gguf_loops.dequantise(
            self.kind,
            _bytes(weight),
            weight.codes.shape[1],
            begin,
            out.numpy(),
            numba.get_num_threads(),
        )


def _bytes(weight: GgufWeight) -> NDArray[np.uint8]:
    return weight.codes.view(-1).numpy()


def converts_halves() -> bool:
    """Whether the processor converts float16, as all x86 with AVX2 do: no library is linked that
    would."""
    return platform.machine() != "x86_64" or bool(get_host_cpu_features().get("f16c"))


def adopt(model: nn.Module) -> None:
    """Have the kernels multiply with the weights that they know."""
    if not converts_halves():
        return
    for weight in model.modules():
        if isinstance(weight, GgufWeight):
            kind = gguf_codes.KINDS.get(weight.format.block.name)
            weight.kernel = None if kind is None else CpuBlocks(kind)


def warm_up() -> None:
    """Compile, or load from the cache."""
    if not converts_halves():
        return
    codes, numbers = torch.zeros(4 * 18, dtype=torch.uint8).numpy(), np.zeros((4, 32), np.float32)
    gguf_loops.one_row(gguf_codes.Q4_0, numbers[0], codes, 18, np.empty(4, np.float32), 1)
    scratch, out = np.empty((1, _TILE, 32), np.float32), np.empty((4, 4), np.float32)
    gguf_loops.few_rows(gguf_codes.Q4_0, numbers, codes, 18, scratch, out)
    gguf_loops.dequantise(gguf_codes.Q4_0, codes, 18, 0, numbers, 1)
