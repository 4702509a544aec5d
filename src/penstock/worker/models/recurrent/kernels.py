"""What kernels for recurrent layers do; and all of it in plain torch, right on every device.

Rows are those of a step: single rows of sequences that decode, then chunks. Every function reads
the state of each sequence from its slot and leaves there the state behind its last row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.activations import ACT2FN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.worker.kv.layout.layer_states import LayerStates
    from penstock.worker.models.recurrent.rows import StateRows, StateSpan

PIECE_ROWS = 256  # of a chunk, through transformers' own scan at once: it takes 6 KB a row and head


class Convolution(NamedTuple):
    """A causal convolution, each channel by itself."""

    weight: Tensor  # [channels, kernel]
    bias: Tensor | None
    activation: str | None


class DeltaRule(NamedTuple):
    """Rows of a gated delta rule: S = exp(g) S; S += k (v - k S) beta; out = q S."""

    query: Tensor  # [T, heads, key_dim], normalised and scaled
    key: Tensor  # [T, heads, key_dim], normalised
    value: Tensor  # [T, heads, value_dim]
    decay: Tensor  # [T, heads], or [T, heads, key_dim]: logarithms
    beta: Tensor  # [T, heads]


class SelectiveScan(NamedTuple):
    """Rows of Mamba 2: S = exp(dt A) S + dt x B; out = C S + D x."""

    inputs: Tensor  # [T, heads, head_dim]
    steps: Tensor  # [T, heads]: dt
    decay: Tensor  # [heads]: A
    b: Tensor  # [T, groups, state]
    c: Tensor  # [T, groups, state]
    skip: Tensor | None  # [heads]: D


class StateKernels(Protocol):
    """One set for each kind of device."""

    def convolve(self, rows: Tensor, by: Convolution, states: LayerStates, of: StateRows) -> Tensor:
        """Rows [1, channels, T], each with those before it."""

    def delta_rule(
        self, rows: DeltaRule, states: LayerStates, of: StateRows, chunk: Callable[..., Any]
    ) -> Tensor:
        """[T, heads, value_dim]; `chunk` is transformers' own function for rows of one sequence."""

    def selective_scan(
        self, rows: SelectiveScan, states: LayerStates, of: StateRows, chunk: Callable[..., Any]
    ) -> Tensor:
        """[T, heads, head_dim]; likewise."""


@dataclass(slots=True)
class ReferenceStates:
    """Decodes together, chunks one after the other in pieces."""

    def convolve(self, rows: Tensor, by: Convolution, states: LayerStates, of: StateRows) -> Tensor:
        out = torch.empty_like(rows)
        slots, count = of.decodes, len(of.decodes)
        if count:
            past = states.columns[slots]  # [B, channels, kernel - 1]
            seen = torch.cat([past, rows[0, :, :count].t()[:, :, None]], dim=2)
            answer = (seen * by.weight).sum(dim=2)
            out[0, :, :count] = (answer if by.bias is None else answer + by.bias).t()
            states.columns[slots] = seen[:, :, 1:]
        convolve_chunks(rows, by, states, of, out)
        return activated(out, by)

    def delta_rule(
        self, rows: DeltaRule, states: LayerStates, of: StateRows, chunk: Callable[..., Any]
    ) -> Tensor:
        matrices = states.matrices
        assert matrices is not None
        out = torch.empty_like(rows.value)
        if count := len(of.decodes):
            query, key, value, decay, beta = (part[:count].float() for part in rows)
            decay = decay.exp()[..., None] if decay.dim() == 3 else decay.exp()[..., None, None]
            state = matrices[of.decodes] * decay
            missing = (value - (state * key[..., None]).sum(dim=-2)) * beta[..., None]
            state = state + key[..., None] * missing[..., None, :]
            matrices[of.decodes] = state
            out[:count] = (state * query[..., None]).sum(dim=-2).to(out.dtype)
        for piece, part, _ in _pieces(of, matrices):
            state = piece.state[None].clone()
            query, key, value, decay, beta = (each[part][None] for each in rows)
            scale = query.shape[-1] ** 0.5  # which the function divides by
            answer, state = chunk(
                *(query * scale, key, value),
                g=decay,
                beta=beta,
                initial_state=state,
                output_final_state=True,
                use_qk_l2norm_in_kernel=False,
            )
            out[part] = answer[0].to(out.dtype)
            piece.put(state[0])
        return out

    def selective_scan(
        self, rows: SelectiveScan, states: LayerStates, of: StateRows, chunk: Callable[..., Any]
    ) -> Tensor:
        matrices = states.matrices
        assert matrices is not None
        out = torch.empty_like(rows.inputs)
        if count := len(of.decodes):
            inputs, steps = rows.inputs[:count].float(), rows.steps[:count].float()[..., None]
            groups = rows.inputs.shape[1] // rows.b.shape[1]
            b, c = (p[:count].float().repeat_interleave(groups, dim=1) for p in (rows.b, rows.c))
            state = matrices[of.decodes] * (steps * rows.decay[:, None].float()).exp()[..., None]
            state = state + (steps * inputs)[..., None] * b[..., None, :]
            matrices[of.decodes] = state
            answer = (state * c[..., None, :]).sum(dim=-1)
            if rows.skip is not None:
                answer = answer + inputs * rows.skip[:, None].float()
            out[:count] = answer.to(out.dtype)
        for piece, part, _ in _pieces(of, matrices):
            answer, state = chunk(
                *(rows.inputs[part][None], rows.steps[part][None], rows.decay),
                *(rows.b[part][None], rows.c[part][None]),
                chunk_size=min(PIECE_ROWS, max(16, part.stop - part.start)),
                D=rows.skip,
                initial_states=piece.state[None].clone(),
                return_final_states=True,
            )
            out[part] = answer[0].to(out.dtype)
            piece.put(state[0])
        return out


def convolve_chunks(
    rows: Tensor, by: Convolution, states: LayerStates, of: StateRows, out: Tensor
) -> None:
    """Each chunk behind the last inputs of its sequence."""
    weight, columns = by.weight[:, None], states.columns
    for span in of.chunks:
        own = slice(span.row, span.row + span.count)
        seen = torch.cat([columns[span.slot], rows[0, :, own]], dim=1)
        out[0, :, own] = F.conv1d(seen[None], weight, by.bias, groups=len(weight))[0]
        for end, slot in span.stops:
            columns[slot] = seen[:, end : end + columns.shape[2]]


def activated(rows: Tensor, by: Convolution) -> Tensor:
    """Behind a convolution."""
    answer: Tensor = ACT2FN[by.activation](rows) if by.activation else rows
    return answer


@dataclass(slots=True)
class _Piece:
    """A part of a chunk between two stops: where its state comes from and goes."""

    state: Tensor
    places: list[Tensor]

    def put(self, state: Tensor) -> None:
        for place in self.places:
            place.copy_(state)


def _pieces(of: StateRows, matrices: Tensor) -> Iterator[tuple[_Piece, slice, StateSpan]]:
    """Rows that are computed at once: up to the next stop, and no more than memory is meant for."""
    for span in of.chunks:
        state, begin = matrices[span.slot], 0
        ends = {end for end, _ in span.stops} | set(range(PIECE_ROWS, span.count, PIECE_ROWS))
        for end in sorted(ends):
            places = [matrices[slot] for stop, slot in span.stops if stop == end]
            piece = _Piece(state, places or [matrices[span.slot]])
            yield piece, slice(span.row + begin, span.row + end), span
            state, begin = piece.places[0], end
