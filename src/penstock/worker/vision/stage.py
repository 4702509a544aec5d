"""Images of requests, encoded one by one between steps; and their rows in the steps that need them.

A request waits outside the batch until the rows of all its images are there, and then has them
until it ends: whoever gives way is computed again with what it had. Who comes first is encoded
first, so that nobody waits for room behind somebody who waits for it as well.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from penstock.catalog.vision import UnfitImage
from penstock.errors import BadRequest, InternalError, Overloaded
from penstock.images import BadImage
from penstock.wire import Failure
from penstock.worker.backends.caps import is_out_of_memory
from penstock.worker.models.batch import Batch, MediaRows
from penstock.worker.vision.positions import three_rows
from penstock.worker.vision.rows import RowCache

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray
    from torch import Tensor

    from penstock.wire import Media, Submit
    from penstock.worker.core.plan import Plan, Slice

log = logging.getLogger(__name__)


class Encoder(Protocol):
    """One image's file to rows."""

    row_bytes: int  # of the rows of one image token
    three_rows: bool  # positions have a row each for time, height and width

    def encode(self, data: bytes, media: Media) -> Tensor:
        """[levels, tokens, hidden]; `BadImage` or `UnfitImage` say what is wrong with it."""


@dataclass(slots=True)
class _Seer:
    """A request with images."""

    request: Submit
    missing: list[Media]  # whose rows are not there
    failure: Failure | None = None
    held: list[bytes] = field(default_factory=list)  # digests
    positions: NDArray[np.int64] | None = None  # [3, prompt]
    behind: int = 0  # of a token behind the prompt: its position beyond its number


class ImageStage:
    """Used on the device thread only."""

    def __init__(
        self, encoder: Encoder, limit_bytes: int, relieve: Callable[[], None] = lambda: None
    ) -> None:
        self.encoder = encoder
        self._rows = RowCache(limit_bytes)
        self._relieve = relieve  # gives back what allocators keep
        self._seers: dict[int, _Seer] = {}  # by request, by arrival
        self.encoded = 0
        self.encode_s = 0.0

    def add(self, request: Submit) -> None:
        """Take a request's images; one whose rows can never be held is refused."""
        if not request.media:
            return
        sizes = {image.digest: self._bytes_of(image) for image in request.media}
        if (needed := sum(sizes.values())) > (limit := self._rows.limit_bytes):
            raise BadRequest(
                f"The images of this request come to {needed} bytes in the model, and {limit} are "
                "kept for images (models.image_bytes); send fewer or smaller ones.",
                numbers={"needed_bytes": needed, "limit_bytes": limit},
            )
        seer = self._seers[request.id] = _Seer(request, list(request.media))
        if self.encoder.three_rows:
            seer.positions, seer.behind = three_rows(len(request.prompt), request.media)
        self._take_found(seer)

    def remove(self, request_id: int) -> None:
        """Forget a request."""
        if (seer := self._seers.pop(request_id, None)) is not None:
            for digest in seer.held:
                self._rows.give(digest)

    def ready(self, request_id: int) -> bool:
        """Whether it has all its rows, or never will."""
        seer = self._seers.get(request_id)
        return seer is None or not seer.missing or seer.failure is not None

    def failure(self, request_id: int) -> Failure | None:
        """Why it cannot be answered."""
        seer = self._seers.get(request_id)
        return None if seer is None else seer.failure

    @property
    def waits(self) -> bool:
        """An image is to be encoded, and there is room for it."""
        found = self._next()
        return found is not None and self._rows.has_room(self._bytes_of(found[1]))

    def _bytes_of(self, image: Media) -> int:
        return image.tokens * self.encoder.row_bytes

    def work(self) -> None:
        """Encode the next image, if there is one and its rows have room."""
        found = self._next()
        if found is None:
            return
        seer, image = found
        if not self._rows.make_room(self._bytes_of(image)):
            return
        began = time.perf_counter()
        try:
            rows = self.encoder.encode(image.data, image)
        except (BadImage, UnfitImage) as error:
            self._fail(seer, Failure(BadRequest.code, f"`{image.where}`: {error}"))
            return
        except (MemoryError, RuntimeError, ValueError) as error:
            log.warning("an image of %d bytes was not encoded", len(image.data), exc_info=True)
            self._fail(seer, _failure_of(error, image))
            return
        finally:
            self._relieve()
        self.encoded += 1
        self.encode_s += time.perf_counter() - began
        self._rows.insert(image.digest, rows)
        for other in self._seers.values():
            self._take_found(other)

    def _next(self) -> tuple[_Seer, Media] | None:
        """The first image of the first request that lacks one."""
        for seer in self._seers.values():
            if seer.missing and seer.failure is None:
                return seer, seer.missing[0]
        return None

    def _take_found(self, seer: _Seer) -> None:
        """Hold what is there of a request's images; their files are needed no longer."""
        left = []
        for image in seer.missing:
            if image.digest in self._rows:
                self._rows.hold(image.digest)
                seer.held.append(image.digest)
                image.data = b""
            else:
                left.append(image)
        seer.missing = left

    def _fail(self, seer: _Seer, failure: Failure) -> None:
        seer.failure = failure
        for image in seer.request.media:
            image.data = b""

    # --- in steps ---

    def laid(self, batch: Batch, plan: Plan) -> Batch:
        """A batch with what its images and their positions make of it."""
        seers = [self._seers.get(piece.request_id) for piece in plan.slices]
        if not any(seers):
            return batch
        places: list[NDArray[np.int64]] = []
        rows: list[Tensor] = []
        row = 0
        for piece, seer in zip(plan.slices, seers, strict=True):
            if seer is not None:
                for place, part in self._overlaps(seer, piece, row):
                    places.append(place)
                    rows.append(part)
            row += piece.rows
        device = batch.input_ids.device
        media = None
        if rows:
            where = torch.from_numpy(np.concatenate(places)).to(device)
            media = MediaRows(where, torch.cat(rows, dim=1))
        position_ids = batch.position_ids
        if self.encoder.three_rows:
            position_ids = torch.from_numpy(_positions(plan, seers)).to(device)[:, None]
        return replace(batch, media=media, position_ids=position_ids)

    def _overlaps(
        self, seer: _Seer, piece: Slice, row: int
    ) -> Iterator[tuple[NDArray[np.int64], Tensor]]:
        """Rows of the batch in which the slice has tokens of images, and these."""
        for image in seer.request.media:
            done = 0
            for first, count in zip(image.runs[::2], image.runs[1::2], strict=True):
                start, end = max(first, piece.start), min(first + count, piece.end)
                if start < end:
                    own = slice(done + start - first, done + end - first)
                    place = np.arange(start, end) + row - piece.start
                    yield place, self._rows.rows(image.digest)[:, own]
                done += count

    def check(self) -> None:
        """Rows are held by whom they are needed."""
        held = Counter(digest for seer in self._seers.values() for digest in seer.held)
        self._rows.check(dict(held))


def _positions(plan: Plan, seers: list[_Seer | None]) -> NDArray[np.int64]:
    """[3, rows] of a batch: of a text all three are the same."""
    parts = []
    for piece, seer in zip(plan.slices, seers, strict=True):
        numbers = np.arange(piece.start, piece.end_of_rows)
        if seer is None or seer.positions is None:
            parts.append(np.tile(numbers, (3, 1)))
            continue
        known = seer.positions.shape[1]
        prompt = seer.positions[:, piece.start : min(piece.end_of_rows, known)]
        behind = np.tile(numbers[numbers >= known] + seer.behind, (3, 1))
        parts.append(np.concatenate((prompt, behind), axis=1))
    return np.concatenate(parts, axis=1)


def _failure_of(error: Exception, image: Media) -> Failure:
    if is_out_of_memory(error):
        return Failure(
            Overloaded.code,
            "There was no memory to encode an image of this request; others are not affected. Send "
            "a smaller image, or raise memory.limit.",
        )
    return Failure(
        InternalError.code,
        f"`{image.where}` could not be encoded; the worker's log has the reason. Other requests "
        "are not affected.",
    )
