"""The weights of a layer's experts: each expert's are linear weights like any other.

transformers keeps plain ones stacked in two tensors. Packed ones stay one by one as files have
them, so that codes can remain in a mapped file and every expert keeps its own scales.
"""

from __future__ import annotations

import copy
import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from penstock.worker.models.linear.weight import LinearWeight, Parts, PlainWeight

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from penstock.worker.models.linear.packed import PackedWeight

    Gate = Callable[[Tensor], Tensor]

log = logging.getLogger(__name__)

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")  # of one expert in a file
TOGETHER = "gate_up_proj"  # where a file has the first two as one
# Up to so many rows all experts compute all of them: nothing waits for the router's choice, which
# may lie on a device. More are sorted by their experts.
_ALL_OF_THEM = 256
_SAMPLE = 2  # experts, and rows of ordinary and of large size for them
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}


class PlainExperts:
    """Stacked in a module's `gate_up_proj` and `down_proj`."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._transposed = bool(getattr(module, "is_transposed", False))
        wide, narrow = (1, 2) if self._transposed else (2, 1)
        down = module.down_proj
        self.count: int = down.shape[0]
        self.hidden: int = down.shape[narrow]
        self.inner: int = down.shape[wide]

    def gate_up(self, expert: int) -> LinearWeight:
        return self._weight(self._module.gate_up_proj, expert)

    def down(self, expert: int) -> LinearWeight:
        return self._weight(self._module.down_proj, expert)

    def bias(self, name: str, expert: int) -> Tensor | None:
        bias = getattr(self._module, f"{name}_bias", None)
        return None if bias is None else bias[expert]

    def like(self) -> Tensor:
        """Of the type and on the device that is computed in."""
        weight: Tensor = self._module.down_proj
        return weight

    def _weight(self, stacked: Tensor, expert: int) -> LinearWeight:
        weight = stacked[expert]
        return PlainWeight(weight.t() if self._transposed else weight)


class PackedExperts(nn.Module):
    """Gated experts in the place of a module of transformers', whose biases become this one's."""

    def __init__(self, own: Any, weights: Sequence[Mapping[str, PackedWeight]]) -> None:
        """`weights` of each expert: gate and up one by one, or as one if a file has them so."""
        super().__init__()
        names = [name for name in (TOGETHER, *PROJECTIONS) if name in weights[0]]
        self._inputs = names[:-1]
        self.packed = nn.ModuleDict(
            {name: nn.ModuleList(weight[name] for weight in weights) for name in names}
        )
        for name in ("gate_up_proj_bias", "down_proj_bias"):
            self.register_parameter(name, own._parameters.get(name))
        self.count = len(weights)
        self.hidden, self.inner = weights[0]["down_proj"].shape
        self._own = (own,)  # has no weights; not a part of the model
        self._apply_gate: Gate = _silu_gate

    def gate_up(self, expert: int) -> LinearWeight:
        """The weights of one, in the order of its outputs in the file; gate first if apart."""
        parts = [self._weight(name, expert) for name in self._inputs]
        return parts[0] if len(parts) == 1 else Parts(parts)

    def down(self, expert: int) -> LinearWeight:
        """The weights of one."""
        return self._weight("down_proj", expert)

    def bias(self, name: str, expert: int) -> Tensor | None:
        """Of one, if they have any."""
        bias: Tensor | None = getattr(self, f"{name}_bias")
        return None if bias is None else bias[expert]

    def like(self) -> LinearWeight:
        """Of the type and on the device that is computed in."""
        return self.down(0)

    def _weight(self, name: str, expert: int) -> PackedWeight:
        of_all: Any = self.packed[name]
        weight: PackedWeight = of_all[expert]
        return weight

    def forward(self, hidden_states: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """Rows [T, hidden], the experts chosen for each and their shares, both [T, k]."""
        answer = torch.zeros_like(hidden_states)
        if len(hidden_states) <= _ALL_OF_THEM:
            # Beyond the last: to no expert.
            weights = shares.new_zeros(len(hidden_states), self.count + 1)
            weights.scatter_add_(1, chosen.long(), shares)
            for expert in range(self.count):
                share = weights[:, expert, None]
                outer = self._computed(expert, hidden_states) * share
                answer += torch.where(share != 0, outer, 0).to(answer.dtype)
            return answer
        sent, flat = chosen.reshape(-1), shares.reshape(-1, 1)
        order = sent.argsort(stable=True)
        sizes = torch.bincount(sent, minlength=self.count).tolist()[: self.count]
        for expert, sending in enumerate(torch.split(order[: sum(sizes)], sizes)):
            if len(sending):
                tokens = sending // chosen.shape[1]
                outer = self._computed(expert, hidden_states[tokens]) * flat[sending]
                answer.index_add_(0, tokens, outer.to(answer.dtype))
        return answer

    def adopt_gate(self) -> bool:
        """Find out how gates are applied; whether the answers are then those of the module that
        this one replaces, given the numbers of the first experts."""
        own = copy.copy(self._own[0])
        own._parameters = {
            "gate_up_proj": self._numbers(*self._inputs),
            "down_proj": self._numbers("down_proj"),
            **{name: bias[:_SAMPLE] for name, bias in self._parameters.items() if bias is not None},
        }
        own.num_experts = _SAMPLE
        ours = copy.copy(self)
        ours.count = _SAMPLE
        device, dtype = self.like().device, self.like().dtype
        rows = torch.randn(_SAMPLE, self.hidden, generator=torch.Generator().manual_seed(0))
        rows = torch.cat([rows, 100 * rows]).to(device, dtype)  # as far as clamps
        chosen = torch.tensor([[0, 1], [1, 0]] * 2, device=device)
        shares = torch.tensor([[0.7, 0.3], [0.4, 0.6]] * 2, device=device, dtype=dtype)
        try:
            theirs = own(rows, chosen, shares)
        except (TypeError, ValueError, RuntimeError, AttributeError, IndexError) as error:
            log.warning("experts cannot be compared with their own code: %s", error)
            return False
        for gate in (_silu_gate, getattr(own, "_apply_gate", _silu_gate)):
            ours._apply_gate = gate
            apart = (ours(rows, chosen, shares) - theirs).double().norm(dim=-1)
            if bool((apart <= _TOLERANCE[dtype] * theirs.double().norm(dim=-1)).all()):
                self._apply_gate = gate
                return True
        return False

    def _computed(self, expert: int, rows: Tensor) -> Tensor:
        both = self.gate_up(expert).product(rows, self.bias("gate_up_proj", expert))
        return self.down(expert).product(self._apply_gate(both), self.bias("down_proj", expert))

    def _numbers(self, *names: str) -> nn.Parameter:
        firsts = [[self._weight(name, expert) for name in names] for expert in range(_SAMPLE)]
        numbers = [torch.cat([weight.dequantised() for weight in of_one]) for of_one in firsts]
        stacked = torch.stack(numbers)
        if getattr(self._own[0], "is_transposed", False):
            stacked = stacked.transpose(1, 2).contiguous()
        return nn.Parameter(stacked, requires_grad=False)


def experts_of(module: Any) -> PlainExperts | PackedExperts | None:
    """The experts that a module has in one place; None: it has none there."""
    if isinstance(module, PackedExperts):
        return module
    weights = [getattr(module, name, None) for name in ("gate_up_proj", "down_proj")]
    if any(not isinstance(weight, Tensor) or weight.dim() != 3 for weight in weights):
        return None
    return PlainExperts(module)


def _silu_gate(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, dim=-1)
    return nn.functional.silu(gate) * up
