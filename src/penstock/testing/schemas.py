"""JSON schemas of many shapes, for tests of structured output: the same ones for a given seed."""

from __future__ import annotations

import random
from typing import Any

_PATTERNS = ("^[a-z]{2,6}$", "^(yes|no)$", "^[0-9]{3}-[0-9]{2}$", "^A[^B]{0,4}B$")
_FORMATS = ("date", "time", "uuid", "ipv4", "email")


def schemas(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Schemas that can be enforced; each is bounded, so that a model comes to an end."""
    source = random.Random(seed)
    return [_schema(source, 3) for _ in range(count)]


def bounds_texts(schema: Any) -> bool:
    """Whether every text that such a schema (of `schemas`) allows has a longest one."""
    if isinstance(schema, list):
        return all(map(bounds_texts, schema))
    if not isinstance(schema, dict):
        return True
    return schema.get("format") != "email" and all(map(bounds_texts, schema.values()))


def _schema(source: random.Random, depth: int) -> dict[str, Any]:
    kinds = [_string, _integer, _number, _constant, _scalar]
    if depth > 0:
        kinds += [_object, _object, _array, _any_of, _reference]
    return source.choice(kinds)(source, depth)


def _string(source: random.Random, depth: int) -> dict[str, Any]:
    match source.randrange(4):
        case 0:
            return {"type": "string", "maxLength": source.randint(0, 12)}
        case 1:
            least = source.randint(0, 4)
            return {"type": "string", "minLength": least, "maxLength": least + 4}
        case 2:
            return {"type": "string", "pattern": source.choice(_PATTERNS)}
    return {"type": "string", "format": source.choice(_FORMATS)}


def _integer(source: random.Random, depth: int) -> dict[str, Any]:
    least = source.randint(-50, 50)
    return {"type": "integer", "minimum": least, "maximum": least + source.randint(0, 500)}


def _number(source: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "number", "minimum": 0, "exclusiveMaximum": source.choice((1, 10, 2.5))}


def _constant(source: random.Random, depth: int) -> dict[str, Any]:
    values: list[Any] = ["red", 'gre"en', "bläu", 1, -2.5, True, None, [1, "x"], {"k": 0}]
    if source.random() < 0.3:
        return {"const": source.choice(values)}
    return {"enum": source.sample(values, source.randint(1, 5))}


def _scalar(source: random.Random, depth: int) -> dict[str, Any]:
    return {"type": source.choice(("boolean", "null"))}


def _object(source: random.Random, depth: int) -> dict[str, Any]:
    names = source.sample(["name", "age", "a b", "ünï", "x-1", "$ref_", "é"], source.randint(0, 4))
    properties = {name: _schema(source, depth - 1) for name in names}
    required = [name for name in names if source.random() < 0.6]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _array(source: random.Random, depth: int) -> dict[str, Any]:
    least = source.randint(0, 2)
    items = _schema(source, depth - 1)
    return {"type": "array", "items": items, "minItems": least, "maxItems": least + 2}


def _any_of(source: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_schema(source, depth - 1) for _ in range(source.randint(1, 3))]}


def _reference(source: random.Random, depth: int) -> dict[str, Any]:
    # References look from the root, so a schema that has them stands in a document of its own.
    inner = {"$id": f"urn:x:{source.randrange(10**9)}", "$defs": {"d": _string(source, 0)}}
    return {**inner, "type": "array", "items": {"$ref": "#/$defs/d"}, "maxItems": 2}
