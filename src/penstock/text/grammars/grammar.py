"""What an answer must look like, as a grammar: built here, enforced by the worker's sampler.

A `Grammar` is a Lark rule and the named grammars it refers to, in the form that llguidance reads.
It is only written here; it is compiled, and refused, in processes of its own (`penstock.grammars`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from penstock.errors import BadRequest
from penstock.text.grammars.gbnf import GbnfError, is_gbnf
from penstock.text.grammars.gbnf_lark import to_lark
from penstock.text.grammars.json_form import Style, styled

if TYPE_CHECKING:
    from collections.abc import Iterable

Kind = Literal["json_object", "json_schema", "regex", "choice", "grammar"]

MAX_FORMAT_BYTES = 256 << 10
# The library follows at most 2,000 items at once; each choice is one at first.
MAX_CHOICES = 1024
# Of all rules and schemas; what is larger would have more symbols than LIMITS allows, and take a
# second to say so.
MAX_CHARACTERS = 4 << 20

# A lexer state takes 1 to 2 kB, so one grammar stays below 32 MiB however long the answer is. The
# rest bounds time: 20 ms to build and some 15 ms for one mask, at the library's own figures.
LIMITS: dict[str, int] = {
    "max_lexer_states": 16_384,
    "max_grammar_size": 100_000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_items_in_row": 2_000,
}

# Every token that keeps the answer within its form is allowed, however the form's own text would be
# tokenised: the model chooses.
_OPTIONS = '%llguidance {"no_forcing": true}'


@dataclass(frozen=True, slots=True)
class Format:
    """A form that the client asks for; `param` is the field a refusal points at."""

    kind: Kind
    value: Any = None  # a schema, a pattern, a list of choices, or a grammar in Lark or GBNF
    param: str = "response_format"
    size: int = 0  # of the value, in bytes as it was sent


@dataclass(slots=True)
class Grammar:
    """A Lark grammar under construction. `start` is the body of its first rule."""

    start: str = ""
    rules: list[str] = field(default_factory=list)
    named: dict[str, dict[str, Any]] = field(default_factory=dict)
    style: Style = "compact"  # of all JSON in it
    _added: dict[bytes, str] = field(default_factory=dict)  # names, by a digest of the content
    _characters: int = 0  # of what is named

    def json(self, schema: dict[str, Any], *, lenient: bool = False) -> str:
        """A reference to a JSON value that the schema allows; `lenient` as far as it can be."""
        return self._add({"json_schema": styled(schema, self.style, lenient=lenient)})

    def lark(self, text: str) -> str:
        """A reference to a Lark grammar of the client's own."""
        return self._add({"lark_grammar": text})

    def rule(self, name: str, body: str) -> str:
        """A further rule; its name, for use in others."""
        self.rules.append(f"{name}: {body}")
        return name.partition("[")[0]

    def part(self, body: str) -> str:
        """A further rule with a name of the grammar's own, for what others refer to repeatedly."""
        return self.rule(f"part{len(self.rules)}", body)

    def text(self, param: str = "tools") -> str:
        """The whole, for the wire; `param` is the field that a refusal points at."""
        rules = [_OPTIONS, f"start: {self.start}", *self.rules]
        size = sum(map(len, rules)) + self._characters
        if size > MAX_CHARACTERS:
            raise BadRequest(
                f"`{param}` comes to a grammar of {size} characters; at most "
                f"{MAX_CHARACTERS} are allowed.",
                param=param,
            )
        grammars: list[dict[str, Any]] = [{"lark_grammar": "\n".join(rules)}]
        grammars += [{"name": name, **content} for name, content in self.named.items()]
        return json.dumps({"grammars": grammars}, ensure_ascii=False)

    def _add(self, content: dict[str, Any]) -> str:
        written = json.dumps(content)
        digest = sha256(written.encode()).digest()
        name = self._added.get(digest)
        if name is None:  # what is the same stands there once
            name = self._added[digest] = f"g{len(self.named)}"
            self._characters += len(written)
            if self._characters <= MAX_CHARACTERS:  # otherwise it is refused in the end
                self.named[name] = content
        return f"@{name}"


class GrammarSource:
    """A grammar's text and its key. Whoever holds it can have it compiled again."""

    __slots__ = ("__weakref__", "key", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.key = sha256(text.encode()).digest()


def literal(text: str) -> str:
    """A Lark string; "" is nothing at all."""
    return json.dumps(text, ensure_ascii=False) if text else ""


def one_of(bodies: Iterable[str]) -> str:
    """One of several; bodies are rules or literals."""
    return "(" + " | ".join(bodies) + ")"


def body_of(grammar: Grammar, wanted: Format) -> str:
    """What stands in a rule for the form that was asked for."""
    match wanted.kind:
        case "json_object":
            return grammar.json({"type": "object"})
        case "json_schema":
            return grammar.json(_schema(wanted))
        case "regex":
            return grammar.rule("pattern", f"/{_slashed(_string(wanted))}/")
        case "choice":
            return one_of(map(literal, _choices(wanted)))
        case "grammar":
            return grammar.lark(_lark(wanted))


def grammar_of(wanted: Format, style: Style = "compact") -> str:
    """The grammar of an answer that is nothing but this form."""
    grammar = Grammar(style=style)
    grammar.start = body_of(grammar, wanted)
    return grammar.text(wanted.param)


def _schema(wanted: Format) -> dict[str, Any]:
    schema = wanted.value
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    if not isinstance(schema, dict):
        raise BadRequest(f"`{wanted.param}` needs a JSON schema, an object.", param=wanted.param)
    if "x-guidance" in schema:
        raise BadRequest(
            f"`{wanted.param}`: the keyword x-guidance is the server's own.", param=wanted.param
        )
    return schema


def _string(wanted: Format) -> str:
    if not isinstance(wanted.value, str) or not wanted.value:
        raise BadRequest(f"`{wanted.param}` is a text, and not empty.", param=wanted.param)
    return wanted.value


def _lark(wanted: Format) -> str:
    """The grammar in Lark's notation; in llama.cpp's it is translated."""
    text = _string(wanted)
    if not is_gbnf(text):
        return text
    try:
        return to_lark(text)
    except GbnfError as error:
        raise BadRequest(f"`{wanted.param}`: {error}", param=wanted.param) from None


def _choices(wanted: Format) -> list[str]:
    try:
        choices = msgspec.convert(wanted.value, list[str])
    except msgspec.ValidationError:
        choices = []
    if not choices or not all(choices) or len(choices) > MAX_CHOICES:
        raise BadRequest(
            f"`{wanted.param}` is a list of 1 to {MAX_CHOICES} texts, none of them empty.",
            param=wanted.param,
        )
    return choices


def _slashed(pattern: str) -> str:
    """The pattern so that it can stand between slashes."""
    result, escaped = [], False
    for character in pattern:
        if character == "/" and not escaped:
            result.append("\\/")
        elif character == "\n":
            result.append("\\n")
        else:
            result.append(character)
        escaped = character == "\\" and not escaped
    return "".join(result)
