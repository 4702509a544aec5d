"""How a refusal looks in each protocol: the one place where it is rendered.

It knows `PenstockError` and the shape of an answer, nothing of how the error came about.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

import msgspec

from penstock.errors import ContextTooLong, MethodNotAllowed, NoThreads

if TYPE_CHECKING:
    from penstock.errors import PenstockError


class ErrorStyle(Protocol):
    """A protocol's way to refuse."""

    name: str

    def status(self, error: PenstockError) -> int:
        """The HTTP status."""

    def body(self, error: PenstockError, request_id: str) -> dict[str, object]:
        """The JSON document of a refusal before the first byte."""

    def event(self, error: PenstockError, request_id: str) -> bytes:
        """The same as one event of a stream that has already begun."""


def event(content: object, name: str | None = None) -> bytes:
    """One server-sent event."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + msgspec.json.encode(content) + b"\n\n"


# OpenAI's `type` is coarser than its `code`.
_OPENAI_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    499: "request_cancelled",
    503: "overloaded_error",
    507: "insufficient_memory_error",
}


class _OpenAI:
    """`{"error": {...}}`."""

    name = "openai"

    def status(self, error: PenstockError) -> int:
        return error.status

    def body(self, error: PenstockError, request_id: str) -> dict[str, object]:
        return error_object(error)

    def event(self, error: PenstockError, request_id: str) -> bytes:
        return event(error_object(error))


class _Anthropic:
    """`{"type": "error", "error": {...}, "request_id": ...}`, with statuses of its own."""

    name = "anthropic"

    def status(self, error: PenstockError) -> int:
        return error.anthropic[0]

    def body(self, error: PenstockError, request_id: str) -> dict[str, object]:
        content: dict[str, object] = {
            "type": error.anthropic[1],
            "message": _anthropic_message(error),
        }
        if error.numbers is not None:
            content["penstock"] = error.numbers
        if isinstance(error, NoThreads):
            # By this their client knows that it has to send the whole conversation every time.
            content["details"] = {"error_code": "thread_unsupported_request"}
        return {"type": "error", "error": content, "request_id": request_id}

    def event(self, error: PenstockError, request_id: str) -> bytes:
        return event(self.body(error, request_id), "error")


def _anthropic_message(error: PenstockError) -> str:
    # Clients look for these words and numbers to know that the conversation must be shortened.
    if isinstance(error, ContextTooLong) and error.numbers is not None:
        needed, limit = error.numbers["needed_tokens"], error.numbers["limit_tokens"]
        return f"prompt is too long: {needed} tokens > {limit} maximum. {error.message}"
    return error.message


class _Ollama:
    """`{"error": "..."}`, and one line of it in a stream."""

    name = "ollama"

    def status(self, error: PenstockError) -> int:
        return error.status

    def body(self, error: PenstockError, request_id: str) -> dict[str, object]:
        return {"error": error.message}

    def event(self, error: PenstockError, request_id: str) -> bytes:
        return msgspec.json.encode({"error": error.message}) + b"\n"


OPENAI: ErrorStyle = _OpenAI()
ANTHROPIC: ErrorStyle = _Anthropic()
OLLAMA: ErrorStyle = _Ollama()


def error_object(error: PenstockError) -> dict[str, object]:
    """`{"error": {...}}` as OpenAI's clients expect it."""
    content: dict[str, object] = {
        "message": error.message,
        "type": _OPENAI_TYPES.get(error.status, "server_error"),
        "param": error.param,
        "code": error.code,
    }
    if error.numbers is not None:
        content["penstock"] = error.numbers
    return {"error": content}


def error_headers(error: PenstockError) -> dict[str, str]:
    """Headers that tell a client whether and when to come back."""
    headers: dict[str, str] = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    if error.status == 507:
        headers["x-should-retry"] = "false"
    if isinstance(error, MethodNotAllowed):
        headers["allow"] = ", ".join(error.allowed)
    if error.status in (408, 413):
        headers["connection"] = "close"  # the rest of the body is not wanted
    if error.status == 415:
        headers["accept-encoding"] = "gzip, deflate"
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return headers
