"""Proposers that know the answer, or lie: an answer must be the same with any of them."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from penstock.worker.core.drafts.drafting import Drafting
from penstock.worker.core.drafts.proposer import Proposal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.wire import TokenIds
    from penstock.worker.core.drafts.proposer import Proposer
    from penstock.worker.core.engine import GenerateEngine


class Fake:
    """Proposes `most` tokens after any context. `truth` has whole answers by request."""

    name = "fake"

    def __init__(self, truth: Mapping[int, Sequence[int]], vocabulary: int, seed: int = 0) -> None:
        self.truth = truth
        self.vocabulary = vocabulary
        self.chance = Random(seed)
        self.prompts: dict[int, int] = {}  # their lengths
        self.outcomes: list[tuple[int, int]] = []  # right, known

    def propose(self, number: int, tokens: TokenIds, most: int) -> Proposal | None:
        self.prompts.setdefault(number, len(tokens) - 1)  # a first draft follows the first token
        drafts = self.drafts(number, len(tokens) - self.prompts[number], most)
        return Proposal(drafts, [0.9] * len(drafts)) if drafts else None

    def right(self, number: int, generated: int, most: int) -> list[int]:
        """What will come."""
        return list(self.truth[number][generated : generated + most])

    def drafts(self, number: int, generated: int, most: int) -> list[int]:
        raise NotImplementedError

    def learn(self, number: int, proposal: Proposal, right: int, known: int) -> None:
        self.outcomes.append((right, known))

    def forget(self, number: int) -> None:
        self.prompts.pop(number, None)


class Oracle(Fake):
    """Always right; at its end the answer goes on for ever."""

    def drafts(self, number: int, generated: int, most: int) -> list[int]:
        return (self.right(number, generated, most) + [0] * most)[:most]


class Liar(Fake):
    """Never right."""

    def drafts(self, number: int, generated: int, most: int) -> list[int]:
        right = Oracle.drafts(self, number, generated, most)  # type: ignore[arg-type]
        return [(token + 1) % self.vocabulary for token in right]


class Gambler(Fake):
    """Each draft is right or not, and there are more or fewer of them."""

    def drafts(self, number: int, generated: int, most: int) -> list[int]:
        right = Oracle.drafts(self, number, generated, most)  # type: ignore[arg-type]
        some = right[: self.chance.randint(0, most)]
        return [
            token if self.chance.random() < 0.7 else self.chance.randrange(self.vocabulary)
            for token in some
        ]


KINDS: tuple[type[Fake], ...] = (Oracle, Liar, Gambler)


class Always:
    """As many drafts as there is room for, whatever they are worth."""

    wants_plain = False

    def observe(self, rows: int, drafts: int, duration_s: float) -> None:
        pass

    def choose(self, survivals: Sequence[Sequence[float]], streams: int, spare: int) -> list[int]:
        places = [place for place, chances in enumerate(survivals) for _ in chances]
        return places[: max(0, spare)]


def draft_with(engine: GenerateEngine, proposers: Sequence[Proposer], most: int = 5) -> Drafting:
    """Let an engine verify whatever these propose."""
    drafting = engine._scheduler.drafting = Drafting(proposers, most, Always())
    return drafting
