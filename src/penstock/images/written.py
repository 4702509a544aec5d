"""How clients write an image into JSON: base64, alone or in a data URL."""

from __future__ import annotations

import binascii
from dataclasses import dataclass

from penstock.images.header import BadImage

_UNSAID = "application/octet-stream"
_SHOWN = 60


@dataclass(frozen=True, slots=True)
class SentImage:
    """An image as it came: a file that nobody has looked into."""

    data: bytes
    where: str  # the field that has it


def from_url(url: str) -> bytes:
    """The file in a data URL; `BadImage` for any other address."""
    if url[:5].lower() != "data:":
        scheme = url.partition(":")[0][:_SHOWN]
        raise BadImage(
            f"The image is given by an address ({scheme}:…); this server fetches nothing. Send "
            "the file itself as a data URL: data:image/png;base64,…"
        )
    head, comma, content = url.partition(",")
    kind, *parameters = head[5:].lower().split(";")
    if not comma or "base64" not in (parameter.strip() for parameter in parameters):
        raise BadImage("The image's data URL is not in base64; write data:image/png;base64,…")
    if kind not in {"", _UNSAID} and not kind.startswith("image/"):
        raise BadImage(f"The data URL is of the type {kind[:_SHOWN]!r}, which is no image.")
    return from_base64(content)


def from_base64(content: str) -> bytes:
    """The file in base64, with or without line breaks."""
    try:
        data = binascii.a2b_base64(content)
    except ValueError as error:
        raise BadImage(f"The image is not valid base64: {error}.") from None
    if not data:
        raise BadImage("The image is empty.")
    return data
