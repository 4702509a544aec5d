"""What steps need of a request beside the plan: sampling parameters, token history, grammar."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.wire import token_ids
from penstock.worker.core.plan import UNKNOWN
from penstock.worker.engine.history import PromptHistories, TokenCounts, WindowCounts

if TYPE_CHECKING:
    from array import array

    from penstock.wire import Submit, TokenIds
    from penstock.worker.core.plan import Slice


@dataclass(slots=True, eq=False)
class RequestState:
    """One request where its steps are run; plans tell it its tokens."""

    request: Submit
    histories: PromptHistories = field(default_factory=PromptHistories)  # shared with others
    answer: array[int] = field(default_factory=lambda: token_ids(()))  # as far as it is known
    position: int = 0  # of the token that the latest slice gives
    scored: int = 0  # prompt tokens whose log-probabilities were sent
    drafts: TokenIds = ()  # behind the answer, as if they were right
    _base: RequestState | None = None  # of which it is a branch: the same without drafts
    _counts: TokenCounts | WindowCounts | None = None

    def __post_init__(self) -> None:
        self.position = self.prompt_tokens

    @property
    def id(self) -> int:
        """The request's number."""
        return self.request.id

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.request.prompt)

    @property
    def generated(self) -> int:
        """Tokens of the answer before the one that the latest slice gives."""
        return self.position - self.prompt_tokens

    @property
    def wants_prompt_logits(self) -> bool:
        """The prompt's own log-probabilities are asked for and not all given yet."""
        return self.request.prompt_logprobs is not None and self.scored < self.prompt_tokens

    @property
    def counts(self) -> TokenCounts | WindowCounts:
        """Of all its tokens, for penalties."""
        if self._base is not None:
            counts = self._base.counts.copy()
            counts.take(self.answer + token_ids(self.drafts))
            return counts
        if self._counts is None:
            window = self.request.sampling.penalty_window
            self._counts = (
                WindowCounts(self.request.prompt, window)
                if window
                else TokenCounts(self.histories.of(self.request.prompt))
            )
        self._counts.take(self.answer)
        return self._counts

    @property
    def is_branch(self) -> bool:
        """What it would be with some drafts, and not what it is."""
        return self._base is not None

    def branch(self, drafts: TokenIds) -> RequestState:
        """As it would be if these came behind its latest slice: for the token after them."""
        other = copy(self)
        other.drafts, other._base = drafts, self
        other.position = self.position + len(drafts)
        return other

    def answer_from(self, place: int) -> list[int]:
        """Tokens of the answer from a place on."""
        return [*self.answer[place:], *self.drafts]

    def extend(self, tokens: TokenIds) -> None:
        """It has had these too."""
        self.answer.extend(tokens)
        self.position = self.prompt_tokens + len(self.answer)

    def observe(self, piece: Slice) -> None:
        """A slice of it is about to be computed: take in the tokens that are new."""
        known = self.prompt_tokens + len(self.answer)
        if piece.end > known:
            fresh = piece.tokens[known - piece.start :]
            self.answer.extend(token for token in fresh if token != UNKNOWN)
        self.position = piece.end
