"""Images of requests: what a file is by its header, and how clients write one into JSON."""

from penstock.images.header import FORMATS, BadImage, ImageHeader, read_header
from penstock.images.written import SentImage, from_base64, from_url

__all__ = [
    "FORMATS",
    "BadImage",
    "ImageHeader",
    "SentImage",
    "from_base64",
    "from_url",
    "read_header",
]
