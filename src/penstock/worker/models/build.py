"""From a model folder to transformers' model in memory, with its weights in place.

A folder that transformers would complete with random numbers is refused. Knows neither KV nor
which device the weights go to.
"""

from __future__ import annotations

import json
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig

from penstock.catalog.linear_formats import MADE_AT_LOAD, packed_linears, quantisation
from penstock.catalog.random_tensors import random_tensors
from penstock.catalog.weights import packed_weights, read_json, weight_files
from penstock.errors import ModelUnusable
from penstock.worker.models import attention, random_weights, weights
from penstock.worker.models.kinds import class_for, implementation_for, sees

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module
    from transformers import PretrainedConfig, PreTrainedModel

    from penstock.wire import LoadSpec
    from penstock.worker.core.engine_contract import Progress


def read_config(spec: LoadSpec) -> PretrainedConfig:
    return config_of(spec.path, spec.name, trust_remote_code=spec.trust_remote_code)


def config_of(path: str, name: str, *, trust_remote_code: bool = False) -> PretrainedConfig:
    try:
        config = AutoConfig.from_pretrained(
            path, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except (ValueError, KeyError, OSError) as error:
        raise ModelUnusable(f"{name}: config.json cannot be used: {error}") from error
    config = deepcopy(config)  # transformers keeps and changes the object it is given
    # What is packed is read from the files; transformers would use loaders of its own.
    for part in (config, config.get_text_config()):
        if getattr(part, "quantization_config", None) is not None:
            del part.quantization_config
    return config


def build_model(
    spec: LoadSpec,
    config: PretrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress,
) -> PreTrainedModel:
    folder = Path(spec.path)
    progress("weights", 0, 0)
    if (seed := _random_seed(folder)) is not None:
        if spec.dtype in MADE_AT_LOAD:
            raise ModelUnusable(f"{spec.name} has random weights, which are not rounded to int8.")
        model, total = _random_model(folder, config, dtype, device, seed), 0
    else:
        files = weight_files(folder)
        total = sum(file.stat().st_size for file in files)
        progress("weights", 0, total)
        packed = packed_weights(folder, spec.dtype)
        if packed and sees(config):
            raise ModelUnusable(
                f"{spec.name}: packed weights of models that see are not served yet; take its "
                "plain checkpoint, with dtype float32, bfloat16 or float16."
            )
        model = None
        # With code of its own the model may be another than transformers'.
        if packed or not spec.trust_remote_code:
            told = partial(progress, "weights")
            model = weights.stream(config, dtype, device, files, packed, told)
        if model is None:
            model = stored_model(spec, config, dtype, class_for(config))
    model = model.to(device).eval().requires_grad_(False)
    progress("weights", total, total)
    return model


def stored_model(
    spec: LoadSpec,
    config: PretrainedConfig,
    dtype: torch.dtype,
    kind: Any,
    spare: tuple[str, ...] = (),
) -> Any:
    """As transformers reads it, as one of its `Auto` kinds; parts that are `spare` may be missing
    in the files."""
    try:
        model, report = kind.from_pretrained(
            spec.path,
            config=config,
            dtype=dtype,
            attn_implementation=implementation_for(config),
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=spec.trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported, and refused below with their names
        )
    except (ValueError, KeyError, OSError, RuntimeError, ImportError) as error:
        # Older model code looks its attention up in a table of its own.
        if isinstance(error, KeyError) and error.args == (attention.IMPLEMENTATION,):
            raise ModelUnusable(
                f"{spec.name}: models of type {config.model_type} have attention code of their "
                "own, which penstock cannot page."
            ) from error
        raise ModelUnusable(f"{spec.name} cannot be loaded: {error}") from error
    _refuse_incomplete(spec.name, report, spare)
    return model


def _refuse_incomplete(name: str, report: dict[str, Any], spare: tuple[str, ...]) -> None:
    """transformers fills what it does not find, or cannot use, with random numbers."""
    if missing := sorted(key for key in report["missing_keys"] if not key.startswith(spare)):
        raise ModelUnusable(
            f"{name}: {len(missing)} weights are missing from its safetensors files, the first "
            f"is {missing[0]}: pull the model again."
        )
    if mismatched := sorted(report["mismatched_keys"]):
        weight, stored, expected = mismatched[0]
        raise ModelUnusable(
            f"{name}: {len(mismatched)} weights have another shape than config.json asks for, the "
            f"first is {weight}: {list(stored)} instead of {list(expected)}."
        )


def _random_model(
    folder: Path, config: PretrainedConfig, dtype: torch.dtype, device: torch.device, seed: int
) -> Any:
    stated = read_json(folder / "config.json")
    if said := quantisation(stated):
        headers = random_tensors(stated)
        packed = packed_linears(headers, "", folder, said)
        numbers = random_weights.made_up(headers, device, seed)
        return weights.fill(config, dtype, device, numbers, packed)
    torch.manual_seed(seed)
    with torch.device(device):
        return class_for(config).from_config(
            config, dtype=dtype, attn_implementation=implementation_for(config)
        )


def _random_seed(folder: Path) -> int | None:
    """The seed of a folder that names a shape instead of holding weights."""
    note = folder / "penstock.json"
    if not note.exists():
        return None
    seed: int | None = json.loads(note.read_text()).get("random_seed")
    return seed


def sliding_windows(text: PretrainedConfig) -> tuple[int | None, ...]:
    """Each layer's sliding window as the config has it, for models that put it only in the mask."""
    size = getattr(text, "sliding_window", None)
    # Without a list of kinds, a window is every layer's.
    kinds = getattr(text, "layer_types", None) or ["sliding_attention"] * text.num_hidden_layers
    return tuple(size if kind == "sliding_attention" else None for kind in kinds)


def kept_tensors(model: Module) -> tuple[Tensor, ...]:
    """What the model keeps; tied weights are one parameter and count once."""
    return (*model.parameters(), *model.buffers())


def routing_matters(model: PreTrainedModel) -> bool:
    """Whether what a step takes depends on the experts that its tokens are sent to."""
    return any(
        name.rpartition(".")[2] == "experts" and not getattr(module.forward, "even", False)
        for name, module in model.named_modules()
    )
