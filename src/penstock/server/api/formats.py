"""Structured output as clients ask for it: OpenAI's `response_format` and vLLM's fields.

Turns them into one `Format`; what it means is `text.grammar`'s.
"""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.errors import BadRequest
from penstock.server.api.limits import decode_free_form
from penstock.text.grammar import MAX_FORMAT_BYTES, Format, Kind


class JsonSchema(msgspec.Struct):
    """`response_format.json_schema`."""

    name: str | None = None
    schema: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(msgspec.Struct):
    """`response_format`."""

    type: str
    json_schema: JsonSchema | None = None

    def format(self) -> Format | None:
        """What it asks for; None: any text."""
        param = "response_format"
        match self.type:
            case "text":
                return None
            case "json_object":
                return Format("json_object", None, param)
            case "json_schema":
                if self.json_schema is None or not bytes(self.json_schema.schema):
                    raise BadRequest(f"`{param}.json_schema.schema` is missing.", param=param)
                return schema_format(self.json_schema.schema, f"{param}.json_schema.schema")
        raise BadRequest(
            f"`{param}` {self.type[:40]!r} is not supported; text, json_object and json_schema "
            "are.",
            param=param,
        )


class StructuredOutputs(msgspec.Struct, rename={"json_": "json"}):
    """vLLM's `structured_outputs`: one of these."""

    json_: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def formats(self, prefix: str = "structured_outputs.") -> list[Format]:
        """All that were asked for."""
        found: list[Format] = []
        if bytes(self.json_) not in (b"", b"null"):
            found.append(schema_format(self.json_, f"{prefix}json"))
        kinds: tuple[Kind, ...] = ("regex", "choice", "grammar")
        found += [
            Format(kind, _bounded(value, prefix + kind), prefix + kind)
            for kind in kinds
            if (value := getattr(self, kind)) is not None
        ]
        if self.json_object:
            found.append(Format("json_object", None, f"{prefix}json_object"))
        return found


def schema_format(raw: msgspec.Raw, param: str) -> Format:
    """The schema that stands in a body; vLLM's users may also send it as a text."""
    schema = decode_free_form(raw, param, MAX_FORMAT_BYTES)
    if isinstance(schema, str):
        try:
            schema = msgspec.json.decode(schema)
        except (msgspec.DecodeError, RecursionError):
            raise BadRequest(f"`{param}` is no JSON.", param=param) from None
    return Format("json_schema", schema, param)


def _bounded(value: Any, param: str) -> Any:
    size = len(value) if isinstance(value, str) else sum(map(len, value))
    if size > MAX_FORMAT_BYTES:
        raise BadRequest(
            f"`{param}` has {size} characters; at most {MAX_FORMAT_BYTES} are allowed.",
            param=param,
        )
    return value


def only_one(formats: list[Format | None]) -> Format | None:
    """The one form that was asked for; two are refused, since only one could be kept."""
    asked = [each for each in formats if each is not None]
    if len(asked) > 1:
        raise BadRequest(
            f"`{asked[1].param}` and `{asked[0].param}` both ask for a form of the answer; "
            "only one can be kept.",
            param=asked[1].param,
        )
    return asked[0] if asked else None
