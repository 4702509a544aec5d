"""Free-form JSON inside a body: decoded late, and only when it is small and flat enough.

Decoded JSON is some ten times its text, and decoding holds up every other thread while it runs. So
schemas, tools, arguments and lists of ids are kept as text until their size is known. Knows no
protocol.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from msgspec import Meta

from penstock.errors import BadRequest, shortened

if TYPE_CHECKING:
    from msgspec import Raw

Result = TypeVar("Result")

MAX_NESTING = 64
# For what nobody writes much of: template arguments, metadata, a choice of tools.
MAX_SMALL_BYTES = 64 << 10
# The arguments of one call in a history: a file that a tool has written may be among them.
MAX_ARGUMENTS_BYTES = 4 << 20
_NOTHING = (b"", b"null")


def kept_as_text(kind: Any) -> Meta:
    """Describes a field that is kept as text until its size is known."""
    return Meta(extra_json_schema=msgspec.json.schema(kind | None))


def check_nesting(value: object, param: str, depth: int = MAX_NESTING) -> None:
    """Refuse free-form JSON that is nested deeper than a template or a schema could need."""
    if depth == 0:
        raise BadRequest(f"`{param}` is nested more than {MAX_NESTING} deep.", param=param)
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            check_nesting(item, param, depth - 1)


def is_given(raw: Raw) -> bool:
    """Whether a field that was kept as text is there, and not null."""
    return len(memoryview(raw)) > len(b"null") or bytes(raw) not in _NOTHING


def decode_free_form(raw: Raw, param: str, max_bytes: int) -> Any:
    """The value of a field that was kept as text; None where it was left out or null."""
    if not is_given(raw):
        return None
    value = _decode(raw, Any, param, max_bytes)
    check_nesting(value, param)
    return value


def decode_small(
    raw: Raw, kind: type[Result], param: str, max_bytes: int, holds: str = ""
) -> Result | None:
    """The same where its type is known; `holds` says how much of what the bytes are enough for."""
    return _decode(raw, kind, param, max_bytes, holds) if is_given(raw) else None


def field_error(error: msgspec.ValidationError, inside: str = "") -> BadRequest:
    """msgspec's complaint with the field's name where OpenAI's clients look for it."""
    # What it complains about may be repeated in its words; the path comes last.
    text, mark, path = str(error).rpartition(" - at `")
    text, path = (text, path) if mark else (path, "")
    name = path.removesuffix("`").removeprefix("$").replace("[...]", "")
    name = f"{inside}{name}" if inside else name.removeprefix(".")
    where = f"`{name}`" if name else "The body"
    return BadRequest(f"{where}: {text[:1].lower()}{shortened(text[1:], 200)}.", param=name or None)


def _decode(raw: Raw, kind: Any, param: str, max_bytes: int, holds: str = "") -> Any:
    size = len(memoryview(raw))
    if size > max_bytes:
        enough = f", enough for the {holds} that it may have" if holds else ""
        raise BadRequest(
            f"`{param}` has {size} bytes; at most {max_bytes} are allowed{enough}.", param=param
        )
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        raise field_error(error, param) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        # Only its outline was looked at so far: numbers out of range, text that is no UTF-8.
        raise BadRequest(f"`{param}` is no JSON that can be used.", param=param) from None
