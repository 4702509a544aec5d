"""Parsers of text that comes in pieces, written as if it were all there.

A parser is a generator over a `Source`: it asks the source for text up to a marker, for a literal,
for one JSON value, and yields `Part`s. Where the source has not enough text yet it yields `MORE`
and the generator sleeps until the next piece, so a parser never sees how the text was cut.

    def parse(source):                          "…<tool" | "_call>{…"      cut anywhere
        marker = yield from source.text_until("<tool_call>")
        ...

Nothing is lost: what a parser has consumed since `mark()` can be given back as text. Knows no
dialect.
"""

from __future__ import annotations

from collections.abc import Generator
from enum import Enum
from typing import TYPE_CHECKING, TypeVar

from penstock.text.parts import CallArguments, Part, ReasoningDelta, TextDelta, merged

if TYPE_CHECKING:
    from collections.abc import Callable


class More(Enum):
    """What a parser yields when it can go no further."""

    MORE = 0


MORE = More.MORE
Result = TypeVar("Result")
Parse = Generator[Part | More, None, Result]
Delta = type[TextDelta] | type[ReasoningDelta] | type[CallArguments]

_SPACE = " \t\r\n"


class Source:
    """The text so far; methods are used with `yield from`."""

    def __init__(self) -> None:
        self.ended = False
        self.reasoning = False  # what is being read now is the model's reasoning
        # Attempts at a call that may fail and be read again as text: each can cost a look at all
        # that follows, so there are not many.
        self.attempts = 16
        self._text = ""
        self._at = 0
        self._mark: int | None = None

    def feed(self, text: str) -> None:
        """More text; what was consumed and is not marked is forgotten."""
        start = self._at if self._mark is None else self._mark
        self._text = self._text[start:] + text
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
            held = 0 if self.ended else self._open(markers)
            # A marker that has only begun may start earlier, or be longer.
            if found is not None and (held == 0 or found[0] < len(self._text) - held):
                place, _, marker = found
                yield kind(self._text[self._at : place])
                self._at = place + len(marker)
                return marker
            if found is None:
                end = len(self._text) - held
                yield kind(self._text[self._at : end])
                self._at = end
            if self.ended:
                return None
            yield MORE

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
            if self.ended or not literal.startswith(here):
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
        while self._at >= len(self._text) and not self.ended:
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

    @property
    def reasoning(self) -> bool:
        """Whether the text that comes next is reasoning, as far as is known."""
        return self._source.reasoning

    def push(self, text: str) -> list[Part]:
        """What is certain after one more piece of text."""
        self._source.feed(text)
        return self._run()

    def finish(self) -> list[Part]:
        """What was held back; nothing may be pushed after it."""
        self._source.ended = True
        return self._run()

    def _run(self) -> list[Part]:
        parts: list[Part] = []
        for item in self._parts:
            if isinstance(item, More):
                break
            parts.append(item)
        return merged(parts)


def plain(source: Source) -> Parse[None]:
    """An answer that is nothing but text."""
    yield from source.rest(TextDelta)
