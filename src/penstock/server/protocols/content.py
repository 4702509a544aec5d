"""The content of a message, the same for all protocols: a list of parts.

Every protocol turns its own parts into these. Only text is served now; what else there may be is
refused here, and nowhere else, with the field that has it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.errors import BadRequest

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True, slots=True)
class TextContent:
    """A piece of text."""

    text: str


@dataclass(frozen=True, slots=True)
class MediaContent:
    """An image, a sound, a film or a document."""

    kind: str  # as the protocol calls it
    where: str  # the field that has it


ContentPart = TextContent | MediaContent


def template_content(parts: Iterable[ContentPart]) -> str:
    """The content as a chat template is given it."""
    texts: list[str] = []
    for part in parts:
        if isinstance(part, MediaContent):
            raise BadRequest(
                f"`{part.where}` is of the type {part.kind!r}; this model takes text only.",
                param=part.where,
            )
        texts.append(part.text)
    return "\n".join(texts)
