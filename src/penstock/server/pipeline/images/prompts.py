"""A prompt with images in it: the text that stands for each, and the runs of tokens in the ids."""

from __future__ import annotations

from array import array
from itertools import pairwise
from typing import TYPE_CHECKING

from penstock.errors import BadRequest
from penstock.wire import Media

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.catalog import Card
    from penstock.server.pipeline.images.pictures import Picture
    from penstock.text.tokenizer import Tokenizer
    from penstock.wire import TokenIds


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
