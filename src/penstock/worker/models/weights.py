"""Weights from safetensors files to where they are computed with, one tensor after the other.

No second copy is made on the way: a file is mapped, and what is in the right type already stays
there on a CPU. Knows nothing of conversions between names: checkpoints that need one are left to
transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM
from transformers.initialization import no_init_weights

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from transformers import PretrainedConfig, PreTrainedModel

_TELL_EVERY = 100  # th part of the bytes


def stream(
    config: PretrainedConfig,
    attention: str,
    dtype: torch.dtype,
    device: torch.device,
    files: list[Path],
    progress: Callable[[int, int], None],
) -> PreTrainedModel | None:
    """The model of a config with the weights of `files`; None if their names or shapes are not
    exactly the model's own, or it keeps some of them in another type."""
    model = _without_weights(config, attention, dtype)
    if model is None:
        return None
    # Also names of one weight that is tied already: each of them may be stored.
    expected = dict(model.named_parameters(remove_duplicate=False))
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    total = sum(file.stat().st_size for file in files)
    done = told = 0
    try:
        for file in files:
            with safe_open(file, framework="pt") as weights:
                for name in weights.keys():  # noqa: SIM118 - not a dictionary
                    tensor = weights.get_tensor(name)
                    wanted = expected.pop(name, None)
                    if wanted is None or wanted.shape != tensor.shape:
                        return None
                    _put(model, name, tensor.to(device, dtype))
                    done += tensor.nbytes
                    if done - told > total // _TELL_EVERY:
                        told = done
                        progress(done, total)
    except (SafetensorError, OSError):
        return None  # transformers has words for it
    if expected.keys() - tied:
        return None
    # Told what is missing, it does not tie what is stored twice and differs.
    model.tie_weights(missing_keys=set(expected), recompute_mapping=False)
    return model.to(device)  # its tables


def _without_weights(
    config: PretrainedConfig, attention: str, dtype: torch.dtype
) -> PreTrainedModel | None:
    try:
        with no_init_weights(), _Nowhere():
            model: Any = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=attention, trust_remote_code=False
            )
    except (ValueError, KeyError, RuntimeError, ImportError):
        return None
    kept = any(
        getattr(model, name, None)
        for name in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
    )
    # Tables that are stored with the weights may be meant to stay in their own type.
    stored_tables = model.state_dict().keys() - dict(model.named_parameters()).keys()
    empty_tables = any(table.is_meta for table in model.buffers())
    return None if kept or stored_tables or empty_tables else model


class _Nowhere(TorchFunctionMode):
    """Uninitialised tensors made inside have no memory."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def _put(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    model.get_submodule(path)._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
