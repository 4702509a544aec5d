"""What was left open in the settings is decided for the device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.config import ModelSettings
from penstock.server.plans import plan_for

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
