"""What was left open in the settings is decided for the device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from penstock.catalog import read_card
from penstock.catalog.linear_formats import scratch_bytes
from penstock.catalog.weights import ITEM_BYTES
from penstock.config import ModelSettings
from penstock.memory.cost import GroupCost, KvCost
from penstock.memory.device_kinds import CPU, CUDA
from penstock.memory.limits import IMAGE_FILE_COPIES, IMAGE_PIXEL_BYTES, MIN_KV_TOKENS
from penstock.server.residency.load_estimate import (
    BLOCK_TOKENS,
    LoadEstimate,
    Storage,
    estimate_load,
)
from penstock.testing.model_folders import LLAMA, TENSORS, write_model

if TYPE_CHECKING:
    from pathlib import Path

CARD = cast("Any", SimpleNamespace(dtype="bfloat16", encoder=None, vision=None))
GIB = 1 << 30


@pytest.mark.parametrize(
    ("device", "limit_gib", "own", "wanted"),
    [
        ("cpu", 500, {}, (1024, 64)),
        ("cuda:0", 8, {}, (1024, 64)),
        ("cuda:0", 24, {}, (8192, 128)),
        ("cuda:0", 24, {"step_tokens": 2048}, (2048, 128)),
        ("cuda:0", 24, {"step_tokens": 64}, (64, 32)),
        ("cuda:0", 24, {"step_sequences": 8}, (8192, 8)),
    ],
)
def test_the_largest_step(
    device: str, limit_gib: int, own: dict[str, int], wanted: tuple[int, int]
) -> None:
    settings = ModelSettings(**own)  # type: ignore[arg-type]
    plan = estimate_load(CARD, settings, device, limit_gib * GIB)
    assert (plan.step_tokens, plan.step_sequences) == wanted


def llama(**own: Any) -> LoadEstimate:
    card = SimpleNamespace(
        encoder=None, vision=own.pop("vision", None),
        name="m", dtype="float32", context=1000, hidden_size=8, vocab_size=8,
        kv_cost=lambda *_: KvCost((GroupCost(100 * BLOCK_TOKENS),), BLOCK_TOKENS),
        bytes_in_memory=lambda dtype, made, kind: 1,
    )  # fmt: skip
    return estimate_load(cast("Any", card), ModelSettings(**own), "cpu", GIB)


def test_a_minimum_of_kv() -> None:
    assert llama().kv_min_bytes == 100 * MIN_KV_TOKENS
    own = llama(kv_min_tokens=500, kv_min_bytes=1)
    assert own.kv_min_bytes == 100 * 528
    assert llama(kv_min_bytes=10**6).kv_min_bytes == 10**6
    # A load finds room for it beside the largest step; all the KV there may be is no minimum.
    assert own.load_need().kv_min_bytes > own.kv_min_bytes
    assert own.load_need().kv_min_bytes <= own.load_need().kv_window_bytes
    fixed = llama(kv_tokens=200, kv_min_tokens=500)
    assert fixed.load_need().kv_min_bytes == fixed.kv_min_bytes == 100 * 224


def test_weights_made_at_load_leave_kv_and_steps_what_they_are(tmp_path: Path) -> None:
    folder = write_model(
        tmp_path / "m", tensors={**TENSORS, "model.layers.0.up_proj.weight": ("BF16", (64, 8))}
    )
    plain, int8 = (
        estimate_load(read_card(folder), ModelSettings(dtype=dtype), "cpu", GIB)
        for dtype in ("auto", "int8")
    )
    assert plain.weight_bytes == (136 + 64 * 8) * 4
    assert int8.weight_bytes == 136 * 4 + 64 * 8 + 64 * 4 + scratch_bytes(1, CPU)
    assert int8.kv == plain.kv
    assert int8.step_bytes() == plain.step_bytes()
    storage = Storage(tmp_path)
    assert [estimate.spec(1, 1, storage).dtype for estimate in (plain, int8)] == ["float32", "int8"]


@pytest.mark.parametrize(("device", "of"), [("cpu", "float32"), ("cuda:0", "bfloat16")])
def test_kv_in_8_bits_takes_its_own_bytes(tmp_path: Path, device: str, of: str) -> None:
    """Of a token and, with windows, of what stays; weights and steps are what they were."""
    config = {
        **LLAMA,
        "torch_dtype": "bfloat16",
        "model_type": "qwen2",
        "num_hidden_layers": 6,
        "head_dim": 64,
        "use_sliding_window": True,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
    }
    card = read_card(write_model(tmp_path / "m", config, {"a": ("BF16", (8, 8))}))
    plain, int8 = (
        estimate_load(card, ModelSettings(kv_dtype=kv_dtype), device, GIB)
        for kv_dtype in ("auto", "int8")
    )
    assert [plan.summary()["kv_dtype"] for plan in (plain, int8)] == [of, "int8"]
    least = 1.9 * ITEM_BYTES[of] / 2
    assert plain.kv.token_bytes >= least * int8.kv.token_bytes
    assert plain.kv.sequence(1000) >= least * int8.kv.sequence(1000)
    assert (int8.weight_bytes, int8.step_bytes()) == (plain.weight_bytes, plain.step_bytes())
    assert int8.load_need().kv_window_bytes < plain.load_need().kv_window_bytes
    assert int8.spec(1, 1, Storage(tmp_path)).kv_dtype == "int8"


def test_images_are_booked_beside_the_step() -> None:
    settings: dict[str, Any] = {"image_bytes": 1000, "image_file_bytes": 100}
    text, seeing = llama(**settings), llama(vision=object(), **settings)
    booked = 1000 + IMAGE_FILE_COPIES * 100
    assert (text.image_bytes, seeing.image_bytes) == (0, booked)
    assert seeing.step_bytes() == text.step_bytes() + booked
    # The largest image has what there is to spare, and raises no minimum.
    more = seeing.load_need().kv_max_bytes - text.load_need().kv_max_bytes
    assert more == IMAGE_PIXEL_BYTES * seeing.settings.image_pixels
    assert seeing.load_need().kv_min_bytes == text.load_need().kv_min_bytes
    assert llama(vision=object(), image_pixels=0).image_bytes == 0


def test_a_gpu_dequantises_more_at_a_time() -> None:
    assert [scratch_bytes(4 * GIB, kind) for kind in (CPU, CUDA)] == [16 << 20, 64 << 20]
    assert scratch_bytes(160 << 20, CUDA) == 10 << 20
    assert scratch_bytes(0, CUDA) == 0
