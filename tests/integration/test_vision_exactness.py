"""Greedy tokens of models that see equal those of transformers' `generate`, however requests are
batched, cut, found or preempted; and the comparison bites."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace as changed

from penstock.errors import ModelUnusable
from penstock.testing import tiny_vision
from penstock.testing.exactness import (
    Mismatch,
    Mode,
    Tally,
    giving_way,
    poisoned_blocks,
    run,
    start_engine,
)
from penstock.testing.fake_proposers import Gambler, draft_with
from penstock.wire import LoadSpec, Media, Sampling, Submit
from penstock.worker.backends.cpu import CpuBackend
from penstock.worker.kv import cache
from penstock.worker.loading import load_engine
from penstock.worker.models.build import read_config
from penstock.worker.vision import stage
from penstock.worker.vision.door import VisionDoor
from penstock.worker.vision.loading import open_sight
from penstock.worker.vision.stage import ImageStage

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from penstock.testing.tiny_vision import Prompt, Prompts
    from penstock.worker.core.engine import GenerateEngine

pytestmark = pytest.mark.usefixtures("one_thread")

NEW_TOKENS = 12
TEXT = [7, 8, 9, 10, 11] * 5  # more than a block
PROOF = pytest.mark.proof
CROWDED = Mode("crowded", step_tokens=64, step_sequences=6, pool_tokens=176, give_way_every=3)
LONG = (
    Mode("alone", alone=True),
    Mode("chunks-of-7-arrivals", step_tokens=7, step_sequences=3, arrive_every=3),
)
# Crowded steps are cut too. Rows behind early layers, and of tiles, are cut smaller in every run.
SMALL_CHUNKS = ("smolvlm", "qwen3_vl")
RUNS = [
    pytest.param(
        *(kind, mode),
        id=f"{kind}-{mode}",
        marks=() if mode is CROWDED or (mode is LONG[1] and kind in SMALL_CHUNKS) else PROOF,
    )
    for kind in tiny_vision.SERVED
    for mode in (CROWDED, *LONG)
]


@pytest.fixture(autouse=True)
def small_extents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuBackend, "extent_bytes", 1 << 14)


class TinyModels:
    """Folders of tiny models and their prompts, made once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._prompts: dict[str, Prompts] = {}

    def folder(self, kind: str) -> Path:
        folder = self._root / kind
        return folder if folder.exists() else tiny_vision.save(kind, folder)

    def prompts(self, kind: str) -> Prompts:
        if kind not in self._prompts:
            self._prompts[kind] = tiny_vision.Prompts(self.folder(kind))
        return self._prompts[kind]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    return TinyModels(tmp_path_factory.mktemp("tiny"))


def several(prompts: Prompts) -> list[Prompt]:
    """Text alone, one image, the same image behind other text, two images, another behind the
    same text."""
    wide, high = tiny_vision.picture(40, 24), tiny_vision.picture(20, 33, seed=1)
    return [
        prompts.of(TEXT),
        prompts.of(TEXT[:18], wide, TEXT),
        # Not an image at the very end: there `generate` counts each row of positions on by itself.
        prompts.of(TEXT[:3], wide, [5]),
        prompts.of(TEXT[:18], high, [3], wide, TEXT[:9]),
        prompts.of(TEXT[:18], tiny_vision.picture(40, 24, seed=2), TEXT),
    ]


def start(folder: Path, mode: Mode) -> GenerateEngine:
    engine = start_engine(folder, mode)
    assert not engine.ready().no_images and engine.ready().image_pixels > 0
    return engine


def images_of(engine: GenerateEngine) -> ImageStage:
    executor: Any = engine.executor
    assert isinstance(executor.images, ImageStage)
    return executor.images


def answers(engine: GenerateEngine, asked: Sequence[Prompt], mode: Mode) -> list[list[int]]:
    media = [prompt.media for prompt in asked]
    ids = [prompt.ids for prompt in asked]
    if mode.alone:
        return [
            run(engine, [prompt], NEW_TOKENS, media=[images])[0]
            for prompt, images in zip(ids, media, strict=True)
        ]
    give_way = giving_way(engine, mode.give_way_every)
    return run(
        engine,
        ids,
        NEW_TOKENS,
        arrive_every=mode.arrive_every,
        between_steps=give_way,
        media=media,
    )


def compare(prompts: Prompts, asked: Sequence[Prompt], told: list[list[int]]) -> Tally:
    tally = Tally()
    for prompt, tokens in zip(asked, told, strict=True):
        assert len(tokens) == NEW_TOKENS
        tally.compare(prompts.reference(prompt), prompt.ids, tokens)
    return tally


@pytest.mark.parametrize(("kind", "mode"), RUNS)
def test_tokens_equal_transformers(models: TinyModels, kind: str, mode: Mode) -> None:
    prompts = models.prompts(kind)
    asked = several(prompts)
    with poisoned_blocks():
        engine = start(models.folder(kind), mode)
        told = answers(engine, asked, mode)
        compare(prompts, asked, told)
        assert (engine.status().preemptions > 0) == (mode is CROWDED)
        # With another image there is another answer: else all this would show nothing.
        assert told[1] != told[4]
        if mode is CROWDED:  # once more, over what is found of the first time
            compare(prompts, asked, answers(engine, asked, replace(mode, give_way_every=0)))
    images_of(engine).check()


def first_reused(engine: GenerateEngine, prompt: Prompt) -> int:
    images = [changed(image) for image in prompt.media]
    engine.submit(Submit(99, list(prompt.ids), 1, Sampling(temperature=0), media=images))
    reused = -1
    while engine.has_work():
        for output in engine.step():
            assert output.failure is None
            reused = max(reused, output.reused)
    return reused


@pytest.mark.parametrize("kind", ["smolvlm", "qwen3_vl"])
def test_the_same_image_is_found_and_another_is_not(models: TinyModels, kind: str) -> None:
    prompts = models.prompts(kind)
    engine = start(models.folder(kind), Mode("at once"))
    image, other = tiny_vision.picture(40, 24), tiny_vision.picture(40, 24, seed=2)
    one = prompts.of(TEXT[:18], image, TEXT)
    assert first_reused(engine, one) == 0
    assert first_reused(engine, one) == (len(one.ids) - 1) // 16 * 16
    # Behind the same text, and with the same placeholders.
    assert first_reused(engine, prompts.of(TEXT[:18], other, TEXT)) == 16
    # The same image and text behind another beginning share nothing.
    assert first_reused(engine, prompts.of([99, *TEXT[:17]], image, TEXT)) == 0
    assert images_of(engine).encoded == 3  # with the one that is checked at load


def test_room_for_the_images_of_one_request_at_a_time(models: TinyModels) -> None:
    prompts = models.prompts("smolvlm")
    asked = several(prompts)
    engine = start(models.folder("smolvlm"), CROWDED)
    images = images_of(engine)
    sizes = [{m.digest: m.tokens * images.encoder.row_bytes for m in p.media} for p in asked]
    images._rows.limit_bytes = max(sum(size.values()) for size in sizes)
    compare(prompts, asked, answers(engine, asked, CROWDED))
    images.check()
    assert images._rows.used_bytes <= images._rows.limit_bytes


def test_found_on_disk_after_a_restart(models: TinyModels, tmp_path: Path) -> None:
    prompts = models.prompts("qwen2_5_vl")
    image, other = tiny_vision.picture(40, 24), tiny_vision.picture(40, 24, seed=2)
    asked = [prompts.of(TEXT[:18], each, TEXT) for each in (image, other)]
    for reused in (0, 48):
        engine = start_engine(
            models.folder("qwen2_5_vl"), Mode("disk"), cache=tmp_path / "profiles" / "kv"
        )
        deadline = time.monotonic() + 60
        while "saved" not in engine.status().tier and time.monotonic() < deadline:
            time.sleep(0.01)  # until the weights' digest is known
        assert first_reused(engine, asked[0]) == reused
        compare(prompts, asked, answers(engine, asked, Mode("at once")))
        while engine.tidy(lambda: False) is not None:
            pass
        engine.close()


def test_drafts_behind_images(models: TinyModels) -> None:
    """Right and wrong ones, whose positions are those of an image's text."""
    prompts = models.prompts("qwen2_vl")
    asked = several(prompts)
    truth = {n: prompts.greedy(each, NEW_TOKENS).tokens for n, each in enumerate(asked)}
    engine = start(models.folder("qwen2_vl"), Mode("drafts", speculation="auto"))
    gambler = Gambler(truth, tiny_vision.VOCABULARY)
    draft_with(engine, [gambler])
    compare(prompts, asked, answers(engine, asked, Mode("at once")))
    assert any(right for right, _ in gambler.outcomes)
    assert any(right < known for right, known in gambler.outcomes)


# The comparison must bite: each of these makes one small thing wrong.


def compare_running(models: TinyModels, kind: str, engine: GenerateEngine) -> None:
    prompts = models.prompts(kind)
    asked = several(prompts)
    compare(prompts, asked, answers(engine, asked, Mode("at once")))


def test_keys_without_images_are_seen(models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "media_extras", lambda _media, _block_tokens: {})
    engine = start(models.folder("smolvlm"), Mode("at once"))
    prompts = models.prompts("smolvlm")
    asked = several(prompts)
    with pytest.raises(Mismatch):
        compare(prompts, asked, answers(engine, asked, Mode("alone", alone=True)))


def test_positions_of_text_are_seen(models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start(models.folder("qwen2_5_vl"), Mode("at once"))

    def flat(tokens: int, _media: Sequence[Media]) -> object:
        return np.tile(np.arange(tokens), (3, 1)), 0

    monkeypatch.setattr(stage, "three_rows", flat)
    with pytest.raises(Mismatch):
        compare_running(models, "qwen2_5_vl", engine)


def test_rows_that_are_left_out_behind_early_layers_are_seen(
    models: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(models.folder("qwen3_vl"), Mode("at once"))
    encode = VisionDoor.encode

    def without(door: VisionDoor, inputs: dict[str, torch.Tensor], tokens: int) -> torch.Tensor:
        rows = encode(door, inputs, tokens)
        return torch.cat((rows[:1], torch.zeros_like(rows[1:])))

    monkeypatch.setattr(VisionDoor, "encode", without)
    with pytest.raises(Mismatch):
        compare_running(models, "qwen3_vl", engine)


def test_a_model_whose_images_are_not_exact_serves_text_only(
    models: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = VisionDoor.encode
    monkeypatch.setattr(
        VisionDoor,
        "encode",
        lambda *given: encode(*given).mul(1.01),  # a hundredth beside
    )
    engine = start_engine(models.folder("mistral3"), Mode("at once"))
    assert engine.ready().image_pixels == 0 and "differ" in engine.ready().no_images
    prompts = models.prompts("mistral3")
    text = prompts.of(TEXT)
    compare(prompts, [text], answers(engine, [text], Mode("at once")))


@pytest.mark.parametrize(
    ("change", "words"),
    [({"dtype": "int8"}, "packed weights"), ({"device": "cuda:0"}, "on a CPU only so far")],
)
def test_what_is_not_served_yet_is_refused(
    models: TinyModels, change: dict[str, str], words: str
) -> None:
    folder = models.folder("llava")
    known: dict[str, Any] = {"device": "cpu", "dtype": "float32", **change}
    spec = LoadSpec(name="m", path=str(folder), memory_bytes=1 << 28, **known)
    with pytest.raises(ModelUnusable, match=words):
        if known["device"] == "cpu":
            load_engine(spec, lambda *_: None)
        else:
            open_sight(spec, read_config(spec), models.prompts("llava").model)


def test_recurrent_layers_beside_an_encoder_are_refused(tmp_path: Path) -> None:
    text = {
        **tiny_vision.TEXT,
        "model_type": "lfm2",
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["conv", "full_attention", "conv"],
    }
    folder = tiny_vision.save("llava", tmp_path / "both", text_config=text)
    spec = LoadSpec("both", str(folder), "cpu", "float32", 1 << 28)
    with pytest.raises(ModelUnusable, match="encoder of images and recurrent layers"):
        load_engine(spec, lambda *_: None)
