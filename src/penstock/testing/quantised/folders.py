"""Whole checkpoints in a format, beside the same numbers in float32."""

from __future__ import annotations

import json
import re
import shutil
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from penstock.testing.quantised.forms import FORMS, int8_numbers
from penstock.testing.quantised.four_bits import from_mxfp4, to_mxfp4
from penstock.testing.quantised.fp8 import channel_numbers
from penstock.testing.quantised.integers import ct_numbers

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    Tensors = dict[str, Tensor]

LINEAR = re.compile(r"(.*\.layers\.\d+\..*_proj(?:_\w+)?)\.weight")
_STACKED = re.compile(r".*\.experts\.(gate_up|down)_proj")


def save(plain: Path, folder: Path, form: str, *, keep: str = "nothing") -> tuple[Path, Path]:
    """A float32 folder's linear weights in a format, except those whose names contain `keep`; and
    the same numbers as a float32 folder, for a reference."""
    of = FORMS[form]
    stored: Tensors = {}
    meant: Tensors = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        found = LINEAR.fullmatch(name)
        if found is None or keep in name:
            stored[name] = meant[name] = tensor
            continue
        packed = of.pack(tensor)
        stored |= {f"{found[1]}.{leaf}": part for leaf, part in packed.items()}
        meant[name] = of.numbers(packed)
    return _write(plain, folder, stored, meant, {"quantization_config": of.said})


def save_int8_reference(plain: Path, folder: Path) -> Path:
    """A float32 folder with the numbers that rounding its layers to int8 leaves."""
    tensors = load_file(plain / "model.safetensors")
    meant = {
        name: int8_numbers(tensor) if LINEAR.fullmatch(name) else tensor
        for name, tensor in tensors.items()
    }
    return _write(plain, folder, tensors, meant, {})[1]


def save_stacked_mxfp4(plain: Path, folder: Path) -> tuple[Path, Path]:
    """A gpt-oss folder, whose experts are stacked with their inputs first, as it is published."""
    stored: Tensors = {}
    meant: Tensors = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if _STACKED.fullmatch(name) is None:
            stored[name] = meant[name] = tensor
            continue
        packed, exponents = to_mxfp4(tensor.transpose(1, 2).contiguous().numpy())
        groups = packed.reshape(*exponents.shape, 16)
        stored[f"{name}_blocks"] = torch.from_numpy(groups)
        stored[f"{name}_scales"] = torch.from_numpy(exponents)
        meant[name] = torch.from_numpy(from_mxfp4(packed, exponents)).transpose(1, 2)
    said = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    return _write(plain, folder, stored, meant, {"quantization_config": said})


def save_numbers(quantised: Path, folder: Path) -> Path:
    """A folder of compressed-tensors' as a float32 folder with the numbers that it stands for."""
    modules: dict[str, Tensors] = {}
    for file in quantised.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            module, _, leaf = name.rpartition(".")
            modules.setdefault(module, {})[leaf] = tensor
    meant: Tensors = {}
    for module, parts in modules.items():
        if "weight_scale" not in parts:
            meant |= {f"{module}.{leaf}": tensor for leaf, tensor in parts.items()}
            continue
        numbers = ct_numbers if "weight_packed" in parts else channel_numbers
        meant[f"{module}.weight"] = numbers(parts)
    folder.mkdir()
    save_file({name: t.contiguous() for name, t in meant.items()}, folder / "model.safetensors")
    config = json.loads((quantised / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _write(
    plain: Path, folder: Path, stored: Tensors, meant: Tensors, config: dict[str, Any]
) -> tuple[Path, Path]:
    reference = folder.with_name(f"{folder.name}-numbers")
    for path, tensors in ((folder, stored), (reference, meant)):
        shutil.copytree(plain, path)
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(contiguous, path / "model.safetensors", metadata={"format": "pt"})
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **config}))
    return folder, reference
