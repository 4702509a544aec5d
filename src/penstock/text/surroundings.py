"""What a tokenizer puts around a text, and around and between two: learned from it, once.

So texts are encoded by themselves, and a pair is put together, cut to a length where that is asked
for, without losing its special tokens.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.errors import ModelUnusable

if TYPE_CHECKING:
    from penstock.text.tokenizer import Tokenizer

_WORD = "a"


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Token ids beside the texts' own."""

    before: tuple[int, ...]
    after: tuple[int, ...]

    @property
    def added(self) -> int:
        """How many they are."""
        return len(self.before) + len(self.after)

    def around(self, ids: array[int], most: int | None = None) -> array[int]:
        """The text's ids with what belongs around them; no more than `most`, cut at its end."""
        kept = len(ids) if most is None else max(0, most - self.added)
        return array("i", self.before) + ids[:kept] + array("i", self.after)


@dataclass(frozen=True, slots=True)
class PairSurroundings:
    """The same of two texts."""

    before: tuple[int, ...]
    between: tuple[int, ...]
    after: tuple[int, ...]
    # Which of `between` are of the second segment, from the end; None: segments are all alike.
    second_from: int | None

    @property
    def added(self) -> int:
        """How many they are."""
        return len(self.before) + len(self.between) + len(self.after)

    def joined(self, first: array[int], second: array[int]) -> tuple[array[int], int | None]:
        """Both texts as one, and where its second segment begins, if there is one."""
        before, between, after = (
            array("i", part) for part in (self.before, self.between, self.after)
        )
        ids = before + first + between + second + after
        if self.second_from is None:
            return ids, None
        return ids, len(self.before) + len(first) + self.second_from


def surroundings(tokenizer: Tokenizer) -> Surroundings:
    """Of one text."""
    bare = tokenizer.encode(_WORD, add_special_tokens=False)
    full = tokenizer.encode(_WORD, add_special_tokens=True)
    at = _find(full, bare, 0)
    return Surroundings(tuple(full[:at]), tuple(full[at + len(bare) :]))


def pair_surroundings(tokenizer: Tokenizer) -> PairSurroundings:
    """Of two texts."""
    bare = tokenizer.encode(_WORD, add_special_tokens=False)
    full, segments = tokenizer.encode_pair(_WORD, _WORD)
    first = _find(full, bare, 0)
    end = first + len(bare)
    second = _find(full, bare, end)
    change = next((place for place, segment in enumerate(segments) if segment), None)
    if change is not None and not end <= change <= second:
        raise ModelUnusable(
            "The tokenizer begins the second segment of a pair inside one of its texts."
        )
    return PairSurroundings(
        tuple(full[:first]),
        tuple(full[end:second]),
        tuple(full[second + len(bare) :]),
        None if change is None else change - end,
    )


def _find(full: list[int], bare: list[int], begin: int) -> int:
    for place in range(begin, len(full) - len(bare) + 1):
        if full[place : place + len(bare)] == bare:
            return place
    raise ModelUnusable("The tokenizer writes a text otherwise where special tokens are around it.")
