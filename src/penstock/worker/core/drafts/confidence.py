"""How often a draft was right, by how long the match before it was: of each request, and of all.

A draft behind a match of m tokens that is right makes it one of m + 1, so each of a row of drafts
counts for a length of its own. Old outcomes count less and less; a request of which little is known
is taken to be like the others.
"""

from __future__ import annotations

from bisect import bisect_right

# Lengths from which matches count as longer ones, and what is thought of each before anything is
# known: text that has run alike for long goes on alike.
_LENGTHS = (4, 5, 7, 9, 13, 17, 25)
_THOUGHT = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9)
_KEPT_OF_ONE, _KEPT_OF_ALL = 0.95, 0.99  # of what was known, an outcome later
_DOUBT = 4.0  # outcomes that what is known of others counts for


class _Rates:
    """Decaying counts, by length."""

    __slots__ = ("_kept", "right", "tried")

    def __init__(self, kept: float) -> None:
        self._kept = kept
        self.right = [0.0] * len(_THOUGHT)
        self.tried = [0.0] * len(_THOUGHT)

    def count(self, kind: int, right: bool) -> None:
        self.right[kind] = self._kept * self.right[kind] + right
        self.tried[kind] = self._kept * self.tried[kind] + 1.0

    def rate(self, kind: int, otherwise: float) -> float:
        return (self.right[kind] + _DOUBT * otherwise) / (self.tried[kind] + _DOUBT)


class Confidences:
    """What has been learned of a proposer that goes by matches."""

    def __init__(self) -> None:
        self._all = _Rates(_KEPT_OF_ALL)
        self._each: dict[int, _Rates] = {}

    def of(self, number: int, length: int, count: int) -> list[float]:
        """For `count` drafts of a request behind a match: each if those before it are right."""
        return [self._rate(number, _kind(length + place)) for place in range(count)]

    def learn(self, number: int, length: int, right: int, known: int) -> None:
        """Of `known` drafts behind such a match the first `right` were right."""
        own = self._each.setdefault(number, _Rates(_KEPT_OF_ONE))
        for place in range(min(known, right + 1)):
            kind = _kind(length + place)
            own.count(kind, place < right)
            self._all.count(kind, place < right)

    def forget(self, number: int) -> None:
        """A request is gone; what was learned of it for others stays."""
        self._each.pop(number, None)

    def _rate(self, number: int, kind: int) -> float:
        of_all = self._all.rate(kind, _THOUGHT[kind])
        own = self._each.get(number)
        return of_all if own is None else own.rate(kind, of_all)


def _kind(length: int) -> int:
    return bisect_right(_LENGTHS, length)
