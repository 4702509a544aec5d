"""Images of requests at the door of a model."""

from penstock.server.pipeline.images.pictures import (
    Picture,
    check_loaded,
    check_taken,
    looked_at,
    taken_out,
)
from penstock.server.pipeline.images.prompts import added_tokens, image_token, laid_out, spread

__all__ = [
    "Picture",
    "added_tokens",
    "check_loaded",
    "check_taken",
    "image_token",
    "laid_out",
    "looked_at",
    "spread",
    "taken_out",
]
