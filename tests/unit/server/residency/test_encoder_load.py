"""What a model without KV needs: weights and its largest step, and nothing that could be shed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from penstock.catalog import read_card
from penstock.config import ModelSettings
from penstock.errors import ContextTooLong
from penstock.memory.admission import Accept, Refuse, RequestNeed, decide
from penstock.memory.domains import RAM
from penstock.memory.ledger import Ledger
from penstock.memory.limits import MIB
from penstock.server.residency.load_estimate import (
    LoadEstimate,
    Storage,
    estimate_load,
    fitting,
)
from penstock.testing.model_folders import LLAMA, write_model
from penstock.wire import EngineKind

if TYPE_CHECKING:
    from pathlib import Path

WINDOW = LLAMA["max_position_embeddings"]


def _plan(folder: Path, device: str = "cpu", stored: str = "F32", **own: object) -> LoadEstimate:
    config = {**LLAMA, "architectures": ["BertModel"], "model_type": "bert"}
    tensors = {"weight": (stored, (16, 8))}
    model = write_model(folder / "m", config, tensors)
    settings = ModelSettings(**own)  # type: ignore[arg-type]
    return estimate_load(read_card(model), settings, device, 4000 * MIB)


def test_it_asks_for_no_kv(tmp_path: Path) -> None:
    plan = _plan(tmp_path)
    need = plan.load_need()
    assert (plan.kv_min_bytes, need.kv_min_bytes) == (0, 0)
    # What it asks for beside its smallest step is the rest of the largest.
    assert need.kv_max_bytes == plan.step_bytes() - plan.step_bytes(64)
    spec = plan.spec(need.kv_max_bytes, 0, Storage(tmp_path))
    assert spec.memory_bytes == plan.step_bytes()
    assert (spec.engine, spec.pooling) == (EngineKind.ENCODE, None)
    assert _plan(tmp_path / "other", pooling="cls").spec(0, 0, Storage(tmp_path)).pooling == "cls"


def test_the_queue_has_the_next_steps_texts_at_the_worker_too(tmp_path: Path) -> None:
    plan = _plan(tmp_path)
    assert plan.at_worker == 2 * plan.step_sequences


@pytest.mark.parametrize(
    ("device", "stored", "setting", "dtype"),
    [
        ("cpu", "F16", "auto", "float32"),
        ("cpu", "F32", "int8", "float32"),  # which is for weights of layers that generate
        ("cuda:0", "F16", "auto", "float32"),  # many overflow in it
        ("cuda:0", "BF16", "auto", "bfloat16"),
        ("cuda:0", "F16", "float16", "float16"),
    ],
)
def test_the_type_that_it_is_computed_in(
    tmp_path: Path, device: str, stored: str, setting: str, dtype: str
) -> None:
    plan = _plan(tmp_path, device, stored, dtype=setting)
    assert (plan.dtype, plan.made) == (dtype, "")


def test_a_text_may_fill_the_window_and_no_more(tmp_path: Path) -> None:
    snapshot = Ledger({RAM: 4000 * MIB}).snapshot()
    for capacity in (_plan(tmp_path).capacity(), _plan(tmp_path / "l").planned_capacity()):
        fits = RequestNeed(WINDOW, 0, "input", answer_tokens=0)
        assert isinstance(decide(fits, snapshot, capacity), Accept)
        long = RequestNeed(WINDOW + 1, 0, "input", answer_tokens=0)
        refusal = decide(long, snapshot, capacity)
        assert isinstance(refusal, Refuse) and isinstance(refusal.error, ContextTooLong)
        assert f"{WINDOW} tokens, but the text has {WINDOW + 1}." in refusal.error.message
        # An answer would need one more.
        assert isinstance(decide(RequestNeed(WINDOW, None), snapshot, capacity), Refuse)


def test_what_fits_says_that_nothing_is_kept(tmp_path: Path) -> None:
    told = fitting(_plan(tmp_path).planned_capacity(), 1000 * MIB, None, None)
    assert json.dumps(told)
    assert (told["kv_bytes"], told["kv_groups"], told["longest_context"]) == (0, [], WINDOW)
