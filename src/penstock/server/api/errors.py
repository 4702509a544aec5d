"""How a refusal looks in the OpenAI protocol: the one place where it is rendered.

It knows `PenstockError` and the shape of an answer, nothing of how the error came about.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from penstock.errors import PenstockError

# OpenAI's `type` is coarser than its `code`.
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    503: "overloaded_error",
    507: "insufficient_memory_error",
}


def error_object(error: PenstockError) -> dict[str, object]:
    """`{"error": {...}}` as OpenAI's clients expect it."""
    content: dict[str, object] = {
        "message": error.message,
        "type": _TYPES.get(error.status, "server_error"),
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
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return headers


def error_event(error: PenstockError) -> bytes:
    """The error as one event of a stream that has already begun."""
    return b"data: " + msgspec.json.encode(error_object(error)) + b"\n\n"
