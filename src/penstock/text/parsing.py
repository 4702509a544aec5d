"""Parsers of text that comes in pieces, written as if it were all there.

A parser is a generator over a `Source`: it asks the source for text up to a marker, for a literal,
for one JSON value, and yields `Part`s. Where the source has not enough text yet it yields `MORE`
and the generator sleeps until the next piece, so a parser never sees how the text was cut.

    def parse(source):                          "…<tool" | "_call>{…"      cut anywhere
        marker = yield from source.text_until("<tool_call>")
        ...

Nothing is lost: what a parser has consumed since `mark()` can be given back as text. Only where an
answer was cut short is a mark that has just begun no text: whoever wants more then gets `CutShort`,
so that a parser stops where it is, unless it knows better. Knows no dialect.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Generator
from contextlib import suppress
from enum import Enum
from typing import TYPE_CHECKING, TypeVar

from penstock.text.parts import CallArguments, Part, ReasoningDelta, TextDelta, merged

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class More(Enum):
    """What a parser yields when it can go no further."""

    MORE = 0


class CutShort(Exception):  # noqa: N818 - nothing is wrong with the parser
    """The answer was cut off where more had to come; `taken` is what `taken_until` had by then."""

    taken = ""


MORE = More.MORE
Result = TypeVar("Result")
Parse = Generator[Part | More, None, Result]
Delta = type[TextDelta] | type[ReasoningDelta] | type[CallArguments]

_SPACE = " \t\r\n"


class Source:
    """The text so far; methods are used with `yield from`."""

    def __init__(self) -> None:
        self.ended = False
        self.cut = False  # when it has ended: not by itself
        # Where in the whole text reasoning began and ended, in turn.
        self.reasoning: list[int] = []
        # Attempts at a call that may fail and be read again as text: each can cost a look at all
        # that follows, so there are not many.
        self.attempts = 16
        self._text = ""
        self._dropped = 0  # characters of the whole text before `_text`
        self._at = 0
        self._mark: int | None = None

    def begin_reasoning(self) -> None:
        """What follows is the model's reasoning."""
        self.reasoning.append(self._dropped + self._at)

    def end_reasoning(self) -> None:
        """What follows is no reasoning any more."""
        self.reasoning.append(self._dropped + self._at)

    def feed(self, text: str) -> None:
        """More text; what was consumed and is not marked is forgotten."""
        start = self._at if self._mark is None else self._mark
        self._text = self._text[start:] + text
        self._dropped += start
        self._at -= start
        if self._mark is not None:
            self._mark = 0

    def mark(self) -> None:
        """Keep what is consumed from here on, for `since_mark`."""
        self._mark = self._at

    def since_mark(self) -> str:
        """What was consumed since the mark, which is removed."""
        assert self._mark is not None
        text, self._mark = self._text[self._mark : self._at], None
        return text

    @property
    def marked(self) -> bool:
        """Whether there is a mark."""
        return self._mark is not None

    def unmark(self) -> None:
        """What was marked is understood."""
        self._mark = None

    def rewind(self) -> None:
        """Go back to the mark, and remove it."""
        assert self._mark is not None
        self._at, self._mark = self._mark, None

    def until(self, kind: Delta, *markers: str) -> Parse[str | None]:
        """Yields text as deltas up to the first of the markers, which is consumed and returned.

        Of markers that begin at the same place the longest is taken. None: the text ended.
        """
        while True:
            found = min(
                ((place, -len(m), m) for m in markers if (place := self._find(m)) >= 0),
                default=None,
            )
            held = 0 if self.ended and not self.cut else self._open(markers)
            # A marker that has only begun may start earlier, or be longer.
            certain = held == 0 or self.ended or (found and found[0] < len(self._text) - held)
            if found is not None and certain:
                place, _, marker = found
                yield kind(self._text[self._at : place])
                self._at = place + len(marker)
                return marker
            if found is None:
                end = len(self._text) - held
                yield kind(self._text[self._at : end])
                self._at = end
            if self.ended:
                self._refuse_if_cut()
                return None
            yield MORE

    def _refuse_if_cut(self) -> None:
        if self.cut:
            raise CutShort

    def _find(self, marker: str) -> int:
        return self._text.find(marker, self._at)

    def _open(self, markers: tuple[str, ...]) -> int:
        """How much of the end of the text may be the beginning of a longer marker."""
        left = len(self._text) - self._at
        for size in range(min(left, max(map(len, markers)) - 1), 0, -1):
            end = self._text[-size:]
            if any(len(m) > size and m.startswith(end) for m in markers):
                return size
        return 0

    def taken_until(self, *markers: str) -> Parse[tuple[str, str | None]]:
        """The text up to the first of the markers, all at once, and which one it was."""
        pieces: list[str] = []
        reading = self.until(TextDelta, *markers)
        while True:
            try:
                item = next(reading)
            except StopIteration as stop:
                return "".join(pieces), stop.value
            except CutShort as short:
                short.taken = "".join(pieces)
                raise
            if item is MORE:
                yield MORE
            else:
                assert isinstance(item, TextDelta)
                pieces.append(item.text)

    def accept(self, literal: str) -> Parse[bool]:
        """Consume `literal` if it comes next."""
        while True:
            here = self._text[self._at : self._at + len(literal)]
            if here == literal:
                self._at += len(literal)
                return True
            if not literal.startswith(here):
                return False
            if self.ended:
                self._refuse_if_cut()
                return False
            yield MORE

    def accept_any(self, *literals: str) -> Parse[str | None]:
        """Consume the first of the literals that comes next; a longer one before its beginning."""
        for literal in literals:
            if (yield from self.accept(literal)):
                return literal
        return None

    def peek(self) -> Parse[str]:
        """The next character, "" at the end."""
        while self._at >= len(self._text):
            if self.ended:
                self._refuse_if_cut()
                return ""
            yield MORE
        return self._text[self._at : self._at + 1]

    def space(self) -> Parse[None]:
        """Consume white space."""
        while (character := (yield from self.peek())) and character in _SPACE:
            self._at += 1

    def word(self, is_part: Callable[[str], bool]) -> Parse[str]:
        """Consume characters as long as they are part of a word."""
        word = []
        while (character := (yield from self.peek())) and is_part(character):
            self._at += 1
            word.append(character)
        return "".join(word)

    def json_string(self) -> Parse[str | None]:
        """Consume one JSON string and return it as it is written; None if there is none."""
        if (yield from self.peek()) != '"':
            return None
        self._at += 1
        escaped = False
        consumed = ['"']
        while character := (yield from self.peek()):
            self._at += 1
            consumed.append(character)
            if escaped:
                escaped = False
            elif character == "\\":
                escaped = True
            elif character == '"':
                return "".join(consumed)
        return None

    def json_value(self, kind: Delta) -> Parse[bool]:
        """Yields one JSON value as deltas, as it is written; whether it was complete.

        Only brackets and strings are looked at: what a model writes between them is its own.
        """
        depth, in_string, escaped = 0, False, False
        while True:
            for place in range(self._at, len(self._text)):
                character = self._text[place]
                if in_string:
                    in_string = escaped or character != '"'
                    escaped = character == "\\" and not escaped
                    ends = not in_string and depth == 0
                elif character == '"':
                    in_string, ends = True, False
                elif character in "[{":
                    depth, ends = depth + 1, False
                elif character in "]}" and depth:
                    depth -= 1
                    ends = depth == 0
                elif depth == 0 and character in ",]}" + _SPACE:  # after a number or a name
                    yield kind(self._text[self._at : place])
                    self._at = place
                    return True
                else:
                    ends = False
                if ends:
                    yield kind(self._text[self._at : place + 1])
                    self._at = place + 1
                    return True
            yield kind(self._text[self._at :])
            self._at = len(self._text)
            if self.ended:
                self._refuse_if_cut()
                return depth == 0 and not in_string
            yield MORE

    def rest(self, kind: Delta) -> Parse[None]:
        """Yields everything that follows."""
        while True:
            yield kind(self._text[self._at :])
            self._at = len(self._text)
            if self.ended:
                return
            yield MORE


class Parsing:
    """A parser at work on one answer."""

    def __init__(self, parser: Callable[[Source], Parse[None]]) -> None:
        self._source = Source()
        self._parts = parser(self._source)

    def reasoning_tokens(self, offsets: Sequence[int]) -> int:
        """How many tokens begin in reasoning, its marks included, of those that begin at these
        characters of the text."""
        borders = [bisect_left(offsets, place) for place in self._source.reasoning]
        if len(borders) % 2:
            borders.append(len(offsets))
        return sum(borders[1::2]) - sum(borders[::2])

    def push(self, text: str) -> list[Part]:
        """What is certain after one more piece of text."""
        self._source.feed(text)
        return self._run()

    def finish(self, *, cut: bool = False) -> list[Part]:
        """What was held back; nothing may be pushed after it. `cut`: the answer was cut short, so
        a mark that has only begun is left out and a call that is not whole stays open."""
        self._source.ended, self._source.cut = True, cut
        return self._run()

    def _run(self) -> list[Part]:
        parts: list[Part] = []
        with suppress(CutShort):
            for item in self._parts:
                if isinstance(item, More):
                    break
                parts.append(item)
        return merged(parts)


def plain(source: Source) -> Parse[None]:
    """An answer that is nothing but text."""
    yield from source.rest(TextDelta)
