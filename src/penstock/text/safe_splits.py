"""Where a long text may be cut without changing its tokens, and how few tokens it can have.

Both follow from what `tokenizer.json` says and hold only for byte-level BPE, which keeps every
byte of a text. Cutting matters because the library takes some hundred bytes for each byte of a
text while it works on it. Knows the file's format, no requests.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

PIECE_CHARS = 4 << 10  # some milliseconds of work

# In all of these a run of letters or digits ends at a space, and the space belongs to what comes
# after it or stands alone: so between two of them a new word begins before a single space, and BPE
# never joins tokens over words.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WORDS = frozenset({_GPT2, _LLAMA3, _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")})
_SPLIT = re.compile(r"[A-Za-z0-9](?= [A-Za-z0-9])")


class _Kind(msgspec.Struct):
    type: str | None = None


class Spec(msgspec.Struct):
    """The parts of `tokenizer.json` that are read; the rest, often 10 MB of it, is skipped."""

    model: _Kind = msgspec.field(default_factory=_Kind)
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None
    added_tokens: list[dict[str, Any]] | None = None
    decoder: dict[str, Any] | None = None


def pieces(text: str, chars: int = PIECE_CHARS) -> Iterator[str]:
    """The text in pieces of about so many characters, longer only where it cannot be split."""
    return (text[start:end] for start, end in _spans(text, chars))


def longest_piece(text: str) -> int:
    """Characters of the longest of the pieces."""
    return max(end - start for start, end in _spans(text, PIECE_CHARS))


def _spans(text: str, chars: int) -> Iterator[tuple[int, int]]:
    start = 0
    while len(text) - start > chars:
        split = _SPLIT.search(text, start + chars // 2)
        if split is None:
            break
        yield start, split.end()
        start = split.end()
    yield start, len(text)


def can_be_split(spec: Spec) -> bool:
    """Whether `pieces` of a text have the text's tokens, one after the other."""
    if not _keeps_bytes(spec) or any(" " in token["content"] for token in _added(spec)):
        return False
    steps = _steps(spec)
    by_words = [
        step
        for step in steps
        if (step["type"] == "ByteLevel" and step.get("use_regex", True))
        or (step["type"] == "Split" and step.get("pattern", {}).get("Regex") in _WORDS)
    ]
    # A space put before the text would be put before each piece.
    return bool(by_words) and not any(step.get("add_prefix_space") for step in steps)


def longest_token_bytes(spec: Spec, vocabulary: Iterable[str]) -> int | None:
    """The most bytes of text that one token can stand for; None if there is no such bound."""
    if not _keeps_bytes(spec):
        return None
    # In a byte-level vocabulary each character of a token stands for one byte.
    added = (len(token["content"].encode()) for token in _added(spec))
    return max(max(map(len, vocabulary), default=0), max(added, default=0)) or None


def _keeps_bytes(spec: Spec) -> bool:
    steps = _steps(spec)
    return (
        spec.model.type == "BPE"
        and spec.normalizer is None
        and any(step["type"] == "ByteLevel" for step in steps)
        and all(step["type"] in {"ByteLevel", "Digits", "Split"} for step in steps)
        and not any(step.get("behavior") == "Removed" for step in steps)
        # These take any amount of space around them into one token.
        and not any(token.get("lstrip") or token.get("rstrip") for token in _added(spec))
    )


def _steps(spec: Spec) -> list[dict[str, Any]]:
    step = spec.pre_tokenizer
    if step is None:
        return []
    steps: list[dict[str, Any]] = step["pretokenizers"] if step["type"] == "Sequence" else [step]
    return steps


def _added(spec: Spec) -> list[dict[str, Any]]:
    return spec.added_tokens or []
