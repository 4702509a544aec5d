"""Mixtures of experts on a GPU when few rows come: the choice and the experts by our own kernels.

Put in the place of a module's forward where both give the same answers on a sample; more rows go
through transformers' own code, whose grouped products are good at many.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn

from penstock.worker.backends.cuda.kernels import triton_experts
from penstock.worker.models.fusions import TOLERANCE, alike, sample_rows

log = logging.getLogger(__name__)


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    """Of two answers, in the norm of the second."""
    ours, theirs = ours.double(), theirs.double()
    return float((ours - theirs).norm() / theirs.norm().clamp_min(1e-30))


class FewRowsExperts:
    """Experts whose few rows are ours; more go through transformers' grouped products."""

    def __init__(self, module: nn.Module) -> None:
        self._experts: Any = module
        self._plain = type(module).forward.__get__(module)

    @classmethod
    def of(cls, module: Any) -> FewRowsExperts | None:
        """For gated experts without biases that give the same answers on a sample."""
        gate_up, down = (getattr(module, name, None) for name in ("gate_up_proj", "down_proj"))
        if not isinstance(gate_up, Tensor) or not isinstance(down, Tensor) or down.dim() != 3:
            return None
        count, hidden, inner = down.shape
        if gate_up.shape != (count, 2 * inner, hidden) or getattr(module, "has_bias", True):
            return None
        ours = cls(module)
        rows = sample_rows(2, hidden, gate_up)
        chosen = torch.tensor([[0, count - 1], [count // 2, 0]] * 2, device=gate_up.device)
        shares = torch.tensor([[0.7, 0.3], [0.4, 0.6]] * 2).to(gate_up)
        try:
            theirs = ours._plain(rows, chosen, shares)
        except (TypeError, ValueError, RuntimeError) as error:
            log.debug("experts are left as they are: %s", error)
            return None
        same = alike(ours(rows, chosen, shares), theirs, TOLERANCE[gate_up.dtype])
        return ours if same else None

    def __call__(
        self, hidden_states: Tensor, chosen: Tensor, shares: Tensor, **more: Any
    ) -> Tensor:
        if hidden_states.shape[0] > triton_experts.MOST_ROWS or more:
            answer: Tensor = self._plain(hidden_states, chosen, shares, **more)
            return answer
        return triton_experts.few_rows_experts(
            hidden_states.contiguous(),
            self._experts.gate_up_proj,
            self._experts.down_proj,
            chosen.contiguous(),
            shares.contiguous(),
        )


class FewRowsRouter:
    """The choice of experts in two launches instead of eight."""

    def __init__(self, module: Any) -> None:
        self._router = module
        self._plain = type(module).forward.__get__(module)

    @classmethod
    def of(cls, module: Any) -> FewRowsRouter | None:
        """For the softmax of a product and its best, if the answers are the same on a sample."""
        weight = getattr(module, "weight", None)
        wanted = ("top_k", "num_experts", "norm_topk_prob")
        if not isinstance(weight, Tensor) or not all(hasattr(module, name) for name in wanted):
            return None
        if weight.shape[0] != module.num_experts or len(list(module.parameters())) != 1:
            return None
        ours = cls(module)
        sample = torch.randn(3, weight.shape[1], generator=torch.Generator().manual_seed(0))
        # A router without weights yet ties everywhere; its own order of ties is kept then.
        rows = sample.to(weight)
        try:
            theirs, mine = ours._plain(rows), ours(rows)
        except (TypeError, ValueError, RuntimeError):
            return None
        if not isinstance(theirs, tuple) or len(theirs) != 3:
            return None
        equal = torch.equal(theirs[2], mine[2]) and theirs[1].dtype == mine[1].dtype
        return (
            ours
            if equal and relative_error(mine[1], theirs[1]) <= TOLERANCE[weight.dtype]
            else None
        )

    def __call__(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        router = self._router
        rows = hidden_states.reshape(-1, router.weight.shape[1])
        if rows.shape[0] > triton_experts.MOST_ROWS:
            answer: tuple[Tensor, Tensor, Tensor] = self._plain(hidden_states)
            return answer
        logits = nn.functional.linear(rows, router.weight)
        shares, chosen = triton_experts.choose_experts(logits, router.top_k, router.norm_topk_prob)
        return logits, shares, chosen
