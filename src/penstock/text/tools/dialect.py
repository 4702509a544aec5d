"""What every dialect of tool calls is, and the tools themselves."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from penstock.text.grammars.grammar import Grammar, literal
from penstock.text.parts import CallArguments, CallBegin, CallEnd, TextDelta

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.text.parsing import Parse, Source

# A schema of these keywords says all that it has to say of its properties' names in `properties`.
_NAMING = frozenset(
    {"type", "properties", "required", "title", "description", "$defs", "definitions", "$schema"}
)
_LONGEST_TEXT = 10_000  # characters; a longer one has no bound
MAX_CALLS = 16  # of one answer that must call: a small model does not end by itself


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    definition: dict[str, Any]  # as templates are given it
    parameters: dict[str, Any] = field(default_factory=dict)  # a JSON schema
    strict: bool = False

    def arguments(self, grammar: Grammar) -> str:
        """A reference to the arguments in a grammar: to the letter only if the tool is strict."""
        return grammar.json(self.schema, lenient=not self.strict)

    def alone(self) -> str:
        """A grammar of its arguments and nothing else."""
        grammar = Grammar()
        grammar.start = self.arguments(grammar)
        return grammar.text()

    def loosened(self) -> Tool:
        """The same tool with any arguments: its schema cannot be kept and need not be."""
        return self if self.strict else replace(self, parameters={})

    @property
    def schema(self) -> dict[str, Any]:
        """The schema of the arguments: always an object, closed where it names its properties."""
        schema = {"type": "object", **self.parameters}
        names, required = schema.get("properties"), schema.get("required", [])
        if schema.keys() <= _NAMING and isinstance(names, dict) and isinstance(required, list):
            schema["additionalProperties"] = not names.keys() >= set(map(str, required))
        return schema

    def property_type(self, name: str) -> object:
        """The JSON type of one argument, as far as the schema says it plainly."""
        properties = self.parameters.get("properties")
        known = properties.get(name) if isinstance(properties, dict) else None
        return known.get("type") if isinstance(known, dict) else None


@dataclass(frozen=True, slots=True)
class Marks:
    """How the marks of a dialect stand in a grammar: as special tokens, where they are such."""

    special: Callable[[str], int | None]  # the id of a special token

    def __call__(self, *texts: str) -> str:
        """Marks and other text, one after the other."""
        return " ".join(self._one(text) for text in texts if text)

    def is_special(self, text: str) -> bool:
        """Whether ordinary text cannot contain this mark."""
        return self.special(text) is not None

    def _one(self, text: str) -> str:
        number = self.special(text)
        return literal(text) if number is None else f"<[{number}]>"


@dataclass(frozen=True, slots=True)
class CallRule:
    """Calls as a grammar: `trigger` opens them, `after` is the rule of all that follows it.

    Without a trigger, calls are told from text by their first character only.
    """

    trigger: str
    after: str


class Dialect(Protocol):
    """One way of writing calls."""

    @property
    def name(self) -> str:
        """What a setting calls it."""

    @property
    def visible(self) -> tuple[str, ...]:
        """Its marks that may be special tokens."""

    def taught_by(self, template: str) -> bool:
        """Whether a chat template teaches this dialect."""

    def parse(self, source: Source, tools: Sequence[Tool]) -> Parse[None]:
        """Text and calls, to the end of the answer."""

    def calls(
        self, grammar: Grammar, tools: Sequence[Tool], most: int, marks: Marks, template: str
    ) -> CallRule:
        """One to `most` calls of these tools."""


def known(tools: Sequence[Tool], name: str) -> Tool | None:
    """The tool of that name."""
    return next((tool for tool in tools if tool.name == name), None)


def json_call(source: Source, name: str, call_id: str | None = None) -> Parse[bool]:
    """A call whose arguments stand before us as JSON; False, still marked, when they do not."""
    if (yield from source.peek()) != "{":
        return False
    source.unmark()
    yield CallBegin(name, call_id)
    yield from source.json_value(CallArguments)
    yield CallEnd()
    return True


def closing(source: Source, mark: str, before: str = "") -> Parse[None]:
    """The mark behind a call, perhaps with another before it; without it, what came is text."""
    source.mark()
    yield from source.space()
    if before and (yield from source.accept(before)):
        yield from source.space()
    if (yield from source.accept(mark)):
        source.unmark()
    else:
        yield TextDelta(source.since_mark())


def section(
    source: Source, marks: tuple[str, str, str], call: Callable[[Source], Parse[bool]]
) -> Parse[None]:
    """Text, and calls in an envelope: `marks` open it, begin a call and close it.

    `call` reads one behind its mark, or says that it is none. An envelope without calls is text,
    and so is whatever breaks one off.
    """
    opening, begin, closing = marks
    while (yield from source.until(TextDelta, opening)) is not None:
        opened = opening
        while True:
            source.mark()
            yield from source.space()
            if not (yield from source.accept(begin)) or not (yield from call(source)):
                break
            opened = ""
        if not opened and (yield from source.accept(closing)):
            source.unmark()
        else:
            yield TextDelta(opened + source.since_mark())


def properties(
    grammar: Grammar, schema: dict[str, Any], body_of: Callable[[str, Any], str], comma: str
) -> str:
    """The properties of an object, each as `body_of` its name and schema writes it: required ones
    in their order, then the others if wanted."""
    wanted = schema.get("properties")
    wanted = wanted if isinstance(wanted, dict) else {}
    required = schema.get("required")
    required = required if isinstance(required, list) else []
    names = {name for name in required if isinstance(name, str)}
    bodies = {name: body_of(name, each) for name, each in wanted.items()}
    needed = [body for name, body in bodies.items() if name in names]
    optional = [body for name, body in bodies.items() if name not in names]
    if needed:
        return f" {comma} ".join(needed) + "".join(f" ({comma} {body})?" for body in optional)
    return _any_in_order(grammar, optional, comma)


def _any_in_order(grammar: Grammar, bodies: list[str], comma: str) -> str:
    """Some of these, or none. Any of them may be the first, so each is a rule, and so is what may
    follow it: written out, the text would grow with the square of their number."""
    starts: list[str] = []
    rest = ""
    for body in reversed(bodies):
        part = grammar.part(body)
        starts.append(f"{part} {rest}")
        rest = grammar.part(f"({comma} {part})? {rest}")
    return f"({' | '.join(reversed(starts))})?" if starts else ""


def text_lengths(schema: dict[str, Any]) -> dict[str, int]:
    """The least and the most characters of a text, as far as a grammar can keep them."""
    given = ((key, schema.get(key)) for key in ("minLength", "maxLength"))
    return {key: n for key, n in given if isinstance(n, int) and 0 <= n <= _LONGEST_TEXT}


def text_rule(schema: dict[str, Any]) -> str:
    """Any text of the length that the schema gives it, as a terminal."""
    lengths = text_lengths(schema)
    return f"/(?s:.{{{lengths.get('minLength', 0)},{lengths.get('maxLength', '')}}})/"


def repeated(rule: str, most: int, separator: str = "") -> str:
    """The rule once, or up to `most` times with the separator between."""
    if most == 1:
        return rule
    return f"{rule} ({separator} {rule}){{0,{most - 1}}}"
