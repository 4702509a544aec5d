"""Arguments between tags, as a grammar: each required one in its order, the others if wanted.

A text value is anything up to its closing tag; any other is JSON by its own schema. What a schema
says of several arguments together cannot be said here, so it is refused where it must be kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.errors import BadRequest
from penstock.text.grammar import literal, one_of

if TYPE_CHECKING:
    from penstock.text.grammar import Grammar
    from penstock.text.tools.dialect import Tool

_PLAIN = frozenset(
    {"type", "properties", "required", "additionalProperties", "description", "title", "$schema"}
)
_ANNOTATIONS = frozenset({"type", "description", "title", "default", "examples"})


@dataclass(frozen=True, slots=True)
class TaggedForm:
    """What stands before (with the argument's name) and behind a value."""

    before: str
    close: str  # the first of these ends a text
    lead: str = ""  # stands before the closing tag, where a model is taught so

    @property
    def behind(self) -> str:
        """All that follows a value which says itself where it ends."""
        return f"{self.lead}{self.close}\n"


def tagged_call(grammar: Grammar, tool: Tool, form: TaggedForm, prefix: str) -> str:
    """The arguments of one tool, in the order of its schema."""
    schema = tool.parameters
    if tool.strict and (odd := sorted(schema.keys() - _PLAIN)):
        raise BadRequest(
            f"`tools`: the model writes the arguments of {tool.name!r} one by one, so the keyword "
            f"{odd[0]!r} beside its properties cannot be enforced; drop it or `strict`.",
            param="tools",
        )
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        properties = {}
    required = schema.get("required")
    bodies = []
    for number, (name, wanted) in enumerate(properties.items()):
        value = _value(grammar, tool, wanted, form, f"{prefix}_{number}")
        body = f"{literal(form.before.format(name))} {value}"
        is_required = isinstance(required, list) and name in required
        bodies.append(f"({body})" if is_required else f"({body})?")
    return " ".join(bodies)


def _value(grammar: Grammar, tool: Tool, wanted: Any, form: TaggedForm, name: str) -> str:
    """A value and what stands behind it."""
    wanted = wanted if isinstance(wanted, dict) else {}
    behind = literal(form.behind)
    if wanted.get("type") != "string":
        return f"{grammar.json(wanted, lenient=not tool.strict)} {behind}"
    odd = sorted(wanted.keys() - _ANNOTATIONS)
    if odd == ["enum"] and isinstance(wanted["enum"], list):
        return f"{one_of(literal(str(choice)) for choice in wanted['enum'])} {behind}"
    if odd and tool.strict:
        raise BadRequest(
            f"`tools`: the model writes text arguments of {tool.name!r} as they are, so the "
            f"keyword {odd[0]!r} of one of them cannot be enforced; drop it or `strict`.",
            param="tools",
        )
    text = grammar.rule(f"{name}[lazy]", f"/(?s:.*)/ {literal(form.close)}")
    return f"{text} {literal(chr(10))}"
