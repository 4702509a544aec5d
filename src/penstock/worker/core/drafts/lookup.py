"""Drafts from the request's own tokens: what followed when they last ran like this.

Who edits a file, quotes or fills in a form repeats what stands in the prompt. An index finds where
the newest tokens have been before: of each place the one before it with the same last three tokens,
as in LZ77. It grows with the sequence, in constant time a token and at most `INDEX_BYTES` each.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import numpy as np

from penstock.worker.core.drafts.confidence import Confidences
from penstock.worker.core.drafts.proposer import Proposal

if TYPE_CHECKING:
    from penstock.wire import TokenIds

INDEX_BYTES = 16  # of a token, at most: two places in the table of heads, one in the chain
MIN_MATCH = 3  # tokens: fewer are found everywhere
MAX_MATCH = 32  # tokens compared
_CANDIDATES = 8
_FACTORS = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
_FEW = 48  # new tokens, up to which they are entered one by one
_PIECE = 4096  # tokens entered at once
_LEAST_HEADS = 256


class LookupIndex:
    """Where the latest tokens of one sequence have been before."""

    def __init__(self, tokens: TokenIds) -> None:
        self._tokens = tokens  # grows; what is in it does not change
        self._heads = array("i")  # by hash of three tokens: the latest place that ends with them
        self._previous = array("i")  # by place: the one before it with the same hash
        self._bits = 0
        self._source: int | None = None  # where the latest match ended
        self._asked_at = 0  # and how many tokens there were

    def __len__(self) -> int:
        """Tokens that are entered."""
        return len(self._previous)

    def match(self) -> tuple[int, int]:
        """The place at which the longest match of the newest tokens ends, and how long it is; a
        length of 0: they are new."""
        tokens, last = self._tokens, len(self._tokens) - 1
        self._enter(last)
        place, longest = 0, MIN_MATCH - 1
        for candidate in self._candidates(last):
            # Whoever is to be longer agrees at this distance, too.
            if candidate < longest or tokens[candidate - longest] != tokens[last - longest]:
                continue
            length = self._common(candidate, last)
            if length > longest:
                place, longest = candidate, length
            if length == MAX_MATCH:
                break
        found = longest >= MIN_MATCH
        self._source, self._asked_at = place if found else None, last
        return (place, longest) if found else (0, 0)

    def following(self, place: int, most: int) -> list[int]:
        """What came after a place; what has just been matched goes on from its own beginning."""
        first, period = place + 1, len(self._tokens) - 1 - place
        return [self._tokens[first + number % period] for number in range(most)]

    def _candidates(self, last: int) -> list[int]:
        """Places to compare with: where the latest match goes on, then the latest."""
        found = [] if self._source is None else [self._source + last - self._asked_at]
        if last >= MIN_MATCH - 1 and self._bits:
            place, most = self._heads[self._hash(last)], len(found) + _CANDIDATES
            while place >= 0 and len(found) < most:
                found.append(place)
                place = self._previous[place]
        return found

    def _common(self, one: int, other: int) -> int:
        """How many tokens up to these places are the same."""
        tokens, length = self._tokens, 0
        while (
            length < MAX_MATCH and one >= length and tokens[one - length] == tokens[other - length]
        ):
            length += 1
        return length

    def _enter(self, end: int) -> None:
        """Have all places below `end`."""
        if end > len(self._heads):
            self._bits = max(_LEAST_HEADS, end).bit_length()
            self._heads = array("i", [-1]) * (1 << self._bits)  # none
            self._previous = array("i")
        while end - len(self) > _FEW:
            self._enter_piece(min(end, len(self) + _PIECE))
        for place in range(len(self), end):
            if place < MIN_MATCH - 1:
                self._previous.append(-1)
                continue
            key = self._hash(place)
            self._previous.append(self._heads[key])
            self._heads[key] = place

    def _hash(self, place: int) -> int:
        a, b, c = self._tokens[place - 2 : place + 1]
        mixed = a * _FACTORS[0] + b * _FACTORS[1] + c * _FACTORS[2]
        return (mixed & 0xFFFFFFFF) >> (32 - self._bits)

    def _enter_piece(self, end: int) -> None:
        """Many at once: each comes after the one before it in an order by hash."""
        begin = len(self)
        if begin < MIN_MATCH - 1:
            self._previous.extend([-1] * (MIN_MATCH - 1 - begin))
            begin = MIN_MATCH - 1
        ids = np.asarray(self._tokens[begin - 2 : end], np.int64).astype(np.uint32)
        a, b, c = (np.uint32(factor) for factor in _FACTORS)
        mixed = ids[:-2] * a + ids[1:-1] * b + ids[2:] * c
        keys = (mixed >> np.uint32(32 - self._bits)).astype(np.int64)
        order = np.argsort(keys, kind="stable")
        ordered = keys[order]
        firsts = np.concatenate(([True], ordered[1:] != ordered[:-1]))
        heads = np.frombuffer(self._heads, np.int32)
        before = np.empty(len(keys), np.int32)
        before[order[1:]] = order[:-1] + begin
        before[order[firsts]] = heads[ordered[firsts]]
        lasts = np.concatenate((firsts[1:], [True]))
        heads[ordered[lasts]] = order[lasts] + begin
        self._previous.frombytes(before.tobytes())


class Lookup:
    """Proposes what followed the longest match. Holds indexes of `most_tokens` tokens at most."""

    name = "lookup"

    def __init__(self, most_tokens: int) -> None:
        self._most_tokens = most_tokens
        self._indexes: dict[int, LookupIndex] = {}
        self._confidences = Confidences()
        self.tokens = 0  # in all indexes

    def propose(self, number: int, tokens: TokenIds, most: int) -> Proposal | None:
        index = self._indexes.get(number)
        before = 0 if index is None else len(index)
        if self.tokens + len(tokens) - before > self._most_tokens:
            return None
        if index is None:
            index = self._indexes[number] = LookupIndex(tokens)
        place, length = index.match()
        self.tokens += len(index) - before
        if not length:
            return None
        drafts = index.following(place, most)
        return Proposal(drafts, self._confidences.of(number, length, most), length)

    def learn(self, number: int, proposal: Proposal, right: int, known: int) -> None:
        self._confidences.learn(number, proposal.mark, right, known)

    def forget(self, number: int) -> None:
        index = self._indexes.pop(number, None)
        self.tokens -= 0 if index is None else len(index)
        self._confidences.forget(number)
