"""What images cost a model beside its steps: encoding the largest one, and what is kept of all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.memory.limits import IMAGE_FILE_COPIES

if TYPE_CHECKING:
    from penstock.wire import LoadSpec
    from penstock.worker.backends.meters import Meter
    from penstock.worker.profiling.store import StoredProfile
    from penstock.worker.vision.encoder import ImageEncoder

_WINDOWS = 4


class ImageCost:
    """Nothing of a model that takes none.

    An image is encoded between two steps, so the larger of the two needs its memory, not both.
    """

    def __init__(self, encoder: ImageEncoder | None = None, spec: LoadSpec | None = None) -> None:
        self._encoder = encoder
        self._rows_bytes = 0 if spec is None else spec.image_bytes
        self._files_bytes = 0 if spec is None else spec.image_file_bytes
        self.stage_bytes = 0  # of the largest image, while it is encoded
        self.stage_s = 0.0  # how long that takes

    @property
    def pixels(self) -> int:
        """The most of an image; 0: none is taken."""
        return 0 if self._encoder is None else self._encoder.max_pixels

    @property
    def host_bytes(self) -> int:
        """Kept for rows, and for files on their way to be rows."""
        return self._rows_bytes + IMAGE_FILE_COPIES * self._files_bytes if self.pixels else 0

    def _most_bytes(self, grant_bytes: int, window_bytes: int) -> int:
        """What encoding an image may take: half of the grant, or all but KV of some windows."""
        left = grant_bytes - self.host_bytes
        return max(left // 2, left - _WINDOWS * window_bytes)

    def measure(self, meter: Meter, grant_bytes: int, window_bytes: int) -> None:
        """Find out, and with it how large images may be; `window_bytes`: KV of the longest
        sequence."""
        if self._encoder is not None and self.pixels:
            most = self._most_bytes(grant_bytes, window_bytes)
            self._encoder.max_pixels, self.stage_bytes = self._encoder.fitted(meter, most)
            self.stage_s = self._encoder.encode_s

    def give_up(self) -> None:
        """Images turned out not to be right: none is taken, by later loads neither."""
        if self._encoder is not None:
            self._encoder.max_pixels = 0

    def applies(self, stored: StoredProfile, grant_bytes: int, window_bytes: int) -> bool:
        """Whether what an earlier load has measured holds in this grant."""
        if self._encoder is None:
            return True
        held_back = 0 < stored.image_pixels < self.pixels or not stored.image_pixels
        fits = stored.stage_bytes <= self._most_bytes(grant_bytes, window_bytes)
        return fits and not (held_back and grant_bytes > stored.memory_bytes)

    def take(self, stored: StoredProfile) -> None:
        """As an earlier load has measured."""
        if self._encoder is not None:
            self._encoder.max_pixels = stored.image_pixels
            self.stage_bytes, self.stage_s = stored.stage_bytes, stored.stage_s
