"""Every refusal penstock can give, in one place; a protocol only renders them.

    PenstockError
    ├── BadRequest            400  a field, an image, a model of the wrong kind
    │   ├── ContextTooLong    400  the prompt can never fit (window or memory)
    │   └── NoThreads         400  a conversation that the server is to keep
    ├── Unauthorized          401
    ├── Forbidden             403  a Host or Origin that this server does not answer to, or no admin
    ├── UnknownModel          404
    ├── UnknownResponse       404  no stored response of that id
    ├── UnknownRoute          404  no such address
    ├── MethodNotAllowed      405
    ├── BodyTooSlow           408  the body did not come in time
    ├── BodyTooLarge          413
    ├── Cancelled             499  an operator has ended the request
    ├── UnknownEncoding       415  a body compressed in a way that is not understood
    ├── Overloaded            503  queue full or deadline passed
    ├── WorkerLost            503  the model's process died before the first byte
    ├── StoreUnavailable      507  responses cannot be stored: the disk is full or read-only
    ├── ModelTooLarge         507  can never be loaded under the limit
    ├── ModelUnusable         400  the files cannot be served (unreadable, unknown architecture)
    ├── PullFailed            502  a model could not be fetched or stored
    ├── QuantizeFailed        507  a quantised model could not be made or stored
    └── InternalError         500  our own fault

A message is a sentence the reader can act on: what happened, the numbers, the knob.
"""

from __future__ import annotations

from typing import Any, ClassVar

# No sentence of ours is longer; what is was made so by a client's own words.
_MAX_CHARACTERS = 4000


def shortened(text: str, most: int = 80) -> str:
    """What a client sent, as far as it can be repeated to it and in logs."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


class PenstockError(Exception):
    """A refusal with a status, a code of the error table, and a sentence."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    # Anthropic's words for the same thing: (status, type).
    anthropic: ClassVar[tuple[int, str]] = (500, "api_error")

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        numbers: dict[str, Any] | None = None,
    ) -> None:
        message = shortened(message, _MAX_CHARACTERS)
        super().__init__(message)
        self.message = message
        self.param = None if param is None else shortened(param)
        self.retry_after_s = retry_after_s
        # The `penstock` object inside `error`: reason, domain, needed_* and limit_*.
        self.numbers = numbers


class BadRequest(PenstockError):  # noqa: N818 - named for what the client did
    """A field, an image or a model kind that cannot be used; `param` names it."""

    status = 400
    code = "invalid_request_error"
    anthropic = (400, "invalid_request_error")


class ContextTooLong(BadRequest):
    """The prompt can never fit, by window or by memory."""

    code = "context_length_exceeded"


class NoThreads(BadRequest):
    """The client wants the server to keep the conversation between turns."""


class ModelUnusable(BadRequest):
    """The model's files cannot be served: unreadable, incomplete or of an unknown architecture."""


class Unauthorized(PenstockError):  # noqa: N818
    """The API key is missing or wrong."""

    status = 401
    code = "invalid_api_key"
    anthropic = (401, "authentication_error")


class Forbidden(PenstockError):  # noqa: N818
    """A Host or Origin header that this server does not answer to."""

    status = 403
    code = "forbidden"
    anthropic = (403, "permission_error")


class UnknownModel(PenstockError):  # noqa: N818
    """No model of that name; the message lists the known ones."""

    status = 404
    code = "model_not_found"
    anthropic = (404, "not_found_error")


class UnknownResponse(PenstockError):  # noqa: N818
    """No stored response of that id, or it is another's."""

    status = 404
    code = "response_not_found"
    anthropic = (404, "not_found_error")


class UnknownRoute(PenstockError):  # noqa: N818
    """There is nothing at that address."""

    status = 404
    code = "not_found"
    anthropic = (404, "not_found_error")


class MethodNotAllowed(PenstockError):  # noqa: N818
    """The address exists, but not for that method; `allowed` are those it is for."""

    status = 405
    code = "method_not_allowed"
    anthropic = (405, "invalid_request_error")

    def __init__(self, message: str, allowed: list[str]) -> None:
        super().__init__(message)
        self.allowed = allowed


class BodyTooSlow(PenstockError):  # noqa: N818
    """The request body did not come in time."""

    status = 408
    code = "request_timeout"
    anthropic = (408, "timeout_error")


class UnknownEncoding(PenstockError):  # noqa: N818
    """The request body is compressed in a way that is not understood."""

    status = 415
    code = "unsupported_encoding"
    anthropic = (415, "invalid_request_error")


class BodyTooLarge(PenstockError):  # noqa: N818
    """The request body is over the limit."""

    status = 413
    code = "request_too_large"
    anthropic = (413, "request_too_large")


class Cancelled(PenstockError):  # noqa: N818
    """An operator has ended the request; no client should send it again by itself."""

    status = 499
    code = "cancelled"
    anthropic = (499, "api_error")


class Overloaded(PenstockError):  # noqa: N818
    """The queue is full or a deadline passed; `retry_after_s` says when to come back."""

    status = 503
    code = "overloaded"
    anthropic = (529, "overloaded_error")


class WorkerLost(PenstockError):  # noqa: N818
    """The model's process died before the first byte, and so did the retry."""

    status = 503
    code = "worker_restarted"
    anthropic = (529, "overloaded_error")


class ModelTooLarge(PenstockError):  # noqa: N818
    """The model can never be loaded under the memory limit."""

    status = 507
    code = "model_exceeds_memory"
    anthropic = (507, "api_error")


class StoreUnavailable(PenstockError):  # noqa: N818
    """Stored responses cannot be written or read: the disk is full, read-only or damaged."""

    status = 507
    code = "storage_unavailable"
    anthropic = (507, "api_error")


class PullFailed(PenstockError):  # noqa: N818
    """A model could not be fetched or stored: no network, no such package, no room."""

    status = 502
    code = "pull_failed"


class QuantizeFailed(PenstockError):  # noqa: N818
    """A quantised model could not be made: no room for it, or its name is taken."""

    status = 507
    code = "quantize_failed"


class InternalError(PenstockError):
    """Our own fault; the log has the rest under the request's id."""


def by_code(code: str) -> type[PenstockError]:
    """The class for a code that came over the wire."""
    return _BY_CODE.get(code, InternalError)


_BY_CODE: dict[str, type[PenstockError]] = {
    kind.code: kind
    for kind in (
        BadRequest,
        ContextTooLong,
        Unauthorized,
        UnknownModel,
        BodyTooLarge,
        Overloaded,
        WorkerLost,
        ModelTooLarge,
        PullFailed,
        QuantizeFailed,
        InternalError,
    )
}
