"""A model's card: all that is known about it before a byte of its weights is read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock import shapes
from penstock.catalog.geometry import read_geometry
from penstock.catalog.weights import (
    ITEM_BYTES,
    Weights,
    read_json,
    read_tensors,
    sum_weights,
)
from penstock.errors import ModelUnusable

if TYPE_CHECKING:
    from collections.abc import Mapping

ORIGIN_FILE = "penstock.json"  # written by pull: where a folder came from
_SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_PACKED_BITS = {"mxfp4": 4, "fp8": 8}


@dataclass(frozen=True, slots=True)
class Card:
    """One model on disk, read from its headers and configurations."""

    name: str
    path: Path
    kind: str  # "generate", "embed", "rerank" or "other" (not served)
    architecture: str  # transformers' class, as in "LlamaForCausalLM"
    model_type: str
    weights: Weights
    context: int  # the window the model was made for
    layers: tuple[str, ...]  # kinds: "full_attention", "sliding_attention", "linear_attention", ...
    kv_values_per_token: int  # over all attention layers, keys and values
    hidden_size: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    sampling_defaults: Mapping[str, float]  # the author's, where the folder has them
    source: str  # where it came from, as `pull` spells it

    @property
    def parameters(self) -> int:
        """How many weights the model has."""
        return self.weights.parameters

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights as stored (for `random:` shapes, as they would be)."""
        return self.weights.stored_bytes

    @property
    def dtype(self) -> str:
        """The stored dtype, by torch's name."""
        return self.weights.dtype

    def bytes_in_memory(self, dtype: str = "auto") -> int:
        """Bytes of the weights once loaded as `dtype`; "auto" keeps the stored one."""
        return self.weights.bytes_as(dtype)

    def kv_bytes_per_token(self, item_bytes: int) -> int:
        """KV bytes of one token over all attention layers, at so many bytes per value."""
        return self.kv_values_per_token * item_bytes


def read_card(path: Path, name: str | None = None) -> Card:
    """The card of the model folder `path`; ModelUnusable says what is wrong with which file."""
    path = Path(path)
    if not path.is_dir():
        raise ModelUnusable(f"{path} is not a folder with a model.")
    config_path = path / "config.json"
    config = read_json(config_path)
    architecture = _architecture(config, config_path)
    geometry = read_geometry(config, config_path)
    origin = _optional_json(path / ORIGIN_FILE)
    generation = _optional_json(path / "generation_config.json")
    source = str(origin.get("source") or path)
    return Card(
        name=name or path.name,
        path=path,
        kind=_kind(architecture, config, path),
        architecture=architecture,
        model_type=geometry.model_type,
        weights=_weights(path, config, config_path, source),
        context=geometry.context,
        layers=geometry.layers,
        kv_values_per_token=geometry.kv_values,
        hidden_size=geometry.hidden_size,
        vocab_size=geometry.vocab_size,
        eos_token_ids=_eos_token_ids(generation, config, path),
        sampling_defaults={
            field: float(value)
            for field in _SAMPLING_FIELDS
            if isinstance(value := generation.get(field), int | float)
        },
        source=source,
    )


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _architecture(config: dict[str, Any], path: Path) -> str:
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ModelUnusable(f"{path} has no architectures, so the model's class is unknown.")
    return names[0]


def _kind(architecture: str, config: dict[str, Any], path: Path) -> str:
    if config.get("is_encoder_decoder") is True:
        return "other"
    if (path / "modules.json").exists():  # sentence-transformers
        return "embed"
    if architecture.endswith("ForSequenceClassification"):
        return "rerank"
    if architecture.endswith(("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")):
        return "generate"
    if architecture.endswith(("Model", "ForMaskedLM")):
        return "embed"
    return "other"


def _weights(path: Path, config: dict[str, Any], config_path: Path, source: str) -> Weights:
    if source.startswith(shapes.PREFIX):
        parameters = shapes.count_parameters(config)
        dtype = str(config.get("dtype"))
        if dtype not in ITEM_BYTES:
            raise ModelUnusable(f"{config_path}: dtype is {dtype!r}, not a floating-point type.")
        return Weights(parameters, parameters * ITEM_BYTES[dtype], dtype, 0)
    return sum_weights(read_tensors(path), _packed_bits(config, config_path), path)


def _packed_bits(config: dict[str, Any], path: Path) -> int | None:
    """The width of one quantised weight, or None for a model that is not quantised."""
    quantization = config.get("quantization_config")
    if not isinstance(quantization, dict):
        return None
    method = quantization.get("quant_method")
    bits = _PACKED_BITS.get(str(method)) or quantization.get("bits")
    if bits is None and method == "bitsandbytes":
        bits = 4 if quantization.get("load_in_4bit") else 8
    if bits is None and isinstance(groups := quantization.get("config_groups"), dict):
        group: Any = next(iter(groups.values()), {})
        bits = (group.get("weights") or {}).get("num_bits") if isinstance(group, dict) else None
    if not isinstance(bits, int) or bits not in (1, 2, 3, 4, 5, 6, 8):
        raise ModelUnusable(f"{path}: quantization_config ({method}) does not say how many bits.")
    return bits


def _eos_token_ids(
    generation: dict[str, Any], config: dict[str, Any], path: Path
) -> tuple[int, ...]:
    text = config.get("text_config")
    places = (generation, text if isinstance(text, dict) else {}, config)
    value: Any = next((p["eos_token_id"] for p in places if p.get("eos_token_id") is not None), [])
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) for token in ids):
        raise ModelUnusable(f"{path}: eos_token_id is {value!r}, not token ids.")
    return tuple(ids)
