"""What encoding images takes is measured with the largest one, and holds for all others; under a
real cap hostile images take nobody with them."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from penstock.config import parse_size
from penstock.testing import pictures, tiny_vision
from penstock.testing.cage import Cage, NoCage
from penstock.testing.exactness import Mode, start_engine
from penstock.testing.hard_cap import CAGE_SHARE, Watcher
from penstock.testing.served import served
from penstock.worker.backends.cpu.meter import RamMeter
from penstock.worker.vision.encoder import ImageEncoder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PIXELS = 1 << 19
_FORMS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("RGB", "PNG", {}),
    ("RGBA", "PNG", {}),
    ("L", "JPEG", {}),
    ("RGB", "JPEG", {"progressive": True, "subsampling": 0}),
    ("CMYK", "JPEG", {}),
    ("RGBA", "WEBP", {"lossless": True, "method": 0}),
    ("RGB", "WEBP", {"method": 0}),
)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> ImageEncoder:
    folder = tiny_vision.save("smolvlm", tmp_path_factory.mktemp("tiny") / "seeing")
    mode = Mode("small", step_tokens=64, step_sequences=4)
    executor: Any = start_engine(folder, mode).executor
    assert isinstance(executor.images.encoder, ImageEncoder)
    return executor.images.encoder


def files(count: int) -> Iterator[bytes]:
    """Images of sizes up to the largest that nobody has measured, in every form."""
    source = random.Random(count)
    for _ in range(count):
        width = int(2 ** source.uniform(3, 11))
        height = min(int(2 ** source.uniform(3, 12)), PIXELS // width, width * 150)
        mode, form, options = source.choice(_FORMS)
        image = pictures.noise(width, max(height, width // 150, 1), source.randint(0, 9))
        exif = image.getexif()
        exif[0x0112] = source.randint(1, 8)
        yield pictures.file_of(image.convert(mode), form, exif=exif, **options)


def taken(encoder: ImageEncoder, meter: RamMeter, data: bytes) -> int:
    meter.drop_caches()
    before = meter.held()
    meter.mark()
    encoder.rows(data)
    return meter.peak() - before


@pytest.mark.parametrize("count", [15, pytest.param(100, marks=pytest.mark.proof)])
def test_no_image_takes_more_than_the_largest(encoder: ImageEncoder, count: int) -> None:
    meter = RamMeter()
    most = encoder.measured(meter, PIXELS)
    takes = [taken(encoder, meter, data) for data in files(count)]
    assert max(takes) <= most
    # Measured with a smaller image, it would not hold.
    less = encoder.measured(meter, PIXELS // 16)
    encoder.max_pixels = PIXELS
    assert max(takes) > less


@pytest.mark.proof
def test_hostile_images_under_a_cap(tmp_path: Path) -> None:
    memory, name = "1200MiB", "seeing"
    tiny_vision.save("smolvlm", tmp_path / "models" / name)
    good = [data for _, data in pictures.ordinary()]
    bad = [data for _, data, _ in pictures.hostile()]
    source = random.Random(1)

    def body(number: int) -> dict[str, Any]:
        kind = number % 4
        data = source.choice(good if kind else bad)
        image = {"type": "image_url", "image_url": {"url": pictures.as_url(data)}}
        content: list[dict[str, Any]] = [{"type": "text", "text": "Well " * source.randint(1, 60)}]
        content += [image] * (1 if kind < 3 else 0)
        messages = [{"role": "user", "content": content}]
        return {"model": name, "max_tokens": source.randint(1, 40), "messages": messages}

    bodies = [body(number) for number in range(500)]
    try:
        cage = Cage(int(parse_size(memory) * CAGE_SHARE))
    except NoCage as reason:
        pytest.skip(f"no control group to run in: {reason}")
    log = tmp_path / "log"
    flags = (f"--memory={memory}", f"--model={name}")
    with cage, served(tmp_path, log, *flags, cage=cage) as server:
        watcher = Watcher(cage, tmp_path / "models" / name, server.url)
        with watcher.watching(), httpx.Client(base_url=server.url, timeout=300) as client:
            server.wait_until_ready()
            before = server.row(name)["pid"]

            def send(one: dict[str, Any]) -> int:
                return client.post("/v1/chat/completions", json=one).status_code

            with ThreadPoolExecutor(16) as pool:
                statuses = list(pool.map(send, bodies))
        assert server.row(name)["pid"] == before
        assert watcher.highest is not None
        assert watcher.highest.total_bytes <= parse_size(memory)
        assert cage.kills() == 0 and cage.pushed() == 0
    for number, status in enumerate(statuses):
        allowed = {200} if number % 4 == 3 else {400} if number % 4 == 0 else {200, 400, 503}
        assert status in allowed, (number, status)
    assert statuses.count(200) > 300
