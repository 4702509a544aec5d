"""What makes drafts: the protocol. A context goes in; drafts and confidences come out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from penstock.wire import TokenIds


@dataclass(frozen=True, slots=True)
class Proposal:
    """How a sequence may go on."""

    tokens: list[int]
    confidences: list[float]  # of each the chance to be right, if all before it are
    mark: int = 0  # the proposer's own, to learn by

    def survivals(self, most: int) -> list[float]:
        """The chance of each of the first `most` to be kept."""
        chances, all_right = [], 1.0
        for confidence in self.confidences[:most]:
            all_right *= confidence
            chances.append(all_right)
        return chances


class Proposer(Protocol):
    """Guesses; nothing that it says can change an answer."""

    name: str

    def propose(self, number: int, tokens: TokenIds, most: int) -> Proposal | None:
        """How request `number`, which has these tokens, goes on; None: nothing to say.

        `tokens` is the same growing list at every call.
        """

    def learn(self, number: int, proposal: Proposal, right: int, known: int) -> None:
        """The first `right` drafts of a proposal came true, of `known` about which that is known;
        they may have been in no step."""

    def forget(self, number: int) -> None:
        """A request is gone."""
