"""`/openapi.json`: what this server takes and gives, made from the types that decode the bodies.

A body is described by the very type it is decoded into, so the two cannot drift apart; answers are
described by the fields that are always there. Knows how a route is described, not which there are
(`routes` does).
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from penstock import __version__
from penstock.server.http.errors import OPENAI

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.server.http.errors import ErrorStyle
    from penstock.server.http.exchange import Exchange

# Takes the exchange and what the server has for its endpoints.
Endpoint = Callable[["Exchange", Any], Awaitable[None]]
JSON = "application/json"
_TEXT = {"type": "string"}


@dataclass(frozen=True, slots=True)
class Route:
    """One address and method."""

    method: str
    path: str
    endpoint: Endpoint
    summary: str
    answer: dict[str, Any]  # the schema of a whole answer
    body: type | None = None  # what the body is decoded into
    stream: str | None = None  # the media type of a streamed answer
    needs_body: bool = True
    media_type: str = JSON  # of a whole answer
    # How it refuses; where two protocols share an address, a second for clients of Anthropic's.
    styles: tuple[ErrorStyle, ...] = (OPENAI,)


def _object(**fields: Any) -> dict[str, Any]:
    return {"type": "object", "properties": fields, "required": list(fields)}


_ERRORS = {
    "openai": _object(
        error=_object(message=_TEXT, type=_TEXT, param={"type": ["string", "null"]}, code=_TEXT)
    ),
    "anthropic": _object(type=_TEXT, error=_object(type=_TEXT, message=_TEXT), request_id=_TEXT),
    "ollama": _object(error=_TEXT),
}
# Every refusal a route can give.
_REFUSALS = {
    "400": "A field, the model or the body cannot be used.",
    "401": "The API key is missing or wrong.",
    "403": "Not for this client: its host, its origin, or operators only.",
    "404": "There is no such model, stored response or address.",
    "405": "The address is not for this method; `Allow` says for which.",
    "408": "The body did not come in time.",
    "413": "The body is over the limit.",
    "415": "The body is compressed in a way that is not understood.",
    "499": "An operator has ended the request.",
    "500": "The server's own fault.",
    "502": "A model could not be fetched or stored.",
    "503": "Too much is being done at the moment, or the model's process died.",
    "507": "The model can never be loaded under the memory limit, or the disk is full.",
    "529": "What 503 is to clients of Anthropic.",
}
_RETRY_AFTER = {
    "retry-after": {"description": "Seconds until another try.", "schema": {"type": "integer"}}
}
_HEADERS: dict[str, dict[str, Any]] = {
    "405": {"allow": {"description": "The methods of the address.", "schema": _TEXT}},
    "503": _RETRY_AFTER,
    "529": _RETRY_AFTER,
}


def describe(routes: Sequence[Route]) -> bytes:
    """The description of these routes."""
    bodies = [route.body for route in routes if route.body is not None]
    _, components = msgspec.json.schema_components(
        bodies, ref_template="#/components/schemas/{name}", schema_hook=_free_form
    )
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        path = route.path.replace(":path}", "}")
        paths.setdefault(path, {})[route.method.lower()] = _operation(route, path)
    errors = {f"{name}_error": schema for name, schema in _ERRORS.items()}
    security: list[dict[str, list[str]]] = [{"bearer": []}, {"x_api_key": []}, {}]
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "Penstock", "version": __version__},
            "paths": paths,
            "security": security,
            "components": {
                "schemas": {**components, **errors},
                "securitySchemes": {
                    "bearer": {"type": "http", "scheme": "bearer"},
                    "x_api_key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
                },
            },
        }
    )


def _operation(route: Route, path: str) -> dict[str, Any]:
    refusal = {"$ref": f"#/components/schemas/{route.styles[0].name}_error"}
    content: dict[str, Any] = {route.media_type: {"schema": route.answer}}
    if route.stream is not None:
        content[route.stream] = {}  # a schema would be of one document, not of many events
    described: dict[str, Any] = {
        "summary": route.summary,
        "operationId": f"{route.method.lower()}{path}".translate(_NO_MARKS),
        "responses": {
            "200": {"description": "The answer.", "content": content},
            **{
                status: {
                    "description": meaning,
                    "headers": _HEADERS.get(status, {}),
                    "content": {JSON: {"schema": refusal}},
                }
                for status, meaning in _REFUSALS.items()
            },
        },
    }
    if names := re.findall(r"\{(\w+)\}", path):
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": _TEXT} for name in names
        ]
    if route.body is not None:
        schema = {"$ref": f"#/components/schemas/{route.body.__name__}"}
        described["requestBody"] = {
            "required": route.needs_body,
            "content": {JSON: {"schema": schema}},
        }
    return described


_NO_MARKS = str.maketrans("/{}", "___")


def _free_form(kind: type) -> dict[str, Any]:
    """What is kept as text until its size is known may be any JSON."""
    if kind is msgspec.Raw:
        return {}
    raise NotImplementedError
