"""Structured output as clients ask for it: OpenAI's `response_format`, and the fields of vLLM,
llama.cpp and others.

Turns them into one `Format`; what it means is `text.grammars.grammar`'s.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from penstock.errors import BadRequest, shortened
from penstock.server.http.free_form import check_nesting, decode_free_form
from penstock.text.grammars.grammar import MAX_FORMAT_BYTES, Format, Kind


class JsonSchema(msgspec.Struct):
    """`response_format.json_schema`."""

    name: str | None = None
    schema: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(msgspec.Struct):
    """`response_format`. Some servers have the schema right here, beside either type."""

    type: str
    json_schema: JsonSchema | None = None
    schema: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    grammar: str | None = None

    def format(self, param: str = "response_format") -> Format | None:
        """What it asks for; None: any text."""
        match self.type:
            case "text":
                return None
            case "json_object":
                return self._schema(param) or Format("json_object", None, param)
            case "json_schema":
                wanted = self._schema(param)
                if wanted is None:
                    raise BadRequest(f"`{param}.json_schema.schema` is missing.", param=param)
                return wanted
            case "grammar":
                if self.grammar is None:
                    raise BadRequest(f"`{param}.grammar` is missing.", param=param)
                return _bounded("grammar", self.grammar, f"{param}.grammar")
        raise BadRequest(
            f"`{param}` {shortened(self.type, 40)!r} is not supported; text, json_object, "
            "json_schema and grammar are.",
            param=param,
        )

    def _schema(self, param: str) -> Format | None:
        """The schema, wherever it stands."""
        inner = None if self.json_schema is None else self.json_schema.schema
        places = ((inner, f"{param}.json_schema.schema"), (self.schema, f"{param}.schema"))
        return only_one([_given(raw, place) for raw, place in places if raw is not None])


class StructuredOutputs(msgspec.Struct, rename={"json_": "json"}):
    """vLLM's `structured_outputs`: one of these."""

    json_: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    whitespace_pattern: str | None = None

    def formats(self, prefix: str = "structured_outputs.") -> list[Format]:
        """All that were asked for."""
        self._refuse_unkept(prefix)
        schema = _given(self.json_, f"{prefix}json")
        found = [] if schema is None else [schema]
        kinds: tuple[Kind, ...] = ("regex", "choice", "grammar")
        found += [
            _bounded(kind, value, prefix + kind)
            for kind in kinds
            if (value := getattr(self, kind)) is not None
        ]
        if self.json_object:
            found.append(Format("json_object", None, f"{prefix}json_object"))
        return found

    def _refuse_unkept(self, prefix: str) -> None:
        """What would change the answer and is not done here."""
        if _is_given(self.structural_tag):
            raise BadRequest(
                f"`{prefix}structural_tag` is not supported; json, regex, choice and grammar are.",
                param=f"{prefix}structural_tag",
            )
        if self.whitespace_pattern is not None:
            raise BadRequest(
                f"`{prefix}whitespace_pattern` is not supported; how JSON is laid out is a setting "
                "of the server (models.json_style).",
                param=f"{prefix}whitespace_pattern",
            )


def _is_given(raw: msgspec.Raw) -> bool:
    return bytes(raw) not in (b"", b"null")


def _given(raw: msgspec.Raw, param: str) -> Format | None:
    return schema_format(raw, param) if _is_given(raw) else None


def top_level_formats(json_schema: msgspec.Raw, **texts: str | None) -> list[Format]:
    """Fields of llama.cpp and SGLang that stand by themselves; a text may be empty there."""
    schema = _given(json_schema, "json_schema")
    found = [] if schema is None else [schema]
    return found + [
        _bounded("regex" if name == "regex" else "grammar", text, name)
        for name, text in texts.items()
        if text
    ]


def schema_format(raw: msgspec.Raw, param: str) -> Format:
    """The schema that stands in a body; vLLM's users may also send it as a text."""
    schema = decode_free_form(raw, param, MAX_FORMAT_BYTES)
    if isinstance(schema, str):
        try:
            schema = msgspec.json.decode(schema)
        except (msgspec.DecodeError, RecursionError):
            raise BadRequest(f"`{param}` is no JSON.", param=param) from None
        check_nesting(schema, param)
    return Format("json_schema", schema, param, len(bytes(raw)))


def _bounded(kind: Kind, value: Any, param: str) -> Format:
    size = len(value) if isinstance(value, str) else sum(map(len, value))
    if size > MAX_FORMAT_BYTES:
        raise BadRequest(
            f"`{param}` has {size} characters; at most {MAX_FORMAT_BYTES} are allowed.",
            param=param,
        )
    return Format(kind, value, param, size)


def only_one(formats: list[Format | None]) -> Format | None:
    """The one form that was asked for. It may be said twice, and a schema of objects may be said
    beside `json_object`; two others are refused, since only one could be kept."""
    kept: Format | None = None
    for asked in formats:
        if asked is None or (kept is not None and _covers(kept, asked)):
            continue
        if kept is not None and not _covers(asked, kept):
            raise BadRequest(
                f"`{asked.param}` and `{kept.param}` ask for different forms of the answer; "
                "only one can be kept.",
                param=asked.param,
            )
        kept = asked
    return kept


def _covers(one: Format, other: Format) -> bool:
    """Whether an answer of the one form is of the other too, as far as that can be seen."""
    if one.kind == other.kind:
        return _canonical(one.value) == _canonical(other.value)
    if other.kind != "json_object" or one.kind != "json_schema":
        return False
    return isinstance(one.value, dict) and one.value.get("type") == "object"


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
