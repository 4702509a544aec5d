"""From logits to tokens. Every random number is a function of (seed, position).

One uniform number a token, inverted through the cumulative distribution in token order: a request
gets the same answer whatever else is in the batch, on whatever device, before and after a
preemption. Rows never mix: every operation here works along the vocabulary. So they are taken in
slices, and the memory this needs does not grow with their number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from penstock.wire import Candidate, TokenLogprobs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from penstock.wire import Sampling
    from penstock.worker.engine.constraint import Bits
    from penstock.worker.engine.grammar import Masks
    from penstock.worker.engine.requests import RequestState

    Values = list[int] | list[list[float]]

_MASK = (1 << 64) - 1
_COLDEST = 1e-30  # a temperature that float32 can still divide by


@dataclass(frozen=True, slots=True)
class Sampled:
    """What one step chose, row by row."""

    tokens: list[int]
    logprobs: list[TokenLogprobs | None]


class Sampler:
    """Chooses tokens by plain torch. A backend has one of its own where its device differs."""

    slice_elements = 1 << 17  # of logits worked on at once

    def rows_at_once(self, vocabulary: int) -> int:
        """With more rows than these the sampler takes no more memory."""
        return max(1, self.slice_elements // vocabulary)

    def sample(
        self,
        logits: Tensor,
        sequences: list[RequestState],
        masks: Masks | None = None,
        rows: list[int] | None = None,
    ) -> Sampled:
        """One token for each sequence from its row of `logits` [rows, vocabulary].

        `rows` are the sequences' own; None: one after the other. A sequence with a mask gets a
        token that it allows.
        """
        answer = Sampled([], [])
        if rows is None and masks is None and all(map(_is_plain, sequences)):
            answer.tokens.extend(self.best(logits).tolist())
            answer.logprobs.extend(self.chosen_logprobs(logits, answer.tokens, sequences))
            return answer
        for own, few, masked in self._portions(logits, sequences, masks, rows):
            tokens: list[int] = self._choose_slice(own, few, masked).tolist()
            answer.tokens.extend(tokens)
            answer.logprobs.extend(self._logprobs(own, tokens, [s.request.sampling for s in few]))
        return answer

    def best(self, logits: Tensor) -> Tensor:
        """The first of the largest in each row; a row with what is no number has that."""
        return logits.argmax(dim=-1)

    def choose(
        self, logits: Tensor, sequences: list[RequestState], masks: Masks | None = None
    ) -> Tensor:
        """The tokens, on the logits' device. Waits for nothing, but for `wants_host` sequences."""
        if masks is None and all(map(_is_plain, sequences)):
            return self.best(logits)  # which needs no memory, so no slices
        parts = [
            self._choose_slice(*portion)
            for portion in self._portions(logits, sequences, masks, None)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def chosen_logprobs(
        self, logits: Tensor, tokens: list[int], sequences: list[RequestState]
    ) -> list[TokenLogprobs | None]:
        """Log-probabilities of the rows that want them."""
        hows = [sequence.request.sampling for sequence in sequences]
        return [
            answer
            for few in self._slices(len(tokens), logits)
            for answer in self._logprobs(logits[few], tokens[few], hows[few])
        ]

    def logprobs_of(
        self, logits: Tensor, tokens: list[int], alternatives: int
    ) -> list[TokenLogprobs]:
        """Log-probability of a given token in each row, with the best alternatives."""
        return [
            answer
            for rows in self._slices(len(tokens), logits)
            for answer in _logprobs_of_slice(logits[rows], tokens[rows], alternatives)
        ]

    def _logprobs(
        self, logits: Tensor, tokens: list[int], hows: list[Sampling]
    ) -> list[TokenLogprobs | None]:
        wanted = [row for row, how in enumerate(hows) if how.logprobs is not None]
        answers: list[TokenLogprobs | None] = [None] * len(tokens)
        if wanted:
            most = max(hows[row].logprobs or 0 for row in wanted)
            found = self.logprobs_of(logits[wanted], [tokens[row] for row in wanted], most)
            for row, answer in zip(wanted, found, strict=True):
                answers[row] = TokenLogprobs(answer.chosen, answer.top[: hows[row].logprobs])
        return answers

    def _portions(
        self,
        logits: Tensor,
        sequences: list[RequestState],
        masks: Masks | None,
        rows: list[int] | None,
    ) -> Iterator[tuple[Tensor, list[RequestState], dict[int, Bits]]]:
        """A few sequences at a time: their logits, they, and the masks among them."""
        bits = {} if masks is None else dict(zip(masks.rows, masks.bits, strict=True))
        for few in self._slices(len(sequences), logits):
            masked = {row - few.start: bits[row] for row in bits if few.start <= row < few.stop}
            yield logits[few] if rows is None else logits[rows[few]], sequences[few], masked

    def _slices(self, count: int, logits: Tensor) -> list[slice]:
        rows = self.rows_at_once(logits.shape[1])
        return [slice(start, start + rows) for start in range(0, count, rows)]

    def _choose_slice(
        self, logits: Tensor, sequences: list[RequestState], masked: dict[int, Bits]
    ) -> Tensor:
        shaped = self._shape(logits, sequences)
        if masked:
            shaped = logits.clone() if shaped is logits else shaped
            self._apply_masks(shaped, masked)
        tokens = self.best(shaped)
        random = [i for i, s in enumerate(sequences) if s.request.sampling.temperature > 0]
        if len(random) == len(sequences):
            return self._draw(shaped.float(), sequences)
        if random:
            places = self.moved(random, torch.int64, logits.device)
            tokens[places] = self._draw(shaped[places].float(), [sequences[i] for i in random])
        return tokens

    def _shape(self, logits: Tensor, sequences: list[RequestState]) -> Tensor:
        """Penalties, bias and forbidden tokens; the given logits stay as they are."""
        if not any(map(_reshapes, sequences)):
            return logits
        shaped = logits.float() if logits.dtype != torch.float32 else logits.clone()
        for row, sequence in enumerate(sequences):
            if _is_penalised(sequence):
                _penalise(shaped[row], sequence)
        _add_biases(shaped, sequences)
        self._forbid(shaped, sequences)
        return shaped

    def _forbid(self, logits: Tensor, sequences: list[RequestState]) -> None:
        """Rule out what is not among the allowed tokens, and stop tokens that come too early."""
        limited = [row for row, s in enumerate(sequences) if s.request.sampling.allowed_ids]
        if limited:
            ids = [
                np.frombuffer(sequences[row].request.sampling.allowed_ids, np.int32)
                for row in limited
            ]
            places = _places(limited, ids, logits)
            kept = logits[places]
            logits[self.moved(limited, torch.int64, logits.device)] = float("-inf")
            logits.index_put_(places, kept)
        early = [
            row
            for row, s in enumerate(sequences)
            if s.generated < s.request.min_tokens and s.request.stop_token_ids
        ]
        if early:
            stops = [np.asarray(sequences[row].request.stop_token_ids, np.int32) for row in early]
            nothing = torch.tensor(float("-inf"), dtype=logits.dtype, device=logits.device)
            logits.index_put_(_places(early, stops, logits), nothing)

    def _apply_masks(self, logits: Tensor, masked: dict[int, Bits]) -> None:
        """Rule out what a row's mask has no bit for."""
        packed = np.stack(list(masked.values())).view(np.uint8)  # [rows, bytes]
        allowed = self.unpacked(packed, logits.device)[:, : logits.shape[1]]
        for place, row in enumerate(masked):
            logits[row].masked_fill_(allowed[place] == 0, float("-inf"))

    def _draw(self, rows: Tensor, sequences: list[RequestState]) -> Tensor:
        hows = [sequence.request.sampling for sequence in sequences]
        width = rows.shape[1]
        # One tensor, so that there is one copy to the device.
        knobs = self.moved(
            [
                [how.temperature for how in hows],
                [how.top_p for how in hows],
                [how.min_p for how in hows],
                [uniform(how.seed, s.position) for how, s in zip(hows, sequences, strict=True)],
                [float(min(how.top_k, width)) for how in hows],
            ],
            torch.float64,
            rows.device,
        )[:, :, None]
        temperatures, shares, floors = knobs[:3].to(rows.dtype).unbind()
        # The best logit becomes 0 first: divided by ever so little it stays 0 and the rest falls
        # away. What is not wanted any more goes at once: this is the highest point of many a step.
        scaled = (rows - rows.amax(dim=-1, keepdim=True)).div_(temperatures.clamp_min(_COLDEST))
        probabilities = torch.softmax(scaled, dim=-1)
        del scaled
        if any(how.top_k > 0 for how in hows):
            widest = min(max(how.top_k for how in hows), width)
            _keep_top_k(probabilities, knobs[4].long(), widest)
        if any(how.top_p < 1.0 for how in hows):
            self._keep_top_p(probabilities, shares)
        if any(how.min_p > 0.0 for how in hows):
            best = probabilities.amax(dim=-1, keepdim=True)
            probabilities.masked_fill_(probabilities < floors * best, 0.0)
        cumulative = probabilities.double().cumsum_(dim=-1)
        # Strictly below the total, so that rounding never falls past the last possible token.
        total = cumulative[:, -1:]
        targets = torch.minimum(knobs[3] * total, torch.nextafter(total, torch.zeros_like(total)))
        found = torch.searchsorted(cumulative, targets, right=True)[:, 0]
        # A row of NaN finds no place. An id past the vocabulary would end the others' next step
        # too.
        return found.clamp_(max=width - 1)

    def _keep_top_p(self, probabilities: Tensor, shares: Tensor) -> None:
        """Keep the smallest set of best tokens that reaches the share; at least one."""
        floors = self.nucleus_floors(probabilities, shares)
        floors = torch.where(shares >= 1.0, 0.0, floors)
        probabilities.masked_fill_(probabilities < floors, 0.0)

    # --- what a device may do in its own way ---

    def moved(self, values: Values, dtype: torch.dtype, device: torch.device) -> Tensor:
        """On the device, without waiting for what runs there."""
        return torch.tensor(values, dtype=dtype, device=device)

    def unpacked(self, packed: NDArray[np.uint8], device: torch.device) -> Tensor:
        """A number for each bit, the lowest of a byte first, on the device."""
        return torch.from_numpy(np.unpackbits(packed, axis=1, bitorder="little")).to(device)

    def nucleus_floors(self, probabilities: Tensor, shares: Tensor) -> Tensor:
        """The smallest probability in each row's smallest set of best tokens that reaches its
        share, [rows, 1]."""
        ordered = probabilities.sort(dim=-1, descending=True).values
        before = ordered.cumsum(dim=-1) - ordered
        kept = before < shares * ordered.sum(dim=-1, keepdim=True)
        kept[:, 0] = True
        return ordered.masked_fill(~kept, float("inf")).amin(dim=-1, keepdim=True)


def wants_host(sequence: RequestState) -> bool:
    """What is sampled depends on all earlier tokens, or more than the token is asked for."""
    return (
        _is_penalised(sequence)
        or sequence.request.sampling.logprobs is not None
        or sequence.wants_prompt_logits
        or sequence.request.grammar is not None
        or sequence.request.thinking is not None
    )


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


def _is_plain(sequence: RequestState) -> bool:
    return sequence.request.sampling.temperature <= 0 and not _reshapes(sequence)


def _reshapes(sequence: RequestState) -> bool:
    how = sequence.request.sampling
    return (
        _is_penalised(sequence)
        or how.logit_bias is not None
        or bool(how.allowed_ids)
        or sequence.generated < sequence.request.min_tokens
    )


def _is_penalised(sequence: RequestState) -> bool:
    how = sequence.request.sampling
    return (
        how.repetition_penalty != 1.0 or how.presence_penalty != 0.0 or how.frequency_penalty != 0.0
    )


def _penalise(row: Tensor, sequence: RequestState) -> None:
    how, known = sequence.request.sampling, sequence.counts
    if how.repetition_penalty != 1.0:
        seen = torch.from_numpy(known.seen).to(row.device).long()
        scores = row[seen]
        factor = how.repetition_penalty
        row[seen] = torch.where(scores < 0, scores * factor, scores / factor)
    if (sequence.generated or how.penalty_window) and (
        how.presence_penalty or how.frequency_penalty
    ):
        cost = how.presence_penalty + how.frequency_penalty * known.counts
        row[torch.from_numpy(known.ids).to(row.device).long()] -= torch.from_numpy(cost).to(row)


def _add_biases(logits: Tensor, sequences: list[RequestState]) -> None:
    """All rows' in one go: a copy to the device and an operation, however many there are."""
    biases = [
        (row, how) for row, s in enumerate(sequences) if (how := s.request.sampling.logit_bias)
    ]
    if not biases:
        return
    ids = [np.frombuffer(bias.ids, np.int32) for _, bias in biases]
    values = np.concatenate([np.frombuffer(bias.values, np.float32) for _, bias in biases])
    places = _places([row for row, _ in biases], ids, logits)
    logits.index_put_(places, logits[places] + torch.from_numpy(values).to(logits.device))


def _places(rows: list[int], ids: list[NDArray[np.int32]], logits: Tensor) -> tuple[Tensor, Tensor]:
    """Row and token of every id, on the logits' device."""
    repeated = np.repeat(np.asarray(rows, np.int64), [len(few) for few in ids])
    pair = torch.from_numpy(np.stack([repeated, np.concatenate(ids)])).to(logits.device)
    return pair[0], pair[1]


def _keep_top_k(probabilities: Tensor, counts: Tensor, widest: int) -> None:
    """`counts` [rows, 1]: how many each row keeps, 0 for all."""
    best = probabilities.topk(widest, dim=-1).values
    floors = best.gather(1, (counts - 1).clamp_min(0))
    probabilities.masked_fill_((probabilities < floors) & (counts > 0), 0.0)
