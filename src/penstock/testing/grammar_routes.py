"""The same form of an answer as every protocol asks for it: an address and a body.

`hostile_grammars` makes a chat's fields; here they become whole requests. Not every protocol can
say everything: Ollama's and Anthropic's have schemas and tools alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.testing.hostile_grammars import any_grammar

if TYPE_CHECKING:
    from random import Random

Request = tuple[str, dict[str, Any]]
CHAT = "/v1/chat/completions"
_TOKENS = 8
_TEXT = "Tell me about the sea."
_MESSAGES = [{"role": "user", "content": _TEXT}]


def requests_with(model: str, fields: dict[str, Any]) -> list[Request]:
    """One request for each route that can ask for it; the first is the chat."""
    asked = {"model": model, "max_tokens": _TOKENS}
    found: list[Request] = [(CHAT, {**asked, "messages": _MESSAGES, **fields})]
    if "tools" in fields:
        return [*found, *_with_tools(asked, fields)]
    found.append(("/v1/completions", {**asked, "prompt": _TEXT, **fields}))
    schema = fields.get("response_format", {}).get("json_schema", {}).get("schema")
    return found if schema is None else [*found, *_with_schema(asked, schema)]


def any_request(model: str, random: Random) -> Request:
    """Any form, by any route."""
    return random.choice(requests_with(model, any_grammar(random)))


def _with_schema(asked: dict[str, Any], schema: Any) -> list[Request]:
    ollama = {"model": asked["model"], "stream": False, "options": {"num_predict": _TOKENS}}
    form = {"type": "json_schema", "name": "x", "schema": schema}
    tool = {"name": "x", "input_schema": schema}
    return [
        ("/api/chat", {**ollama, "messages": _MESSAGES, "format": schema}),
        ("/api/generate", {**ollama, "prompt": _TEXT, "format": schema}),
        ("/v1/responses", {**_responses(asked), "text": {"format": form}}),
        (
            "/v1/messages",
            {**asked, "messages": _MESSAGES, "tools": [tool], "tool_choice": {"type": "any"}},
        ),
    ]


def _with_tools(asked: dict[str, Any], fields: dict[str, Any]) -> list[Request]:
    functions = [tool["function"] for tool in fields["tools"]]
    tools = [{"name": one["name"], "input_schema": one["parameters"]} for one in functions]
    own = [{"type": "function", **one} for one in functions]
    return [
        (
            "/v1/messages",
            {**asked, "messages": _MESSAGES, "tools": tools, "tool_choice": {"type": "any"}},
        ),
        ("/v1/responses", {**_responses(asked), "tools": own, "tool_choice": "required"}),
    ]


def _responses(asked: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": asked["model"],
        "max_output_tokens": max(asked["max_tokens"], 16),
        "input": _TEXT,
        "store": False,
    }
