"""Grammars at the front door: what is refused, and that its reason names the keyword."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.errors import BadRequest
from penstock.testing.grammar_hosts import checked_grammar
from penstock.text.grammars.grammar import MAX_CHARACTERS, Format, Grammar


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("json_object", None),
        ("json_schema", {"type": "object", "properties": {"a": {"type": "integer"}}}),
        ("json_schema", {"$defs": {"n": {"type": ["null", "object"]}}, "$ref": "#/$defs/n"}),
        ("json_schema", True),
        ("regex", r"[a-z]+/\d{2,4}\/"),
        ("choice", ["yes", 'a "quoted" no', "line\nbreak"]),
        ("grammar", 'start: "a" NUMBER\nNUMBER: /[0-9]+/'),
    ],
)
def test_forms_that_can_be_kept(kind: Any, value: Any) -> None:
    assert checked_grammar(Format(kind, value))


@pytest.mark.parametrize(
    ("kind", "value", "words"),
    [
        ("json_schema", {"type": "array", "uniqueItems": True}, "uniqueItems"),
        ("json_schema", {"not": {"type": "string"}}, "not"),
        ("json_schema", {"if": {}, "then": {}}, "if"),
        ("json_schema", {"type": "strin"}, "strin"),
        ("json_schema", {"$ref": "https://example.com/schema"}, "example.com"),
        ("json_schema", [1], "object"),
        ("json_schema", {"x-guidance": {"lenient": True}}, "x-guidance"),
        ("json_schema", {"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ("json_schema", {"type": "string", "pattern": "("}, "regex"),
        ("regex", "(", "regex"),
        ("regex", "", "empty"),
        ("choice", [], "list"),
        ("choice", ["a", ""], "empty"),
        ("grammar", "start: b", "b"),
        ("grammar", "no grammar at all", "cannot be enforced"),
    ],
)
def test_forms_that_cannot_are_refused_with_the_reason(kind: Any, value: Any, words: str) -> None:
    with pytest.raises(BadRequest) as refusal:
        checked_grammar(Format(kind, value, "here"))
    assert words in refusal.value.message
    assert refusal.value.param == "here"


def test_a_schema_that_grows_without_bound_is_refused() -> None:
    pairs = [
        {"anyOf": [{"properties": {f"{side}{n}": {"type": "string"}}} for side in "ab"]}
        for n in range(14)
    ]
    with pytest.raises(BadRequest, match="too large"):
        checked_grammar(Format("json_schema", {"allOf": pairs}))


def test_rules_beyond_all_measure_are_refused_with_their_size() -> None:
    grammar = Grammar('"a"')
    for _ in range(5):
        grammar.part(f'"{"a" * (MAX_CHARACTERS // 5)}"')
    with pytest.raises(BadRequest, match=rf"4194\d+ characters; at most {MAX_CHARACTERS}") as no:
        grammar.text("here")
    assert no.value.param == "here"
    grammar.rules.pop()
    assert grammar.text("here")
