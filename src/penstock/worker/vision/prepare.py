"""From an image's file to what an encoder takes: decoded, turned upright, cut by the model's own
processor.

Pixels are prepared by transformers' processors in their Pillow form, whatever else is installed: in
another they differ a little, and so would KV. Runs on the device thread between two steps, within
the memory that a profile has measured for the largest image.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image, UnidentifiedImageError

from penstock.catalog.vision import UnfitImage
from penstock.errors import ModelUnusable
from penstock.images import BadImage, read_header

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from torch import Tensor

    from penstock.catalog.vision import Layout, Vision
    from penstock.images import ImageHeader

# Pillow's own guard comes too late and knows no setting of ours: the header is asked before.
Image.MAX_IMAGE_PIXELS = None
_TILES_AT_ONCE = 4  # of those that an encoder sees one by one
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_ORIENTATION = 0x0112
_WEBP_SIDE = 16383
_ENOUGH = 1 << 22  # pixels
_BROKEN = (OSError, SyntaxError, ValueError, EOFError, UnidentifiedImageError, ArithmeticError)


class Preparer:
    """One model's way from files to tensors."""

    def __init__(self, folder: Path, vision: Vision) -> None:
        import transformers

        self.vision = vision
        name = f"{vision.processor}Pil"
        kind = getattr(transformers, name, None)
        if kind is None or getattr(kind, "is_dummy", False):
            raise ModelUnusable(
                f"{folder.name}: its images are prepared by transformers' {name}, which this "
                "installation does not have."
            )
        try:
            self._processor: Any = kind.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ModelUnusable(
                f"{folder.name}: its image processor cannot be made: {error}"
            ) from error

    def inputs(self, data: bytes, max_pixels: int) -> tuple[Layout, dict[str, Tensor]]:
        """How the image is laid out, and what the encoder takes for it; `BadImage` or `UnfitImage`
        say what is wrong with it."""
        header = read_header(data)
        if header.pixels > max_pixels:
            raise BadImage(
                f"The image has {header.pixels} pixels, and at most {max_pixels} are decoded."
            )
        width, height = header.upright
        layout = self.vision.layout(width, height, "\0")
        return layout, self._processed(_decoded(data, header))

    def _processed(self, image: Image.Image) -> dict[str, Tensor]:
        try:
            made: Mapping[str, Any] = self._processor(images=[image], return_tensors="pt")
        except (ValueError, ZeroDivisionError, TypeError, IndexError) as error:
            raise UnfitImage(f"The image cannot be prepared for this model: {error}") from error
        finally:
            image.close()
        return {name: value for name, value in made.items() if name != "num_patches"}


def pieces(inputs: dict[str, Tensor], tokens: int) -> Iterator[tuple[dict[str, Tensor], int]]:
    """Some tiles at a time, where an encoder sees each by itself, with the tokens that they come
    to."""
    pixels = inputs["pixel_values"]
    axis = {5: 1, 4: 0}.get(pixels.dim())
    count = pixels.shape[axis] if axis is not None else 1
    if axis is None or count <= _TILES_AT_ONCE or tokens % count:
        yield inputs, tokens
        return
    for first in range(0, count, _TILES_AT_ONCE):
        some = min(_TILES_AT_ONCE, count - first)
        own = {name: part.narrow(axis, first, some) for name, part in inputs.items()}
        yield own, tokens // count * some


def _decoded(data: bytes, header: ImageHeader) -> Image.Image:
    """Upright, in red, green and blue of 8 bits; what is transparent keeps the colour it has."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image: Image.Image = Image.open(io.BytesIO(data), formats=(header.format,))
            if image.size != (header.width, header.height):
                raise BadImage(
                    f"The image is {image.width} x {image.height} pixels, and its header says "
                    f"{header.width} x {header.height}."
                )
            image.load()
    except _BROKEN as error:
        if isinstance(error, BadImage):
            raise
        what = str(error).rstrip(".") or type(error).__name__
        raise BadImage(f"The image's {header.format} file cannot be decoded: {what}.") from None
    return _rgb(_turned(image, header.orientation))


def _turned(image: Image.Image, orientation: int) -> Image.Image:
    turn = _TURNS.get(orientation)
    return image if turn is None else image.transpose(turn)


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # grey of 16 bits, which a plain conversion would clip
        with contextlib.suppress(ValueError):
            image = image.point(lambda value: value / 256).convert("L")
    return image if image.mode == "RGB" else image.convert("RGB")


def _shape_of(pixels: int, ratio: float) -> tuple[int, int]:
    """Width and height of so many pixels, as a file on its side has them."""
    height = min(max(1, int((pixels * ratio) ** 0.5)), _WEBP_SIDE)
    return min(max(1, pixels // height), _WEBP_SIDE), height


def largest_images(pixels: int, ratio: float = 1.0) -> Iterator[tuple[bytes, int]]:
    """Files whose preparation takes the most of images of so many pixels, `ratio` times as wide as
    high: each format has a way of decoding that needs more than others. With how many pixels each
    has: beyond some millions what it takes grows with them alone, so that only the first is made
    as large as there may be."""
    exif = Image.Exif()
    exif[_ORIENTATION] = 5  # both turned and mirrored
    ways: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("CMYK", "JPEG", {"progressive": True, "quality": 30}),
        ("RGBA", "WEBP", {"lossless": True, "quality": 0, "method": 0}),
        ("RGBA", "PNG", {"compress_level": 1}),
    )
    for number, (mode, form, options) in enumerate(ways):
        width, height = _shape_of(pixels if not number else min(pixels, _ENOUGH), ratio)
        image = Image.new(mode, (width, height), (90, 60, 30, 10))
        file = io.BytesIO()
        image.save(file, form, exif=exif, **options)
        image.close()
        yield file.getvalue(), width * height


def placeholder_image(width: int, height: int) -> bytes:
    """A file with something on every pixel."""
    generator = torch.Generator().manual_seed(width * height)
    numbers = torch.randint(0, 256, (height, width, 3), generator=generator, dtype=torch.uint8)
    file = io.BytesIO()
    Image.fromarray(numbers.numpy()).save(file, "PNG")
    return file.getvalue()
