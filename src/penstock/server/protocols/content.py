"""The content of a message, the same for all protocols: a list of parts.

Every protocol turns its own parts into these. Texts and images are served; what else there may be
is refused here, and nowhere else, with the field that has it. Whether a model takes images is asked
behind this, where the model is known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.errors import BadRequest
from penstock.images import BadImage, SentImage, from_base64, from_url

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True, slots=True)
class TextContent:
    """A piece of text."""

    text: str


@dataclass(frozen=True, slots=True)
class MediaContent:
    """A sound, a film, a document, or an image where none may stand."""

    kind: str  # as the protocol calls it
    where: str  # the field that has it


ContentPart = TextContent | MediaContent | SentImage
# What a template is given: text, or parts of which some are images.
TemplateContent = str | list[dict[str, Any]]


def template_content(parts: Iterable[ContentPart]) -> TemplateContent:
    """The content as a chat template is given it, with images as they came among the parts."""
    found: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, MediaContent):
            raise BadRequest(
                f"`{part.where}` is of the type {part.kind!r}, which is not served; send text, or "
                "images to a model that takes them.",
                param=part.where,
            )
        if isinstance(part, TextContent):
            found.append({"type": "text", "text": part.text})
        else:
            found.append({"type": "image", "image": part})
    if any(part["type"] == "image" for part in found):
        return found
    return "\n".join(part["text"] for part in found)


def text_content(parts: Iterable[ContentPart]) -> str:
    """The same where only text may stand."""
    content = template_content(parts)
    if isinstance(content, str):
        return content
    image: SentImage = next(part["image"] for part in content if part["type"] == "image")
    raise BadRequest(
        f"`{image.where}` is an image; images are taken in messages of the role user.",
        param=image.where,
    )


def image_from_url(url: str, where: str) -> SentImage:
    """The image of a data URL."""
    try:
        return SentImage(from_url(url), where)
    except BadImage as error:
        raise BadRequest(f"`{where}`: {error}", param=where) from None


def image_from_base64(content: str, where: str) -> SentImage:
    """The same of base64, or of a data URL where clients write one all the same."""
    if content[:5].lower() == "data:":
        return image_from_url(content, where)
    try:
        return SentImage(from_base64(content), where)
    except BadImage as error:
        raise BadRequest(f"`{where}`: {error}", param=where) from None
