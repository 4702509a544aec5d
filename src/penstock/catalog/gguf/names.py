"""Which module of transformers' each GGUF tensor is the weight of, and what differs between them.

Only what llama.cpp's converters do to the weights of an architecture is undone here: its rows in
another order, one added to the weights of norms. Packed rows can be put in order as they are.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from penstock.errors import ModelUnusable, shortened

if TYPE_CHECKING:
    from pathlib import Path


class Change(Enum):
    """What was done to a tensor on its way into the file."""

    NONE = 0
    PAIRED = 1  # rows of each head: halves that are rotated together lie beside each other
    PLUS_ONE = 2


_OUTSIDE = {
    "token_embd": "model.embed_tokens",
    "output": "lm_head",
    "output_norm": "model.norm",
}
_INSIDE = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_GEMMA = {
    **_INSIDE,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PHI3 = {**_INSIDE, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_TABLES = {"gemma2": _GEMMA, "gemma3": _GEMMA, "phi3": _PHI3}
# All experts of a layer in one tensor.
_STACKED = {
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
# Numbers of the rotary embedding, which are in the configuration.
_OF_THE_CONFIGURATION = re.compile(r"rope_(freqs|factors_long|factors_short)\.weight")
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_ROTATED = frozenset(("attn_q", "attn_k"))


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor belongs."""

    name: str  # of transformers' parameter; experts have a {} for their number
    change: Change = Change.NONE

    @property
    def is_stacked(self) -> bool:
        """Whether it is the weights of all experts of a layer."""
        return "{}" in self.name


def place_of(name: str, architecture: str, path: Path) -> Place | None:
    """Of one tensor; None: the configuration has its numbers. ModelUnusable: nothing is known of
    it."""
    if _OF_THE_CONFIGURATION.fullmatch(name):
        return None
    part, _, leaf = name.rpartition(".")
    if part in _OUTSIDE and leaf == "weight":
        return Place(f"{_OUTSIDE[part]}.weight", _change(part, architecture))
    if found := _BLOCK.fullmatch(name):
        layer, part, leaf = found.groups()
        inside = _TABLES.get(architecture, _INSIDE).get(part) or _STACKED.get(part)
        if inside is not None:
            change = _change(part, architecture)
            return Place(f"model.layers.{int(layer)}.{inside}.{leaf}", change)
    raise ModelUnusable(
        f"{path}: {shortened(name)} has no place in a model of the architecture {architecture}."
    )


def _change(part: str, architecture: str) -> Change:
    if architecture == "llama" and part in _ROTATED:
        return Change.PAIRED
    if architecture in ("gemma2", "gemma3") and part.endswith("norm"):
        return Change.PLUS_ONE
    return Change.NONE
