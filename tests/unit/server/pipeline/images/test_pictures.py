"""Images of a request at the door: taken out of messages, looked at, laid out among the tokens."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from penstock.catalog.vision import Vision
from penstock.catalog.vision.layouts import Patches, Tiles
from penstock.config.model_settings import ModelSettings
from penstock.errors import BadRequest
from penstock.images import SentImage
from penstock.server.pipeline.images import (
    Picture,
    added_tokens,
    check_loaded,
    laid_out,
    looked_at,
    spread,
    taken_out,
)
from penstock.testing import pictures
from penstock.wire import Ready

if TYPE_CHECKING:
    from penstock.catalog.vision.layouts import Cut

TOKEN = 99


def seen(cut: Cut, *sizes: tuple[int, int], **settings: Any) -> list[Picture]:
    sent = [SentImage(pictures.file_of(pictures.noise(*size), "PNG"), "m[0]") for size in sizes]
    vision = Vision("qwen2_vl", TOKEN, cut, "Some")
    return looked_at(sent, vision, "*", replace(ModelSettings(), **settings))


def test_images_leave_the_messages_in_order() -> None:
    one, other = SentImage(b"1", "a"), SentImage(b"2", "b")
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "image", "image": one}]},
        {"role": "assistant", "content": "yes"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "and"}, {"type": "image", "image": other}],
        },
    ]
    shown, images = taken_out(messages)
    assert images == [one, other]
    assert shown[2]["content"] == [{"type": "text", "text": "and"}, {"type": "image"}]
    assert messages[0]["content"][0]["image"] is one


def test_pictures_are_known_by_their_headers() -> None:
    (picture,) = seen(Patches(8, 64, 4096), (40, 24))
    assert picture.facts() == {"width": 40, "height": 24, "tokens": 15}
    assert len(picture.digest) == 16 and picture.layout.grid == (3, 5)


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"image_pixels": 100}, r"960 pixels; at most 100 are taken \(models\.image_pixels\)"),
        ({"image_file_bytes": 100}, r"at most 100 are taken \(models\.image_file_bytes\)"),
    ],
)
def test_limits(limits: dict[str, int], words: str) -> None:
    with pytest.raises(BadRequest, match=words) as refusal:
        seen(Patches(8, 64, 4096), (40, 24), **limits)
    assert refusal.value.param == "m[0]"


def test_runs_take_the_place_of_single_tokens() -> None:
    found = seen(Tiles(32, 3, 64), (40, 40), (64, 30))
    text = laid_out("a*b*c", found, "*")
    assert text.startswith("a<fake_token_around_image><row_1_col_1>*") and text.count("*") == 8
    assert added_tokens(found) == 2 * 8
    # Tokens as a tokenizer would have them: one for each image token, 1 for all else.
    ids = array("i", [1, TOKEN, TOKEN, 1, TOKEN, TOKEN, TOKEN, 1, TOKEN, TOKEN, TOKEN])
    whole, media = spread(ids, found, TOKEN)
    assert len(whole) == len(ids) + added_tokens(found)
    for image, picture in zip(media, found, strict=True):
        assert image.tokens == picture.layout.tokens and image.data == picture.data
        for first, count in zip(image.runs[::2], image.runs[1::2], strict=True):
            assert list(whole[first : first + count]) == [TOKEN] * count
    assert media[0].runs[:4] == [1, 3, 4, 3]
    assert sum(token == 1 for token in whole) == 3


@pytest.mark.parametrize("prompt", ["none", "*", "* and * and *"])
def test_a_text_with_the_mark_of_an_image_is_refused(prompt: str) -> None:
    found = seen(Patches(8, 64, 4096), (40, 24), (40, 24))
    with pytest.raises(BadRequest, match=r"times '\*', which marks an image, for 2 images"):
        laid_out(prompt, found, "*")


def test_a_tokenizer_that_does_not_know_the_mark() -> None:
    found = seen(Patches(8, 64, 4096), (40, 24))
    with pytest.raises(BadRequest, match="does not read what stands for images"):
        spread(array("i", [1, 2, 3]), found, TOKEN)


def ready(**more: Any) -> Ready:
    known: dict[str, Any] = dict.fromkeys(("pid", "weight_bytes", "context", "process_bytes"), 0)
    known |= {"device": "cpu", "dtype": "float32", "load_s": 0.0, "cost": None}
    return Ready(**known, step_bytes=0, step_tokens=0, **more)


def test_what_the_loaded_model_takes() -> None:
    found = seen(Patches(8, 64, 4096), (40, 24))
    check_loaded(found, ready(image_pixels=960))
    check_loaded([], ready())
    with pytest.raises(BadRequest, match="960 pixels; at most 900"):
        check_loaded(found, ready(image_pixels=900))
    with pytest.raises(BadRequest, match="served without: it is on a GPU"):
        check_loaded(found, ready(no_images="it is on a GPU"))
