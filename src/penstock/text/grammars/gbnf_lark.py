"""GBNF in Lark's notation, as llguidance reads it.

    root ::= "[" item ("," item)* "]"               start: /\\[/ r1 (/,/ r1)* /\\]/
    item ::= [0-9] | root                           r1: (/[0-9]/ | start)

GBNF knows characters only; llguidance wants lexemes, which it reads as far as they go. So a grammar
without recursion becomes one regular expression, and of any other every character is a lexeme of
its own: both allow exactly the same texts as the original.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.text.grammars.gbnf import (
    Choice,
    Class,
    GbnfError,
    Node,
    Reference,
    Repeat,
    Sequence,
    Text,
    parse,
    references,
)
from penstock.text.grammars.gbnf_endings import endless_rule

if TYPE_CHECKING:
    from collections.abc import Iterable

_MAX_EXPRESSION = 8192  # characters; what is longer stays rules
_MAX_WRITTEN = 4 << 20  # characters, over all expressions
_META = frozenset("\\.+*?()|[]{}^$#&-~/")


def to_lark(text: str) -> str:
    """The same grammar for llguidance; raises `GbnfError`."""
    return _Writer(parse(text)).grammar()


@dataclass(slots=True)
class _Writer:
    """Rules as Lark."""

    rules: dict[str, Node]
    _regular: dict[str, str] = field(default_factory=dict)  # rules that are expressions
    _known: dict[int, str | None] = field(default_factory=dict)  # expressions, by node
    _names: dict[str, str] = field(default_factory=dict)  # what they are called in Lark
    _written: int = 0

    def grammar(self) -> str:
        """The whole."""
        endless = endless_rule(self.rules)
        if endless is not None:
            raise GbnfError(f"The rule {endless[:80]!r} of the grammar never ends.")
        self._find_regular(self._users())
        if (expression := self._regular.get("root")) is not None:
            return f"start: /{expression}/" if expression else 'start: ""'
        lines, pending = [], ["root"]
        self._names["root"] = "start"
        while pending:
            name = pending.pop()
            body = self.rules[name]
            for reference in references(body):
                if reference.name not in self._names:
                    self._names[reference.name] = f"r{len(self._names)}"
                    pending.append(reference.name)
            lines.append(f"{self._names[name]}: {self._lark(body)}")
        return "\n".join(lines)

    def _users(self) -> dict[str, list[str]]:
        """For every rule the others that refer to it."""
        users: dict[str, list[str]] = {name: [] for name in self.rules}
        for name, body in self.rules.items():
            for used in {reference.name for reference in references(body)} - {name}:
                users[used].append(name)
        return users

    def _find_regular(self, users: dict[str, list[str]]) -> None:
        """Every rule after all that it refers to; those that lead back to themselves stay over,
        except where that is only a way to write a repetition."""
        missing = dict.fromkeys(self.rules, 0)
        for others in users.values():
            for name in others:
                missing[name] += 1
        ready = deque(name for name, count in missing.items() if count == 0)
        while ready:
            name = ready.popleft()
            expression = self._rule(name)
            if expression is not None:
                self._regular[name] = expression
            for user in users[name]:
                missing[user] -= 1
                if missing[user] == 0:
                    ready.append(user)

    def _rule(self, name: str) -> str | None:
        body = self.rules[name]
        if all(reference.name != name for reference in references(body)):
            return self._expression(body)
        turns = self._turns(body, name)
        if turns is None:
            return None
        again, end = turns
        assert end is not None  # or the rule would never end
        return self._kept(f"(?:{again})*(?:{end})" if again else _group(end))

    def _turns(self, node: Node, name: str) -> tuple[str | None, str | None] | None:
        """The rule `name` as `again name | end`; None when it cannot be put so."""
        if all(reference.name != name for reference in references(node)):
            expression = self._expression(node)
            return None if expression is None else (None, expression)
        match node:
            case Reference():
                return "", None
            case Choice(options):
                both = [self._turns(option, name) for option in options]
                if None in both:
                    return None
                found = [each for each in both if each is not None]
                return _union(again for again, _ in found), _union(end for _, end in found)
            case Sequence(items):
                before = self._joined(items[:-1])
                last = self._turns(items[-1], name)
                if before is None or last is None:
                    return None
                again, end = (None if part is None else before + _group(part) for part in last)
                return again, end
            case Repeat(item, 0, 1) if (once := self._turns(item, name)) is not None:
                return once[0], _union(("", once[1]))
        return None

    def _expression(self, node: Node) -> str | None:
        """The node as a regular expression; None when it is none, or too long for one."""
        key = id(node)
        if key not in self._known:
            self._known[key] = self._kept(self._written_out(node))
        return self._known[key]

    def _kept(self, expression: str | None) -> str | None:
        if expression is None or len(expression) > _MAX_EXPRESSION:
            return None
        self._written += len(expression)
        if self._written > _MAX_WRITTEN:
            raise GbnfError(f"The grammar comes to over {_MAX_WRITTEN} characters.")
        return expression

    def _written_out(self, node: Node) -> str | None:
        """An expression that may stand beside others as it is."""
        match node:
            case Text(text):
                return "".join(map(_escaped, text))
            case Class():
                return _class(node)
            case Reference(name):
                return self._regular.get(name)
            case Sequence(items):
                return self._joined(items)
            case Choice(options):
                written = [self._expression(option) for option in options]
                return None if None in written else _group(_union(written) or "")
            case Repeat(item):
                once = self._expression(item)
                if not once or node.most == 0:
                    return None if once is None else ""
                return f"(?:{once}){node.suffix}"

    def _joined(self, items: tuple[Node, ...]) -> str | None:
        written = [self._expression(item) for item in items]
        known = [each for each in written if each is not None]
        return "".join(known) if len(known) == len(written) else None

    def _lark(self, node: Node) -> str:
        """The node as the body of a rule, character by character."""
        match node:
            case Text(text):
                return " ".join(f"/{_escaped(character)}/" for character in text) or '""'
            case Class():
                return f"/{_class(node)}/"
            case Reference(name):
                return self._names[name]
            case Sequence(items):
                return " ".join(map(self._lark, items)) or '""'
            case Choice(options):
                return "(" + " | ".join(map(self._lark, options)) + ")"
            case Repeat(item):
                return '""' if node.most == 0 else f"({self._lark(item)}){node.suffix}"


def _union(expressions: Iterable[str | None]) -> str | None:
    """One of several; None is nothing at all, and all of them may be."""
    known = [each for each in expressions if each is not None]
    return "|".join(dict.fromkeys(known)) if known else None


def _group(expression: str) -> str:
    return f"(?:{expression})" if "|" in expression else expression


def _escaped(character: str) -> str:
    if character in _META:
        return "\\" + character
    return character if " " <= character <= "~" else f"\\u{{{ord(character):X}}}"


def _class(node: Class) -> str:
    if not node.ranges:
        return "(?s:.)"
    parts = (
        _escaped(chr(low)) if low == high else f"{_escaped(chr(low))}-{_escaped(chr(high))}"
        for low, high in node.ranges
    )
    return f"[{'^' if node.negated else ''}{''.join(parts)}]"
