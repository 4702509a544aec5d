"""`prompt` of /v1/completions (a text, token ids, or a list of either), and other token ids."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from penstock.errors import BadRequest, ContextTooLong
from penstock.server.http.free_form import field_error

Prompt = str | list[str | int | list[int]]
PROMPT_SCHEMA = msgspec.json.schema(Prompt)


@dataclass(frozen=True, slots=True)
class PromptField:
    """Where prompts are, and what a refusal of too many of them says."""

    name: str = "prompt"
    allowed: str = "with this `n` at most {most} are allowed (server.max_choices)"


_PROMPT = PromptField()


def decode_prompt(raw: msgspec.Raw, most: int, window: int, field: PromptField = _PROMPT) -> Prompt:
    """The prompt of a request that may have `most` of them, each at most `window` long; blocking.

    Lists of more ids or texts than could ever be served are refused before they are made: each
    takes twenty times its text.
    """
    text = bytes(raw)
    if text.startswith(b"["):
        _check_length(text, most, window, field)
    try:
        return msgspec.json.decode(text, type=Prompt)  # type: ignore[no-any-return]
    except msgspec.ValidationError as error:
        raise field_error(error, field.name) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        said = f"`{field.name}` is no JSON that can be used."
        raise BadRequest(said, param=field.name) from None


def decode_ids(raw: msgspec.Raw, window: int, param: str) -> list[int]:
    """Token ids of a field that may be left out, at most `window` of them; blocking."""
    text = bytes(raw)
    if text in (b"", b"null"):
        return []
    if (values := text.count(b",") + 1) > window:
        raise ContextTooLong(
            f"`{param}` has {values} token ids; the model's window is {window} tokens.",
            param=param,
            numbers={"reason": "window", "needed_tokens": values, "limit_tokens": window},
        )
    try:
        return msgspec.json.decode(text, type=list[int])
    except msgspec.ValidationError as error:
        raise field_error(error, param) from None


def _check_length(text: bytes, most: int, window: int, field: PromptField) -> None:
    """Refuse too many values, as far as that can be told from their marks."""
    name, allowed = field.name, field.allowed.format(most=most)
    texts = (text.count(b'"') - text.count(b'\\"')) // 2
    if texts > most:
        raise BadRequest(f"`{name}` has {texts} texts; {allowed}.", param=name)
    if texts:
        return  # commas and brackets may be part of them
    lists = text.count(b"[") - 1
    values = text.count(b",") + 1
    if lists > most:
        raise BadRequest(f"`{name}` has {lists} lists of token ids; {allowed}.", param=name)
    if values > max(lists, 1) * window:
        raise ContextTooLong(
            f"`{name}` has {values} token ids; the model's window is {window} tokens.",
            param=name,
            numbers={"reason": "window", "needed_tokens": values, "limit_tokens": window},
        )
