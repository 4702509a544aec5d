"""From logits to tokens. Every random number is a function of (seed, position).

One uniform number a token, inverted through the cumulative distribution in token order: a request
gets the same answer whatever else is in the batch, on whatever device, before and after a
preemption. Rows never mix: every operation here works along the vocabulary. So they are taken in
slices, and the memory this needs does not grow with their number.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from penstock.wire import Candidate, TokenLogprobs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.wire import Sampling
    from penstock.worker.engine.grammar import Bits, Masks
    from penstock.worker.scheduling.sequence import Sequence

_MASK = (1 << 64) - 1
_SLICE_ELEMENTS = {"cpu": 1 << 17, "cuda": 1 << 23}  # of logits worked on at once
_COLDEST = 1e-30  # a temperature that float32 can still divide by


@dataclass(frozen=True, slots=True)
class Sampled:
    """What one step chose, row by row."""

    tokens: list[int]
    logprobs: list[TokenLogprobs | None]


def sample(
    logits: Tensor,
    sequences: list[Sequence],
    masks: Masks | None = None,
    rows: list[int] | None = None,
) -> Sampled:
    """One token for each sequence from its row of `logits` [rows, vocabulary].

    `rows` are the sequences' own; None: one after the other. A sequence with a mask gets a token
    that it allows.
    """
    answer = Sampled([], [])
    for own, few, masked in _portions(logits, sequences, masks, rows):
        tokens: list[int] = _choose_slice(own, few, masked).tolist()
        answer.tokens.extend(tokens)
        answer.logprobs.extend(_logprobs(own, tokens, [s.request.sampling for s in few]))
    return answer


def choose(logits: Tensor, sequences: list[Sequence], masks: Masks | None = None) -> Tensor:
    """The tokens, on the logits' device. Waits for nothing, but for `wants_host` sequences."""
    if masks is None and all(map(_is_plain, sequences)):
        return logits.argmax(dim=-1)  # which needs no memory, so no slices
    parts = [_choose_slice(*portion) for portion in _portions(logits, sequences, masks, None)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _portions(
    logits: Tensor, sequences: list[Sequence], masks: Masks | None, rows: list[int] | None
) -> Iterator[tuple[Tensor, list[Sequence], dict[int, Bits]]]:
    """A few sequences at a time: their logits, they, and the masks among them."""
    bits = {} if masks is None else dict(zip(masks.rows, masks.bits, strict=True))
    for few in _slices(len(sequences), logits):
        masked = {row - few.start: bits[row] for row in bits if few.start <= row < few.stop}
        yield logits[few] if rows is None else logits[rows[few]], sequences[few], masked


def wants_host(sequence: Sequence) -> bool:
    """What is sampled depends on all earlier tokens, or more than the token is asked for."""
    how = sequence.request.sampling
    return (
        how.repetition_penalty != 1.0
        or how.presence_penalty != 0.0
        or how.frequency_penalty != 0.0
        or how.logprobs is not None
        or sequence.wants_prompt_logits
        or sequence.request.grammar is not None
        or sequence.request.thinking is not None
    )


def chosen_logprobs(
    logits: Tensor, tokens: list[int], sequences: list[Sequence]
) -> list[TokenLogprobs | None]:
    """Log-probabilities of the rows that want them."""
    hows = [sequence.request.sampling for sequence in sequences]
    return [
        answer
        for few in _slices(len(tokens), logits)
        for answer in _logprobs(logits[few], tokens[few], hows[few])
    ]


def rows_at_once(device: str, vocabulary: int) -> int:
    """With more rows than these the sampler takes no more memory."""
    return max(1, _SLICE_ELEMENTS[device] // vocabulary)


def _slices(count: int, logits: Tensor) -> list[slice]:
    rows = rows_at_once(logits.device.type, logits.shape[1])
    return [slice(start, start + rows) for start in range(0, count, rows)]


def _choose_slice(logits: Tensor, sequences: list[Sequence], masked: dict[int, Bits]) -> Tensor:
    shaped = _shape(logits, sequences)
    if masked:
        shaped = logits.clone() if shaped is logits else shaped
        _apply_masks(shaped, masked)
    tokens = shaped.argmax(dim=-1)
    random = [i for i, s in enumerate(sequences) if s.request.sampling.temperature > 0]
    if len(random) == len(sequences):
        return _draw(shaped.float(), sequences)
    if random:
        places = _moved(random, torch.int64, logits.device)
        tokens[places] = _draw(shaped[places].float(), [sequences[i] for i in random])
    return tokens


def _moved(
    values: list[int] | list[list[float]], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """On the device, without waiting for what runs there."""
    pinned = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return pinned.to(device, non_blocking=True)


def logprobs_of(logits: Tensor, tokens: list[int], alternatives: int) -> list[TokenLogprobs]:
    """Log-probability of a given token in each row, with the best alternatives."""
    return [
        answer
        for rows in _slices(len(tokens), logits)
        for answer in _logprobs_of_slice(logits[rows], tokens[rows], alternatives)
    ]


def _logprobs_of_slice(logits: Tensor, tokens: list[int], alternatives: int) -> list[TokenLogprobs]:
    scores = torch.log_softmax(logits.float(), dim=-1)
    chosen = scores.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0].tolist()
    top: list[list[Candidate]] = [[] for _ in tokens]
    if alternatives:
        best, ids = scores.topk(min(alternatives, scores.shape[1]), dim=-1)
        top = [
            [Candidate(token, score) for token, score in zip(*row, strict=True)]
            for row in zip(ids.tolist(), best.tolist(), strict=True)
        ]
    return [
        TokenLogprobs(Candidate(token, score), others)
        for token, score, others in zip(tokens, chosen, top, strict=True)
    ]


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) for a place in a sequence: two rounds of a 64-bit mixing function."""
    return (_mix(_mix(seed & _MASK) ^ position) >> 11) * 2.0**-53


def _mix(x: int) -> int:
    # The finaliser of splitmix64 over a Weyl step.
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def _shape(logits: Tensor, sequences: list[Sequence]) -> Tensor:
    """Penalties, bias and forbidden stop tokens; the given logits stay as they are."""
    shaped = logits
    for row, sequence in enumerate(sequences):
        if not _reshapes(sequence):
            continue
        if shaped is logits:
            shaped = logits.float() if logits.dtype != torch.float32 else logits.clone()
        _shape_row(shaped[row], sequence)
    return shaped


def _apply_masks(logits: Tensor, masked: dict[int, Bits]) -> None:
    """Rule out what a row's mask has no bit for."""
    packed = np.stack(list(masked.values())).view(np.uint8)  # [rows, bytes]
    if logits.device.type == "cpu":
        allowed = torch.from_numpy(np.unpackbits(packed, axis=1, bitorder="little"))
    else:
        shifts = torch.arange(8, dtype=torch.uint8, device=logits.device)
        bits = torch.from_numpy(packed).to(logits.device, non_blocking=True)[:, :, None] >> shifts
        allowed = bits.bitwise_and_(1).flatten(1)
    allowed = allowed[:, : logits.shape[1]]
    for place, row in enumerate(masked):
        logits[row].masked_fill_(allowed[place] == 0, float("-inf"))


def _is_plain(sequence: Sequence) -> bool:
    return sequence.request.sampling.temperature <= 0 and not _reshapes(sequence)


def _reshapes(sequence: Sequence) -> bool:
    how = sequence.request.sampling
    return (
        how.repetition_penalty != 1.0
        or how.presence_penalty != 0.0
        or how.frequency_penalty != 0.0
        or bool(how.logit_bias)
        or sequence.generated < sequence.request.min_tokens
    )


def _shape_row(row: Tensor, sequence: Sequence) -> None:
    how = sequence.request.sampling
    if how.repetition_penalty != 1.0:
        seen = torch.from_numpy(np.unique(np.asarray(sequence.tokens))).to(row.device)
        scores = row[seen]
        factor = how.repetition_penalty
        row[seen] = torch.where(scores < 0, scores * factor, scores / factor)
    output = sequence.tokens[sequence.prompt_tokens :]
    if output and (how.presence_penalty or how.frequency_penalty):
        ids, counts = np.unique(np.asarray(output), return_counts=True)
        cost = how.presence_penalty + how.frequency_penalty * counts
        row[torch.from_numpy(ids).to(row.device)] -= torch.from_numpy(cost).to(row)
    if how.logit_bias:
        ids_biased = torch.tensor(list(how.logit_bias), device=row.device)
        row[ids_biased] += torch.tensor(list(how.logit_bias.values())).to(row)
    if sequence.generated < sequence.request.min_tokens and sequence.request.stop_token_ids:
        row[torch.tensor(sequence.request.stop_token_ids, device=row.device)] = float("-inf")


def _draw(rows: Tensor, sequences: list[Sequence]) -> Tensor:
    hows = [sequence.request.sampling for sequence in sequences]
    width = rows.shape[1]
    # One tensor, so that there is one copy to the device.
    knobs = _moved(
        [
            [how.temperature for how in hows],
            [how.top_p for how in hows],
            [how.min_p for how in hows],
            [uniform(how.seed, len(s.tokens)) for how, s in zip(hows, sequences, strict=True)],
            [float(min(how.top_k, width)) for how in hows],
        ],
        torch.float64,
        rows.device,
    )[:, :, None]
    temperatures, shares, floors = knobs[:3].to(rows.dtype).unbind()
    # The best logit becomes 0 first: divided by ever so little it stays 0 and the rest falls away.
    # What is not wanted any more goes at once: this is the highest point of many a step.
    scaled = (rows - rows.amax(dim=-1, keepdim=True)).div_(temperatures.clamp_min(_COLDEST))
    probabilities = torch.softmax(scaled, dim=-1)
    del scaled
    if any(how.top_k > 0 for how in hows):
        widest = min(max(how.top_k for how in hows), width)
        _keep_top_k(probabilities, knobs[4].long(), widest)
    if any(how.top_p < 1.0 for how in hows):
        _keep_top_p(probabilities, shares)
    if any(how.min_p > 0.0 for how in hows):
        best = probabilities.amax(dim=-1, keepdim=True)
        probabilities.masked_fill_(probabilities < floors * best, 0.0)
    cumulative = probabilities.double().cumsum_(dim=-1)
    # Strictly below the total, so that rounding never falls past the last possible token.
    total = cumulative[:, -1:]
    targets = torch.minimum(knobs[3] * total, torch.nextafter(total, torch.zeros_like(total)))
    found = torch.searchsorted(cumulative, targets, right=True)[:, 0]
    # A row of NaN finds no place. An id past the vocabulary would end the others' next step too.
    return found.clamp_(max=width - 1)


def _keep_top_k(probabilities: Tensor, counts: Tensor, widest: int) -> None:
    """`counts` [rows, 1]: how many each row keeps, 0 for all."""
    best = probabilities.topk(widest, dim=-1).values
    floors = best.gather(1, (counts - 1).clamp_min(0))
    probabilities.masked_fill_((probabilities < floors) & (counts > 0), 0.0)


def _keep_top_p(probabilities: Tensor, shares: Tensor) -> None:
    """Keep the smallest set of best tokens that reaches the share; at least one."""
    if probabilities.device.type == "cuda" and find_spec("triton") is not None:
        from penstock.worker.models.kernels.triton_sampling import nucleus_floors

        floors = nucleus_floors(probabilities, shares)
    else:
        ordered = probabilities.sort(dim=-1, descending=True).values
        before = ordered.cumsum(dim=-1) - ordered
        kept = before < shares * ordered.sum(dim=-1, keepdim=True)
        kept[:, 0] = True
        floors = ordered.masked_fill(~kept, float("inf")).amin(dim=-1, keepdim=True)
    floors = torch.where(shares >= 1.0, 0.0, floors)
    probabilities.masked_fill_(probabilities < floors, 0.0)


def _logprobs(
    logits: Tensor, tokens: list[int], hows: list[Sampling]
) -> list[TokenLogprobs | None]:
    wanted = [row for row, how in enumerate(hows) if how.logprobs is not None]
    answers: list[TokenLogprobs | None] = [None] * len(tokens)
    if wanted:
        most = max(hows[row].logprobs or 0 for row in wanted)
        found = logprobs_of(logits[wanted], [tokens[row] for row in wanted], most)
        for row, answer in zip(wanted, found, strict=True):
            answers[row] = TokenLogprobs(answer.chosen, answer.top[: hows[row].logprobs])
    return answers
