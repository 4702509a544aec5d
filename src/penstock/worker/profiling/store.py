"""Measured profiles kept between loads: one small file each, under a fingerprint.

A file that cannot be read, or is not what it should be, is as good as none.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

from penstock.catalog.linear_formats import MADE_AT_LOAD
from penstock.memory.cost import CostModel  # noqa: TC001 - msgspec reads the annotation
from penstock.worker.kv.arena import LayerGeometry  # noqa: TC001
from penstock.worker.kv.layout.layer_states import StateGeometry  # noqa: TC001

if TYPE_CHECKING:
    from penstock.wire import LoadSpec

FORMAT = 25
_LIBRARIES = ("penstock", "torch", "transformers", "numba", "numpy", "pillow")


class StoredProfile(msgspec.Struct, frozen=True):
    """What a load has measured, and within what."""

    format: int
    fingerprint: str
    memory_bytes: int  # the grant it was measured in
    step_tokens: int
    step_sequences: int
    cost: CostModel
    layers: tuple[tuple[int, LayerGeometry], ...]  # the model's own numbers of its attention layers
    # A load went through its validation and the comparison with the model's own attention.
    proven: bool = False
    times: tuple[tuple[int, float], ...] = ()  # seconds of steps of so many rows, if measured
    states: tuple[tuple[int, StateGeometry], ...] = ()  # its recurrent layers
    prompts_differ: bool = False  # these leave other states behind tokens of a prompt
    kept_bytes: int = 0  # what libraries took for themselves at the largest step
    provisional: bool = False  # of smaller steps than there may be, which are still to be measured
    image_pixels: int = 0  # of the largest image that is taken
    stage_bytes: int = 0  # while that is encoded
    stage_s: float = 0.0


def fingerprint(
    spec: LoadSpec, processor: str, dtype: torch.dtype, window: int, block_tokens: int
) -> str:
    """A digest of the weights' identity, the machine, the libraries and the settings."""
    folder = Path(spec.path)
    files = [
        (file.name, file.stat().st_size, file.stat().st_mtime_ns)
        for file in sorted(folder.iterdir())
        if file.suffix in {".safetensors", ".gguf", ".json"}
    ]
    config = hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()
    parts = (
        FORMAT,
        files,
        config,
        (str(dtype), spec.dtype if spec.dtype in MADE_AT_LOAD else "", spec.kv_dtype),
        processor,
        [(name, _version(name)) for name in _LIBRARIES],
        (spec.step_tokens, spec.step_sequences, window, block_tokens, torch.get_num_threads()),
        spec.speculation,
        (spec.image_pixels, spec.image_bytes, spec.image_file_bytes),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def load(directory: str | None, wanted: str) -> StoredProfile | None:
    """The profile of a fingerprint, if there is one."""
    if directory is None:
        return None
    try:
        data = (Path(directory) / f"{wanted}.json").read_bytes()
        stored = msgspec.json.decode(data, type=StoredProfile)
    except (OSError, msgspec.DecodeError):
        return None
    return stored if (stored.format, stored.fingerprint) == (FORMAT, wanted) else None


def save(directory: str | None, profile: StoredProfile) -> None:
    """Keep it; a full or read-only disk only means measuring again."""
    if directory is None:
        return
    target = Path(directory) / f"{profile.fingerprint}.json"
    temporary = target.with_suffix(f".{os.getpid()}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(msgspec.json.encode(profile))
        temporary.replace(target)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "none"
