"""Parts of a layer that Numba or fewer operators compute with less traffic than transformers' own.

Each is found by structure, and taken only where it gives the answers of what it replaces on a
sample: architectures differ in what they call by the same name.
"""

from __future__ import annotations

import inspect
from functools import cache
from types import FunctionType, MethodType
from typing import TYPE_CHECKING

import numba
import numpy as np
import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable

    Rotation = Callable[..., tuple[Tensor, Tensor]]

_ROTATION = "apply_rotary_pos_emb"


def adopt_rotation(model: nn.Module) -> None:
    """Rotate queries and keys in one pass instead of ten operators.

    transformers' attention looks the function up among the names of its file. A module of ours gets
    its forward with one of these names bound to another function; other models of the same
    architecture in this process keep theirs.
    """
    for module in model.modules():
        forward = type(module).forward
        if not isinstance(forward, FunctionType) or _ROTATION not in forward.__code__.co_names:
            continue
        plain = forward.__globals__.get(_ROTATION)
        if plain is None or not _turns_halves(plain):
            continue
        names = {**forward.__globals__, _ROTATION: _in_one_pass(plain)}
        ours = FunctionType(
            forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__
        )
        ours.__kwdefaults__ = forward.__kwdefaults__
        module.forward = MethodType(ours, module)


@cache
def _turns_halves(plain: Rotation) -> bool:
    """Whether it pairs the first half of a head with the second; some pair neighbours."""
    if list(inspect.signature(plain).parameters) != ["q", "k", "cos", "sin", "unsqueeze_dim"]:
        return False
    chance = torch.Generator().manual_seed(0)
    queries, keys = (torch.randn(1, heads, 3, 8, generator=chance) for heads in (2, 1))
    cos, sin = (torch.randn(1, 3, 8, generator=chance) for _ in range(2))
    try:
        expected = plain(queries, keys, cos, sin)
    except RuntimeError:  # wants angles of another shape
        return False
    answers = rotated(queries, keys, cos, sin)
    return all(torch.allclose(*pair) for pair in zip(expected, answers, strict=True))


def _in_one_pass(plain: Rotation) -> Rotation:
    def rotate(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
    ) -> tuple[Tensor, Tensor]:
        if q.shape[-1] == cos.shape[-1] and q.shape[0] == cos.shape[0] == unsqueeze_dim == 1:
            return rotated(q, k, cos, sin)
        return plain(q, k, cos, sin, unsqueeze_dim)

    return rotate


def rotated(queries: Tensor, keys: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """[1, heads, T, d] by [1, T, d]. The answers lie as [T, heads, d], which attention wants."""
    # Projections lie like that already: no copy is made of them.
    rows = [part[0].transpose(0, 1).contiguous() for part in (queries, keys)]
    turned = [torch.empty_like(part) for part in rows]
    angles = cos[0].contiguous().numpy(), sin[0].contiguous().numpy()
    _rotate(*(part.numpy() for part in rows), *angles, *(part.numpy() for part in turned))
    return turned[0].transpose(0, 1)[None], turned[1].transpose(0, 1)[None]


class GatedMlp(nn.Module):
    """down(silu(gate(x)) * up(x)) without copies of what lies between."""

    def __init__(self, gate: nn.Module, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.gate_proj = gate
        self.up_proj = up
        self.down_proj = down

    def forward(self, rows: Tensor) -> Tensor:
        """`rows` [..., hidden]."""
        inner = nn.functional.silu(self.gate_proj(rows), inplace=True)
        answer: Tensor = self.down_proj(inner.mul_(self.up_proj(rows)))
        return answer


def gated_mlp(module: nn.Module) -> GatedMlp | None:
    """The same computation in place; None for what is something else."""
    parts = dict(module.named_children())
    linears = [parts.pop(name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    if any(type(linear) is not nn.Linear for linear in linears) or set(parts) - {"act_fn"}:
        return None
    gate, up, down = linears
    assert isinstance(gate, nn.Linear)
    assert up is not None
    assert down is not None
    if any(True for _ in module.parameters(recurse=False)):
        return None
    mlp = GatedMlp(gate, up, down)
    sample = torch.randn(2, gate.in_features, generator=torch.Generator().manual_seed(0))
    try:
        expected = module(sample)
    except TypeError:  # takes more than rows
        return None
    same = isinstance(expected, Tensor) and torch.allclose(expected, mlp(sample), atol=1e-6)
    return mlp if same else None


def warm_up() -> None:
    """Compile, or load from the cache."""
    row = np.zeros((1, 1, 8), np.float32)
    angles = np.zeros((1, 8), np.float32)
    _rotate(row, row, angles, angles, np.empty_like(row), np.empty_like(row))


# Too little work to share out.
@numba.njit(nogil=True, cache=True, fastmath={"contract"})
def _rotate(queries, keys, cos, sin, turned_queries, turned_keys):  # type: ignore[no-untyped-def]
    half = cos.shape[1] // 2
    for row in range(cos.shape[0]):
        for rows, turned in ((queries[row], turned_queries[row]), (keys[row], turned_keys[row])):
            for head in range(rows.shape[0]):
                plain, answer = rows[head], turned[head]
                for i in range(half):
                    answer[i] = plain[i] * cos[row, i] - plain[i + half] * sin[row, i]
                for i in range(half):
                    answer[i + half] = (
                        plain[i + half] * cos[row, i + half] + plain[i] * sin[row, i + half]
                    )
