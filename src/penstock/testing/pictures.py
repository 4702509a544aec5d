"""Images made for tests: ordinary ones in every form that is served, and hostile ones."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

if TYPE_CHECKING:
    from collections.abc import Iterator

_PNG = b"\x89PNG\r\n\x1a\n"


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    """Something on every pixel."""
    numbers = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(numbers)


def file_of(image: Image.Image, form: str, **options: Any) -> bytes:
    """The image as a file."""
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def as_url(data: bytes, kind: str = "image/png") -> str:
    """A file as a data URL."""
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def ordinary() -> Iterator[tuple[str, bytes]]:
    """What cameras, screens and programs write."""
    image = noise(40, 24)
    yield "png", file_of(image, "PNG")
    yield "jpeg", file_of(image, "JPEG", quality=90)
    yield "progressive jpeg", file_of(image, "JPEG", progressive=True)
    yield "webp", file_of(image, "WEBP")
    yield "lossless webp", file_of(image, "WEBP", lossless=True)
    yield "rotated jpeg", file_of(image, "JPEG", exif=_turned(6))
    yield "rotated webp", file_of(image, "WEBP", exif=_turned(8))
    yield "rotated png", file_of(image, "PNG", exif=_turned(5))
    yield "greyscale", file_of(image.convert("L"), "PNG")
    yield "greyscale jpeg", file_of(image.convert("L"), "JPEG")
    yield "alpha", file_of(image.convert("RGBA"), "PNG")
    yield "alpha webp", file_of(image.convert("RGBA"), "WEBP")
    yield "palette", file_of(image.convert("P"), "PNG")
    yield "black and white", file_of(image.convert("1"), "PNG")
    yield "cmyk", file_of(image.convert("CMYK"), "JPEG")
    wide = np.random.default_rng(1).integers(0, 1 << 16, (24, 40), np.uint16)
    yield "16 bits", file_of(Image.fromarray(wide), "PNG")
    yield "interlaced", _interlaced()
    yield "1 x 1", file_of(noise(1, 1), "PNG")
    yield "2000 x 1500", file_of(noise(2000, 1500), "JPEG")


def hostile() -> Iterator[tuple[str, bytes, str]]:
    """What somebody may send instead, and words of the refusal."""
    good, photo = file_of(noise(64, 48), "PNG"), file_of(noise(64, 48), "JPEG")
    yield "a bomb", _png(50_000, 50_000, b"\0" * 1000), "pixels"
    yield "absurd", _png(2**31 - 1, 2**31 - 1, b""), "each side"
    yield "of no size", _png(0, 5, b""), "each side"
    yield "cut short", good[: len(good) // 2], "cannot be decoded"
    yield "a photo cut short", photo[: len(photo) // 2], "cannot be decoded"
    yield "only a header", good[:20], "cut short"
    yield "nothing behind the header", good[:33], "cannot be decoded"
    yield "rubbish behind the header", _png(64, 48, b"no zlib at all"), "cannot be decoded"
    yield "fewer rows than promised", _png(64, 4800, b"\1" * 3000), "cannot be decoded"
    yield "a strip", _png(1, 400, b"\0" * 1600), "at most 200 times"
    frames = [noise(20, 20, seed) for seed in range(3)]
    more: dict[str, Any] = {"save_all": True, "append_images": frames[1:]}
    yield "an animated png", file_of(frames[0], "PNG", **more), "animated"
    yield "an animated webp", file_of(frames[0], "WEBP", **more), "animated"
    yield "a gif", file_of(frames[0], "GIF"), "GIF"
    yield "a bmp", file_of(frames[0], "BMP"), "BMP"
    yield "a tiff", file_of(frames[0], "TIFF"), "TIFF"
    yield "a pdf", b"%PDF-1.7 no image", "PDF"
    yield "a drawing", b"<svg xmlns='http://www.w3.org/2000/svg'/>", "no format"
    yield "text", b"not an image", "no format"
    yield "many parts", _PNG + _chunk(b"IHDR", _head(4, 4)) + 5000 * _chunk(b"teXt", b""), "parts"
    yield "much text", _with_text(good), "cannot be decoded"


def _turned(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def _chunk(name: bytes, content: bytes) -> bytes:
    checksum = struct.pack(">I", zlib.crc32(name + content))
    return struct.pack(">I", len(content)) + name + content + checksum


def _head(width: int, height: int, interlaced: int = 0) -> bytes:
    return struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, interlaced)


def _png(width: int, height: int, content: bytes) -> bytes:
    """A file that says what it likes; `content` is packed unless it is no zlib on purpose."""
    packed = content if content.startswith(b"no zlib") else zlib.compress(content)
    head = _chunk(b"IHDR", _head(width, height))
    return _PNG + head + _chunk(b"IDAT", packed) + _chunk(b"IEND", b"")


def _interlaced() -> bytes:
    """Adam7, of one grey: seven passes of rows, each with its filter byte."""
    rows = b"".join(b"\0" + b"\x55" * 3 * wide for wide, high in _PASSES for _ in range(high))
    head = _chunk(b"IHDR", _head(8, 8, interlaced=1))
    return _PNG + head + _chunk(b"IDAT", zlib.compress(rows)) + _chunk(b"IEND", b"")


_PASSES = ((1, 1), (1, 1), (2, 1), (2, 2), (4, 2), (4, 4), (8, 4))  # of 8 x 8


def _with_text(good: bytes) -> bytes:
    """Megabytes of text in a few bytes, before the pixels."""
    bomb = _chunk(b"zTXt", b"Comment\0\0" + zlib.compress(b"x" * (80 << 20), 9))
    return good[:33] + bomb + good[33:]
