"""Decoder layers of the shape that most architectures share, their weights packed.

    x + attention(norm(x)), then x + mlp(norm(x))

Found by structure, not by name: a layer with two norms, an attention of four plain projections and
an mlp. Keys, queries and values become one weight, gate and up another, whatever their formats; the
modules' own weights are views of these, so that nothing is held twice and the model's own forward
still works. A backend that computes such a layer in another way calls `install`, which compares its
output with the layer's own on a sample: what an architecture does beside (a scaled residual,
another rotation) shows there, and such a layer keeps its own code. So a sample must go where these
things show: rows large enough to meet a clamp, positions up to the end of the model's window.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from penstock.worker.models import attention
from penstock.worker.models.linear import LinearWeight, Parts, fuse, weight_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

log = logging.getLogger(__name__)

SAMPLE_TOKENS = 24
# Of an answer's norm, on a sample: rounding of the type, and nothing else.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 4e-2}
# Gates of a sample's larger rows come to about a hundred, and the clamps in use lie near ten.
_LARGER = 100.0
_FAR = 1 << 17  # a position, for models that do not say where their window ends
_LAYER = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
_PROJECTIONS = ("q_proj", "k_proj", "v_proj")
_HEAD_NORMS = {"q_norm", "k_norm"}


@dataclass(frozen=True, slots=True)
class PackedMlp:
    """down(silu(gate) x up), without biases."""

    gate_up: LinearWeight  # [2 inner, hidden]
    down: LinearWeight


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """What a layer of the common shape is made of."""

    module: nn.Module
    index: int
    head_dim: int
    scaling: float
    window: int | None
    epsilon: float
    attention_norm: Tensor
    mlp_norm: Tensor
    qkv: LinearWeight  # [(heads + 2 kv_heads) x head_dim, hidden]
    qkv_bias: Tensor | None
    head_norms: tuple[Tensor, Tensor] | None  # of queries and of keys
    out: LinearWeight  # [hidden, heads x head_dim]
    mlp: PackedMlp | nn.Module


def packed_layers(
    model: nn.Module, join: Callable[[Sequence[Any]], LinearWeight] = fuse
) -> Iterator[PackedLayer]:
    """Layers of the common shape; `join` makes one weight of several, by default in memory of its
    own, on the way."""
    for module in common_layers(model):
        if not _heeds_positions(module) and (found := _pack(module, join)) is not None:
            yield found


def side_by_side(linears: Sequence[Any]) -> Parts:
    """Their weights where they are."""
    weights = [weight for linear in linears if (weight := weight_of(linear)) is not None]
    assert len(weights) == len(linears)
    return Parts(weights)


def common_layers(model: nn.Module) -> Iterator[nn.Module]:
    """Whatever has the parts of one, and may do more with them."""
    for module in model.modules():
        if {name for name, _ in module.named_children()} == _LAYER:
            yield module


def install(layer: PackedLayer, forward: Callable[..., Tensor]) -> None:
    """Compute a layer by `forward` from now on."""
    layer.module.forward = forward


def own_forward(layer: PackedLayer) -> Callable[..., Tensor]:
    """The layer's forward as transformers wrote it."""
    forward: Callable[..., Tensor] = type(layer.module).forward.__get__(layer.module)
    return forward


def sample_rows(count: int, width: int, weight: Tensor | LinearWeight) -> Tensor:
    """Ordinary rows of a weight's kind, and behind them as many that are much larger."""
    rows = torch.randn(count, width, generator=torch.Generator().manual_seed(0))
    return torch.cat([rows, rows * _LARGER]).to(weight.device, weight.dtype)


def alike(ours: Tensor, theirs: Tensor, tolerance: float) -> bool:
    """Whether each answer to such rows is the other's: large ones must not hide the rest."""
    finite = theirs.isfinite().all(dim=-1)
    # Larger rows may be beyond float16; not where they are clamped, which is what they are for.
    if not bool(finite[: len(finite) // 2].all()):
        return False
    ours, theirs = ours[finite].double(), theirs[finite].double()
    return bool(((ours - theirs).norm(dim=-1) <= tolerance * theirs.norm(dim=-1)).all())


def sample_call(layer: Any, positions: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """Hidden states [1, T, hidden] for a layer, and what it is called with beside them.

    The rotation is an arbitrary one, and does not depend on the positions.
    """
    weight, count = weight_of(layer.self_attn.q_proj), len(positions)
    if weight is None:
        raise TypeError("its queries are not the product of a linear layer")
    like = torch.empty(0, device=weight.device, dtype=weight.dtype)
    chance = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, count, weight.shape[1], generator=chance).to(like)
    turns = torch.randn(1, count, layer.self_attn.head_dim // 2, generator=chance)
    angles = tuple(torch.cat([f(turns)] * 2, dim=-1).to(like) for f in (torch.cos, torch.sin))
    return hidden, {
        "attention_mask": None,
        "position_ids": positions[None].to(weight.device),
        "past_key_values": None,
        "use_cache": False,
        "position_embeddings": angles,
    }


@torch.inference_mode()
def _heeds_positions(layer: Any) -> bool:
    """Whether attention depends on positions by more than its rotation; True if unknown.

    Some scale their queries by a function of the position that is 1 for as long as a sample is.
    """
    config = getattr(layer.self_attn, "config", None)
    window = getattr(config, "max_position_embeddings", None) or _FAR
    whole_window = torch.linspace(0, window - 1, SAMPLE_TOKENS, dtype=torch.float64).long()
    answers = []
    try:
        for positions in (torch.arange(SAMPLE_TOKENS), whole_window):
            hidden, call = sample_call(layer, positions)
            with attention.running(attention.Recording()):
                answers.append(layer.self_attn(hidden_states=hidden, **call)[0])
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        log.debug("a layer is left as it is: %s", error)
        return True
    # The same computation twice is the same to the last bit.
    return not torch.equal(*answers)


def _pack(module: Any, join: Callable[[Sequence[Any]], LinearWeight]) -> PackedLayer | None:
    attention, mlp = module.self_attn, module.mlp
    children = dict(attention.named_children())
    plain = {*_PROJECTIONS, "o_proj"}
    norms = set(children) - plain
    if not plain <= set(children) or norms not in (set(), _HEAD_NORMS):
        return None
    if any(True for _ in attention.parameters(recurse=False)) or attention.o_proj.bias is not None:
        return None
    if any(weight_of(children[name]) is None for name in plain):
        return None
    if any(not _is_norm(norm) for norm in _norms(module, norms)):
        return None
    epsilons = {_epsilon(norm) for norm in _norms(module, norms)}
    head_dim, scaling = getattr(attention, "head_dim", None), getattr(attention, "scaling", None)
    if len(epsilons) != 1 or head_dim is None or scaling is None:
        return None
    if norms and attention.q_norm.weight.shape != (head_dim,):
        return None
    out = weight_of(attention.o_proj)
    assert out is not None
    projections = [children[name] for name in _PROJECTIONS]
    biases = [projection.bias for projection in projections]
    if any(bias is None for bias in biases) != all(bias is None for bias in biases):
        return None
    return PackedLayer(
        module=module,
        index=attention.layer_idx,
        head_dim=head_dim,
        scaling=scaling,
        window=getattr(attention, "sliding_window", None),
        epsilon=epsilons.pop() or 0.0,
        attention_norm=module.input_layernorm.weight,
        mlp_norm=module.post_attention_layernorm.weight,
        qkv=join(projections),
        qkv_bias=None if biases[0] is None else torch.cat([bias.data for bias in biases]),
        head_norms=(attention.q_norm.weight, attention.k_norm.weight) if norms else None,
        out=out,
        mlp=_pack_mlp(mlp, join),
    )


def _pack_mlp(mlp: Any, join: Callable[[Sequence[Any]], LinearWeight]) -> PackedMlp | Any:
    children = dict(mlp.named_children())
    names = ("gate_proj", "up_proj", "down_proj")
    linears: list[Any] = [children.get(name) for name in names]
    if any(weight_of(linear) is None or linear.bias is not None for linear in linears):
        return mlp
    activation = getattr(mlp, "act_fn", None)
    sample = torch.linspace(-4, 4, 65)
    if activation is None or not torch.equal(activation(sample), nn.functional.silu(sample)):
        return mlp
    if not _is_gated_silu(mlp):
        return mlp
    down = weight_of(mlp.down_proj)
    assert down is not None
    return PackedMlp(join([mlp.gate_proj, mlp.up_proj]), down)


@torch.inference_mode()
def _is_gated_silu(mlp: Any) -> bool:
    """Whether it does nothing else with its parts, to large numbers either."""
    weight = weight_of(mlp.gate_proj)
    assert weight is not None
    rows = sample_rows(2, weight.shape[1], weight)
    ours = mlp.down_proj(nn.functional.silu(mlp.gate_proj(rows)) * mlp.up_proj(rows))
    try:
        theirs = mlp(rows)
    except (TypeError, ValueError, RuntimeError):  # takes more than rows
        return False
    return isinstance(theirs, Tensor) and alike(ours, theirs, TOLERANCE[rows.dtype])


def _norms(module: Any, names: set[str]) -> list[nn.Module]:
    attention = module.self_attn
    heads = [getattr(attention, name) for name in sorted(names)]
    return [module.input_layernorm, module.post_attention_layernorm, *heads]


def _is_norm(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.dim() == 1 and _epsilon(module) is not None


def _epsilon(module: nn.Module) -> float | None:
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return epsilon if isinstance(epsilon, float) else None
