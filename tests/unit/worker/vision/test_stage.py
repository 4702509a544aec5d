"""Images of requests on their way to rows: who comes first, who waits for room, who fails alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.errors import BadRequest, InternalError, Overloaded
from penstock.images import BadImage
from penstock.wire import Media, Sampling, Submit, token_ids
from penstock.worker.core.plan import Plan, Slice
from penstock.worker.models.batch import build_batch
from penstock.worker.vision.none import NoImages
from penstock.worker.vision.rows import RowCache
from penstock.worker.vision.stage import ImageStage

HIDDEN = 4
ROW = 4 * HIDDEN
CPU = torch.device("cpu")


class Encoder:
    """Rows that say which image they are of, and which of its rows."""

    row_bytes = ROW

    def __init__(self, *, three_rows: bool = False) -> None:
        self.three_rows = three_rows
        self.seen: list[bytes] = []

    def encode(self, data: bytes, media: Media) -> torch.Tensor:
        self.seen.append(data)
        match data:
            case b"bad":
                raise BadImage("It is cut short.")
            case b"large":
                raise MemoryError
            case b"strange":
                raise ValueError("nobody knows")
        numbers = torch.arange(media.tokens, dtype=torch.float32)
        return (1000 * data[0] + numbers)[None, :, None].expand(1, -1, HIDDEN).clone()


def image(data: bytes, first: int, count: int, *more: int) -> Media:
    return Media(data.ljust(16, b"."), data, [first, count, *more], (1, count), "images[0]")


def request(number: int, *media: Media, length: int = 40) -> Submit:
    return Submit(number, token_ids(range(length)), 4, Sampling(), media=list(media))


def stage(tokens: int, encoder: Encoder | None = None) -> ImageStage:
    return ImageStage(encoder or Encoder(), tokens * ROW)


def test_a_request_waits_until_all_its_images_are_there() -> None:
    images = stage(100)
    asked = request(1, image(b"a", 2, 5), image(b"b", 10, 5))
    images.add(asked)
    for expected in (False, False, True):
        assert images.ready(1) is expected
        images.work()
    assert [media.data for media in asked.media] == [b"", b""]  # files are kept no longer
    images.check()
    assert images.ready(2)  # who has no images waits for none


def test_the_same_image_is_encoded_once() -> None:
    encoder = Encoder()
    images = stage(100, encoder)
    images.add(request(1, image(b"a", 2, 5), image(b"a", 20, 5)))
    images.add(request(2, image(b"a", 7, 5)))
    images.work()
    assert images.ready(1) and images.ready(2) and not images.waits
    images.remove(1)
    images.remove(2)
    images.add(request(3, image(b"a", 0, 5)))
    assert images.ready(3) and encoder.seen == [b"a"]
    images.check()


def test_who_finds_no_room_waits_and_keeps_the_order() -> None:
    encoder = Encoder()
    images = stage(10, encoder)
    images.add(request(1, image(b"a", 0, 6)))
    images.add(request(2, image(b"b", 0, 6)))
    images.add(request(3, image(b"c", 0, 2)))
    for _ in range(3):
        images.work()
    # There would be room for the third, but not if the second comes first.
    assert [images.ready(n) for n in (1, 2, 3)] == [True, False, False]
    assert not images.waits  # for those who ask: nothing comes of waiting for it
    images.remove(1)  # its rows make way
    assert images.waits
    images.work()
    images.work()
    assert images.ready(2) and images.ready(3)
    assert encoder.seen == [b"a", b"b", b"c"]
    images.check()


def test_what_can_never_be_held_is_refused_with_numbers() -> None:
    images = stage(10)
    with pytest.raises(BadRequest, match=r"models\.image_bytes") as refusal:
        images.add(request(1, image(b"a", 0, 6), image(b"b", 10, 6)))
    assert refusal.value.numbers == {"needed_bytes": 12 * ROW, "limit_bytes": 10 * ROW}
    images.add(request(1, image(b"a", 0, 6), image(b"a", 10, 6)))  # the same one twice is held once
    images.work()
    assert images.ready(1)


@pytest.mark.parametrize(
    ("data", "code", "words"),
    [
        (b"bad", BadRequest.code, "`images[0]`: It is cut short."),
        (b"large", Overloaded.code, "no memory to encode"),
        (b"strange", InternalError.code, "could not be encoded"),
    ],
)
def test_an_image_that_fails_costs_its_request_alone(data: bytes, code: str, words: str) -> None:
    images = stage(100)
    images.add(request(1, image(b"a", 0, 3), image(data, 10, 3), image(b"z", 20, 3)))
    images.add(request(2, image(b"b", 0, 3)))
    for _ in range(3):
        images.work()
    failure = images.failure(1)
    assert failure is not None and failure.code == code and words in failure.message
    assert images.ready(1) and images.ready(2) and images.failure(2) is None
    images.remove(1)
    images.check()


def piece(number: int, start: int, count: int, *, samples: bool = False) -> Slice:
    table = np.zeros(8, np.int32)
    ids = token_ids(range(start, start + count))
    return Slice(number, start, ids, (table,), int(samples), samples)


def test_rows_lie_where_their_tokens_are() -> None:
    images = stage(100)
    images.add(request(7, image(b"a", 3, 4, 9, 2)))
    images.add(request(8, image(b"b", 0, 2)))
    images.work()
    images.work()
    plan = Plan(decodes=[piece(5, 20, 1, samples=True)], chunks=[piece(7, 5, 5), piece(8, 0, 3)])
    batch = images.laid(build_batch(plan, 16, CPU), plan)
    assert batch.media is not None
    # A decode, then positions 5 .. 9 of the first and 0 .. 2 of the second request.
    assert batch.media.places.tolist() == [1, 2, 5, 6, 7]
    first = 1000 * b"a"[0]
    assert batch.media.rows[0, :, 0].tolist() == [
        *(first + 2, first + 3, first + 4),  # the fifth row is the second run's first
        *(1000 * b"b"[0], 1000 * b"b"[0] + 1),
    ]
    assert batch.position_ids.tolist() == [[20, 5, 6, 7, 8, 9, 0, 1, 2]]


def test_a_step_without_images_is_as_it_was() -> None:
    images = stage(100)
    plan = Plan(chunks=[piece(1, 0, 4)])
    batch = build_batch(plan, 16, CPU)
    assert images.laid(batch, plan) is batch
    # Nor has a step of a request whose images are all behind it any rows of them.
    images.add(request(7, image(b"a", 3, 4)))
    images.work()
    plan = Plan(decodes=[piece(7, 41, 1, samples=True)])
    assert images.laid(build_batch(plan, 16, CPU), plan).media is None


def test_positions_have_three_rows_where_the_model_has_them() -> None:
    images = stage(100, Encoder(three_rows=True))
    images.add(request(7, image(b"a", 2, 3), length=8))
    images.work()
    behind = piece(7, 9, 1, samples=True)
    plan = Plan(decodes=[piece(5, 4, 1, samples=True), behind], chunks=[piece(7, 1, 5)])
    batch = images.laid(build_batch(plan, 16, CPU), plan)
    assert batch.position_ids[:, 0].tolist() == [
        [4, 9, 1, 2, 2, 2, 5],
        [4, 9, 1, 2, 2, 2, 5],
        [4, 9, 1, 2, 3, 4, 5],
    ]


def test_rows_that_nobody_needs_make_way_the_oldest_first() -> None:
    rows = RowCache(3 * ROW)
    for name in (b"a", b"b", b"c"):
        rows.insert(name, torch.zeros(1, 1, HIDDEN))
    rows.hold(b"a")
    rows.give(b"a")  # used last
    assert rows.make_room(ROW) and b"b" not in rows and b"a" in rows and b"c" in rows
    rows.hold(b"c")
    assert not rows.make_room(3 * ROW) and b"c" in rows
    rows.check({b"c": 1})


def test_a_model_that_takes_none_says_why() -> None:
    with pytest.raises(BadRequest, match="cannot be served: it is on a GPU"):
        NoImages("it is on a GPU").add(request(1, image(b"a", 0, 3)))
    NoImages().add(request(1))
