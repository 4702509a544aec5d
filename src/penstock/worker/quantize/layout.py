"""What becomes of each tensor of a checkpoint, by its headers and the model's structure.

The weights of the layers' linear modules are rounded; embeddings, the head, routers and norms stay
as they are. Files of experts that are stacked are written one by one, as other servers expect them.
A checkpoint whose result could not be served is refused here, before anything is written.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from penstock.catalog.linear_formats import MADE_AT_LOAD, packed_linears, split_name
from penstock.catalog.linear_formats.base import FLOATS
from penstock.catalog.weights import INDEX_FILE, read_header, read_tensors, weight_files
from penstock.errors import ModelUnusable
from penstock.worker.models import weights
from penstock.worker.models.linear.experts import PROJECTIONS, TOGETHER
from penstock.worker.quantize.schemes import Scheme, scheme_for

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from transformers import PretrainedConfig, PreTrainedModel

    from penstock.catalog.weights import Tensor as Header

_STACKED = re.compile(rf"(.+\.experts)\.({TOGETHER}|down_proj)")
_EXPERT = re.compile(r"(.+\.experts)\.\d+\.\w+")
_LAYERS = MADE_AT_LOAD["int8"]  # knows what a layer's weight is


@dataclass(frozen=True, slots=True)
class Layer:
    """The weight of one linear layer: rows of a stored tensor."""

    module: str
    stored: str
    shape: tuple[int, int]
    scales: torch.dtype
    expert: int | None = None  # of stacked ones
    begin: int = 0  # its first row


@dataclass(frozen=True, slots=True)
class Shard:
    """One file."""

    file: Path  # that it is made of, and whose name it has
    kept: Mapping[str, Header]
    layers: tuple[Layer, ...]
    tensors: Mapping[str, Header]  # of the new file


@dataclass(frozen=True, slots=True)
class Layout:
    """A quantised checkpoint that is still to be written."""

    scheme: Scheme
    shards: tuple[Shard, ...]
    described: dict[str, Any]  # its quantization_config
    is_indexed: bool

    @property
    def size_bytes(self) -> int:
        """Of all tensors."""
        return sum(t.size_bytes for shard in self.shards for t in shard.tensors.values())


def lay_out(folder: Path, config: PretrainedConfig, wanted: str) -> Layout:
    """Of the checkpoint in `folder` in the format that is called `wanted`; ModelUnusable says why
    not."""
    named = read_tensors(folder)
    stored = {
        file: {name: tensor for name, tensor in read_header(file).items() if name in named}
        for file in weight_files(folder)
    }
    found = {file: list(_layers(tensors)) for file, tensors in stored.items()}
    every = [layer for layers in found.values() for layer in layers]
    has_experts = any(_EXPERT.fullmatch(layer.module) for layer in every)
    scheme = scheme_for(wanted, {layer.shape[1] for layer in every}, has_experts=has_experts)
    chosen = _chosen(every, scheme)
    if not chosen:
        raise ModelUnusable(
            f"{folder} has no layers whose weights can be rounded to {wanted}: their inputs are "
            f"{', '.join(map(str, sorted({layer.shape[1] for layer in every}))) or 'none'}."
        )
    shards = tuple(
        _shard(file, tensors, [layer for layer in found[file] if layer.module in chosen], scheme)
        for file, tensors in stored.items()
    )
    model = weights.skeleton(config, folder)
    skipped = {layer.module for layer in every} - chosen
    described = scheme.described(_plain_linears(model, shards) | skipped)
    _check_served(folder, model, shards, described)
    return Layout(scheme, shards, described, (folder / INDEX_FILE).exists())


def _layers(tensors: Mapping[str, Header]) -> Iterator[Layer]:
    """The weights of linear layers, by their names and shapes."""
    for name, tensor in tensors.items():
        if found := _STACKED.fullmatch(name):
            yield from _experts(name, tensor, found[1], found[2])
            continue
        module, leaf = split_name(name)
        if leaf == "weight" and (linear := _LAYERS.find(module, {leaf: tensor}, {})) is not None:
            yield Layer(module, name, (linear.shape[0], linear.shape[1]), _scales(tensor))


def _experts(name: str, tensor: Header, experts: str, projection: str) -> Iterator[Layer]:
    if len(tensor.shape) != 3 or tensor.dtype not in FLOATS:
        return
    count, outputs, inputs = tensor.shape
    parts = PROJECTIONS[:2] if projection == TOGETHER else (projection,)
    rows = outputs // len(parts)
    for expert in range(count):
        for number, part in enumerate(parts):
            module = f"{experts}.{expert}.{part}"
            first = number * rows
            yield Layer(module, name, (rows, inputs), _scales(tensor), expert, first)


def _scales(weight: Header) -> torch.dtype:
    """Those of float32 have no more bits than others: other servers compute in bfloat16."""
    return torch.float16 if weight.dtype == "F16" else torch.bfloat16


def _chosen(layers: list[Layer], scheme: Scheme) -> set[str]:
    """Modules whose weights are rounded: of a layer's experts all of them or none."""
    plain = [layer.module for layer in layers if not scheme.takes(layer.shape[1])]
    kept = {found[1] for module in plain if (found := _EXPERT.fullmatch(module))}
    return {
        layer.module
        for layer in layers
        if scheme.takes(layer.shape[1])
        and not ((found := _EXPERT.fullmatch(layer.module)) and found[1] in kept)
    }


def _shard(file: Path, tensors: Mapping[str, Header], layers: list[Layer], scheme: Scheme) -> Shard:
    rounded = {layer.stored for layer in layers}
    kept = {name: tensor for name, tensor in tensors.items() if name not in rounded}
    made = {
        f"{layer.module}.{leaf}": header
        for layer in layers
        for leaf, header in scheme.headers(layer.shape, layer.scales).items()
    }
    return Shard(file, kept, tuple(layers), {**kept, **made})


def _plain_linears(model: PreTrainedModel, shards: tuple[Shard, ...]) -> set[str]:
    """Linear modules that stay as they are, also those that only other servers have as such."""
    modules = dict(model.named_modules())
    linear = {name for name, module in modules.items() if isinstance(module, nn.Linear)}
    tables = {name for name, module in modules.items() if isinstance(module, nn.Embedding)}
    stored = {
        name.removesuffix(".weight")
        for shard in shards
        for name, tensor in shard.kept.items()
        if name.endswith(".weight") and len(tensor.shape) == 2
    }
    rounded = {layer.module for shard in shards for layer in shard.layers}
    return (linear | stored) - rounded - tables


def _check_served(
    folder: Path, model: PreTrainedModel, shards: tuple[Shard, ...], described: dict[str, Any]
) -> None:
    tensors = {name: tensor for shard in shards for name, tensor in shard.tensors.items()}
    packed = packed_linears(tensors, "", folder, described)
    kept = sorted(name for shard in shards for name in shard.kept)
    if problem := weights.misfit(model, packed, kept):
        raise ModelUnusable(
            f"{folder} cannot be quantised, since the result could not be served: {problem}."
        )
