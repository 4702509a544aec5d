"""Which tokens an answer may go on with: grammars, and the bounds of reasoning, as masks.

A mask is one bit per token of the vocabulary. It follows from the tokens that a sequence has, so it
is computed on a helper thread while the forward runs, and computing it changes nothing that a
failed step would have to undo. Compiled grammars are kept and shared by requests of the same form.
Knows no logits: the sampler applies masks.

    thinking ──end──▶ answer                    a grammar holds in the answer only
        └─ budget spent: the end is the only token allowed
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum
from hashlib import sha256
from typing import TYPE_CHECKING, NoReturn, Self

import numpy as np

from penstock.errors import BadRequest, ModelUnusable
from penstock.text.grammar import limits
from penstock.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence as Series
    from concurrent.futures import Future
    from pathlib import Path

    from llguidance import LLMatcher
    from numpy.typing import NDArray

    from penstock.wire import Submit, Thinking
    from penstock.worker.scheduling.sequence import Sequence

    Bits = NDArray[np.int32]

log = logging.getLogger(__name__)

_READING_FACTOR = 20  # bytes of memory for each of the file, at the highest; 16.4 measured
_KEPT = 32  # compiled grammars; most take well under a megabyte


@dataclass(slots=True)
class Masks:
    """The masks of one step: `bits[i]` is for row `rows[i]` of those that sample."""

    rows: list[int]
    bits: Bits  # [len(rows), words]
    failed: dict[int, str] = field(default_factory=dict)  # requests that cannot go on, and why


class Vocabulary:
    """A model's vocabulary, from which its `Grammars` are made when they are wanted.

    To read one takes about a second and some megabytes, and most requests never need it.
    """

    def __init__(self, folder: Path, size: int) -> None:
        self._folder = folder
        self._size = size
        self._helper = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        # Threads are started before the process is capped.
        self._helper.submit(int).result()
        self._reading: Future[Grammars | None] | None = None

    def read(self) -> Future[Grammars | None]:
        """Begin, unless that was done; the outcome is None where nothing can be constrained."""
        if self._reading is None or _failed(self._reading):
            self._reading = self._helper.submit(
                Grammars.from_folder, self._folder, self._size, self._helper
            )
        return self._reading

    @property
    def tried(self) -> bool:
        """Whether reading it is over, well or not."""
        return self._reading is not None and self._reading.done()

    @property
    def known(self) -> Grammars | None:
        """What it has come to, if it has been read."""
        reading = self._reading
        if reading is None or not reading.done() or _failed(reading):
            return None
        return reading.result()

    @property
    def reading_bytes(self) -> int:
        """What reading it may take at its highest."""
        try:
            return _READING_FACTOR * (self._folder / "tokenizer.json").stat().st_size
        except OSError:
            return 0


def _failed(reading: Future[Grammars | None]) -> bool:
    return reading.done() and reading.exception() is not None


class Grammars:
    """All constraints of one model. `add`, `remove` and `begin` are called on the device thread."""

    def __init__(
        self,
        tokens: list[bytes],
        special_ids: Series[int],
        helper: ThreadPoolExecutor | None = None,
    ) -> None:
        """`tokens` are the bytes of each id; special ones only stand where a grammar names them."""
        from llguidance import LLTokenizer, TokenizerWrapper

        # The library wants one token that ends every text. Which tokens do so here each request
        # says for itself, so it gets one of its own, behind those of the model.
        self._words = -(-(len(tokens) + 1) // 32)
        self._tokenizer = LLTokenizer(
            TokenizerWrapper(_Vocabulary([*tokens, b"<end>"], [*special_ids, len(tokens)]))
        )
        self._compiled: OrderedDict[bytes, LLMatcher] = OrderedDict()
        self._constraints: dict[int, Constraint] = {}
        self._helper = helper or ThreadPoolExecutor(1, thread_name_prefix="grammar")

    @classmethod
    def from_folder(cls, folder: Path, vocabulary: int, helper: ThreadPoolExecutor) -> Self | None:
        """For the tokenizer of a model; None when it, or the library, is not there."""
        try:
            import llguidance  # noqa: F401 - there is no wheel of it for every machine

            tokenizer = Tokenizer.from_folder(folder)
        except (ImportError, ModelUnusable) as error:
            log.warning("answers of this model cannot be constrained: %s", error)
            return None
        special = set(tokenizer.special_ids)
        tokens: list[bytes] = []
        for number in range(vocabulary):
            content = tokenizer.token_bytes(number)
            if number in special or not content:
                special.add(number)
                content = (tokenizer.token(number) or f"<unused {number}>").encode()
            tokens.append(content)
        return cls(tokens, sorted(number for number in special if number < vocabulary), helper)

    def add(self, request: Submit) -> None:
        """Take a request; compiling begins at once, beside the steps."""
        if request.grammar is None and request.thinking is None:
            return
        constraint = Constraint(request.stop_token_ids, request.thinking)
        self._constraints[request.id] = constraint
        if request.grammar is not None:
            constraint.constrained = True
            self._helper.submit(self._compile, constraint, request.grammar)

    def remove(self, request_id: int) -> None:
        """Forget a request."""
        self._constraints.pop(request_id, None)

    def begin(self, sequences: list[Sequence]) -> Future[Masks] | None:
        """Compute the masks of these, which are to sample in this step; None: all are free."""
        wanted = [
            (row, sequence, self._constraints[sequence.id])
            for row, sequence in enumerate(sequences)
            if sequence.id in self._constraints
        ]
        return self._helper.submit(self._masks, wanted) if wanted else None

    # --- on the helper thread ------------------------------------------------------------------

    def _compile(self, constraint: Constraint, grammar: str) -> None:
        key = sha256(grammar.encode()).digest()
        matcher = self._compiled.get(key)
        if matcher is None:
            from llguidance import LLMatcher

            matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits())
            self._compiled[key] = matcher
            while len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(key)
        constraint.matcher = matcher.deep_copy()

    def _masks(self, wanted: list[tuple[int, Sequence, Constraint]]) -> Masks:
        masks = Masks([], np.empty((len(wanted), self._words), dtype=np.int32))
        for row, sequence, constraint in wanted:
            place = len(masks.rows)
            if constraint.fill(sequence, masks.bits[place]):
                masks.rows.append(row)
            if constraint.error:
                masks.failed[sequence.id] = constraint.error
        masks.bits = masks.bits[: len(masks.rows)]
        return masks


class _Phase(Enum):
    UNDECIDED = 0  # the first token says whether the model thinks
    THINKING = 1
    ANSWER = 2


class Constraint:
    """What one answer may go on with, as far as its tokens are known."""

    def __init__(self, stop_token_ids: list[int], thinking: Thinking | None) -> None:
        self.constrained = False  # a grammar holds, though it may not be compiled yet
        self.matcher: LLMatcher | None = None
        self._stops = stop_token_ids
        self._thinking = thinking
        self._phase = _Phase.ANSWER
        if thinking is not None:
            self._phase = _Phase.THINKING if thinking.open else _Phase.UNDECIDED
        self._seen = 0  # tokens of the answer that are taken in
        self._thought = 0  # tokens of reasoning
        self._ended = 0  # tokens of its end that have come

    @property
    def error(self) -> str:
        """Why the grammar cannot be followed any further; "" if it can."""
        return self.matcher.get_error() if self.matcher is not None else ""

    def fill(self, sequence: Sequence, row: Bits) -> bool:
        """Write the mask of its next token; False when every token is allowed."""
        for token in sequence.tokens[sequence.prompt_tokens + self._seen :]:
            self._take(token)
        self._seen = sequence.generated
        if self._phase is _Phase.THINKING:
            return self._fill_thinking(row)
        if self.matcher is None:
            return False
        self._fill_answer(self.matcher, row)
        if self._phase is _Phase.UNDECIDED and self._thinking is not None:
            _allow(row, [] if self._thinking.start is None else [self._thinking.start])
        return True

    def _fill_thinking(self, row: Bits) -> bool:
        thinking = self._thinking
        assert thinking is not None
        if thinking.budget is not None and self._thought >= thinking.budget:
            row[:] = 0
            _allow(row, [thinking.end[self._ended]])
            return True
        if not self.constrained:
            return False
        # An answer that ended here would not have the form it must have.
        row[:] = -1
        _forbid(row, self._stops)
        return True

    def _fill_answer(self, matcher: LLMatcher, row: Bits) -> None:
        matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if matcher.is_accepting():
            _allow(row, self._stops)

    def _take(self, token: int) -> None:
        if self._phase is _Phase.UNDECIDED:
            assert self._thinking is not None
            thinks = token == self._thinking.start
            self._phase = _Phase.THINKING if thinks else _Phase.ANSWER
            if thinks:
                return
        if self._phase is _Phase.THINKING:
            self._take_thought(token)
        elif self.matcher is not None:
            self.matcher.consume_token(token)

    def _take_thought(self, token: int) -> None:
        assert self._thinking is not None
        end = self._thinking.end
        spent = self._thinking.budget is not None and self._thought >= self._thinking.budget
        self._thought += not spent
        if token == end[self._ended]:
            self._ended += 1
        else:
            self._ended = int(token == end[0])
        if self._ended == len(end):
            self._phase = _Phase.ANSWER


class _Vocabulary:
    """What llguidance wants to know of a tokenizer. It never has to tokenise: nothing is forced."""

    def __init__(self, tokens: list[bytes], special_ids: Series[int]) -> None:
        self.eos_token_id = len(tokens) - 1
        self.bos_token_id = None
        self.tokens = tokens
        self.special_token_ids = list(special_ids)

    def __call__(self, text: bytes) -> list[int]:
        return []


def refuse_unconstrained() -> NoReturn:
    """Nobody can be held to a form where the vocabulary is not known."""
    raise BadRequest(
        "Answers of this model cannot be constrained: it has no tokenizer.json, or the package "
        "llguidance is not installed."
    )


def _allow(row: Bits, tokens: Series[int]) -> None:
    for token in tokens:
        row[token >> 5] |= np.int32(np.uint32(1 << (token & 31)).view(np.int32))


def _forbid(row: Bits, tokens: Series[int]) -> None:
    for token in tokens:
        row[token >> 5] &= ~np.uint32(1 << (token & 31)).view(np.int32)
