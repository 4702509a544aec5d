"""Parts of a layer that Numba or fewer operators compute with less traffic than transformers' own.

Each is found by structure, and taken only where it gives the answers of what it replaces on a
sample: architectures differ in what they call by the same name.
"""

from __future__ import annotations

import inspect
from functools import cache
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import numba
import numpy as np
import torch
from torch import Tensor, nn

from penstock.worker.backends.cpu.kernels.memory import EXPERT_ROWS, LayerMemory
from penstock.worker.backends.cpu.meter import MANY_ROWS
from penstock.worker.models.fusions import alike, common_layers, sample_rows
from penstock.worker.models.linear import experts_of, weight_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from penstock.worker.models.linear import PackedExperts, PlainExperts

    Activation = Callable[[Tensor], Tensor]
    Rotation = Callable[..., tuple[Tensor, Tensor]]

_ROTATION = "apply_rotary_pos_emb"
_ACTIVATED_ROWS = 64


def adopt_rotation(model: nn.Module, memory: LayerMemory) -> None:
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
        names = {**forward.__globals__, _ROTATION: _in_one_pass(plain, memory)}
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
    answers = rotated(queries, keys, cos, sin, LayerMemory())
    return all(torch.allclose(*pair) for pair in zip(expected, answers, strict=True))


def _in_one_pass(plain: Rotation, memory: LayerMemory) -> Rotation:
    def rotate(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
    ) -> tuple[Tensor, Tensor]:
        if q.shape[-1] == cos.shape[-1] and q.shape[0] == cos.shape[0] == unsqueeze_dim == 1:
            return rotated(q, k, cos, sin, memory)
        return plain(q, k, cos, sin, unsqueeze_dim)

    return rotate


def rotated(
    queries: Tensor, keys: Tensor, cos: Tensor, sin: Tensor, memory: LayerMemory
) -> tuple[Tensor, Tensor]:
    """[1, heads, T, d] by [1, T, d]. The answers lie as [T, heads, d], which attention wants."""
    # Projections lie like that already: no copy is made of them.
    rows = [part[0].transpose(0, 1).contiguous() for part in (queries, keys)]
    turned = [memory.rows(len(part), part[0].numel()).view(part.shape) for part in rows]
    angles = cos[0].contiguous().numpy(), sin[0].contiguous().numpy()
    _rotate(*(part.numpy() for part in rows), *angles, *(part.numpy() for part in turned))
    return turned[0].transpose(0, 1)[None], turned[1].transpose(0, 1)[None]


class GatedMlp(nn.Module):
    """down(activation(gate(x)) * up(x)) without copies of what lies between."""

    gate_proj: Any  # linear, of whatever kind
    up_proj: Any
    down_proj: Any

    def __init__(
        self, linears: Iterable[nn.Module], activate: Activation, memory: LayerMemory
    ) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = linears
        self._activate = activate
        self._memory = memory

    def forward(self, rows: Tensor) -> Tensor:
        """`rows` [..., hidden]."""
        count = rows.numel() // rows.shape[-1]
        if count < MANY_ROWS:
            inner, other = self.gate_proj(rows), self.up_proj(rows)
        else:
            inner, other = self._products(rows.reshape(count, -1))
            inner = inner.view(*rows.shape[:-1], -1)
        answer: Tensor = self.down_proj(self._activate(inner).mul_(other.view(inner.shape)))
        return answer

    def _products(self, rows: Tensor) -> list[Tensor]:
        answers = []
        for projection in (self.gate_proj, self.up_proj):
            answer = self._memory.rows(len(rows), projection.out_features)
            weight_of(projection).multiply(rows, answer)  # type: ignore[union-attr] # as found
            if projection.bias is not None:
                answer.add_(projection.bias)
            answers.append(answer)
        return answers


def _silu(inner: Tensor) -> Tensor:
    return nn.functional.silu(inner, inplace=True)


def _in_slices(activation: Activation) -> Activation:
    """Any other, in place as well: a copy of a few rows at a time."""

    def activate(inner: Tensor) -> Tensor:
        for some in torch.split(inner.view(-1, inner.shape[-1]), _ACTIVATED_ROWS):
            some.copy_(activation(some))
        return inner

    return activate


def adopt_mlps(model: nn.Module, memory: LayerMemory) -> None:
    """Compute gated mlps in place, over memory that all layers share."""
    known: dict[object, Activation | None] = {}  # most of a model's layers are alike
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if (linears := _gated_linears(child)) is None:
                continue
            activation = getattr(child, "act_fn", None)
            shape = linears[0].out_features, linears[0].in_features
            kind = (shape, _traits(child), _traits(activation))
            if kind not in known:
                known[kind] = _activation_of(child, linears, memory)
            if (activate := known[kind]) is not None:
                setattr(parent, name, GatedMlp(linears, activate, memory))
                # Its rows, both products and its answer.
                memory.expect(2 * sum(shape))


def _gated_linears(module: nn.Module) -> list[Any] | None:
    """Of what may be the same computation; None for what is something else."""
    parts = dict(module.named_children())
    linears = [parts.pop(name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    # An activation may have weights or tables too, and of each layer others.
    own = [
        tensor
        for part in (module, *parts.values())
        for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False))
    ]
    if set(parts) - {"act_fn"} or own:
        return None
    return None if any(weight_of(linear) is None for linear in linears) else linears


def _traits(part: object) -> tuple[object, ...]:
    """Equal for two parts that compute the same beside their weights: type and plain attributes,
    such as a layer's own window."""
    if not isinstance(part, nn.Module):
        return (id(part),)
    everyones = vars(nn.Module()).keys()
    own = [(name, value) for name, value in vars(part).items() if name not in everyones]
    # Any other attribute equals only itself.
    plain = (int, float, str, type(None))
    return (type(part), *((name, v if isinstance(v, plain) else id(v)) for name, v in own))


def _activation_of(module: nn.Module, linears: list[Any], memory: LayerMemory) -> Activation | None:
    """With which a gated mlp answers as `module` does; None: with none."""
    own = getattr(module, "act_fn", None)
    for activate in (_silu, *([] if own is None else [_in_slices(own)])):
        if _answers_alike(module, GatedMlp(linears, activate, memory)):
            return activate
    return None


def _answers_alike(module: nn.Module, mlp: GatedMlp) -> bool:
    weight = weight_of(mlp.gate_proj)
    assert weight is not None
    sample = sample_rows(2, mlp.gate_proj.in_features, weight)
    try:
        expected = module(sample)
    except TypeError:  # takes more than rows
        return False
    return isinstance(expected, Tensor) and alike(mlp(sample), expected, 1e-5)


class SlicedExperts:
    """Gated experts, each in slices of its rows, over the same memory.

    So what they take does not depend on where the router sends the rows: all of them to one expert
    need no more than a few for each.
    """

    even = True

    def __init__(
        self, weights: PlainExperts | PackedExperts, gate: Activation, memory: LayerMemory
    ) -> None:
        self._weights = weights
        self._gate = gate
        self._memory = memory

    @classmethod
    def of(cls, module: Any, memory: LayerMemory) -> SlicedExperts | None:
        """For experts that lie in one place and give the same answers on a sample."""
        if (weights := experts_of(module)) is None:
            return None
        for gate in (_silu_gate, getattr(module, "_apply_gate", _silu_gate)):
            ours = cls(weights, gate, memory)
            if ours._answers_as(module):
                return ours
        return None

    def _answers_as(self, module: Any) -> bool:
        count = self._weights.count
        rows = sample_rows(5, self._weights.hidden, self._weights.like())
        chosen = torch.tensor([[0, count - 1], [count // 2, 0], [0, 1], [1, 0], [0, count - 1]])
        chosen = chosen.repeat(2, 1)
        shares = torch.rand(len(rows), 2, generator=torch.Generator().manual_seed(0))
        try:
            expected, ours = module(rows, chosen, shares), self(rows, chosen, shares)
        except (TypeError, ValueError, RuntimeError, AttributeError, IndexError):
            return False
        return alike(ours, expected, 1e-4)

    def __call__(self, hidden_states: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """Rows [T, hidden], the experts chosen for each and their shares, both [T, k]."""
        experts, hidden = self._weights.count, self._weights.hidden
        most = min(len(hidden_states), EXPERT_ROWS)
        widths = hidden, 2 * self._weights.inner, hidden
        places = [self._memory.rows(most, width) for width in widths]
        answer = torch.zeros_like(hidden_states)
        sent, weights = chosen.reshape(-1), shares.reshape(-1, 1)
        order = sent.argsort(stable=True)
        sizes = torch.bincount(sent, minlength=experts).tolist()
        begin = 0
        for expert, size in enumerate(sizes[:experts]):  # beyond the last: to no expert
            for start in range(begin, begin + size, EXPERT_ROWS):
                sending = order[start : min(start + EXPERT_ROWS, begin + size)]
                tokens = sending // chosen.shape[1]
                rows, inner, outer = (place[: len(sending)] for place in places)
                torch.index_select(hidden_states, 0, tokens, out=rows)
                self._product("gate_up_proj", expert, rows, inner)
                self._product("down_proj", expert, self._gate(inner), outer)
                answer.index_add_(0, tokens, outer.mul_(weights[sending]))
            begin += size
        return answer

    def _product(self, name: str, expert: int, rows: Tensor, out: Tensor) -> None:
        of = self._weights.gate_up if name == "gate_up_proj" else self._weights.down
        of(expert).multiply(rows, out)
        bias = self._weights.bias(name, expert)
        if bias is not None:
            out.add_(bias)


def _silu_gate(both: Tensor) -> Tensor:
    """In place, for most."""
    gate, up = both.chunk(2, dim=-1)
    return nn.functional.silu(gate, inplace=True).mul_(up)


def adopt_experts(model: nn.Module, memory: LayerMemory) -> None:
    """Compute experts in slices where the answers are the same.

    What does so is marked `even`: a profile need not try how tokens might be routed.
    """
    for module in model.modules():
        if (experts := SlicedExperts.of(module, memory)) is not None:
            module.forward = experts


class SummedLayer:
    """x + attention(norm(x)), then x + mlp(norm(x)): the sums in place, over what came in."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def __call__(self, hidden_states: Tensor, **how: Any) -> Tensor:
        layer = self._layer
        changed, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **how)
        hidden_states.add_(changed)
        del changed  # its place is the mlp's
        return hidden_states.add_(layer.mlp(layer.post_attention_layernorm(hidden_states)))


def adopt_sums(model: nn.Module) -> None:
    """Add up in place in layers of the common shape, so that there is one sum instead of three."""
    for module in common_layers(model):
        if _adds_up(module):
            module.forward = SummedLayer(module)


def _adds_up(layer: Any) -> bool:
    """Whether that gives the layer's own answers, whatever its attention may say."""
    attention, width = layer.self_attn, layer.input_layernorm.weight.shape[0]
    sample = torch.randn(1, 3, width, generator=torch.Generator().manual_seed(0))

    def some(hidden_states: Tensor, **_: object) -> tuple[Tensor, None]:
        return hidden_states.flip(-1), None

    attention.forward = some
    try:
        expected, ours = layer(sample.clone()), SummedLayer(layer)(sample.clone())
    except (TypeError, ValueError, RuntimeError, AttributeError):
        return False
    finally:
        del attention.forward
    return isinstance(expected, Tensor) and torch.allclose(expected, ours, rtol=1e-4, atol=1e-6)


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
