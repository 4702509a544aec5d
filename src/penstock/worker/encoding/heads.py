"""From the rows of one text to its vector or its score, in float32."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from penstock.errors import ModelUnusable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from transformers import PreTrainedModel

    from penstock.catalog.encoders import Encoder, Stage
    from penstock.wire import Encoding, TokenIds

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda values: values,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
}
_Stage = Callable[[Tensor], Tensor]


class Head(Protocol):
    """What comes behind the transformer."""

    tensors: list[Tensor]  # its own weights

    def __call__(self, rows: Tensor, tokens: TokenIds, encoding: Encoding) -> Tensor:
        """One text's result, [dimensions]; `rows` [length, hidden]."""


class VectorHead:
    """Pools the rows, and does what sentence-transformers' modules do behind that."""

    def __init__(self, encoder: Encoder, folder: Path, device: torch.device) -> None:
        self._encoder = encoder
        self._poolings = [_POOLINGS[name] for name in encoder.pooling]
        self._stages: list[_Stage] = [_stage(s, folder, device) for s in encoder.stages]
        self.tensors = [
            tensor
            for stage in self._stages
            if isinstance(stage, nn.Module)
            for tensor in stage.parameters()
        ]

    def __call__(self, rows: Tensor, tokens: TokenIds, encoding: Encoding) -> Tensor:
        rows = rows.float()
        first = 0 if self._encoder.pools_prompt else min(encoding.skipped, len(rows) - 1)
        vector = torch.cat([pool(rows, first) for pool in self._poolings])
        for stage in self._stages:
            vector = stage(vector)
        wanted = encoding.dimensions or self._encoder.default_dimensions
        if wanted >= len(vector):
            return vector
        cut = vector[:wanted]
        return F.normalize(cut, dim=0) if self._encoder.normalised else cut


class ScoreHead:
    """The model's own head over the rows of one text, through the activation of its files.

    The head is the model's own code: its transformer is replaced by one that returns rows which
    have been computed already.
    """

    def __init__(self, model: PreTrainedModel, encoder: Encoder) -> None:
        self._model = model
        self.base: Any = getattr(model, model.base_model_prefix)
        self._activation = ACTIVATIONS[encoder.activation]
        self.tensors: list[Tensor] = []  # they are the model's

    def __call__(self, rows: Tensor, tokens: TokenIds, encoding: Encoding) -> Tensor:
        answer: Any
        ids = torch.tensor(tokens, device=rows.device)
        with _answering(self.base, _Rows(rows[None], getattr(self.base, "pooler", None))):
            answer = self._model(input_ids=ids[None])
        logit: Tensor = answer.logits[0].float()
        return logit if encoding.raw else self._activation(logit)


class _Rows:
    """What a transformer returns, as far as heads ask for it."""

    def __init__(self, rows: Tensor, pooler: nn.Module | None) -> None:
        self.last_hidden_state = rows
        self.pooler_output = None if pooler is None else pooler(rows)

    def __getitem__(self, index: int | slice) -> Any:
        return (self.last_hidden_state, self.pooler_output)[index]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


@contextmanager
def _answering(module: nn.Module, answer: _Rows) -> Iterator[None]:
    """The module answers with this, whatever it is asked."""
    module.forward = lambda *_, **__: answer
    try:
        yield
    finally:
        del module.forward


def _weighted_mean(rows: Tensor, first: int) -> Tensor:
    weights = torch.arange(first + 1, len(rows) + 1, device=rows.device, dtype=rows.dtype)
    return (rows[first:] * weights[:, None]).sum(0) / weights.sum()


_POOLINGS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "cls": lambda rows, _: rows[0],
    "last": lambda rows, _: rows[-1],
    "mean": lambda rows, first: rows[first:].mean(0),
    "max": lambda rows, first: rows[first:].amax(0),
    "mean_sqrt_len": lambda rows, first: rows[first:].sum(0) / (len(rows) - first) ** 0.5,
    "weighted_mean": _weighted_mean,
}


def _stage(stage: Stage, folder: Path, device: torch.device) -> _Stage:
    if stage.kind == "normalize":
        return lambda vector: F.normalize(vector, dim=0)
    module: nn.Module
    if stage.kind == "layer_norm":
        module = nn.LayerNorm(stage.inputs)
        return _filled(module, "norm", folder / stage.folder, device)
    tensors = load_file(folder / stage.folder / "model.safetensors")
    module = nn.Linear(stage.inputs, stage.outputs, bias="linear.bias" in tensors)
    linear = _filled(module, "linear", folder / stage.folder, device)
    return nn.Sequential(linear, _Activation(stage.activation))


class _Activation(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self._apply_to = ACTIVATIONS[name]

    def forward(self, values: Tensor) -> Tensor:
        return self._apply_to(values)


def _filled(module: nn.Module, name: str, folder: Path, device: torch.device) -> nn.Module:
    """With the weights of a module's folder, in float32."""
    tensors = load_file(folder / "model.safetensors")
    own = {key.removeprefix(f"{name}."): tensor.float() for key, tensor in tensors.items()}
    try:
        module.load_state_dict(own)
    except RuntimeError as error:
        raise ModelUnusable(f"{folder / 'model.safetensors'} cannot be used: {error}") from error
    return module.to(device).eval().requires_grad_(False)
