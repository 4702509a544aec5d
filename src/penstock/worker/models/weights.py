"""Weights from safetensors or GGUF files to where they are computed with, one after the other.

No second copy is made on the way: a file is mapped, and what is in the right type already stays
there on a CPU. Knows nothing of conversions between names: checkpoints that need one are left to
transformers, unless their weights are packed, which only we can read.
"""

from __future__ import annotations

import logging
import math
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers.initialization import no_init_weights

from penstock.catalog.linear_formats import (
    MADE_AT_LOAD,
    full_name,
    is_unused,
    scratch_bytes,
    split_name,
)
from penstock.errors import ModelUnusable
from penstock.memory.device_kinds import kind_of
from penstock.worker.models import attention, gguf_weights
from penstock.worker.models.kinds import class_for, implementation_for, sees
from penstock.worker.models.linear import READERS, PackedEmbedding, PackedLinear, weight_of
from penstock.worker.models.linear.expert_slots import ExpertSlots
from penstock.worker.models.linear.reading import BrokenTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedModel

    from penstock.catalog.linear_formats import FormattedWeight
log = logging.getLogger(__name__)

# transformers' lists of modules that stay float32: of float16 models, and of any.
_KEPT_IN_FLOAT16, _KEPT = "_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"
_TELL_EVERY = 100  # th part of the bytes


class _OtherModel(Exception):  # noqa: N818 - not an error
    """The files are not exactly the model's own; it says where."""


def stream(
    config: PretrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    files: list[Path],
    packed: Mapping[str, FormattedWeight],
    progress: Callable[[int, int], None],
) -> PreTrainedModel | None:
    """The model of a config with the weights of `files`, of which those of modules in `packed` stay
    packed; None if their names or shapes are not exactly the model's own, or it keeps some of them
    in another type. With packed weights that is refused, with the name."""
    try:
        model = _without_weights(config, dtype)
        if not packed:
            _refuse_own_types(model)
        _Filling(model, dtype, device, packed).read(files, progress)
    except _OtherModel as other:
        if packed or files[0].suffix == ".gguf":
            made = {linear.format.name for linear in packed.values()} & MADE_AT_LOAD.keys()
            hint = f" Choose another dtype than {min(made)}." if made else ""
            raise ModelUnusable(
                f"{files[0].parent}: its weights cannot be used: {other}.{hint}"
            ) from other
        return None
    return model.to(device)  # its tables


def fill(
    config: PretrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    tensors: Iterable[tuple[str, Tensor]],
    packed: Mapping[str, FormattedWeight],
) -> PreTrainedModel:
    """The model of a config with `tensors`, exactly its own by their names."""
    try:
        model = _without_weights(config, dtype)
        _Filling(model, dtype, device, packed).fill(tensors)
    except _OtherModel as other:
        raise ModelUnusable(f"its random weights cannot be used: {other}.") from other
    return model.to(device)


def skeleton(config: PretrainedConfig, folder: Path) -> PreTrainedModel:
    """The model of a folder's config, without memory for weights; ModelUnusable: there is none."""
    if sees(config):
        raise ModelUnusable(f"{folder}: models that see are not quantised yet.")
    attention.register()
    try:
        return _without_weights(config, torch.float32)
    except _OtherModel as other:
        raise ModelUnusable(f"{folder}: its model cannot be made: {other}.") from other


def misfit(
    model: PreTrainedModel, packed: Mapping[str, FormattedWeight], plain: Iterable[str]
) -> str | None:
    """A weight that has no place in the model, which was built without weights: packed ones are
    looked up by module, others by name. The model cannot be used afterwards."""
    try:
        filling = _Filling(model, torch.float32, torch.device("cpu"), packed)
    except _OtherModel as other:
        return str(other)
    lost = next((name for name in plain if not filling.has_place(name)), None)
    return None if lost is None else f"{lost} is not a weight of {type(model).__name__}"


class _Filling:
    """A model without weights, and what of them is still to come."""

    def __init__(
        self,
        model: Any,
        dtype: torch.dtype,
        device: torch.device,
        packed: Mapping[str, FormattedWeight],
    ) -> None:
        self._model = model
        self._dtype = dtype
        self._device = device
        self._packed = dict(packed)
        # Also names of one weight that is tied already: each of them may be stored.
        self._expected = dict(model.named_parameters(remove_duplicate=False))
        self._tied = set(getattr(model, "all_tied_weights_keys", None) or ())
        self._tables = _stored_tables(model)
        self._float32_parts = _float32_parts(model, dtype)
        self._incomplete: dict[str, dict[str, Tensor]] = {}  # packed weights by module
        self._experts = ExpertSlots(model)
        self._unused: list[str] = []
        self._scratch = torch.empty(0, dtype=dtype, device=device)
        if packed:
            held = sum(linear.resident_bytes for linear in packed.values())
            size = scratch_bytes(held, kind_of(str(device)))
            self._scratch = self._scratch.new_empty(size // dtype.itemsize)
            # So that it is counted with the weights.
            model.register_buffer("linear_scratch", self._scratch, persistent=False)
        # Layers in a file that the model has no use for, such as those that propose tokens.
        patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
        self._ignored = re.compile("|".join(patterns) or "$^")
        for module, linear in packed.items():
            if not self._ignored.search(f"{module}.weight"):
                self._expect_packed(module, linear)

    def read(self, files: list[Path], progress: Callable[[int, int], None]) -> None:
        """All of `files`; _OtherModel if they are not exactly what is expected."""
        total = sum(file.stat().st_size for file in files)
        done = told = 0

        def told_of() -> Iterator[tuple[str, Tensor]]:
            nonlocal done, told
            for name, tensor in _stored(files):
                yield name, tensor
                done += tensor.nbytes
                if done - told > total // _TELL_EVERY:
                    told = done
                    progress(done, total)

        try:
            self.fill(told_of())
        except (SafetensorError, OSError) as error:  # transformers has words for it
            raise _OtherModel(str(error)) from error

    def fill(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """The same with tensors by their names."""
        for name, tensor in tensors:
            self._take(name, tensor)
        lost = [
            full_name(module, leaf)
            for module, stored in self._incomplete.items()
            for leaf in self._packed[module].tensors - stored.keys()
        ]
        if missing := sorted({*self._expected.keys() - self._tied, *lost, *self._tables}):
            raise _OtherModel(f"{missing[0]} is missing")
        try:
            self._experts.put()
        except ValueError as error:
            raise _OtherModel(str(error)) from error
        if self._unused:
            log.info(
                "%d scales for activations or KV are not used, such as %s: both stay floats",
                len(self._unused),
                self._unused[0],
            )
        if self._tie_packed():
            return
        # Told what is missing, it does not tie what is stored twice and differs.
        self._model.tie_weights(missing_keys=set(self._expected), recompute_mapping=False)

    def has_place(self, name: str) -> bool:
        """Whether a plain tensor of that name can be taken, or be left out."""
        known = name in self._expected or name in self._tied or name in self._tables
        return known or self._experts.has_place(name) or self._ignored.search(name) is not None

    def _expect_packed(self, module: str, linear: FormattedWeight) -> None:
        name = f"{module}.weight"
        wanted = self._experts.expect(module, linear)
        if wanted is None:
            wanted = self._table_shape(module) or self._linear_shape(module)
        else:
            for stacked in self._experts.replaced(module):
                self._expected.pop(stacked, None)
        if wanted is None:
            raise _OtherModel(f"{name} is of no linear layer")
        if linear.shape not in (wanted, (math.prod(wanted),)):
            raise _OtherModel(f"{name} is {list(linear.shape)} instead of {list(wanted)}")
        if name in self._tied:
            raise _OtherModel(f"{name} is the embedding's as well, which is not packed")
        self._packed[module] = replace(linear, shape=wanted)
        self._incomplete[module] = {}

    def _table_shape(self, module: str) -> tuple[int, ...] | None:
        """Of a table of embeddings, and of the head that is the same; None: it is no such table."""
        if f"{module}.weight" not in self._expected:  # and there may be no such module
            return None
        if self._model.get_submodule(module) is not self._model.get_input_embeddings():
            return None
        for tied in self._tied:
            self._expected.pop(tied, None)
        return tuple(self._expected.pop(f"{module}.weight").shape)

    def _linear_shape(self, module: str) -> tuple[int, ...] | None:
        wanted = self._expected.pop(f"{module}.weight", None)
        if wanted is None or weight_of(self._model.get_submodule(module)) is None:
            return None
        return tuple(wanted.shape)

    def _take(self, name: str, tensor: Tensor) -> None:
        of, part = split_name(name)
        if of in self._incomplete and part in self._packed[of].tensors:
            self._take_packed(of, part, tensor)
            return
        if self._packed and name not in self._expected and self._has_no_use(name, tensor):
            return
        module, _, leaf = name.rpartition(".")
        table = self._tables.pop(name, None)
        wanted = self._expected.pop(name, None) if table is None else table
        if wanted is None and self._packed and self._stack_expert(name, tensor):
            return
        if wanted is None or wanted.shape != tensor.shape:
            raise _OtherModel(f"{name} {list(tensor.shape)} is not in it")
        kept = any(part in name for part in self._float32_parts)
        own = self._dtype if table is None else table.dtype
        moved = tensor.to(self._device, torch.float32 if kept else own)
        if table is None:
            parameter = nn.Parameter(moved, requires_grad=False)
            self._model.get_submodule(module)._parameters[leaf] = parameter
        else:
            self._model.get_submodule(module)._buffers[leaf] = moved

    def _take_packed(self, module: str, leaf: str, tensor: Tensor) -> None:
        stored, linear = self._incomplete[module], self._packed[module]
        stored[leaf] = tensor
        if stored.keys() != linear.tensors:
            return
        del self._incomplete[module]
        try:
            if self._experts.has(module):
                self._experts.take(module, stored, self._scratch, linear)
                return
            weight = READERS[linear.format.name](stored, self._scratch, linear)
        except BrokenTensor as error:
            raise _OtherModel(f"{full_name(module, error.leaf)} {error.problem}") from error
        plain = self._model.get_submodule(module)
        if plain is self._model.get_input_embeddings():
            self._model.set_submodule(module, PackedEmbedding(weight, plain))
        else:
            self._model.set_submodule(module, PackedLinear(weight, plain.bias))

    def _tie_packed(self) -> bool:
        """Whether the embeddings are packed; a head that is the same then has the same weight."""
        embeddings = self._model.get_input_embeddings()
        if not isinstance(embeddings, PackedEmbedding):
            return False
        for name in self._tied:
            head = PackedLinear(embeddings.table, None)
            self._model.set_submodule(name.rpartition(".")[0], head)
        return True

    def _stack_expert(self, name: str, tensor: Tensor) -> bool:
        try:
            stack = self._experts.take_plain(name, tensor.to(self._device, self._dtype))
        except ValueError as error:
            raise _OtherModel(str(error)) from error
        if stack is not None:
            self._expected.pop(stack, None)
        return stack is not None

    def _has_no_use(self, name: str, tensor: Tensor) -> bool:
        if is_unused(name):
            self._unused.append(name)
            return True
        # GPTQ writes biases of layers that have none.
        module, _, leaf = name.rpartition(".")
        if leaf == "bias" and module in self._packed and not bool(tensor.any()):
            return True
        return self._ignored.search(name) is not None


def _stored(files: list[Path]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the files, by its name in transformers' model."""
    if files[0].suffix == ".gguf":
        yield from gguf_weights.stored(files[0])
        return
    for file in files:
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 - not a dictionary
                yield name, weights.get_tensor(name)


def _without_weights(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    try:
        with no_init_weights(), _Nowhere():
            model: Any = class_for(config).from_config(
                config,
                dtype=dtype,
                attn_implementation=implementation_for(config),
                trust_remote_code=False,
            )
    except (ValueError, KeyError, RuntimeError, ImportError) as error:
        raise _OtherModel(str(error)) from error
    if any(table.is_meta for table in model.buffers()):
        raise _OtherModel("it has tables that are made with its weights")
    return model


def _refuse_own_types(model: Any) -> None:
    """Whatever is kept in a type of its own, transformers knows best, for weights that it reads."""
    kept = any(getattr(model, name, None) for name in (_KEPT_IN_FLOAT16, _KEPT))
    if kept or _stored_tables(model):
        raise _OtherModel("it keeps some of its weights in another type")


def _stored_tables(model: Any) -> dict[str, Tensor]:
    """Buffers that are stored with the weights."""
    tables = model.state_dict().keys() - dict(model.named_parameters()).keys()
    return {name: model.get_buffer(name) for name in tables}


def _float32_parts(model: Any, dtype: torch.dtype) -> tuple[str, ...]:
    """Parts of the names of weights that stay float32 in a model of a narrow type."""
    kept = set(getattr(model, _KEPT, None) or ())
    if dtype == torch.float16:
        kept |= set(getattr(model, _KEPT_IN_FLOAT16, None) or ())
    return tuple(kept)


class _Nowhere(TorchFunctionMode):
    """Uninitialised tensors made inside have no memory."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)
