"""Every route of the server, in one table: what answers, how it is described and how it refuses.

The application finds its endpoints and the style of errors here, and so does `/openapi.json`. Knows
addresses and types of bodies, not who may come in.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from starlette.routing import Route as Pattern

from penstock.server.admin import (
    cache,
    live,
    plan_route,
    residents,
    settings,
    status,
    stream,
    tasks,
)
from penstock.server.http import openapi
from penstock.server.http.errors import ANTHROPIC, OLLAMA, OPENAI
from penstock.server.http.openapi import JSON, Route
from penstock.server.protocols.anthropic import messages as anthropic
from penstock.server.protocols.anthropic.fields import CountFields, MessagesFields
from penstock.server.protocols.encoders import embeddings, rerank, score
from penstock.server.protocols.ollama import embed as ollama_embed
from penstock.server.protocols.ollama import models as ollama_models
from penstock.server.protocols.ollama import pull as ollama_pull
from penstock.server.protocols.ollama import routes as ollama
from penstock.server.protocols.ollama.fields import OllamaChatFields, OllamaGenerateFields
from penstock.server.protocols.openai import chat, completions, models, responses, tokenize
from penstock.server.protocols.openai.responses_fields import ResponseFields
from penstock.server.web import assets, session

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.server.http.errors import ErrorStyle
    from penstock.server.http.exchange import Exchange
    from penstock.server.http.openapi import Endpoint
    from penstock.server.protocols.services import Services

EVENTS = "text/event-stream"
LINES = "application/x-ndjson"
TEXT = "text/plain"


def _object(**fields: Any) -> dict[str, Any]:
    """An object with at least these fields."""
    return {"type": "object", "properties": fields, "required": list(fields)}


_TEXT, _NUMBER, _FLAG = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}
_LIST, _ANY = {"type": "array"}, {"type": "object"}
_CHOICES = _object(
    id=_TEXT, object=_TEXT, created=_NUMBER, model=_TEXT, system_fingerprint=_TEXT, choices=_LIST
)
_RESPONSE = _object(id=_TEXT, object=_TEXT, created_at=_NUMBER, status=_TEXT, output=_LIST)
_MESSAGE = _object(id=_TEXT, type=_TEXT, role=_TEXT, content=_LIST, usage=_ANY)
_OLLAMA = _object(model=_TEXT, created_at=_TEXT, done=_FLAG)
_RESIDENT = _object(name=_TEXT, state=_TEXT, bytes=_NUMBER, pinned=_FLAG, leases=_NUMBER)
_MODEL = _object(id=_TEXT, object=_TEXT, created=_NUMBER, owned_by=_TEXT, max_model_len=_NUMBER)
_TASK = _object(id=_TEXT, kind=_TEXT, state=_TEXT, done=_NUMBER, total=_NUMBER)
_STATUS = _object(status=_TEXT)
_SESSION = _object(version=_TEXT, dashboard=_TEXT, needs_key=_FLAG)
_VECTORS = _object(object=_TEXT, data=_LIST, model=_TEXT, usage=_ANY)
_RANKED = _object(id=_TEXT, model=_TEXT, results=_LIST, usage=_ANY, meta=_ANY)
_NEVER: dict[str, Any] = {"not": {}}  # always refused


async def _describe(exchange: Exchange, services: Services) -> None:
    await exchange.send_bytes(_description(), JSON)


@lru_cache(1)
def _description() -> bytes:
    return openapi.describe(ROUTES)


def _refusing_in(styles: tuple[ErrorStyle, ...], *routes: Route) -> Iterator[Route]:
    return (replace(route, styles=styles) for route in routes)


ROUTES: tuple[Route, ...] = (
    # --- the server itself
    Route("GET", "/", assets.front_page, "What this server is; for browsers, its page", _TEXT,
          media_type=TEXT),
    Route("GET", "/web/session", session.show, "What a browser may do here", _SESSION),
    Route("POST", "/web/session", session.sign_in, "Take a cookie for a key", _SESSION,
          session.KeyFields),
    Route("DELETE", "/web/session", session.sign_out, "Give the cookie back", _SESSION),
    Route("GET", "/web/{path:path}", assets.asset, "A file of the page", _TEXT, media_type=TEXT),
    Route("GET", "/health", status.health, "Whether the server is alive", _STATUS),
    Route("GET", "/ready", status.ready, "Whether every loaded model runs a step now", _STATUS),
    Route("GET", "/metrics", status.metrics, "Figures for Prometheus", _TEXT, media_type=TEXT),
    Route("GET", "/openapi.json", _describe, "This description", _object(openapi=_TEXT)),
    # --- operators
    Route("GET", "/admin/api/models", residents.resident_models,
          "The models in memory, and those on their way", {"type": "array", "items": _RESIDENT}),
    Route("POST", "/admin/api/models/{id:path}/load", residents.load,
          "Have a model ready; streamed, as it goes",
          _RESIDENT, residents.LoadFields, EVENTS, needs_body=False),
    Route("POST", "/admin/api/models/{id:path}/unload", residents.unload, "End a model's process",
          _object(name=_TEXT, unloaded=_FLAG), residents.UnloadFields, needs_body=False),
    Route("POST", "/admin/api/models/{id:path}/pin", residents.pin, "Keep a model, or no longer",
          _object(name=_TEXT, pinned=_FLAG), residents.PinFields, needs_body=False),
    Route("POST", "/admin/api/reload", status.reread_settings, "Read the settings again",
          _object(applied=_LIST, reload=_ANY, restart=_LIST)),
    Route("GET", "/admin/api/memory", status.memory, "Who holds what", _object(requests=_ANY)),
    Route("POST", "/admin/api/memory/reset", status.reset_memory,
          "Forget by how much processes exceeded their estimates", _STATUS),
    Route("GET", "/admin/api/stream", stream.stream, "Rows of all that is below, as it happens",
          _TEXT, stream=EVENTS, media_type=EVENTS),
    Route("GET", "/admin/api/requests", live.live_requests, "The requests in hand", _LIST),
    Route("POST", "/admin/api/requests/{id}/cancel", live.cancel_request, "End a request",
          _object(id=_TEXT, cancelled=_FLAG)),
    Route("GET", "/admin/api/refusals", live.refusals, "The latest refusals for lack of room",
          _LIST),
    Route("GET", "/admin/api/timeline", live.timeline, "Memory over the last 15 minutes",
          _object(step_s=_NUMBER, points=_LIST)),
    Route("GET", "/admin/api/events", status.events, "What happened to models and memory", _LIST),
    Route("GET", "/admin/api/settings", settings.show, "Every setting, its origin and its use",
          _object(settings=_LIST)),
    Route("PATCH", "/admin/api/settings", settings.change, "Change settings until the server ends",
          _object(applied=_LIST, reload=_ANY, restart=_LIST), settings.SettingsFields),
    Route("GET", "/admin/api/tasks", tasks.list_tasks, "Long work, and how far it is", _LIST),
    Route("POST", "/admin/api/tasks", tasks.begin,
          "Pull or quantise a model, check or empty the cache, bench", _TASK, tasks.TaskFields),
    Route("GET", "/admin/api/tasks/{id}", tasks.show, "One of them", _TASK),
    Route("POST", "/admin/api/tasks/{id}/cancel", tasks.cancel, "End one of them",
          _object(id=_TEXT, cancelled=_FLAG)),
    Route("GET", "/admin/api/cache", cache.stats, "KV on disk, and what models found of it",
          _object(dir=_TEXT, held_bytes=_NUMBER, models=_LIST, loaded=_ANY)),
    Route("GET", "/admin/api/catalog", cache.catalog, "The models on disk",
          _object(models=_LIST, problems=_ANY)),
    Route("GET", "/admin/api/plan", plan_route.plan_model, "What a model would need", _ANY),
    # --- OpenAI
    Route("POST", "/v1/plan", plan_route.plan_request,
          "What a request would need, without running it",
          _object(object=_TEXT, verdict=_TEXT), chat.ChatFields),
    *_refusing_in(
        (OPENAI, ANTHROPIC),
        Route("GET", "/v1/models", models.list_models, "The models that can be asked",
              _object(data={"type": "array", "items": _object(id=_TEXT)})),
        Route("GET", "/v1/models/{id:path}", models.show_model, "One of them", _MODEL),
    ),
    Route("POST", "/v1/chat/completions", chat.chat_completions,
          "The next message of a conversation (OpenAI)", _CHOICES, chat.ChatFields, EVENTS),
    Route("POST", "/v1/completions", completions.completions, "What follows a text (OpenAI)",
          _CHOICES, completions.CompletionFields, EVENTS),
    Route("POST", "/v1/responses", responses.create, "An answer as items, stored (OpenAI)",
          _RESPONSE, ResponseFields, EVENTS),
    Route("POST", "/v1/responses/input_tokens", responses.input_tokens,
          "How many tokens the input of a response comes to",
          _object(object=_TEXT, input_tokens=_NUMBER), ResponseFields),
    Route("GET", "/v1/responses/{id}", responses.retrieve, "A stored answer", _RESPONSE),
    Route("DELETE", "/v1/responses/{id}", responses.delete, "Forget a stored answer",
          _object(id=_TEXT, deleted=_FLAG)),
    Route("POST", "/v1/responses/{id}/cancel", responses.cancel,
          "Stop an answer in the background", _RESPONSE),
    Route("GET", "/v1/responses/{id}/input_items", responses.input_items,
          "What a stored answer was asked", _object(object=_TEXT, data=_LIST)),
    Route("POST", "/v1/embeddings", embeddings.embeddings, "A vector of each text (OpenAI)",
          _VECTORS, embeddings.EmbeddingFields),
    # --- Cohere, Jina
    *(
        Route("POST", path, rerank.rerank, "Documents by how well they go with a query",
              _RANKED, rerank.RerankFields)
        for path in ("/v1/rerank", "/v2/rerank")
    ),
    # --- vLLM and llama.cpp
    Route("POST", "/v1/score", score.score, "How well texts go together (vLLM)",
          _object(id=_TEXT, object=_TEXT, data=_LIST, model=_TEXT, usage=_ANY), score.ScoreFields),
    Route("POST", "/tokenize", tokenize.tokenize, "The token ids of a text or a conversation",
          _object(tokens=_LIST), tokenize.TokenizeFields),
    Route("POST", "/detokenize", tokenize.detokenize, "The text of token ids",
          _object(prompt=_TEXT, content=_TEXT), tokenize.DetokenizeFields),
    # --- Anthropic
    *_refusing_in(
        (ANTHROPIC,),
        Route("POST", "/v1/messages", anthropic.messages,
              "The next message of a conversation (Anthropic)", _MESSAGE, MessagesFields, EVENTS),
        Route("POST", "/v1/messages/count_tokens", anthropic.count_tokens,
              "How many tokens a conversation comes to", _object(input_tokens=_NUMBER),
              CountFields),
    ),
    # --- Ollama
    *_refusing_in(
        (OLLAMA,),
        Route("POST", "/api/chat", ollama.chat, "The next message of a conversation (Ollama)",
              _OLLAMA, OllamaChatFields, LINES),
        Route("POST", "/api/generate", ollama.generate, "An answer to a text (Ollama)",
              _OLLAMA, OllamaGenerateFields, LINES),
        Route("POST", "/api/embed", ollama_embed.embed, "A vector of each text (Ollama)",
              _object(model=_TEXT, embeddings=_LIST), ollama_embed.EmbedFields),
        Route("POST", "/api/embeddings", ollama_embed.old_embeddings,
              "A vector of one text (Ollama, older)", _object(embedding=_LIST),
              ollama_embed.OldEmbedFields),
        Route("GET", "/api/tags", ollama_models.tags, "The models that can be asked (Ollama)",
              _object(models=_LIST)),
        Route("GET", "/api/ps", ollama_models.ps, "The models in memory (Ollama)",
              _object(models=_LIST)),
        Route("POST", "/api/show", ollama_models.show, "What is known of a model (Ollama)",
              _object(details=_ANY, model_info=_ANY, capabilities=_LIST), ollama_models.ShowFields),
        Route("GET", "/api/version", ollama_models.version, "Which server this is (Ollama)",
              _object(version=_TEXT)),
        Route("POST", "/api/pull", ollama_pull.pull, "Fetch a model (Ollama)",
              _STATUS, ollama_pull.PullFields, LINES),
        *(
            Route(method, path, ollama_models.refuser(sentence), f"Not offered: {sentence}", _NEVER)
            for (method, path), sentence in ollama_models.NOT_OFFERED.items()
        ),
    ),
)  # fmt: skip


def _first(path: str) -> str:
    return path.partition("/")[2].partition("/")[0]


# What may be called without the `/v1` before it, as some clients do.
_UNDER_V1 = {_first(route.path[3:]) for route in ROUTES if route.path.startswith("/v1/")} - {
    _first(route.path) for route in ROUTES
}


def canonical_path(path: str) -> str:
    """The address as it stands in the table: without slashes at its end, with `/v1` before it."""
    path = path.rstrip("/") or "/"
    return f"/v1{path}" if _first(path) in _UNDER_V1 else path


async def _unused(_: object) -> None:
    """Starlette's routes are used for matching only."""


_ROWS = [(Pattern(row.path, _unused, methods=[row.method]), row.endpoint) for row in ROUTES]
_FIXED = {
    row.path: [pair for pair in _ROWS if pair[0].path == row.path]
    for row in ROUTES
    if "{" not in row.path
}


def rows_at(path: str) -> Sequence[tuple[Pattern, Endpoint]]:
    """The rows that may match an address. One that stands in the table as it is has only its own
    methods, and none of a pattern that would match it too."""
    return _FIXED.get(path, _ROWS)


_USUAL = (OPENAI,)


def _styles_by_prefix() -> dict[str, tuple[ErrorStyle, ...]]:
    """Beginnings of addresses whose routes all refuse alike, and not in the usual style."""
    found: dict[str, set[tuple[ErrorStyle, ...]]] = {}
    for route in ROUTES:
        parts = route.path.split("/")
        for end in range(2, len(parts) + 1):
            found.setdefault("/".join(parts[:end]), set()).add(route.styles)
    return {
        f"{prefix}/": styles.pop()
        for prefix, styles in found.items()
        if len(styles) == 1 and _USUAL not in styles
    }


_STYLES = _styles_by_prefix()


def style_of(path: str, *, anthropic: bool = False) -> ErrorStyle:
    """How a request to an address is refused, whether or not there is anything there: as the routes
    that begin alike do. Where two protocols share it, `anthropic` says that the client speaks
    theirs."""
    whole = f"{path}/"
    found = (styles for prefix, styles in _STYLES.items() if whole.startswith(prefix))
    styles = next(found, _USUAL)
    return styles[-1 if anthropic else 0]
