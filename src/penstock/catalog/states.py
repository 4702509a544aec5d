"""What recurrent layers keep of a sequence, however long it is: from a configuration, and in bytes.

A layer has the last inputs of a short convolution, in the numbers that are computed with, and most
have a matrix for each head beside it, in float32: it sums up a whole text, and rounding it would
change all that follows. Plans and arenas ask here, so that both count the same bytes.

Families that are not known here have no figures before they are loaded; then their states are
measured like everybody's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.catalog.geometry import Fields

RECURRENT_BYTES = 4  # of a number in a matrix
# Without attention nothing is kept of a token; its blocks are there all the same, since prefixes
# are known by them.
NOMINAL_TOKEN_BYTES = 4
ALIGNMENT = 64  # of a tensor in a slot
_PAGE = 4096
_SHARE = 32  # a slot is at most so much of itself larger than what is in it


def slot_bytes(sizes: Iterable[int]) -> int:
    """Bytes of a slot for tensors of these sizes: aligned, and in pieces that pages consist of."""
    size = sum(-(-each // ALIGNMENT) * ALIGNMENT for each in sizes)
    unit = max(ALIGNMENT, min(_PAGE, 1 << (size // _SHARE).bit_length() >> 1))
    return -(-size // unit) * unit


@dataclass(frozen=True, slots=True)
class StateLayer:
    """What one layer keeps: how many numbers of each kind."""

    conv: int
    recurrent: int

    def sizes(self, item_bytes: int) -> tuple[int, int]:
        """Bytes of both."""
        return self.conv * item_bytes, self.recurrent * RECURRENT_BYTES


def read_states(fields: Fields, layers: tuple[str, ...]) -> tuple[StateLayer, ...]:
    """Of each layer that keeps something; none for a family that is not known."""
    shape = _short_conv(fields) or _delta_rule(fields) or _kimi_delta(fields) or _mamba2(fields)
    if shape is None:
        return ()
    attention = ("full_attention", "sliding_attention", "attention", "mlp", "moe")
    both = fields.model_type == "falcon_h1"  # every layer has a mixer beside its attention
    return (shape,) * sum(1 for kind in layers if both or kind not in attention)


def _short_conv(fields: Fields) -> StateLayer | None:
    kernel = fields.optional_count("conv_L_cache")
    hidden = fields.optional_count("hidden_size")
    return StateLayer(hidden * (kernel - 1), 0) if kernel and hidden else None


def _delta_rule(fields: Fields) -> StateLayer | None:
    names = "num_value_heads", "value_head_dim", "num_key_heads", "key_head_dim", "conv_kernel_dim"
    found = [fields.optional_count(f"linear_{name}") for name in names]
    if None in found:
        return None
    heads, width, key_heads, key_width, kernel = (each or 0 for each in found)
    columns = 2 * key_heads * key_width + heads * width
    return StateLayer(columns * (kernel - 1), heads * key_width * width)


def _kimi_delta(fields: Fields) -> StateLayer | None:
    nested = fields.get("linear_attn_config")
    nested = nested if isinstance(nested, dict) else {}
    found = (
        nested.get("num_heads") or fields.get("linear_num_heads"),
        nested.get("head_dim") or fields.get("linear_head_dim"),
        nested.get("short_conv_kernel_size") or fields.get("linear_conv_kernel_dim"),
    )
    if fields.model_type == "bailing_hybrid" and None in found:
        names = "num_attention_heads", "head_dim", "short_conv_kernel_size"
        found = fields.get(names[0]), fields.get(names[1]), fields.get(names[2])
    if not all(isinstance(each, int) and each > 0 for each in found):
        return None
    heads, width, kernel = found
    return StateLayer(3 * heads * width * (kernel - 1), heads * width * width)


def _mamba2(fields: Fields) -> StateLayer | None:
    plain = fields.model_type == "mamba2"
    heads = fields.optional_count("mamba_n_heads", "mamba_num_heads", "n_mamba_heads")
    heads = fields.optional_count("num_heads") if plain else heads
    state = fields.optional_count("mamba_d_state", "ssm_state_size", "state_size")
    groups = fields.optional_count("mamba_n_groups", "mamba_ngroups", "n_groups")
    kernel = fields.optional_count("mamba_d_conv", "conv_kernel")
    if not heads or not state or not groups or not kernel:
        return None
    width = fields.get("mamba_d_head", "mamba_head_dim", *(("head_dim",) if plain else ()))
    if not isinstance(width, int):
        hidden, grows = fields.optional_count("hidden_size"), fields.optional_count("mamba_expand")
        inner = fields.optional_count("mamba_d_ssm") or (hidden or 0) * (grows or 2)
        width = inner // heads
    columns = heads * width + 2 * groups * state
    return StateLayer(columns * (kernel - 1), heads * width * state)
