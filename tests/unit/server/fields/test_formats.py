"""The ways in which clients ask for a form, and what it means when several are used at once."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from penstock.errors import BadRequest
from penstock.server.fields.generation import GenerationFields
from penstock.testing.grammar_hosts import checked_grammar

if TYPE_CHECKING:
    from penstock.text.grammars.grammar import Format

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
SAME = {"required": ["a"], "properties": {"a": {"type": "integer"}}, "type": "object"}
GBNF = 'root ::= "yes" | "no"'
LARK = 'start: "yes" | "no"'


def asked(**body: Any) -> Format | None:
    return msgspec.json.decode(json.dumps(body), type=GenerationFields).format()


@pytest.mark.parametrize(
    ("body", "kind", "value"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", None),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "json_schema", SCHEMA),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, "json_schema", SCHEMA),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            "json_schema",
            SCHEMA,
        ),
        ({"response_format": {"type": "grammar", "grammar": GBNF}}, "grammar", GBNF),
        ({"json_schema": SCHEMA}, "json_schema", SCHEMA),
        ({"grammar": GBNF}, "grammar", GBNF),
        ({"ebnf": GBNF}, "grammar", GBNF),
        ({"regex": "a+"}, "regex", "a+"),
        ({"guided_grammar": GBNF}, "grammar", GBNF),
        ({"guided_grammar": LARK}, "grammar", LARK),
        ({"structured_outputs": {"grammar": GBNF}}, "grammar", GBNF),
        ({"guided_choice": ["a", "b"]}, "choice", ["a", "b"]),
    ],
)
def test_every_way_is_enforced(body: dict[str, Any], kind: str, value: Any) -> None:
    wanted = asked(**body)
    assert wanted is not None
    assert (wanted.kind, wanted.value) == (kind, value)
    assert checked_grammar(wanted)


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({"guided_json": SCHEMA, "structured_outputs": {"json": SAME}}, "json_schema"),
        (
            {
                "json_schema": json.dumps(SAME),
                "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
            },
            "json_schema",
        ),
        ({"json_schema": SCHEMA, "response_format": {"type": "json_object"}}, "json_schema"),
        ({"guided_json": SCHEMA, "response_format": {"type": "text"}}, "json_schema"),
        ({"guided_choice": ["a"], "structured_outputs": {"choice": ["a"]}}, "choice"),
        ({"grammar": GBNF, "guided_grammar": GBNF}, "grammar"),
        ({"grammar": "", "guided_regex": "a+"}, "regex"),
    ],
)
def test_the_same_said_twice_is_enforced_once(body: dict[str, Any], kind: str) -> None:
    wanted = asked(**body)
    assert wanted is not None
    assert wanted.kind == kind


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"guided_json": SCHEMA, "structured_outputs": {"json": {"type": "string"}}}, "json"),
        ({"guided_choice": ["a"], "structured_outputs": {"choice": ["b"]}}, "choice"),
        ({"guided_json": {"const": True}, "json_schema": {"const": 1}}, "json_schema"),
        ({"json_schema": {"type": "array"}, "response_format": {"type": "json_object"}}, "schema"),
        ({"guided_regex": "a", "grammar": GBNF}, "grammar"),
        (
            {
                "response_format": {
                    "type": "json_object",
                    "schema": {},
                    "json_schema": {"schema": 1},
                }
            },
            "response_format.schema",
        ),
    ],
)
def test_two_different_forms_are_refused(body: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest, match="different forms") as refusal:
        asked(**body)
    assert str(refusal.value.param).endswith(param)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"response_format": {"type": "json_schema"}}, "schema` is missing"),
        ({"response_format": {"type": "grammar"}}, "grammar` is missing"),
        ({"response_format": {"type": "xml"}}, "'xml' is not supported"),
        ({"structured_outputs": {"structural_tag": {"a": 1}}}, "structural_tag` is not supported"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "models.json_style"),
        ({"guided_json": "[" * 500 + "]" * 500}, "nested"),
        ({"grammar": "x" * 300_000}, "at most 262144"),
    ],
)
def test_what_cannot_be_kept_is_named(body: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        asked(**body)
