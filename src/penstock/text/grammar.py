"""What an answer must look like, as a grammar: built here, enforced by the worker's sampler.

A `Grammar` is a Lark rule and the named grammars it refers to, in the form that llguidance reads.
It is checked at the front door with the limits the worker compiles it under: a schema that cannot
be expressed, or not at a bounded cost, is refused with the library's own reason. Nothing of what
was asked for is left out silently.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from penstock.errors import BadRequest

if TYPE_CHECKING:
    from collections.abc import Iterable

    from llguidance import LLParserLimits

Kind = Literal["json_object", "json_schema", "regex", "choice", "grammar"]

MAX_FORMAT_BYTES = 256 << 10
MAX_CHOICES = 4096
# Of rules; what is larger would have more symbols than LIMITS allows, and take a second to say so.
MAX_RULE_CHARACTERS = 4 << 20
_CHECKED = 512  # answers kept of the latest checks

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

# JSON may have white space between its parts, but not pages of it: a small model that has begun
# to write blanks does not end by itself.
JSON_STYLE = {"whitespace_pattern": r"[ \n\r\t]{1,24}"}


# Every token that keeps the answer within its form is allowed, however the form's own text would be
# tokenised: the model chooses.
_OPTIONS = '%llguidance {"no_forcing": true}'


def limits() -> LLParserLimits:
    """What a grammar may cost."""
    from llguidance import LLParserLimits

    return LLParserLimits(verbose_errors=False, **LIMITS)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Format:
    """A form that the client asks for; `param` is the field a refusal points at."""

    kind: Kind
    value: Any = None  # a schema, a pattern, a list of choices or a Lark grammar
    param: str = "response_format"


@dataclass(slots=True)
class Grammar:
    """A Lark grammar under construction. `start` is the body of its first rule."""

    start: str = ""
    rules: list[str] = field(default_factory=list)
    named: dict[str, dict[str, Any]] = field(default_factory=dict)

    def json(self, schema: dict[str, Any], *, lenient: bool = False) -> str:
        """A reference to a JSON value that the schema allows; `lenient` as far as it can be."""
        options = {**JSON_STYLE, "lenient": True} if lenient else JSON_STYLE
        return self._add({"json_schema": {**schema, "x-guidance": options}})

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
        size = sum(map(len, rules))
        if size > MAX_RULE_CHARACTERS:
            raise BadRequest(
                f"`{param}` comes to a grammar of {size} characters; at most "
                f"{MAX_RULE_CHARACTERS} are allowed.",
                param=param,
            )
        grammars: list[dict[str, Any]] = [{"lark_grammar": "\n".join(rules)}]
        grammars += [{"name": name, **content} for name, content in self.named.items()]
        return json.dumps({"grammars": grammars}, ensure_ascii=False)

    def _add(self, content: dict[str, Any]) -> str:
        name = f"g{len(self.named)}"
        self.named[name] = content
        return f"@{name}"


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
            return grammar.lark(_string(wanted))


def checked_grammar(wanted: Format) -> str:
    """The grammar of an answer that is nothing but this form; blocking."""
    grammar = Grammar()
    grammar.start = body_of(grammar, wanted)
    check(text := grammar.text(wanted.param), wanted.param)
    return text


def check(text: str, param: str) -> None:
    """Refuse a grammar that the worker could not enforce; blocking, some milliseconds."""
    if problem := problem_of(text):
        raise BadRequest(f"`{param}` cannot be enforced: {problem}", param=param)


def problem_of(text: str) -> str | None:
    """Why a grammar cannot be enforced; None if it can."""
    return _problem(sha256(text.encode()).digest(), _Held(text))


class _Held:
    """A grammar as an argument that is not part of the cache's key."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Held)

    def __hash__(self) -> int:
        return 0


@lru_cache(_CHECKED)
def _problem(digest: bytes, grammar: _Held) -> str | None:
    try:
        # Not at the top: there is no wheel of it for every machine, and without it all else works.
        from llguidance import LLMatcher
    except ImportError:
        return "the package llguidance is not installed on this server."
    text, grammar.text = grammar.text, ""  # the cache keeps its arguments
    failed, messages = LLMatcher.validate_grammar_with_warnings(text, limits=limits())
    if not failed:
        return None
    reason = messages[0].strip().rstrip(".")
    return reason[:600] + "."


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
