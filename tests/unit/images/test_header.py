"""Headers of images: what files of every form say of themselves, and files that say nonsense."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from penstock.images import BadImage, read_header
from penstock.testing import pictures

if TYPE_CHECKING:
    import random


@pytest.mark.parametrize(
    ("name", "data"), list(pictures.ordinary()), ids=lambda value: str(value)[:20]
)
def test_headers_say_what_pillow_says(name: str, data: bytes) -> None:
    header = read_header(data)
    with Image.open(io.BytesIO(data)) as image:
        assert (header.format, header.width, header.height) == (image.format, *image.size), name
        assert header.orientation == image.getexif().get(0x0112, 1)
    assert header.pixels == header.width * header.height


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_that_lies_on_its_side_is_told_upright(form: str, orientation: int) -> None:
    image = pictures.noise(7, 3)
    exif = image.getexif()
    exif[0x0112] = orientation
    header = read_header(pictures.file_of(image, form, exif=exif))
    assert header.orientation == orientation
    assert header.upright == ((3, 7) if orientation >= 5 else (7, 3))


@pytest.mark.parametrize("size", [(1, 1), (1, 300), (16383, 2), (123, 45)])
@pytest.mark.parametrize(
    ("form", "options"), [("WEBP", {}), ("WEBP", {"lossless": True}), ("PNG", {})]
)
def test_sizes(size: tuple[int, int], form: str, options: dict[str, bool]) -> None:
    header = read_header(pictures.file_of(Image.new("RGB", size), form, **options))
    assert (header.width, header.height) == size


CAUGHT = {"a bomb", "a strip"}  # by limits, which are not the header's


@pytest.mark.parametrize(
    ("name", "data", "words"), list(pictures.hostile()), ids=lambda value: str(value)[:20]
)
def test_hostile_files(name: str, data: bytes, words: str) -> None:
    if words == "cannot be decoded" or name in CAUGHT:
        read_header(data)
        return
    with pytest.raises(BadImage, match=words):
        read_header(data)


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from([data for _, data in pictures.ordinary()]), st.randoms(use_true_random=False)
)
def test_broken_files_are_refused_or_read_and_nothing_else(
    data: bytes, source: random.Random
) -> None:
    broken = bytearray(data[: source.randint(0, min(len(data), 400))])
    for _ in range(source.randint(0, 6)):
        if broken:
            broken[source.randrange(len(broken))] = source.randrange(256)
    try:
        header = read_header(bytes(broken))
    except BadImage as error:
        assert str(error).endswith(".")
    else:
        assert header.width > 0 and header.height > 0 and 1 <= header.orientation <= 8
