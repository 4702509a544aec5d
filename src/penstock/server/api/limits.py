"""Free-form JSON inside a body: decoded late, and only when it is small and flat enough.

Decoded JSON is some ten times its text, so schemas and tools are kept as text until their size is
known. Knows no protocol.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from penstock.errors import BadRequest

if TYPE_CHECKING:
    from msgspec import Raw

MAX_NESTING = 64


def check_nesting(value: object, param: str, depth: int = MAX_NESTING) -> None:
    """Refuse free-form JSON that is nested deeper than a template or a schema could need."""
    if depth == 0:
        raise BadRequest(f"`{param}` is nested more than {MAX_NESTING} deep.", param=param)
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            check_nesting(item, param, depth - 1)


def decode_free_form(raw: Raw, param: str, most_bytes: int) -> Any:
    """The value of a field that was kept as text; None where it was left out or null."""
    text = bytes(raw)
    if text in (b"", b"null"):
        return None
    if len(text) > most_bytes:
        raise BadRequest(
            f"`{param}` has {len(text)} bytes; at most {most_bytes} are allowed.", param=param
        )
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        # Only its outline was looked at so far: numbers out of range, text that is no UTF-8.
        raise BadRequest(f"`{param}` is no JSON that can be used.", param=param) from None
    check_nesting(value, param)
    return value
