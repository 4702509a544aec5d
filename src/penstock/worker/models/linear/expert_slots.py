"""The weights of experts on their way from a file into a model that has them stacked.

A file has them one by one (`experts.7.gate_proj`), or stacked as well (`experts.gate_up_proj`).
Plain ones are stacked; packed ones are not.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from penstock.worker.models.linear import READERS, PackedExperts
from penstock.worker.models.linear.experts import PROJECTIONS, TOGETHER

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.catalog.linear_formats import FormattedWeight
    from penstock.worker.models.linear import PackedWeight

_ONE = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)")
_STACKED = re.compile(rf"(.+\.experts)\.({TOGETHER}|down_proj)")


class ExpertSlots:
    """Of one model, which has no weights yet; ValueError says what is wrong with which tensor."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._stacks = {
            name: tuple(parameter.shape)
            for name, parameter in model.named_parameters()
            if _STACKED.fullmatch(name) and parameter.dim() == 3
        }
        # By the experts' module, the expert and the projection.
        self._found: dict[str, dict[int, dict[str, PackedWeight]]] = {}
        # Names of plain weights that are still to come, by the stack that they are parts of.
        self._awaited: dict[str, set[str]] = {}

    def expect(self, module: str, linear: FormattedWeight) -> tuple[int, ...] | None:
        """The shape that a packed weight must have; None: it is not of such experts."""
        if (found := _STACKED.fullmatch(module)) and module in self._stacks:
            self._found.setdefault(found[1], {})
            count, *sides = self._stacks[module]
            if getattr(self._model.get_submodule(found[1]), "is_transposed", False):
                sides.reverse()
            return count, *sides
        if not (found := _ONE.fullmatch(module)) or f"{found[1]}.down_proj" not in self._stacks:
            return None
        self._found.setdefault(found[1], {})
        count, hidden, inner = self._stacks[f"{found[1]}.down_proj"]
        if not self._is_common(found[1]) or int(found[2]) >= count or found[3] not in PROJECTIONS:
            return None
        return (hidden, inner) if found[3] == "down_proj" else (inner, hidden)

    def replaced(self, module: str) -> tuple[str, ...]:
        """Names of the plain tensors that the model has instead of the weights of `module`."""
        if module in self._stacks:
            return (module,)
        experts = self._experts(module)
        return f"{experts}.{TOGETHER}", f"{experts}.down_proj"

    def has(self, module: str) -> bool:
        """Whether `take` is for it."""
        return self._experts(module) in self._found

    def take(
        self, module: str, stored: Mapping[str, Tensor], scratch: Tensor, linear: FormattedWeight
    ) -> None:
        """The weight of one expert, or of all."""
        read, of_module = READERS[linear.format.name], self._found[self._experts(module)]
        if found := _ONE.fullmatch(module):
            of_module.setdefault(int(found[2]), {})[found[3]] = read(stored, scratch, linear)
            return
        moved = {leaf: tensor.to(scratch.device) for leaf, tensor in stored.items()}
        projection = module.rpartition(".")[2]
        for expert in range(linear.shape[0]):
            # Each is a part of the whole tensor's memory.
            own = {leaf: tensor[expert] for leaf, tensor in moved.items()}
            of_module.setdefault(expert, {})[projection] = read(own, scratch, linear)

    def take_plain(self, name: str, tensor: Tensor) -> str | None:
        """One expert's plain weight, in the type and place that it is computed in; the name of the
        stack that it goes to. None: it is no such weight."""
        found = _ONE.fullmatch(name.removesuffix(".weight"))
        if found is None or found[1] in self._found or found[3] not in PROJECTIONS:
            return None
        stack = f"{found[1]}.{'down_proj' if found[3] == 'down_proj' else TOGETHER}"
        if stack not in self._stacks or not self._is_common(found[1]):
            return None
        own, projection = self._model.get_submodule(found[1]), stack.rpartition(".")[2]
        count, outputs, _ = shape = self._stacks[stack]
        if stack not in self._awaited:
            whole = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
            own._parameters[projection] = nn.Parameter(whole, requires_grad=False)
            names = ("down_proj",) if projection == "down_proj" else PROJECTIONS[:2]
            self._awaited[stack] = {
                f"{found[1]}.{expert}.{part}.weight" for expert in range(count) for part in names
            }
        if name not in self._awaited[stack]:
            return None
        rows = {"gate_proj": slice(outputs // 2), "up_proj": slice(outputs // 2, None)}
        place = own.get_parameter(projection)[int(found[2]), rows.get(found[3], slice(None))]
        if place.shape != tensor.shape:
            raise ValueError(f"{name} is {list(tensor.shape)} instead of {list(place.shape)}")
        place.copy_(tensor)
        self._awaited[stack].remove(name)
        return stack

    def has_place(self, name: str) -> bool:
        """Whether `take_plain` is for a tensor of that name."""
        found = _ONE.fullmatch(name.removesuffix(".weight"))
        if found is None or found[1] in self._found or f"{found[1]}.down_proj" not in self._stacks:
            return False
        return found[3] in PROJECTIONS and self._is_common(found[1])

    def put(self) -> None:
        """All of them into the model."""
        if lost_names := sorted(name for names in self._awaited.values() for name in names):
            raise ValueError(f"{lost_names[0]} is missing")
        for path, weights in self._found.items():
            own: Any = self._model.get_submodule(path)
            for expert in range(self._stacks[f"{path}.down_proj"][0]):
                there = weights.get(expert, {})
                wanted = PROJECTIONS[2:] if TOGETHER in there else PROJECTIONS
                if lost := set(wanted) - there.keys():
                    raise ValueError(f"{path}.{expert}.{min(lost)}.weight is missing or plain")
            experts = PackedExperts(own, [weights[expert] for expert in sorted(weights)])
            if not experts.adopt_gate():
                raise ValueError(f"{path} computes in a way that is not known for packed weights")
            self._model.set_submodule(path, experts)

    def _is_common(self, path: str) -> bool:
        """Whether its weights are stacked as they are, and all that there is."""
        own = self._model.get_submodule(path)
        return not any(getattr(own, odd, False) for odd in ("is_transposed", "has_bias"))

    @staticmethod
    def _experts(module: str) -> str:
        found = _ONE.fullmatch(module) or _STACKED.fullmatch(module)
        return found[1] if found else ""
