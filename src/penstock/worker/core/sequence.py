"""One request in the scheduler: its tokens, how many are computed, its KV."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from penstock.wire import Finish, token_ids
from penstock.worker.core.plan import UNKNOWN, Slice

if TYPE_CHECKING:
    from collections.abc import MutableSequence

    from penstock.wire import Submit, TokenIds
    from penstock.worker.kv.tables import KvHandle


class Ended(NamedTuple):
    """How a request ended."""

    how: Finish
    tokens: int  # of those that its last step gave, its own


@dataclass(slots=True, eq=False)
class Sequence:
    """There is no prefill or decode phase: `computed` catches up with `len(tokens)`."""

    request: Submit
    arrival: int
    stops: frozenset[int]  # tokens that end it
    kv: KvHandle = field(init=False)
    # The prompt, then what was generated.
    tokens: MutableSequence[int] = field(init=False)
    computed: int = 0  # tokens whose KV is in its blocks
    running: bool = False  # it holds blocks
    reused: int = 0  # prompt tokens that were found computed
    preempted: int = 0  # how often it gave way
    scored: int = 0  # prompt tokens whose log-probabilities were sent
    # Where others branch off: the state behind so many tokens is worth keeping.
    junctions: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.tokens = token_ids(self.request.prompt)

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
        """Tokens generated so far."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def max_tokens(self) -> int:
        """Tokens it can come to at the very most."""
        return len(self.request.prompt) + self.request.max_tokens

    @property
    def pending(self) -> int:
        """Tokens that are not yet computed."""
        return len(self.tokens) - self.computed

    @property
    def known_tokens(self) -> int:
        """Tokens up to the first that is still on its way."""
        count = len(self.tokens)
        while count and self.tokens[count - 1] == UNKNOWN:
            count -= 1
        return count

    @property
    def decoding(self) -> bool:
        """Only the newest token is missing: one row gives the next token."""
        return self.pending == 1 and self.generated > 0 and not self.complete

    @property
    def complete(self) -> bool:
        """It has all the tokens it may have, though the last may not be known yet."""
        return self.generated >= self.request.max_tokens

    @property
    def wants_prompt_logits(self) -> bool:
        """The prompt's own log-probabilities are asked for and not all given yet."""
        return self.request.prompt_logprobs is not None and self.scored < self.prompt_tokens

    @property
    def reusable_tokens(self) -> int:
        """How many of the first tokens may be found instead of computed. The last never is: its row
        gives the next token."""
        return 0 if self.wants_prompt_logits else len(self.tokens) - 1

    def slice(self, count: int) -> Slice:
        """The next `count` tokens, for a plan."""
        end = self.computed + count
        samples = end == len(self.tokens)
        return Slice(
            request_id=self.id,
            start=self.computed,
            tokens=self.tokens[self.computed : end],
            tables=self.kv.arrays,
            logit_rows=count if self.wants_prompt_logits else int(samples),
            samples=samples,
            state=self.kv.state.place,
            prompt_tokens=self.prompt_tokens,
        )

    def cut(self, tokens: TokenIds, generated: int) -> tuple[int, Finish | None]:
        """How many of `tokens`, of which the first is number `generated` of the answer, are its
        own, and how it ends with them; None: it goes on."""
        for count, token in enumerate(tokens, 1):
            if how := self._finish(token, generated + count - 1):
                return count, how
        return len(tokens), None

    def _finish(self, token: int, generated: int) -> Finish | None:
        """How it ends with a token, the last of so many; None: it goes on."""
        if token in self.stops and generated > self.request.min_tokens:
            return Finish.STOP
        return Finish.LENGTH if generated >= self.request.max_tokens else None
