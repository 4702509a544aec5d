"""What an image file is, told from its header: format, size, rotation. No pixel is decoded.

A file may claim any size in a few bytes, so it is asked here what decoding would come to before
anybody decodes. Whoever decodes compares: a file that turns out to be another one is refused then.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

FORMATS = ("PNG", "JPEG", "WEBP")
MAX_SIDE = 1 << 16  # of what the formats can say, PNG alone says more
_MAX_PARTS = 4096  # chunks or segments that are looked at; ordinary files have some dozens
_PNG = b"\x89PNG\r\n\x1a\n"
_EXIF = b"Exif\0\0"
_ORIENTATION = 0x0112
_MAX_ENTRIES = 512  # of an Exif directory


class BadImage(ValueError):  # noqa: N818 - what it is
    """It is no image that is served, in a sentence."""


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """What a file says of itself."""

    format: str  # one of `FORMATS`
    width: int  # as stored
    height: int
    orientation: int = 1  # 1 to 8, as Exif numbers them

    @property
    def pixels(self) -> int:
        """How many there are to decode."""
        return self.width * self.height

    @property
    def upright(self) -> tuple[int, int]:
        """Width and height as the image is looked at."""
        turned = self.orientation >= 5
        return (self.height, self.width) if turned else (self.width, self.height)


def read_header(data: bytes) -> ImageHeader:
    """The header of a whole file; `BadImage` says what is wrong with it."""
    try:
        header = _read(data)
    except (struct.error, IndexError):
        raise BadImage("The image's file ends within its header; it is cut short.") from None
    if not (0 < header.width <= MAX_SIDE and 0 < header.height <= MAX_SIDE):
        raise BadImage(
            f"The image is {header.width} x {header.height} pixels by its header; each side may "
            f"have 1 to {MAX_SIDE}."
        )
    return header


def _read(data: bytes) -> ImageHeader:
    if data.startswith(_PNG):
        return _png(data)
    if data.startswith(b"\xff\xd8"):
        return _jpeg(data)
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return _webp(data)
    known = {b"GIF8": "GIF", b"BM": "BMP", b"II*\0": "TIFF", b"MM\0*": "TIFF", b"%PDF": "PDF"}
    name = next((name for mark, name in known.items() if data.startswith(mark)), None)
    what = f"The image is a {name} file" if name else "The image is of no format that is known"
    raise BadImage(f"{what}; send it as {', '.join(FORMATS[:-1])} or {FORMATS[-1]}.")


# --- PNG: chunks of length, name, content, checksum ---


def _png(data: bytes) -> ImageHeader:
    if data[12:16] != b"IHDR":
        raise BadImage("The image's PNG file does not begin with its header.")
    width, height = struct.unpack_from(">II", data, 16)
    orientation = 1
    for name, at, size in _chunks(data, len(_PNG), ">I4s", padded=False, behind=4):
        if name == b"acTL":
            raise _animated("PNG")
        if name == b"eXIf":
            orientation = _orientation(data[at : at + size])
    return ImageHeader("PNG", width, height, orientation)


def _chunks(
    data: bytes, start: int, layout: str, *, padded: bool, behind: int = 0
) -> Iterator[tuple[bytes, int, int]]:
    """Name, place and length of each chunk."""
    head = struct.calcsize(layout)
    for _ in range(_MAX_PARTS):
        if start + head > len(data):
            return
        one, other = struct.unpack_from(layout, data, start)
        name, size = (one, other) if isinstance(one, bytes) else (other, one)
        yield name, start + head, size
        start += head + size + (size & 1 if padded else 0) + behind
    raise BadImage(f"The image's file has more than {_MAX_PARTS} parts.")


# --- JPEG: segments of a mark, a length, content ---


def _jpeg(data: bytes) -> ImageHeader:
    at, orientation = 2, 1
    for _ in range(_MAX_PARTS):
        mark = data[at : at + 2]
        if len(mark) < 2 or mark[0] != 0xFF:
            raise BadImage("The image's JPEG file is broken before the size of the image.")
        if mark[1] == 0xFF:  # filling
            at += 1
            continue
        (size,) = struct.unpack_from(">H", data, at + 2)
        content = at + 4
        if mark[1] == 0xE1 and data.startswith(_EXIF, content):
            orientation = _orientation(data[content + len(_EXIF) : at + 2 + size])
        if 0xC0 <= mark[1] <= 0xCF and mark[1] not in {0xC4, 0xC8, 0xCC}:
            height, width = struct.unpack_from(">HH", data, content + 1)
            return ImageHeader("JPEG", width, height, orientation)
        if mark[1] == 0xDA or size < 2:
            raise BadImage("The image's JPEG file does not say how large the image is.")
        at += 2 + size
    raise BadImage(f"The image's file has more than {_MAX_PARTS} parts.")


# --- WebP: chunks of name, length, content ---


def _webp(data: bytes) -> ImageHeader:
    name = data[12:16]
    if name == b"VP8 ":
        if data[23:26] != b"\x9d\x01\x2a":
            raise BadImage("The image's WebP file has no key frame.")
        width, height = struct.unpack_from("<HH", data, 26)
        return ImageHeader("WEBP", width & 0x3FFF, height & 0x3FFF)
    if name == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        return ImageHeader("WEBP", (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1)
    if name != b"VP8X":
        raise BadImage("The image's WebP file has no header that is known.")
    flags = data[20]
    if flags & 0x02:
        raise _animated("WebP")
    width, height = (
        int.from_bytes(data[at : at + 3].ljust(3, b"\0"), "little") + 1 for at in (24, 27)
    )
    orientation = 1
    if flags & 0x08:
        for found, at, size in _chunks(data, 12, "<4sI", padded=True):
            if found == b"EXIF":
                orientation = _orientation(data[at : at + size].removeprefix(_EXIF))
    return ImageHeader("WEBP", width, height, orientation)


def _animated(name: str) -> BadImage:
    return BadImage(f"The image is an animated {name} file; send one frame of it as an image.")


def _orientation(exif: bytes) -> int:
    """From a TIFF directory; 1, upright, where it says nothing that makes sense."""
    order = {b"II": "<", b"MM": ">"}.get(exif[:2])
    if order is None:
        return 1
    try:
        (at,) = struct.unpack_from(f"{order}I", exif, 4)
        (count,) = struct.unpack_from(f"{order}H", exif, at)
        for entry in range(min(count, _MAX_ENTRIES)):
            tag, kind, _, value = struct.unpack_from(f"{order}HHIH", exif, at + 2 + 12 * entry)
            if tag == _ORIENTATION:
                return value if kind == 3 and 1 <= value <= 8 else 1
    except struct.error:
        return 1
    return 1
