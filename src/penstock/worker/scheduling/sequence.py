"""One request in the worker: its tokens, how many are computed, the blocks that hold them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.wire import Submit
    from penstock.worker.kv.prefix import Chain

# A token that has been sampled and is still on its way here from the device.
UNKNOWN = -1


@dataclass(slots=True, eq=False)
class Sequence:
    """There is no prefill or decode phase: `computed` catches up with `len(tokens)`."""

    request: Submit
    arrival: int
    tokens: list[int] = field(default_factory=list)  # the prompt, then what was generated
    computed: int = 0  # tokens whose KV is in the blocks
    blocks: list[int] = field(default_factory=list)
    chain: Chain | None = None  # its blocks' keys; None: they are neither looked for nor kept
    known: int = 0  # blocks, from the first on, that others can find
    reused: int = 0  # prompt tokens that were found computed
    ticket: int | None = None  # under which blocks of it are being read; it is not computed then
    fetched_from: int = 0  # the first block that is read under it
    awaited: int = 0  # blocks that it will have when all have been read
    preempted: int = 0  # how often it gave way
    scored: int = 0  # prompt tokens whose log-probabilities were sent
    ended: bool = False  # finished or cancelled: what is still on its way is of no use

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt)

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
    def most_tokens(self) -> int:
        """Tokens it can come to at the very most."""
        return len(self.request.prompt) + self.request.max_tokens

    @property
    def pending(self) -> int:
        """Known tokens that are not yet computed."""
        return len(self.tokens) - self.computed

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
