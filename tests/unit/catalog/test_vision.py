"""How many tokens an image comes to: the same as transformers' own processors make of it."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import transformers
from PIL import Image

from penstock.catalog.vision import TYPES, UnfitImage, read_vision
from penstock.catalog.vision.layouts import Crops, Fixed, Layout, Lines, Patches, Tiles
from penstock.errors import ModelUnusable

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.catalog.vision.layouts import Cut

_SOURCE = random.Random(0)
SIZES = [(1, 1), (1, 2), (199, 1), (64, 64), (65, 64)]
SIZES += [(int(2 ** _SOURCE.uniform(0, 8)), int(2 ** _SOURCE.uniform(0, 8))) for _ in range(40)]
TILES = {"size": {"longest_edge": 256}, "max_image_size": {"longest_edge": 64}}


def processed(name: str, sides: tuple[int, int], **options: Any) -> Any:
    processor = getattr(transformers, f"{name}Pil")(**options)
    return processor(images=[Image.new("RGB", sides, (9, 9, 9))], return_tensors="np")


def tiles(name: str, size: tuple[int, int]) -> Layout:
    made = processed(name, size, **TILES)
    return Layout("", (4,) * made["pixel_values"].shape[1])


def patches(size: tuple[int, int]) -> Layout:
    limits = {"min_pixels": 56 * 56, "max_pixels": 28 * 28 * 20}
    _, rows, columns = processed("Qwen2VLImageProcessor", size, **limits)["image_grid_thw"][0]
    return Layout("", (rows * columns // 4,), (rows // 2, columns // 2))


def lines(size: tuple[int, int]) -> Layout:
    limits = {"size": {"longest_edge": 96}, "patch_size": {"height": 16, "width": 16}}
    high, wide = processed("PixtralImageProcessor", size, **limits)["image_sizes"][0]
    return Layout("", (wide // 16,) * (high // 16))


def crops(size: tuple[int, int]) -> Layout:
    limits = {"size": {"height": 48, "width": 48}, "crop_to_patches": True, "max_patches": 6}
    made = processed("GotOcr2ImageProcessor", size, **limits)
    return Layout("", (4 * int(np.asarray(made["num_patches"])[0]),))


CASES: dict[str, tuple[Cut, Any]] = {
    "smolvlm": (Tiles(64, 4, 256), lambda size: tiles("SmolVLMImageProcessor", size)),
    "idefics3": (Tiles(64, 4, 256), lambda size: tiles("Idefics3ImageProcessor", size)),
    "qwen": (Patches(28, 56 * 56, 28 * 28 * 20), patches),
    "mistral3": (Lines(16, 96), lines),
    "internvl": (Crops((48, 48), 4, 1, 6), crops),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore")
def test_layouts_are_those_of_the_processors(case: str) -> None:
    cut, theirs = CASES[case]
    for width, height in SIZES:
        try:
            ours = cut.layout(width, height, "<image>")
        except UnfitImage:
            assert case == "mistral3" and max(width, height) > 96
            continue
        expected = theirs((width, height))
        assert (ours.runs, ours.grid) == (expected.runs, expected.grid), (width, height)
        assert ours.text.count("<image>") == len(ours.runs)


@pytest.mark.parametrize("cut", [cut for cut, _ in CASES.values()])
def test_strips_are_refused(cut: Cut) -> None:
    with pytest.raises(UnfitImage, match=r"1 x 201 pixels; one side may be at most 200 times"):
        cut.layout(1, 201, "")


def test_tiles_have_rows_and_columns() -> None:
    text = Tiles(64, 4, 128).layout(100, 60, "*").text
    around = "<fake_token_around_image>"
    assert text == (
        f"{around}<row_1_col_1>*{around}<row_1_col_2>*\n"
        f"{around}<row_2_col_1>*{around}<row_2_col_2>*\n"
        f"\n{around}<global-img>*{around}"
    )
    assert Tiles(64, 4, 64).layout(9, 9, "*").text == f"{around}<global-img>*{around}"
    assert Lines(8, 96).layout(24, 16, "*").text == "*[IMG_BREAK]*[IMG_END]"
    assert Crops((8, 8), 4, 1, 6).layout(8, 8, "*").text == "<img>*</img>"
    assert Fixed(576).layout(3, 4, "*") == Layout("*", (576,))


def folder(path: Path, **settings: Any) -> Path:
    (path / "preprocessor_config.json").write_text(json.dumps(settings))
    return path


QWEN: dict[str, Any] = {"model_type": "qwen3_vl", "image_token_id": 7, "vision_config": {}}


def test_what_a_folder_says(tmp_path: Path) -> None:
    vision = read_vision(folder(tmp_path, patch_size=16, merge_size=2, max_pixels=4096), QWEN)
    assert vision is not None and vision.cut == Patches(32, 56 * 56, 4096)
    assert (vision.token_id, vision.levels, vision.three_rows) == (7, 4, True)
    fast = folder(tmp_path, image_processor_type="Qwen2VLImageProcessorFast")
    assert read_vision(fast, QWEN) is not None
    # The nested settings of newer folders win.
    nested = {"image_processor": {"patch_size": 8, "merge_size": 2}}
    (tmp_path / "processor_config.json").write_text(json.dumps(nested))
    vision = read_vision(tmp_path, QWEN)
    assert vision is not None and isinstance(vision.cut, Patches) and vision.cut.side == 16


def test_models_that_take_no_images(tmp_path: Path) -> None:
    assert read_vision(tmp_path, QWEN) is None  # no processor
    folder(tmp_path, patch_size=16)
    assert read_vision(tmp_path, {**QWEN, "model_type": "llama"}) is None
    assert read_vision(tmp_path, {**QWEN, "model_type": "gemma3"}) is None
    assert read_vision(tmp_path, {**QWEN, "image_token_id": None}) is None
    assert read_vision(folder(tmp_path, image_processor_type="Other"), QWEN) is None
    assert "gemma3" not in TYPES


def test_settings_that_make_no_sense(tmp_path: Path) -> None:
    with pytest.raises(ModelUnusable, match="merge_size is -1"):
        read_vision(folder(tmp_path, merge_size=-1), QWEN)


@pytest.mark.parametrize(
    ("tower", "strategy", "tokens"),
    [
        ("clip_vision_model", "default", 576),
        ("clip_vision_model", "full", 577),
        ("siglip_vision_model", "full", 576),
    ],
)
def test_a_row_of_no_patch(tmp_path: Path, tower: str, strategy: str, tokens: int) -> None:
    config = {
        "model_type": "llava",
        "image_token_index": 7,
        "vision_feature_select_strategy": strategy,
        "vision_config": {"model_type": tower, "image_size": 336, "patch_size": 14},
    }
    vision = read_vision(folder(tmp_path), config)
    assert vision is not None and vision.cut == Fixed(tokens)
