"""Which texts share a step. A text is never split: it is computed whole, in one step. No torch.

The first in line always goes. Behind it whoever fits into what is left of the step's tokens,
sequences and bytes goes along, so nobody waits longer for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.worker.core.gate import StepShape

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.wire import Encoding, TokenIds
    from penstock.worker.core.gate import Gate


@dataclass(frozen=True, slots=True, eq=False)
class Text:
    """One text, or pair of texts, of a request."""

    request_id: int
    tokens: TokenIds
    encoding: Encoding
    place: tuple[int, int]  # in line: priority, then arrival

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class PackedStep:
    """The texts of one step, shortest first, so that equal lengths are neighbours."""

    texts: tuple[Text, ...]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Of the texts."""
        return tuple(map(len, self.texts))

    @property
    def tokens(self) -> int:
        """Rows of the forward."""
        return sum(self.lengths)

    @property
    def shape(self) -> StepShape:
        """What its cost depends on."""
        return StepShape(self.tokens, len(self.texts), max(self.lengths, default=0))


def pack(waiting: Iterable[Text], tokens: int, sequences: int, gate: Gate) -> PackedStep:
    """Those of the waiting texts that go now; a text of more tokens goes alone. Empty only where
    the gate does not admit the first of them alone."""
    chosen: list[Text] = []
    shape = StepShape()
    for text in sorted(waiting, key=lambda text: text.place):
        larger = shape.plus(len(text), len(text), 0)
        if chosen and (larger.tokens > tokens or larger.sequences > sequences):
            continue
        if gate.admits(larger):
            chosen.append(text)
            shape = larger
        elif not chosen:
            break
    return PackedStep(tuple(sorted(chosen, key=len)))
