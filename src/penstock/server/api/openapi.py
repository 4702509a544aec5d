"""`/openapi.json`: what this server takes and gives, made from the types that decode the bodies.

A body is described by the very type it is decoded into, so the two cannot drift apart; answers are
described by the fields that are always there. Knows the routes, not what they do.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec

from penstock import __version__
from penstock.server.api import chat, completions, ollama, residents
from penstock.server.api.anthropic_fields import CountFields, MessagesFields
from penstock.server.api.responses_fields import ResponseFields

if TYPE_CHECKING:
    from penstock.server.api.exchange import Exchange
    from penstock.server.api.services import Services

_JSON = "application/json"
_STREAM = "text/event-stream"
_LINES = "application/x-ndjson"


@dataclass(frozen=True, slots=True)
class _Operation:
    method: str
    path: str
    summary: str
    answer: dict[str, Any]
    body: type | None = None
    stream: str | None = None  # the media type of a streamed answer
    needs_body: bool = True


def _object(**fields: Any) -> dict[str, Any]:
    """An object with at least these fields."""
    return {"type": "object", "properties": fields, "required": list(fields)}


_TEXT, _NUMBER, _FLAG = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}
_LIST = {"type": "array"}
_ANY_OBJECT = {"type": "object"}
_CHOICES = _object(id=_TEXT, object=_TEXT, created=_NUMBER, model=_TEXT, choices=_LIST)
_RESPONSE = _object(id=_TEXT, object=_TEXT, created_at=_NUMBER, status=_TEXT, output=_LIST)
_MESSAGE = _object(id=_TEXT, type=_TEXT, role=_TEXT, content=_LIST, usage=_ANY_OBJECT)
_OLLAMA = _object(model=_TEXT, created_at=_TEXT, done=_FLAG)
_RESIDENT = _object(name=_TEXT, state=_TEXT, bytes=_NUMBER, pinned=_FLAG, leases=_NUMBER)
_MODEL = _object(id=_TEXT, object=_TEXT, created=_NUMBER, owned_by=_TEXT, max_model_len=_NUMBER)

_OPERATIONS = (
    _Operation("post", "/v1/chat/completions", "The next message of a conversation (OpenAI)",
               _CHOICES, chat.ChatFields, _STREAM),
    _Operation("post", "/v1/completions", "What follows a text (OpenAI)",
               _CHOICES, completions.CompletionFields, _STREAM),
    _Operation("post", "/v1/responses", "An answer as items, stored (OpenAI)",
               _RESPONSE, ResponseFields, _STREAM),
    _Operation("get", "/v1/responses/{id}", "A stored answer", _RESPONSE),
    _Operation("delete", "/v1/responses/{id}", "Forget a stored answer",
               _object(id=_TEXT, deleted=_FLAG)),
    _Operation("post", "/v1/responses/{id}/cancel", "Stop an answer in the background", _RESPONSE),
    _Operation("get", "/v1/responses/{id}/input_items", "What a stored answer was asked",
               _object(object=_TEXT, data=_LIST)),
    _Operation("post", "/v1/messages", "The next message of a conversation (Anthropic)",
               _MESSAGE, MessagesFields, _STREAM),
    _Operation("post", "/v1/messages/count_tokens", "How many tokens a conversation comes to",
               _object(input_tokens=_NUMBER), CountFields),
    _Operation("get", "/v1/models", "The models that can be asked",
               _object(object=_TEXT, data={"type": "array", "items": _MODEL})),
    _Operation("get", "/v1/models/{id}", "One of them", _MODEL),
    _Operation("post", "/v1/plan", "What a request would need, without running it",
               _object(object=_TEXT, verdict=_TEXT), chat.ChatFields),
    _Operation("post", "/api/chat", "The next message of a conversation (Ollama)",
               _OLLAMA, ollama.OllamaChatFields, _LINES),
    _Operation("post", "/api/generate", "An answer to a text (Ollama)",
               _OLLAMA, ollama.OllamaGenerateFields, _LINES),
    _Operation("get", "/api/tags", "The models that can be asked (Ollama)", _object(models=_LIST)),
    _Operation("post", "/api/show", "What is known of a model (Ollama)",
               _object(details=_ANY_OBJECT, model_info=_ANY_OBJECT, capabilities=_LIST),
               ollama.ShowFields),
    _Operation("get", "/api/version", "Which server this is (Ollama)", _object(version=_TEXT)),
    _Operation("get", "/admin/api/models", "The models in memory, and those on their way",
               {"type": "array", "items": _RESIDENT}),
    _Operation("post", "/admin/api/models/{id}/load", "Have a model ready; streamed, as it goes",
               _RESIDENT, residents.LoadFields, _STREAM, needs_body=False),
    _Operation("post", "/admin/api/models/{id}/unload", "End a model's process",
               _object(name=_TEXT, unloaded=_FLAG), residents.UnloadFields, needs_body=False),
    _Operation("post", "/admin/api/models/{id}/pin", "Keep a model, or no longer",
               _object(name=_TEXT, pinned=_FLAG), residents.PinFields, needs_body=False),
    _Operation("post", "/admin/api/reload", "Read the settings again",
               _object(applied=_LIST, reload=_ANY_OBJECT, restart=_LIST)),
    _Operation("get", "/health", "Whether the server is alive", _object(status=_TEXT)),
)  # fmt: skip

_ERRORS = {
    "openai": _object(
        error=_object(message=_TEXT, type=_TEXT, param={"type": ["string", "null"]}, code=_TEXT)
    ),
    "anthropic": _object(type=_TEXT, error=_object(type=_TEXT, message=_TEXT), request_id=_TEXT),
    "ollama": _object(error=_TEXT),
}
# Every refusal a route can give; which of them means what is in the error table of the manual.
_REFUSALS = ("400", "401", "403", "404", "405", "413", "503", "507", "529", "500")


async def openapi(exchange: Exchange, services: Services) -> None:
    """The description."""
    await exchange.send_bytes(_description(), _JSON)


@cache
def _description() -> bytes:
    bodies = [operation.body for operation in _OPERATIONS if operation.body is not None]
    _, components = msgspec.json.schema_components(
        bodies, ref_template="#/components/schemas/{name}", schema_hook=_free_form
    )
    paths: dict[str, dict[str, Any]] = {}
    for operation in _OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation)
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


def _operation(operation: _Operation) -> dict[str, Any]:
    style = "openai"
    if operation.path.startswith("/v1/messages"):
        style = "anthropic"
    elif operation.path.startswith("/api/"):
        style = "ollama"
    refusal = {"$ref": f"#/components/schemas/{style}_error"}
    content: dict[str, Any] = {_JSON: {"schema": operation.answer}}
    if operation.stream is not None:
        content[operation.stream] = {}  # a schema would be of one document, not of many events
    described: dict[str, Any] = {
        "summary": operation.summary,
        "operationId": f"{operation.method}{operation.path}".translate(_NO_MARKS),
        "responses": {
            "200": {"description": "The answer.", "content": content},
            **{
                status: {"description": "A refusal.", "content": {_JSON: {"schema": refusal}}}
                for status in _REFUSALS
            },
        },
    }
    if "{id}" in operation.path:
        described["parameters"] = [
            {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
        ]
    if operation.body is not None:
        schema = {"$ref": f"#/components/schemas/{operation.body.__name__}"}
        described["requestBody"] = {
            "required": operation.needs_body,
            "content": {_JSON: {"schema": schema}},
        }
    return described


_NO_MARKS = str.maketrans("/{}", "___")


def _free_form(kind: type) -> dict[str, Any]:
    """What is kept as text until its size is known may be any JSON."""
    if kind is msgspec.Raw:
        return {}
    raise NotImplementedError
