"""A quantised checkpoint in the folder of its own, from the files of a plain one.

Both are mapped or written a few rows at a time, so that what it takes in memory does not depend on
the model.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open

from penstock.catalog.weights import INDEX_FILE, read_json
from penstock.errors import ModelUnusable
from penstock.sources.staging import require_disk
from penstock.worker.quantize.files import TensorFile
from penstock.worker.quantize.layout import Layer, Layout, Shard, lay_out

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor
    from transformers import PretrainedConfig

    Report = Callable[[int, int], None]  # bytes done, bytes in all

# Weights that are rounded at a time, for each thread: with all that is computed of them they fit
# into a core's cache.
_AT_ONCE = 1 << 17
_MOST_AT_ONCE = 1 << 21
_COPIED_BYTES = 8 << 20


def quantize(
    source: Path, target: Path, config: PretrainedConfig, wanted: str, report: Report
) -> None:
    """Write the weights and the configuration of `source` in a format to the folder `target`."""
    layout = lay_out(source, config, wanted)
    require_disk(target, layout.size_bytes, f"Quantising {source} to {wanted}")
    progress = _Progress(layout, report)
    for shard in layout.shards:
        _write(shard, target / shard.file.name, layout, progress)
    if layout.is_indexed:
        names = {name: shard.file.name for shard in layout.shards for name in shard.tensors}
        index = {"metadata": {"total_size": layout.size_bytes}, "weight_map": names}
        _write_json(target / INDEX_FILE, index)
    described = read_json(source / "config.json") | {"quantization_config": layout.described}
    _write_json(target / "config.json", described)


class _Progress:
    """How many bytes of the new files are written."""

    def __init__(self, layout: Layout, report: Report) -> None:
        self._report = report
        self._done, self._total = 0, layout.size_bytes
        report(0, self._total)

    def add(self, size: int) -> None:
        """So many more."""
        self._done += size
        self._report(self._done, self._total)


def _write(shard: Shard, path: Path, layout: Layout, progress: _Progress) -> None:
    with (
        safe_open(shard.file, framework="pt") as stored,
        TensorFile(path, shard.tensors) as file,
    ):
        for name in shard.kept:
            tensor = stored.get_tensor(name).reshape(-1)
            for part in torch.split(tensor, _COPIED_BYTES // tensor.itemsize):
                file.write(name, part)
                progress.add(part.nbytes)
        for layer in shard.layers:
            _round(layer, stored.get_tensor(layer.stored), layout, file, progress)


def _round(
    layer: Layer, stored: Tensor, layout: Layout, file: TensorFile, progress: _Progress
) -> None:
    weight = stored if layer.expert is None else stored[layer.expert]
    outputs, inputs = layer.shape
    weight = weight[layer.begin : layer.begin + outputs]
    at_once = min(_AT_ONCE * torch.get_num_threads(), _MOST_AT_ONCE)
    for rows in torch.split(weight, max(1, at_once // inputs)):
        try:
            parts = layout.scheme.round(rows.float(), layer.scales)
        except ValueError as error:
            raise ModelUnusable(f"{layer.stored} {error}: the file is damaged.") from error
        for leaf, part in parts.items():
            file.write(f"{layer.module}.{leaf}", part)
            progress.add(part.nbytes)
    for leaf, part in layout.scheme.whole(layer.shape).items():
        file.write(f"{layer.module}.{leaf}", part)
        progress.add(part.nbytes)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=2), "utf-8")
