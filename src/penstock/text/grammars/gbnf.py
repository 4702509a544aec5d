"""llama.cpp's grammar notation, GBNF: rules of characters, read into a tree.

Literals, classes, groups, alternatives, repetitions, comments; a rule goes on over line ends until
the next one begins. Size and nesting are bounded. What becomes of the rules is `gbnf_lark`'s.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_RULES = 4096
MAX_NESTING = 32
_MAX_SUFFIXES = 4  # repetitions of a repetition
MAX_REPETITION = 2000
_LAST = 0x10FFFF

_RULE = re.compile(r"^[ \t]*[A-Za-z0-9_-]+\s*::=", re.MULTILINE)
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_HEAD = re.compile(r"([A-Za-z0-9_-]+)\s*::=")
_SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_SPACE_AND_LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
# Possessive: what has matched is not tried again, in a text of blanks or digits without an end.
_COUNTS = re.compile(r"\{\s*+([0-9]*+)\s*+(,?+)\s*+([0-9]*+)\s*+\}")
_HEX = {"x": 2, "u": 4, "U": 8}
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}


class GbnfError(ValueError):
    """A grammar that cannot be read; the message says where and why."""


@dataclass(frozen=True, slots=True, eq=False)
class Text:
    """A literal."""

    text: str


@dataclass(frozen=True, slots=True, eq=False)
class Class:
    """One of some characters; negated and without ranges: any."""

    negated: bool
    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """A rule by its name, and where it is named."""

    name: str
    at: int


@dataclass(frozen=True, slots=True, eq=False)
class Sequence:
    """One after the other."""

    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """One of several."""

    options: tuple[Node, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Repeat:
    """Something several times."""

    item: Node
    least: int
    most: int | None

    @property
    def suffix(self) -> str:
        """How both notations write it."""
        short = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((self.least, self.most))
        if short is not None:
            return short
        if self.least == self.most:
            return f"{{{self.least}}}"
        return f"{{{self.least},{'' if self.most is None else self.most}}}"


Node = Text | Class | Reference | Sequence | Choice | Repeat


def is_gbnf(text: str) -> bool:
    """Whether this is written in GBNF rather than Lark: rules are defined by `::=`."""
    return _RULE.search(text) is not None


def parse(text: str) -> dict[str, Node]:
    """Its rules by name; `root` is among them, and so is all that they refer to."""
    return _Parser(text).rules()


class _Parser:
    """The text as rules, by name."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0

    def rules(self) -> dict[str, Node]:
        rules: dict[str, Node] = {}
        found: list[Reference] = []
        self._skip(_SPACE_AND_LINES)
        while self._at < len(self._text):
            head = _HEAD.match(self._text, self._at)
            if head is None:
                self._fail("a rule is expected: `name ::= ...`")
            if head[1] in rules:
                self._fail(f"the rule {head[1][:80]!r} is defined twice")
            if len(rules) == MAX_RULES:
                self._fail(f"there are over {MAX_RULES} rules")
            self._at = head.end()
            rules[head[1]] = body = self._choice()
            found += references(body)
            if self._at < len(self._text) and not _HEAD.match(self._text, self._at):
                self._fail(f"{self._text[self._at]!r} is not expected here")
        if "root" not in rules:
            raise GbnfError("The grammar has no rule named root.")
        for reference in found:
            if reference.name not in rules:
                self._at = reference.at
                self._fail(f"the rule {reference.name[:80]!r} is defined nowhere")
        return rules

    def _fail(self, problem: str) -> NoReturn:
        line = self._text.count("\n", 0, self._at) + 1
        column = self._at - (self._text.rfind("\n", 0, self._at) + 1) + 1
        raise GbnfError(f"The grammar cannot be read at line {line}, column {column}: {problem}.")

    def _skip(self, space: re.Pattern[str]) -> None:
        match = space.match(self._text, self._at)
        assert match is not None
        self._at = match.end()

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _choice(self) -> Node:
        options = [self._sequence()]
        while self._peek() == "|":
            self._at += 1
            options.append(self._sequence())
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _sequence(self) -> Node:
        items: list[Node] = []
        self._skip(_SPACE_AND_LINES)
        while (item := self._item()) is not None:
            items.append(self._repeated(item))
            # A line end goes on unless the next line begins another rule.
            self._skip(_SPACE_AND_LINES)
        return items[0] if len(items) == 1 else Sequence(tuple(items))

    def _item(self) -> Node | None:
        character, start = self._peek(), self._at
        match character:
            case '"':
                return Text("".join(self._characters('"')))
            case "[":
                return self._class()
            case ".":
                self._at += 1
                return Class(True, ())
            case "(":
                return self._group()
            case "<" | "!":
                self._fail("tokens (`<...>`) are not supported; write their text")
        if character == "" or _HEAD.match(self._text, start):
            return None
        name = _NAME.match(self._text, start)
        if name is None:
            return None
        self._at = name.end()
        return Reference(name[0], start)

    def _group(self) -> Node:
        start = self._at
        self._depth += 1
        if self._depth > MAX_NESTING:
            self._fail(f"groups are nested more than {MAX_NESTING} deep")
        self._at += 1
        body = self._choice()
        if self._peek() != ")":
            self._at = start
            self._fail("this bracket is never closed")
        self._at += 1
        self._depth -= 1
        return body

    def _repeated(self, item: Node) -> Node:
        count = 0
        while True:
            self._skip(_SPACE)
            character = self._peek()
            bounds = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(character)
            if bounds is not None:
                self._at += 1
            elif character == "{":
                bounds = self._counts()
            else:
                return item
            count += 1
            if count > _MAX_SUFFIXES:
                self._fail(f"more than {_MAX_SUFFIXES} repetitions of the same thing")
            item = Repeat(item, *bounds)

    def _counts(self) -> tuple[int, int | None]:
        match = _COUNTS.match(self._text, self._at)
        if match is None or not (match[1] or match[3]):
            self._fail("a repetition is {m}, {m,}, {m,n} or {,n}")
        if (
            max(len(match[1]), len(match[3])) > 9
            or max(int(match[1] or 0), int(match[3] or 0)) > MAX_REPETITION
        ):
            self._fail(f"a repetition of more than {MAX_REPETITION}")
        least = int(match[1] or 0)
        most = int(match[3]) if match[3] else (None if match[2] else least)
        if most is not None and most < least:
            self._fail(f"a repetition of at least {least} and at most {most}")
        self._at = match.end()
        return least, most

    def _characters(self, close: str) -> Iterator[str]:
        """Those of a literal or a class, up to the closing mark, which is consumed."""
        start = self._at
        self._at += 1
        while (character := self._peek()) != close:
            if character in ("", "\n"):
                self._at = start
                self._fail(f"{self._text[start]} is never closed by {close}")
            yield self._character()
        self._at += 1

    def _character(self) -> str:
        character = self._peek()
        if character != "\\":
            self._at += 1
            return character
        code = self._text[self._at + 1 : self._at + 2]
        if size := _HEX.get(code):
            digits = self._text[self._at + 2 : self._at + 2 + size]
            if len(digits) < size or not re.fullmatch("[0-9A-Fa-f]+", digits):
                self._fail(f"\\{code} needs {size} hexadecimal digits")
            value = int(digits, 16)
            if value > _LAST or 0xD800 <= value <= 0xDFFF:
                self._fail(f"\\{code}{digits} is no character")
            self._at += 2 + size
            return chr(value)
        if code == "" or (code.isalnum() and code not in _ESCAPES):
            self._fail(f"\\{code} is no escape")
        self._at += 2
        return _ESCAPES.get(code, code)

    def _class(self) -> Node:
        start = self._at
        negated = self._text.startswith("[^", start)
        self._at += negated
        ranges: list[tuple[int, int]] = []
        characters = self._characters("]")
        for character in characters:
            low = high = ord(character)
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                high = ord(next(characters))
                if high < low:
                    self._fail("a range whose end comes before its beginning")
            ranges.append((low, high))
        if not ranges and not negated:
            self._at = start
            self._fail("a class without characters")
        return Class(negated, tuple(ranges))


def references(node: Node) -> list[Reference]:
    """All in it, without recursion over long lists."""
    found, pending = [], [node]
    while pending:
        each = pending.pop()
        match each:
            case Reference():
                found.append(each)
            case Sequence(items) | Choice(items):
                pending += items
            case Repeat(item):
                pending.append(item)
    return found
