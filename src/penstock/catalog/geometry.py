"""A model's geometry from its `config.json`: layers and their kinds, KV per token, window.

Knows the field names of transformers' configurations, old and new, and nothing about files other
than the name to put in an error. A nested text configuration wins over everything around it. A
field that is needed and absent is an error with its name, never a zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.catalog.kv_formats import KvLayers
from penstock.catalog.states import StateLayer, read_states
from penstock.errors import ModelUnusable

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
VOCABULARY = ("vocab_size", "padded_vocab_size")
WINDOW = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_seq_len",
    "max_sequence_length",
    "seq_length",
    "model_max_length",
)
TEXT_CONFIGS = ("text_config", "llm_config", "language_config")

# What transformers fills in for families whose published files leave fields out; a test compares
# it with transformers itself.
DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
    },
    "llama": {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
    },
    "mistral": {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "max_position_embeddings": 131072,
    },
    "phi3": {"original_max_position_embeddings": 4096},
    "phi4_multimodal": {"original_max_position_embeddings": 4096},
}

_WITHOUT_POSITIONS = frozenset(("mamba2",))
ENDLESS_WINDOW = 131072

# "su" is what longrope was called first.
_LENGTH_DEPENDENT_ROPE = ("longrope", "su", "dynamic")
_ORIGINAL = "original_max_position_embeddings"

SLIDING = "sliding_attention"
# Positions of a text start behind the number of the padding token in these families.
POSITIONS_AFTER_PADDING = frozenset(
    ("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "mpnet", "data2vec-text")
)
NO_KV = frozenset(
    ("linear_attention", "mamba", "mamba2", "conv", "recurrent", "mlp", "moe", "rwkv")
)
_RECURRENT_TYPES = frozenset(("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm"))
_SYNONYMS = {
    "attention": "full_attention",
    "global": "full_attention",
    "local": "sliding_attention",
}
# Families with a rhythm of sliding layers that older files do not spell out: one full layer in so
# many, at the end of each group.
_SLIDING_RHYTHM = {"gemma2": 2, "gemma3_text": 6, "cohere2": 4, "gpt_oss": 2}
_NEMOTRON_LETTERS = {"M": "mamba", "*": "full_attention", "-": "mlp", "E": "moe"}


@dataclass(frozen=True, slots=True)
class Geometry:
    """What the configuration says about shape; KV is counted per token."""

    model_type: str
    hidden_size: int
    vocab_size: int
    context: int
    layers: tuple[str, ...]
    kv_layers: tuple[KvLayers, ...]  # by how far they look back
    states: tuple[StateLayer, ...] = ()  # of recurrent layers, whatever a text's length is


class Fields:
    """Lookup in a configuration: its text part, then the whole, then the family's defaults."""

    def __init__(self, config: dict[str, Any], path: Path) -> None:
        self.path = path
        self._outer = config
        self.text = _text_config(config)
        self.model_type = str(self.text.get("model_type") or config.get("model_type") or "")
        if not self.model_type:
            raise ModelUnusable(f"{path} has no model_type.")
        self._defaults = DEFAULTS.get(self.model_type, {})

    def get(self, *names: str) -> Any:
        """The first of `names` that is present and not null, or None."""
        for place in (self.text, self._outer, self._defaults):
            for name in names:
                if place.get(name) is not None:
                    return place[name]
        return None

    def count(self, *names: str) -> int:
        """A positive integer that must be there."""
        value = self.get(*names)
        if value is None:
            raise ModelUnusable(f"{self.path} has no {names[0]}{_or_else(names[1:])}.")
        return self.positive(value, names[0])

    def optional_count(self, *names: str) -> int | None:
        """A positive integer, or None where the configuration does not have it."""
        value = self.get(*names)
        return None if value is None else self.positive(value, names[0])

    def index(self, name: str, default: int) -> int:
        """A token id, layer number or other integer from zero on."""
        value = self.get(name)
        if value is None:
            return default
        return 0 if value == 0 and value is not False else self.positive(value, name)

    def positive(self, value: Any, name: str) -> int:
        """`value` as a positive integer, or an error that names the field."""
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise ModelUnusable(f"{self.path}: {name} is {value!r}, not a positive integer.")
        return value


def _or_else(names: Sequence[str]) -> str:
    return f" (nor {', '.join(names)})" if names else ""


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    for name in TEXT_CONFIGS:
        nested = config.get(name)
        if isinstance(nested, dict):
            return nested
    thinker = config.get("thinker_config")
    return _text_config(thinker) if isinstance(thinker, dict) else config


def read_geometry(config: dict[str, Any], path: Path, *, keeps_kv: bool = True) -> Geometry:
    """The geometry in `config`, which was read from `path`."""
    fields = Fields(config, path)
    layers = _layer_kinds(fields)
    return Geometry(
        model_type=fields.model_type,
        hidden_size=fields.count(*HIDDEN),
        vocab_size=fields.count(*VOCABULARY),
        context=_window(fields),
        layers=layers,
        kv_layers=_kv_layers(fields, layers) if keeps_kv else (),
        states=read_states(fields, layers) if keeps_kv else (),
    )


def read_window(config: dict[str, Any], path: Path) -> int:
    """The longest sequence that is served of a model; `config` was read from `path`."""
    return _window(Fields(config, path))


def _window(fields: Fields) -> int:
    """What the configuration states, as far as its rotary embedding reaches.

    Some files state the length before scaling by yarn, some after: the scaled one is meant. Tables
    of the kinds in `_LENGTH_DEPENDENT_ROPE` change with the longest position in a batch, and then a
    request's answer would depend on its neighbours, so the window ends where they would change.
    """
    stated = window = fields.optional_count(*WINDOW) or _endless(fields) or fields.count(*WINDOW)
    ends = []
    for rope in _ropes(fields):
        kind = rope.get("rope_type") or rope.get("type")
        original = fields.get(_ORIGINAL) or rope.get(_ORIGINAL) or stated
        if fields.model_type == "phi3" and kind == "yarn":
            kind = "longrope"  # what its first files called it
        if kind == "yarn" and isinstance(factor := rope.get("factor"), int | float):
            window = max(window, int(fields.positive(original, _ORIGINAL) * factor))
        elif kind in _LENGTH_DEPENDENT_ROPE:
            ends.append(fields.positive(original, _ORIGINAL))
    window = min(window, *ends) if ends else window
    return window - _first_position(fields)


def _endless(fields: Fields) -> int | None:
    """The window of a model without positions, which has no end of its own."""
    return ENDLESS_WINDOW if fields.model_type in _WITHOUT_POSITIONS else None


def read_first_position(config: dict[str, Any], path: Path) -> int:
    """The position of a text's first token."""
    return _first_position(Fields(config, path))


def _first_position(fields: Fields) -> int:
    if fields.model_type not in POSITIONS_AFTER_PADDING:
        return 0
    return 1 + fields.index("pad_token_id", default=1)


def _ropes(fields: Fields) -> list[dict[str, Any]]:
    """The parameters of every rotary embedding: one for all layers, or one for each kind."""
    # An empty table is none, and the old name wins, as in transformers.
    found = fields.get("rope_scaling") or fields.get("rope_parameters")
    if not isinstance(found, dict):
        return []
    nested = [value for value in found.values() if isinstance(value, dict)]
    return nested or [found]


def _layer_kinds(fields: Fields) -> tuple[str, ...]:
    named = fields.get("layer_types", "layers_block_type")
    if named is None and isinstance(pattern := fields.get("hybrid_override_pattern"), str):
        named = [_NEMOTRON_LETTERS.get(letter, "full_attention") for letter in pattern]
    given = fields.optional_count(*LAYERS)
    if given is None and isinstance(named, list) and named:
        given = len(named)  # some files only list them
    count = given or fields.count(*LAYERS)
    if named is None:
        return _derived_kinds(fields, count)
    if not isinstance(named, list) or len(named) < count:
        raise ModelUnusable(
            f"{fields.path}: layer_types does not have an entry for each of {count} layers."
        )
    return tuple(_SYNONYMS.get(str(kind), str(kind)) for kind in named[:count])


def _derived_kinds(fields: Fields, count: int) -> tuple[str, ...]:
    """Layer kinds for configurations that only imply them."""
    if fields.model_type in _RECURRENT_TYPES:
        return ("recurrent",) * count
    full = _full_layers(fields, count)
    if full is not None:
        other = "conv" if fields.model_type.startswith("lfm2") else "mamba"
        if fields.get("full_attention_interval") is not None:
            other = "linear_attention"
        return tuple("full_attention" if i in full else other for i in range(count))
    if fields.get("sliding_window") is None or fields.get("use_sliding_window") is False:
        return ("full_attention",) * count
    rhythm = fields.optional_count(
        "sliding_window_pattern", "_sliding_window_pattern"
    ) or _SLIDING_RHYTHM.get(fields.model_type)
    if rhythm is not None:
        return tuple(
            "full_attention" if (i + 1) % rhythm == 0 else "sliding_attention" for i in range(count)
        )
    first_sliding = 0
    if fields.model_type.startswith("qwen"):
        first_sliding = fields.index("max_window_layers", default=0)
    return tuple(
        "sliding_attention" if i >= first_sliding else "full_attention" for i in range(count)
    )


def _full_layers(fields: Fields, count: int) -> frozenset[int] | None:
    """Which layers of a hybrid are attention, in each family's own words; None if not a hybrid."""
    for name in ("full_attn_idxs", "attn_layer_indices"):
        if isinstance(indices := fields.get(name), list):
            return frozenset(indices)
    if interval := fields.optional_count("full_attention_interval"):
        return frozenset(range(interval - 1, count, interval))
    if period := fields.optional_count("attn_layer_period"):
        return frozenset(range(fields.index("attn_layer_offset", default=0), count, period))
    return None


def _kv_layers(fields: Fields, layers: tuple[str, ...]) -> tuple[KvLayers, ...]:
    """Keys and values of a token, by the window of the layers that store them."""
    found: dict[int | None, KvLayers] = {}
    for index, kind in enumerate(layers):
        if kind not in NO_KV:
            window = fields.optional_count("sliding_window") if kind == SLIDING else None
            heads, dims = _kv_shape(fields, index, kind)
            before = found.get(window, KvLayers(window, 0, 0))
            found[window] = KvLayers(
                window, before.values + heads * dims, before.vectors + 2 * heads
            )
    return tuple(found.values())


def _kv_shape(fields: Fields, index: int, kind: str) -> tuple[int, int]:
    """KV heads of layer `index`, and the width of a key and a value of one of them together."""
    if fields.get("kv_lora_rank") is not None:  # latent attention, counted as expanded K and V
        key = fields.count("qk_nope_head_dim") + fields.count("qk_rope_head_dim")
        return fields.count(*HEADS), key + fields.count("v_head_dim")
    heads, dim = _kv_heads(fields, index), _head_dim(fields)
    if kind == "full_attention":  # Gemma 4: its full layers have a geometry of their own
        heads = fields.optional_count("num_global_key_value_heads") or heads
        dim = fields.optional_count("global_head_dim") or dim
    return heads, 2 * dim


def _head_dim(fields: Fields) -> int:
    dim = fields.optional_count("head_dim", "attention_head_dim", "kv_channels", "d_kv")
    return dim or fields.count(*HIDDEN) // fields.count(*HEADS)


def _kv_heads(fields: Fields, index: int) -> int:
    if fields.get("multi_query") is True and not fields.get("new_decoder_architecture"):
        return 1
    heads = fields.get(
        "num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num", *HEADS
    )
    if isinstance(heads, list):
        if index >= len(heads):
            raise ModelUnusable(f"{fields.path}: num_key_value_heads has no entry for {index}.")
        heads = heads[index]
    if heads is None:
        raise ModelUnusable(f"{fields.path} has no num_attention_heads{_or_else(HEADS[1:])}.")
    return fields.positive(heads, "num_key_value_heads")
