"""The text of one answer while its tokens arrive: whole characters only, up to a stop string.

`TextStream` owns what has been sent and what is held back; `StopFinder` owns the search, by tables
that all answers to one request share. Neither knows requests or the wire. Each token costs the same
however long the answer already is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.text.tokenizer import Tokenizer


class TextStream:
    """Turns tokens into text that is safe to send. One per choice.

    What `push` and `finish` return, joined, is the one-shot decode of the tokens up to the first
    stop string: the one that starts first in the text, and of those that start together the
    shortest. Where an answer was cut short, a last character that is not whole is missing.
    """

    stopped: bool  # a stop string was found; further tokens are ignored
    matched: str | None  # which one
    # For each token that was taken in, where its text begins. A token that arrives in the middle
    # of a character has the place of that character.
    offsets: list[int]

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[StopString] = (),
        skip_special_tokens: bool = True,
        visible: frozenset[str] = frozenset(),
    ) -> None:
        """`visible` are special tokens that are not skipped: markers that a parser looks for."""
        self.stopped = False
        self.matched = None
        self.offsets = []
        self._tokenizer = tokenizer
        self._decoding = tokenizer.decoder.start()
        self._skip_special_tokens = skip_special_tokens
        self._visible = visible
        self._finder = StopFinder(stop)
        self._made = 0  # characters made of the tokens so far
        self._held = ""  # the last of them, which may be the beginning of a stop string

    def push(self, tokens: Sequence[int]) -> str:
        """Takes tokens in and returns the text that is now safe to send, "" if there is none."""
        sent = []
        for token_id in tokens:
            if self.stopped:
                break
            self.offsets.append(self._made)
            token = self._tokenizer.token(
                token_id, skip_special_tokens=self._skip_special_tokens, keep=self._visible
            )
            if token is not None:
                sent.append(self._take(self._decoding.push(token)))
        return "".join(sent)

    def finish(self, *, cut: bool = False) -> str:
        """The text that was held back. Nothing may be pushed after it. `cut`: the answer was cut
        short, so a character that is not whole is left out."""
        if self.stopped:
            return ""
        sent = self._take(self._decoding.finish(cut=cut))
        if not self.stopped and (found := self._finder.finish()):
            return sent + self._stop_at(found)
        held, self._held = self._held, ""
        return sent + held

    def _take(self, text: str) -> str:
        self._made += len(text)
        self._held += text
        if found := self._finder.push(text):
            return self._stop_at(found)
        end = len(self._held) - self._finder.open_chars
        safe, self._held = self._held[:end], self._held[end:]
        return safe

    def _stop_at(self, found: Found) -> str:
        """The rest of the answer."""
        self.stopped = True
        self.matched = found.stop
        start = found.start - (self._made - len(self._held))
        rest, self._held = self._held[:start], ""
        return rest


@dataclass(frozen=True, slots=True)
class StopString:
    """A text at which answers end, and the table by which it is searched for."""

    text: str
    shorter: list[int]  # for each length, the next shorter beginning of `text` that also ends there

    @classmethod
    def of(cls, text: str) -> StopString:
        """Makes the table, in about a step a character."""
        stop = cls(text, [0, 0])
        for character in text[1:]:
            stop.shorter.append(stop.step(stop.shorter[-1], character))
        return stop

    def step(self, matched: int, character: str) -> int:
        """How much of it the end of a text matches, once this character is there too."""
        while matched and self.text[matched] != character:
            matched = self.shorter[matched]
        return matched + 1 if self.text[matched] == character else 0


def stop_strings(texts: Sequence[str]) -> tuple[StopString, ...]:
    """All of them, once each."""
    return tuple(StopString.of(text) for text in dict.fromkeys(texts) if text)


@dataclass(frozen=True, slots=True)
class Found:
    """A stop string and where in the text it starts."""

    start: int
    stop: str


class StopFinder:
    """Finds the first of several strings in a text that comes in pieces.

    For each string it keeps how many of its characters the end of the text matches (Knuth, Morris
    and Pratt), so a character costs the same however long the strings are.
    """

    def __init__(self, stops: Sequence[StopString]) -> None:
        self._searches = [_Search(stop) for stop in stops]
        self._seen = 0
        self._best: Found | None = None

    @property
    def open_chars(self) -> int:
        """How much of the end of the text may still turn out to be part of a stop string."""
        return self._seen - self._open_from()

    def push(self, text: str) -> Found | None:
        """The first stop string, once it is certain that none starts before it."""
        if not self._searches:
            self._seen += len(text)
            return None
        for character in text:
            self._seen += 1
            for search in self._searches:
                if search.push(character):
                    stop = search.stop.text
                    self._consider(Found(self._seen - len(stop), stop))
            if self._best and self._first_partial() >= self._best.start:
                return self._best
        return None

    def finish(self) -> Found | None:
        """The first stop string of the whole text: what was only begun does not count."""
        return self._best

    def _consider(self, found: Found) -> None:
        best = self._best
        if best is None or (found.start, len(found.stop)) < (best.start, len(best.stop)):
            self._best = found

    def _first_partial(self) -> int:
        return self._seen - max((search.matched for search in self._searches), default=0)

    def _open_from(self) -> int:
        start = self._first_partial()
        return min(start, self._best.start) if self._best else start


class _Search:
    """One string: how much of it the end of the text matches."""

    __slots__ = ("matched", "stop")

    def __init__(self, stop: StopString) -> None:
        self.stop = stop
        self.matched = 0

    def push(self, character: str) -> bool:
        """Whether the string is complete with this character."""
        self.matched = self.stop.step(self.matched, character)
        complete = self.matched == len(self.stop.text)
        if complete:
            # What follows can only start later than this match.
            self.matched = self.stop.shorter[self.matched]
        return complete
