"""Images of a request before anything runs: checked by their headers, counted, and laid out.

No pixel is decoded here. What an image comes to in tokens is arithmetic over its size and the
model's own processor settings, so that a request is admitted or refused as one of text is.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from penstock.catalog.vision import TYPES, UnfitImage
from penstock.errors import BadRequest
from penstock.images import BadImage, SentImage, read_header
from penstock.wire import Media

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.catalog import Card
    from penstock.catalog.vision import Layout, Vision
    from penstock.config import ModelSettings
    from penstock.text.tokenizer import Tokenizer
    from penstock.wire import Ready, TokenIds

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


def laid_out(prompt: str, pictures: Sequence[Picture], token: str) -> str:
    """The prompt's text with what stands for each image, one image token for each run."""
    pieces = prompt.split(token)
    if len(pieces) != len(pictures) + 1:
        raise BadRequest(
            f"The prompt has {len(pieces) - 1} times {token!r}, which marks an image, for "
            f"{len(pictures)} images: a text of the request has it too, or the model's chat "
            "template has no place for images where they stand.",
            param=pictures[0].where,
        )
    layouts = [picture.layout.text for picture in pictures]
    written = [pieces[0]]
    for layout, piece in zip(layouts, pieces[1:], strict=True):
        written += (layout, piece)
    return "".join(written)


def added_tokens(pictures: Sequence[Picture]) -> int:
    """Tokens of runs beyond the one that is written for each."""
    return sum(picture.layout.tokens - len(picture.layout.runs) for picture in pictures)


def spread(
    ids: TokenIds, pictures: Sequence[Picture], token_id: int
) -> tuple[TokenIds, list[Media]]:
    """Token ids with runs in the place of single image tokens, and where each image's are."""
    runs = [count for picture in pictures for count in picture.layout.runs]
    places = [place for place, token in enumerate(ids) if token == token_id]
    if len(places) != len(runs):
        raise BadRequest(
            "The tokenizer of this model does not read what stands for images as one token each.",
            param=pictures[0].where,
        )
    whole, firsts = array("i"), array("q")
    for (start, end), count in zip(pairwise([*places, len(ids)]), runs, strict=True):
        if not firsts:
            whole.extend(ids[:start])
        firsts.append(len(whole))
        whole.extend(array("i", [token_id]) * count)
        whole.extend(ids[start + 1 : end])
    media, done = [], 0
    for picture in pictures:
        own = range(done, done + len(picture.layout.runs))
        flat = [number for run in own for number in (firsts[run], runs[run])]
        media.append(Media(picture.digest, picture.data, flat, picture.layout.grid, picture.where))
        done = own.stop
    return whole, media


def image_token(tokenizer: Tokenizer, card: Card) -> str:
    """How the model's image token is written."""
    assert card.vision is not None
    token = tokenizer.token(card.vision.token_id)
    if token is None:
        raise BadRequest(
            f"The tokenizer of {card.name!r} does not know the image token "
            f"{card.vision.token_id} of its config.json.",
            param="model",
        )
    return token
