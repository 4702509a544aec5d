"""How JSON may be written: white space and digits are bounded, whatever the schema leaves open."""

from __future__ import annotations

import json
import tracemalloc
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import JSON_STYLES
from penstock.errors import BadRequest
from penstock.server.pipeline.grammar_writing import writing_bytes
from penstock.testing.grammar_hosts import checked_grammar, limits, problem_of
from penstock.testing.hostile_grammars import (
    GRAMMARS,
    anything_everywhere,
    definitions_of_no_kind,
    many_properties,
    nested_identities,
)
from penstock.testing.schemas import schemas
from penstock.text.grammars.grammar import MAX_CHARACTERS, Format, Grammar, grammar_of
from penstock.text.grammars.json_form import Style, narrowed, style_of

if TYPE_CHECKING:
    from collections.abc import Callable

OBJECT: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"type": "number"}}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
COMPACT = ['{"a":1,"b":[1,2]}', '{"a": 1, "b": [1, 2]}', '{"a": 1,"b":[]}']
INDENTED = ['{\n  "a": 1,\n  "b": [\n    1,\n    2\n  ]\n}', '{ "a": 1, "b": [] }']
FREE = ['{"a":  1,\n\n"b": [\n\n\n\n1]}', '{"a": 123456789012345678901234567890,"b": [1e5]}']


def allows(schema: Any, text: str, style: Style = "compact") -> bool:
    from llguidance import LLMatcher, LLTokenizer

    tokenizer = LLTokenizer("byte")
    wanted = Format("json_object" if schema is None else "json_schema", schema)
    grammar = checked_grammar(wanted, style)
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits())
    assert not matcher.is_error(), matcher.get_error()
    return matcher.consume_tokens(tokenizer.tokenize_str(text)) and matcher.is_accepting()


def test_a_style_bounds_white_space() -> None:
    assert all(allows(OBJECT, text, style) for text in COMPACT for style in ("compact", "free"))
    assert not any(allows(OBJECT, text) for text in [*INDENTED, *FREE])
    assert all(allows(OBJECT, text, "indented") for text in [*COMPACT, *INDENTED])
    assert not any(allows(OBJECT, text, "indented") for text in FREE)
    assert all(allows(OBJECT, text, "free") for text in FREE)
    assert not allows(OBJECT, '{"a":' + " " * 30 + '1,"b":[]}', "free")


def test_settings_and_styles_are_the_same() -> None:
    assert [style_of(name) for name in JSON_STYLES] == ["compact", "indented", "free"]


def test_any_object_is_bounded_too() -> None:
    assert allows(None, '{"a": [1, -2.5, {"b": null, "c": "x"}], "d": {}, "e": true}')
    assert not allows(None, "[1]")
    assert not allows(None, '{"a":  1}')
    assert not allows(None, '{"a": ' + "1" * 20 + "}")
    assert not allows(None, '{\n"a": 1}')


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "integer"}, ["0", "-7", "9223372036854774784"], ["1" * 20, "1.0"]),
        ({"type": "number"}, ["0", "-7.25", "0.123456789"], ["1" * 20, "0.1234567891", "1e5"]),
        ({"type": ["integer", "null"]}, ["5", "null"], ["1" * 20]),
        ({"type": "number", "minimum": 0, "exclusiveMaximum": 1}, ["0.5"], ["0.0000000000", "1"]),
        ({"type": "number", "minimum": 2}, ["3.5"], ["1", "1" * 20]),
        ({"type": "number", "multipleOf": 0.5}, ["3.5"], ["3.25"]),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, ["5", '"x"'], ["1" * 20]),
        ({"$defs": {"n": {"type": "integer"}}, "$ref": "#/$defs/n"}, ["5"], ["1" * 20]),
        ({"type": "string", "format": "time"}, ['"12:00:00Z"'], [f'"12:00:00.{"0" * 50}Z"']),
        # Values of which the schema says nothing, wherever they stand.
        ({}, ["5", '[{"a": 1.5}]'], ["1" * 20, "[[" + "1" * 20 + "]]"]),
        (
            {"type": "object", "properties": {"a": {"description": "x"}, "b": {}}},
            ['{"a": 5}', '{"b": {"c": [1]}}'],
            ['{"a": ' + "1" * 20 + "}", '{"b": {"c": [' + "1" * 20 + "]}}"],
        ),
        (
            {"type": "object", "properties": {"a": {"type": "object"}, "b": {"type": "array"}}},
            ['{"a": {"x": 1}}', '{"b": ["x", 2]}'],
            ['{"a": {"x": ' + "1" * 20 + "}}", '{"b": ["x", ' + "1" * 20 + "]}"],
        ),
        (
            {"properties": {"a": {"type": "string"}}, "additionalProperties": True},
            ['{"a": "x", "b": 3}', "7"],
            ['{"a": "x", "b": ' + "1" * 20 + "}", "1" * 20],
        ),
        ({"minimum": 3}, ["4", '"x"', "[5]"], ["1", "1" * 20, "[" + "1" * 20 + "]"]),
        ({"type": "array", "prefixItems": [{}]}, ["[1, 2]"], ["[1, " + "1" * 20 + "]"]),
        (
            {"type": "object", "patternProperties": {"^x": True}},
            ['{"x1": 2, "y": 3}'],
            ['{"x1": ' + "1" * 20 + "}", '{"y": ' + "1" * 20 + "}"],
        ),
        ({"properties": {"a": {"$id": "urn:x"}, "b": {}}}, ['{"b": 1}'], [f'{{"b": {"1" * 20}}}']),
        # Other schemas speak of the same value.
        (
            {
                "type": "object",
                "properties": {"a": {"type": "integer"}},
                "anyOf": [{"required": ["a"]}, {"properties": {"b": {"type": "object"}}}],
            },
            ['{"a": 1, "c": 2}', '{"b": {"x": 1}}'],
            [
                f'{{"a": {"1" * 20}}}',
                f'{{"a": 1, "c": {"1" * 20}}}',
                f'{{"b": {{"x": {"1" * 20}}}}}',
            ],
        ),
        (
            {"allOf": [{"type": "object", "properties": {"a": {}}}, {"required": ["b"]}]},
            ['{"a": {"b": {"c": {"d": {"e": 1}}}}, "b": 2}', '{"b": 1, "c": 2}'],
            [f'{{"b": {"1" * 20}}}', f'{{"a": [{"1" * 20}], "b": 1}}'],
        ),
        ({"allOf": [{"type": "integer"}, {"minimum": 10**18}]}, [str(10**18)], ["5"]),
        # One schema says otherwise, or has a large default: the others are bounded all the same.
        (
            {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "maximum": 2**53 - 1},
                    "b": {"type": "number", "multipleOf": 1e-10},
                    "c": {"type": "integer", "default": 10**30},
                    "d": {"enum": [10**18]},
                    "e": {"type": "number"},
                },
            },
            ['{"b": 0.0000000001}', '{"c": 3}', f'{{"d": {10**18}}}', '{"e": 3}'],
            [f'{{"a": -{"1" * 20}}}', f'{{"c": {"1" * 20}}}', f'{{"e": {"1" * 20}}}', '{"e": 1e5}'],
        ),
        # The schema says otherwise.
        ({"type": "integer", "maximum": 5 * 10**18}, ["4000000000000000000"], ["6" * 19]),
        ({"type": "number", "minimum": 1e-12, "maximum": 1e-11}, ["0.000000000005"], ["0.1"]),
        (
            {"type": "number", "enum": [10**17, 0.12345678901]},
            [str(10**17), "0.12345678901"],
            ["2"],
        ),
        ({"$id": "urn:x", "type": "integer"}, ["5"], ["1" * 20]),
        ({"$defs": {"x-integer": {}}, "type": "integer"}, ["5"], ["1" * 20]),
    ],
)
def test_numbers_have_a_bounded_number_of_digits(
    schema: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    assert [text for text in good if not allows(schema, text)] == []
    assert [text for text in bad if allows(schema, text)] == []


NAMED: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "boolean"}}}


@pytest.mark.parametrize(
    ("schema", "is_open"),
    [
        (NAMED, False),
        (
            {
                **NAMED,
                "required": ["a"],
                "title": "A",
                "$schema": "https://json-schema.org/draft/2020-12/schema",
            },
            False,
        ),
        ({"$ref": "#/$defs/A", "$defs": {"A": NAMED}}, False),
        ({"anyOf": [NAMED, {"type": "null"}]}, False),
        ({**NAMED, "additionalProperties": True}, True),
        ({**NAMED, "additionalProperties": {"type": "integer"}}, True),
        ({**NAMED, "patternProperties": {"^x": {"type": "integer"}}}, True),
        ({**NAMED, "required": ["b"]}, True),
        ({"type": "object", "properties": {}}, True),
        ({"allOf": [NAMED, {"type": "object", "properties": {"b": {}}}]}, True),
        ({**NAMED, "anyOf": [{"properties": {"b": {}}}, {}]}, True),
    ],
)
@pytest.mark.parametrize("style", ["compact", "free"])
def test_an_object_that_names_its_properties_has_no_others(
    schema: dict[str, Any], is_open: bool, style: Style
) -> None:
    assert allows(schema, '{"a":true,"b":1}' if "a" in str(schema) else '{"b":1}', style) is is_open
    items = {"type": "array", "items": schema, "$defs": schema.get("$defs", {})}
    assert allows(items, '[{"a":true,"b":1}]', style) is is_open


def test_bounds_contradict_no_schema() -> None:
    """Whatever a bounded schema allows its original does, and it still allows something."""
    for schema in schemas(200, seed=3):
        changed = narrowed(schema)
        jsonschema.Draft202012Validator.check_schema(changed)
        assert problem_of(checked_grammar(Format("json_schema", schema))) is None


@given(
    value=st.one_of(
        st.integers(-(10**18), 10**18), st.floats(-1e9, 1e9).map(lambda x: round(x, 6))
    ),
    integer=st.booleans(),
)
def test_ordinary_numbers_stay_allowed(value: float, integer: bool) -> None:
    schema = {"type": "integer" if integer else "number"}
    text = json.dumps(value)
    if "e" in text or (integer and isinstance(value, float)) or text.startswith("-0"):
        return
    assert allows(schema, text)


def test_many_numbers_are_bounded_and_cheap() -> None:
    plain = {f"n{number}": {"type": "number", "description": "x"} for number in range(2000)}
    assert checked_grammar(Format("json_schema", {"type": "object", "properties": plain}))
    lists = {f"n{number}": {"type": ["number", "null"]} for number in range(2000)}
    assert checked_grammar(Format("json_schema", {"type": "object", "properties": lists}))
    for kind in ({"type": "number", "minimum": 0}, {"type": ["number", "null"]}):
        names = {f"n{number}": {**kind, "description": str(number)} for number in range(2000)}
        assert not allows({"type": "object", "properties": names}, f'{{"n1999":{"1" * 20}}}')
    own = {f"n{number}": {"type": "number", "minimum": number} for number in range(1000)}
    assert checked_grammar(Format("json_schema", {"type": "object", "properties": own}))


@pytest.mark.parametrize("kind", [[{}], {"a": 1}, 5, [1, None]])
def test_what_is_no_schema_is_refused(kind: Any) -> None:
    with pytest.raises(BadRequest):
        checked_grammar(Format("json_schema", {"type": kind}))


@pytest.mark.parametrize(
    "make", [anything_everywhere, definitions_of_no_kind, nested_identities, many_properties]
)
def test_a_grammar_is_not_many_times_as_large_as_its_schema(make: Callable[..., Any]) -> None:
    schema = make(GRAMMARS[make])["response_format"]["json_schema"]["schema"]
    size = len(json.dumps(schema))
    tracemalloc.start()
    text = grammar_of(Format("json_schema", schema))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(text) < 10 * size
    assert peak < writing_bytes(Format("json_schema", schema, size=size))


def test_what_grows_beyond_all_measure_is_refused_and_not_kept() -> None:
    grammar = Grammar()
    wide = {"enum": ["x" * 1000]}
    for number in range(8000):
        grammar.json({**wide, "title": str(number)})
    assert sum(len(json.dumps(each)) for each in grammar.named.values()) <= MAX_CHARACTERS
    with pytest.raises(BadRequest, match=r"grammar of 9\d+ characters; at most 4194304"):
        grammar.text()


def test_without_a_place_for_definitions_any_json_is_bounded_in_some_places() -> None:
    schema = narrowed({"prefixItems": [{}] * 1000, "$defs": []})
    bounded = [each for each in schema["prefixItems"] if each]
    assert 100 < len(bounded) <= 400
    assert "x-json" not in json.dumps(schema)
    named = {"properties": {"a": {"$id": "x", "type": "boolean"}}, "items": {}}
    assert narrowed(named)["items"]["maximum"]
    assert narrowed({"type": "array", "items": {}})["items"] == {"$ref": "#/$defs/x-json"}
