"""How JSON that a model is held to may be written: white space, digits, names of properties.

Whatever a grammar leaves unbounded a small model may repeat until its tokens are spent: line ends,
digits. So a style bounds both, unless the schema says itself how large its numbers are. Texts are
as long as the schema lets them be. An object that names its properties has no others, unless its
schema says so. Knows schemas, no grammar.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

Style = Literal["compact", "indented", "free"]

# What llguidance is told beside a schema. Compact: a space behind a comma or a colon, or none.
# Indented: between any two parts one space, or one line end and an indent. Free: pages of blanks
# are still no JSON that anybody wants.
_OPTIONS: dict[Style, dict[str, Any]] = {
    "compact": {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"},
    "indented": {"whitespace_pattern": r" |\n[ \t]{0,16}"},
    "free": {"whitespace_pattern": r"[ \n\r\t]{1,24}"},
}

LARGEST = 2**63 - 1024  # 19 digits: the largest double below 2**63, which llguidance can take
_DIGITS = 9  # behind the point
_INTEGER = {"minimum": -LARGEST, "maximum": LARGEST}
_NUMBER = {**_INTEGER, "multipleOf": 10.0**-_DIGITS}
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_SIZES = (*_LOWER, *_UPPER, "multipleOf")
# Each takes the library some 0.5 ms, and 1,000 its fuel; the same bounds are counted once.
_MAX_BOUNDS = 400
# Longest texts of formats whose rules know no end.
_FORMATS = {"time": 40, "date-time": 40, "duration": 40, "email": 254, "hostname": 253}

# Keywords whose values are schemas, lists of them, or schemas by name.
_ONE = frozenset({"items", "additionalProperties", "additionalItems", "contains"})
_SOME = frozenset({"anyOf", "oneOf", "allOf", "prefixItems", "items"})
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_NOTES = frozenset({"title", "description", "default", "examples", "deprecated", "$comment"})
_ANNOTATIONS = _NOTES | {"$schema", "$id", "$defs", "definitions"}
# Keywords by which other schemas speak of the same value, and all that says what a value is.
_FIXED = frozenset({"enum", "const"})
_OTHERS = frozenset({"$ref", "anyOf", "oneOf", "allOf"})
_OWN = frozenset({"type", "required", *_SIZES, *_ONE, *_SOME, *_NAMED}) - _OTHERS - _ANNOTATIONS
# What an object may say so that `properties` are all that it has.
_NAMING = _ANNOTATIONS | {"type", "properties", "required"}
_SCALARS = frozenset({"null", "boolean", "integer", "number", "string"})
_KINDS = ("null", "boolean", "number", "string", "array", "object")


def style_of(name: str) -> Style:
    """The style that a setting names."""
    return name if name in _OPTIONS else "compact"


def styled(schema: dict[str, Any], style: Style, *, lenient: bool) -> dict[str, Any]:
    """The schema as llguidance is given it; `lenient`: kept as far as it can be."""
    options = {**_OPTIONS[style], "lenient": True} if lenient else _OPTIONS[style]
    return {**narrowed(schema, bounds=style != "free"), "x-guidance": options}


def narrowed(schema: dict[str, Any], *, bounds: bool = True) -> dict[str, Any]:
    """The schema with bounds for numbers that have none, and its objects closed that name their
    properties and say nothing of others. All that it allows the original does too."""
    own = schema.get("$defs", {})
    # An `$id` further down moves the place that references look from: then nothing is shared.
    shares = isinstance(own, dict) and not any(map(_has_id, schema.values()))
    prefix = "x-"
    while shares and any(name.startswith(prefix) for name in own):
        prefix = "x" + prefix
    composed = _is_composed(schema)
    # Where several schemas speak of one number, no bound of ours may contradict one of its own.
    bounds = bounds and not (composed and _has_extreme(schema))
    narrowing = _Narrowing(bounds, composed, prefix if shares else None)
    result: dict[str, Any] = narrowing.of(schema)
    if not narrowing.shared:
        return result
    return {**result, "$defs": {**result.get("$defs", {}), **narrowing.shared}}


@dataclass
class _Narrowing:
    """One schema on its way."""

    bounds: bool
    composed: bool  # several of its parts may speak of the same value
    prefix: str | None  # of the names of schemas that stand in it once; None: it can have none
    left: int = _MAX_BOUNDS
    shared: dict[str, dict[str, Any]] = field(default_factory=dict)
    _names: dict[str, str] = field(default_factory=dict)  # of what is shared, by content

    def of(self, schema: Any, *, typed: bool = False) -> Any:
        """A part of it; `typed`: what its value is has been said around it."""
        if schema is True or (isinstance(schema, dict) and schema.keys() <= _ANNOTATIONS):
            anything = None if typed else self._anything()
            return schema if anything is None else anything
        if not isinstance(schema, dict):
            return schema
        kind = schema.get("type")
        others = schema.keys() & _OTHERS
        result = {
            key: self._keyword(key, value, typed=typed or kind is not None)
            for key, value in schema.items()
        }
        if schema.keys() & _FIXED or (kind is None and (typed or others)):
            return result
        kinds = _KINDS if kind is None else kind if isinstance(kind, list) else [kind]
        if not all(isinstance(each, str) for each in kinds):
            return result  # no schema; the library says so
        self._close(result, kinds)
        return self._bound(result, kinds) if self.bounds else result

    def _keyword(self, key: str, value: Any, *, typed: bool) -> Any:
        if key in _NAMED and isinstance(value, dict):
            return {name: self.of(each) for name, each in value.items()}
        if key in _SOME and isinstance(value, list):
            typed = typed and key in _OTHERS
            return [self.of(each, typed=typed) for each in value]
        return self.of(value) if key in _ONE else value

    def _close(self, schema: dict[str, Any], kinds: Any) -> None:
        names, required = schema.get("properties"), schema.get("required", [])
        if self.composed or "object" not in kinds or not schema.keys() <= _NAMING:
            return
        if not names or not isinstance(names, dict) or not isinstance(required, list):
            return
        if names.keys() >= set(map(str, required)):
            schema["additionalProperties"] = False

    def _bound(self, schema: dict[str, Any], kinds: Any) -> dict[str, Any]:
        """The schema, which may now refer to one that is shared."""
        rests = ["additionalProperties"] if "object" in kinds else []
        if "array" in kinds:
            rests.append("additionalItems" if isinstance(schema.get("items"), list) else "items")
        for rest in rests:
            if rest not in schema and (anything := self._anything()) is not None:
                schema[rest] = anything
        if self.left <= 0 or not _add(schema, kinds):
            return schema
        if self.prefix is None or not _SCALARS.issuperset(kinds) or schema.keys() & _OTHERS:
            self.left -= 1
            return schema
        known = len(self.shared)
        plain = {key: value for key, value in schema.items() if key not in _ANNOTATIONS}
        reference = self._share(plain)
        self.left -= len(self.shared) - known
        kept = {key: value for key, value in schema.items() if key in _ANNOTATIONS - _NOTES}
        return {**kept, **reference}

    def _anything(self) -> dict[str, Any] | None:
        """Any JSON with bounds; None: without any. What stands in the schema itself, where nothing
        can be shared, takes a kilobyte in each place, so it is counted like the bounds of numbers.
        """
        if not self.bounds:
            return None
        if self.prefix is not None:
            return self._shared_anything
        self.left -= 1
        return self._three_levels if self.left >= 0 else None

    @cached_property
    def _shared_anything(self) -> dict[str, Any]:
        """To any depth if nothing else speaks of the same value, since the library cannot intersect
        two schemas that refer to themselves."""
        if self.composed:
            return self._share(self._three_levels)
        name = f"{self.prefix}json"
        itself = {"$ref": f"#/$defs/{name}"}
        anything = {"type": [*_KINDS], "items": itself, "additionalProperties": itself}
        self.shared[name] = anything | _NUMBER
        return itself

    @cached_property
    def _three_levels(self) -> dict[str, Any]:
        inner: dict[str, Any] = {"type": [*_KINDS], **_NUMBER}
        for _ in range(2):
            inner = {**inner, "items": inner, "additionalProperties": inner}
        return inner

    def _share(self, schema: dict[str, Any]) -> dict[str, Any]:
        content = json.dumps(schema, sort_keys=True)
        name = self._names.setdefault(content, f"{self.prefix}{len(self._names)}")
        self.shared[name] = schema
        return {"$ref": f"#/$defs/{name}"}


def _add(schema: dict[str, Any], kinds: Any) -> bool:
    """Bounds that a schema of these types does not have; whether any were added."""
    before, otherwise = len(schema), _says_otherwise(schema)
    bounds = _NUMBER if "number" in kinds else _INTEGER if "integer" in kinds else {}
    for key, value in bounds.items():
        own = next((group for group in (_LOWER, _UPPER) if key in group), (key,))
        if not any(name in schema for name in own) and not otherwise:
            schema[key] = value
    longest = _FORMATS.get(str(schema.get("format"))) if "string" in kinds else None
    if longest is not None and not {"minLength", "maxLength", "pattern"} & schema.keys():
        schema["maxLength"] = longest
    return len(schema) > before


def _says_otherwise(schema: dict[str, Any]) -> bool:
    """Whether its own numbers are larger or finer than the bounds could be."""
    said = [value for key in _SIZES if (value := schema.get(key)) is not None]
    return any(map(_is_extreme, said))


def _is_extreme(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    # Between any two numbers of one digit less lies one that the bounds allow.
    return abs(value) >= LARGEST or value != round(value, _DIGITS - 1)


def _has_extreme(schema: Any) -> bool:
    if isinstance(schema, dict):
        return any(_has_extreme(each) for key, each in schema.items() if key not in _NOTES)
    return any(map(_has_extreme, schema)) if isinstance(schema, list) else _is_extreme(schema)


def _is_composed(schema: Any) -> bool:
    """Whether several schemas speak of one value anywhere in it."""
    if isinstance(schema, list):
        return any(map(_is_composed, schema))
    if not isinstance(schema, dict):
        return False
    others = schema.keys() & _OTHERS
    all_of = schema.get("allOf")
    if others and (len(others) > 1 or schema.keys() & (_OWN | _FIXED)):
        return True
    return (isinstance(all_of, list) and len(all_of) > 1) or any(map(_is_composed, schema.values()))


def _has_id(schema: Any) -> bool:
    if isinstance(schema, dict):
        return "$id" in schema or any(map(_has_id, schema.values()))
    return isinstance(schema, list) and any(map(_has_id, schema))
