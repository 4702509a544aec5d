"""A model's card: all that is known about it before a byte of its weights is read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock import sampling, shapes
from penstock.catalog.encoders import (
    EMBED,
    RERANK,
    Encoder,
    kind_of_encoder,
    module_tensors,
    read_encoder,
)
from penstock.catalog.geometry import read_geometry
from penstock.catalog.kv_formats import KvFormat, KvLayers
from penstock.catalog.linear_formats import check_quantisation, quantisation
from penstock.catalog.random_tensors import random_tensors
from penstock.catalog.states import NOMINAL_TOKEN_BYTES, StateLayer, slot_bytes
from penstock.catalog.vision import Vision, read_vision
from penstock.catalog.weights import (
    ITEM_BYTES,
    Weights,
    read_json,
    read_tensors,
    sum_weights,
)
from penstock.errors import ModelUnusable
from penstock.memory.cost import MAX_CHUNK_TOKENS, GroupCost, KvCost
from penstock.memory.device_kinds import CPU, DeviceKind

if TYPE_CHECKING:
    from collections.abc import Mapping

ORIGIN_FILE = "penstock.json"  # written by pull: where a folder came from


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
    kv_layers: tuple[KvLayers, ...]  # what they keep of a token, by how far they look back
    hidden_size: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    sampling_defaults: Mapping[str, float]  # the author's, where the folder has them
    source: str  # where it came from, as `pull` spells it
    states: tuple[StateLayer, ...] = ()  # what recurrent layers keep of a sequence of any length
    encoder: Encoder | None = None  # of a kind that answers with vectors or scores
    vision: Vision | None = None  # of a model that takes images

    def facts(self) -> dict[str, object]:
        """What those who use it check: that it takes images, or how its vectors are made."""
        encoder = self.encoder
        if self.vision is not None:
            return {"images": True}
        if encoder is None or self.kind != EMBED:
            return {}
        return {
            "dimensions": encoder.default_dimensions,
            "pooling": list(encoder.pooling),
            "normalized": encoder.normalised,
            "prompts": sorted(encoder.prompts),
        }

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
        """The stored dtype of what is not packed, by torch's name."""
        return self.weights.dtype

    @property
    def formats(self) -> tuple[str, ...]:
        """Names of the packed formats among its weights."""
        return self.weights.formats

    def bytes_in_memory(self, dtype: str = "auto", made: str = "", kind: DeviceKind = CPU) -> int:
        """Bytes of the weights once loaded as `dtype`; "auto" keeps the stored one. `made`: the
        format that layers are rounded to at load, if any; `kind`: of the device."""
        return self.weights.bytes_as(dtype, made, kind)

    def kv_cost(
        self, form: KvFormat, block_tokens: int, context: int, step_tokens: int, dtype: str = ""
    ) -> KvCost:
        """What KV costs in a format, when `context` tokens are served and computed in `dtype`, by
        default that of KV."""
        if self.encoder is not None:
            return KvCost((), block_tokens)
        sizes: dict[int | None, int] = {}
        for layers in self.kv_layers or (KvLayers(None, 0, 0),):
            window = layers.window
            key = None if window is None or window >= context else window
            sizes[key] = sizes.get(key, 0) + layers.size_bytes(form)
        if self.states and not self.kv_layers:
            sizes = {None: NOMINAL_TOKEN_BYTES}
        item_bytes = ITEM_BYTES.get(dtype or form.name, form.item_bytes)
        ordered = sorted(sizes.items(), key=lambda item: (item[0] is not None, -(item[0] or 0)))
        return KvCost(
            groups=tuple(
                GroupCost(form.token_bytes(size, block_tokens) * block_tokens, window)
                for window, size in ordered
            ),
            block_tokens=block_tokens,
            chunk_tokens=min(step_tokens, MAX_CHUNK_TOKENS),
            state_bytes=slot_bytes(n for layer in self.states for n in layer.sizes(item_bytes)),
        )


def read_card(path: Path, name: str | None = None) -> Card:
    """The card of the model folder `path`; ModelUnusable says what is wrong with which file."""
    path = Path(path)
    if not path.is_dir():
        raise ModelUnusable(f"{path} is not a folder with a model.")
    config_path = path / "config.json"
    config = read_json(config_path)
    architecture = _architecture(config, config_path)
    kind = _kind(architecture, config, path)
    encodes = kind in (EMBED, RERANK)
    geometry = read_geometry(config, config_path, keeps_kv=not encodes)
    origin = _optional_json(path / ORIGIN_FILE)
    generation = _optional_json(path / "generation_config.json")
    source = str(origin.get("source") or path)
    return Card(
        name=name or path.name,
        path=path,
        kind=kind,
        architecture=architecture,
        model_type=geometry.model_type,
        weights=_weights(path, config, config_path, source),
        context=geometry.context,
        layers=geometry.layers,
        kv_layers=geometry.kv_layers,
        states=geometry.states,
        hidden_size=geometry.hidden_size,
        vocab_size=geometry.vocab_size,
        eos_token_ids=_eos_token_ids(generation, config, path),
        sampling_defaults={
            field: float(value)
            for field, parameter in sampling.BY_NAME.items()
            if parameter.author and isinstance(value := generation.get(field), int | float)
        },
        source=source,
        encoder=read_encoder(path, kind, config, geometry.hidden_size) if encodes else None,
        vision=None if encodes else read_vision(path, config),
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
    generates = architecture.endswith(("ForCausalLM", "ForConditionalGeneration", "LMHeadModel"))
    return kind_of_encoder(architecture, config, path) or ("generate" if generates else "other")


def _weights(path: Path, config: dict[str, Any], config_path: Path, source: str) -> Weights:
    if source.startswith(shapes.PREFIX) and (said := quantisation(config)):
        return sum_weights(random_tensors(config), path, said)
    if source.startswith(shapes.PREFIX):
        parameters = shapes.count_parameters(config)
        dtype = str(config.get("dtype"))
        if dtype not in ITEM_BYTES:
            raise ModelUnusable(f"{config_path}: dtype is {dtype!r}, not a floating-point type.")
        return Weights(parameters, parameters * ITEM_BYTES[dtype], dtype, 0)
    tensors = read_tensors(path) | module_tensors(path)
    weights = sum_weights(tensors, path, quantisation(config))
    check_quantisation(config, bool(weights.formats), config_path)
    return weights


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
