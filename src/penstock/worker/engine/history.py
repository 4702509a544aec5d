"""Token counts of a sequence, from which penalties are computed.

Kept up to date token by token, so that a step costs what is new, not a pass over the context. Eight
bytes for each distinct token of an answer, and four for one of a prompt, however many requests
have the same prompt. With a window of tokens that count, eight for each distinct one of them.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from copy import copy
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import numpy as np

if TYPE_CHECKING:
    from typing import Self

    from numpy.typing import NDArray

    from penstock.wire import TokenIds


_MANY = 64  # new tokens: then all are counted anew


class PromptTokens:
    """The distinct tokens of a prompt."""

    __slots__ = ("__weakref__", "ids", "prompt")

    def __init__(self, prompt: TokenIds) -> None:
        self.prompt = prompt  # held, so that no other can be taken for it
        self.ids: NDArray[np.int32] = np.unique(np.asarray(prompt, np.int32))


class PromptHistories:
    """Those of all requests that are here: one for each prompt, while anybody needs it."""

    def __init__(self) -> None:
        self._known: WeakValueDictionary[int, PromptTokens] = WeakValueDictionary()

    def of(self, prompt: TokenIds) -> PromptTokens:
        """Of a prompt, which requests share as an object."""
        known = self._known.get(id(prompt))
        if known is None:
            known = self._known[id(prompt)] = PromptTokens(prompt)
        return known


class TokenCounts:
    """The distinct tokens of one sequence: its prompt's, and its answer's with their counts."""

    __slots__ = ("_counts", "_ids", "_prompt", "_taken")

    def __init__(self, prompt: PromptTokens) -> None:
        self._prompt = prompt
        self._ids = array("i")  # of the answer, ascending
        self._counts = array("i")
        self._taken = 0  # tokens of the answer that are counted

    @property
    def seen(self) -> NDArray[np.int32]:
        """The prompt's tokens and the answer's; what is in both stands there twice."""
        return np.concatenate((self._prompt.ids, self.ids))

    @property
    def ids(self) -> NDArray[np.int32]:
        """The answer's."""
        return np.array(self._ids, np.int32)

    @property
    def counts(self) -> NDArray[np.int32]:
        """How often the answer has each of them."""
        return np.array(self._counts, np.int32)

    def copy(self) -> Self:
        """Another, which goes on by itself."""
        other = copy(self)
        other._ids, other._counts = self._ids[:], self._counts[:]
        return other

    def take(self, answer: TokenIds) -> None:
        """Count what is new of an answer."""
        if len(answer) - self._taken > _MANY:
            self._recount(np.asarray(answer, np.int32))
            self._taken = len(answer)
        for token in answer[self._taken :]:
            self._count(token, 1)
        self._taken = len(answer)

    def _recount(self, tokens: NDArray[np.int32]) -> None:
        ids, counts = np.unique(tokens, return_counts=True)
        self._ids = array("i", ids.tobytes())
        self._counts = array("i", counts.astype(np.int32).tobytes())

    def _count(self, token: int, more: int) -> None:
        place = bisect_left(self._ids, token)
        if place == len(self._ids) or self._ids[place] != token:
            self._ids.insert(place, token)
            self._counts.insert(place, 0)
        self._counts[place] += more
        if not self._counts[place]:
            del self._ids[place], self._counts[place]


class WindowCounts(TokenCounts):
    """The latest tokens of one sequence, prompt and answer alike, as llama.cpp counts them."""

    __slots__ = ("_tokens", "_window")

    def __init__(self, prompt: TokenIds, window: int) -> None:
        super().__init__(_NO_PROMPT)
        self._window = window
        self._tokens = prompt
        self._recount(np.asarray(prompt[-window:], np.int32))

    def take(self, answer: TokenIds) -> None:
        """Count what is new of an answer, and no more what has left the window."""
        before = len(self._tokens) - self._window  # the window's begin, less the answer's tokens
        if len(answer) - self._taken > _MANY:
            latest = [*self._tokens[max(before + len(answer), 0) :], *answer[-self._window :]]
            self._recount(np.asarray(latest, np.int32))
            self._taken = len(answer)
        for number, token in enumerate(answer[self._taken :], self._taken):
            self._count(token, 1)
            if (left := before + number) >= 0:
                gone = left - len(self._tokens)
                self._count(self._tokens[left] if gone < 0 else answer[gone], -1)
        self._taken = len(answer)


_NO_PROMPT = PromptTokens(array("i"))
