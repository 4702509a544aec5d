"""What images are to a model: which tokens stand for one of a size, and who prepares its pixels."""

from penstock.catalog.vision.layouts import Layout, UnfitImage
from penstock.catalog.vision.reading import TYPES, Vision, read_vision

__all__ = ["TYPES", "Layout", "UnfitImage", "Vision", "read_vision"]
