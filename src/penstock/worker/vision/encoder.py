"""One model's encoder: files of images in, rows out; and what the largest image takes."""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from penstock.catalog.vision import UnfitImage
from penstock.images import BadImage
from penstock.memory.limits import IMAGE_PIXEL_BYTES
from penstock.worker.backends.caps import is_out_of_memory
from penstock.worker.vision.prepare import largest_images, pieces

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.catalog.vision import Vision
    from penstock.wire import Media
    from penstock.worker.backends.meters import Meter
    from penstock.worker.vision.door import VisionDoor
    from penstock.worker.vision.prepare import Preparer

log = logging.getLogger(__name__)

MIN_PIXELS = 1 << 16  # images are not refused for less than this many
_NOISE_SHARE = 0.05
# Of width to height: grids of tiles differ in how well they fit a shape.
_RATIOS = (1.0, *(r for n in (5 / 4, 4 / 3, 3 / 2, 2, 3, 4, 6, 12) for r in (n, 1 / n)))


class ImageEncoder:
    """Prepares and encodes, within `max_pixels`."""

    def __init__(
        self, door: VisionDoor, vision: Vision, preparer: Preparer, max_pixels: int
    ) -> None:
        self.max_pixels = max_pixels
        self.row_bytes = door.row_bytes
        self.three_rows = vision.three_rows
        self.token_id = vision.token_id
        self.encode_s = 0.0  # of the largest image, once it is measured
        self.door = door
        self.preparer = preparer

    def encode(self, data: bytes, media: Media) -> Tensor:
        """[levels, tokens, hidden]."""
        rows, grid = self.rows(data)
        if rows.shape[1] != media.tokens or grid != tuple(media.grid):
            raise BadImage(
                f"The image comes to {rows.shape[1]} tokens, and its header promised "
                f"{media.tokens}."
            )
        return rows

    def rows(self, data: bytes) -> tuple[Tensor, tuple[int, int]]:
        """Of any file, with the grid of its tokens."""
        layout, inputs = self.preparer.inputs(data, self.max_pixels)
        rows = [self.door.encode(some, tokens) for some, tokens in pieces(inputs, layout.tokens)]
        return (rows[0] if len(rows) == 1 else torch.cat(rows, dim=1)), layout.grid

    def measured(self, meter: Meter, pixels: int) -> int:
        """Bytes that an image of so many pixels takes at most while it is encoded."""
        self.max_pixels, worst = pixels, 0
        files = largest_images(pixels, self._largest_ratio(pixels))
        for number, (data, its_pixels) in enumerate(files):
            began = time.perf_counter()
            meter.drop_caches()
            before = meter.held()
            meter.mark()
            if number:  # what follows is the same for all files
                self.preparer.inputs(data, pixels)
            else:
                self.rows(data)
                self.encode_s = time.perf_counter() - began
            worst = max(worst, (meter.peak() - before) * max(pixels, its_pixels) // its_pixels)
        meter.drop_caches()
        return int(worst * (1 + _NOISE_SHARE)) + meter.noise_bytes

    def _largest_ratio(self, pixels: int) -> float:
        """Of width to height, where an image of so many pixels comes to the most tokens."""
        tokens = {}
        for ratio in _RATIOS:
            height = max(1, int((pixels / ratio) ** 0.5))
            with suppress(UnfitImage):
                size = max(1, pixels // height), height
                tokens[ratio] = self.preparer.vision.layout(*size, "").tokens
        return max(tokens, key=lambda ratio: (tokens[ratio], -abs(ratio - 1)), default=1.0)

    def fitted(self, meter: Meter, most_bytes: int) -> tuple[int, int]:
        """The most pixels, up to those there may be, whose encoding takes no more than that, and
        what it takes; (0, 0): not even small ones do."""
        pixels = min(self.max_pixels, most_bytes // IMAGE_PIXEL_BYTES)
        while pixels >= MIN_PIXELS:
            try:
                taken = self.measured(meter, pixels)
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                taken = most_bytes + 1
            log.info("images of %d pixels take %d bytes to encode", pixels, taken)
            if taken <= most_bytes:
                return pixels, taken
            pixels //= 2
        return 0, 0
