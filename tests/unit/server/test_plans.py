"""What was left open in the settings is decided for the device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.config import ModelSettings
from penstock.memory.limits import MIN_KV_TOKENS
from penstock.server.plans import BLOCK_TOKENS, ModelPlan, plan_for

CARD = cast("Any", SimpleNamespace(dtype="bfloat16"))
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
    plan = plan_for(CARD, settings, device, limit_gib * GIB)
    assert (plan.step_tokens, plan.step_sequences) == wanted


def llama(**own: object) -> ModelPlan:
    card = SimpleNamespace(
        name="m", dtype="float32", context=1000, hidden_size=8, vocab_size=8,
        kv_bytes_per_token=lambda item_bytes: 100, bytes_in_memory=lambda dtype: 1,
    )  # fmt: skip
    return plan_for(cast("Any", card), ModelSettings(**own), "cpu", GIB)  # type: ignore[arg-type]


def test_a_minimum_of_kv() -> None:
    assert llama().kv_least_bytes == 100 * MIN_KV_TOKENS
    own = llama(kv_least_tokens=500, kv_least_bytes=1)
    assert own.kv_least_bytes == 100 * (500 + BLOCK_TOKENS)
    assert llama(kv_least_bytes=10**6).kv_least_bytes == 10**6
    # A load finds room for it beside the largest step; all the KV there may be is no minimum.
    assert own.load_need().kv_least_bytes > own.kv_least_bytes
    assert own.load_need().kv_least_bytes <= own.load_need().kv_window_bytes
    fixed = llama(kv_tokens=200, kv_least_tokens=500)
    assert fixed.load_need().kv_least_bytes == fixed.kv_least_bytes == 100 * (200 + BLOCK_TOKENS)
