"""Images of a request before anything runs: taken out of messages, counted by their headers.

No pixel is decoded here. What an image comes to in tokens is arithmetic over its size and the
model's own processor settings, so that a request is admitted or refused as one of text is.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from penstock.catalog.vision import TYPES, UnfitImage
from penstock.errors import BadRequest
from penstock.images import BadImage, SentImage, read_header

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.catalog import Card
    from penstock.catalog.vision import Layout, Vision
    from penstock.config import ModelSettings
    from penstock.wire import Ready

_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class Picture:
    """One image, known by its header."""

    data: bytes
    where: str  # the field that has it
    digest: bytes
    width: int  # upright
    height: int
    layout: Layout

    @property
    def pixels(self) -> int:
        """Of it as it is."""
        return self.width * self.height

    def facts(self) -> dict[str, object]:
        """As a plan tells them."""
        return {"width": self.width, "height": self.height, "tokens": self.layout.tokens}


def taken_out(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[SentImage]]:
    """The messages as a template may see them, and their images in order."""
    images: list[SentImage] = []
    shown = []
    for message in messages:
        if isinstance(content := message.get("content"), list):
            images += (part["image"] for part in content if part["type"] == "image")
            parts = [part if part["type"] == "text" else {"type": "image"} for part in content]
            message = {**message, "content": parts}  # noqa: PLW2901 - the client's stays as it was
        shown.append(message)
    return shown, images


def check_taken(card: Card, images: Sequence[SentImage], most: int) -> None:
    """Refuse images that this model does not take, or too many."""
    if not images:
        return
    where = images[0].where
    if card.vision is None:
        kinds = ", ".join(TYPES)
        raise BadRequest(
            f"`{where}` is an image, and the model {card.name!r} takes text only (images are "
            f"served of models of the types {kinds}).",
            param=where,
        )
    if len(images) > most:
        raise BadRequest(
            f"The request has {len(images)} images; at most {most} are allowed "
            "(server.max_images).",
            param=where,
            numbers={"needed": len(images), "limit": most},
        )


def looked_at(
    images: Sequence[SentImage], vision: Vision, token: str, settings: ModelSettings
) -> list[Picture]:
    """The headers of images, their digests and layouts; blocking."""
    size = sum(len(image.data) for image in images)
    if size > settings.image_file_bytes:
        raise BadRequest(
            f"The images of this request are files of {size} bytes together; at most "
            f"{settings.image_file_bytes} are taken (models.image_file_bytes).",
            param=images[0].where,
            numbers={"needed_bytes": size, "limit_bytes": settings.image_file_bytes},
        )
    return [_looked_at(image, vision, token, settings.image_pixels) for image in images]


def _looked_at(image: SentImage, vision: Vision, token: str, most: int) -> Picture:
    try:
        header = read_header(image.data)
        refuse_large(header.pixels, most, image.where, "models.image_pixels")
        width, height = header.upright
        layout = vision.layout(width, height, token)
    except (BadImage, UnfitImage) as error:
        raise BadRequest(f"`{image.where}`: {error}", param=image.where) from None
    digest = blake2b(image.data, digest_size=_DIGEST_BYTES).digest()
    return Picture(image.data, image.where, digest, width, height, layout)


def refuse_large(pixels: int, most: int, where: str, setting: str) -> None:
    """Refuse an image of too many pixels."""
    if pixels > most:
        raise BadRequest(
            f"`{where}`: The image has {pixels} pixels; at most {most} are taken ({setting}).",
            param=where,
            numbers={"needed_pixels": pixels, "limit_pixels": most},
        )


def check_loaded(pictures: Sequence[Picture], ready: Ready) -> None:
    """Refuse what the model as it is loaded does not take."""
    if not pictures:
        return
    first = pictures[0].where
    if not ready.image_pixels:
        raise BadRequest(
            f"`{first}` is an image, and this model is served without: {ready.no_images}.",
            param=first,
        )
    for picture in pictures:
        most = ready.image_pixels
        refuse_large(picture.pixels, most, picture.where, "models.image_pixels, memory.limit")
