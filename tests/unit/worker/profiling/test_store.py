"""By what a stored profile is found."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from msgspec.structs import replace

from penstock.memory.cost import CostModel, GroupCost, KvCost
from penstock.testing.model_folders import write_model
from penstock.wire import LoadSpec
from penstock.worker.kv.layout.layer_states import StateGeometry
from penstock.worker.profiling.store import FORMAT, StoredProfile, fingerprint, load, save

if TYPE_CHECKING:
    from pathlib import Path


def test_a_profile_is_of_one_format_of_weights_and_of_kv(tmp_path: Path) -> None:
    """Steps over other KV take other memory, and blocks of other sizes."""
    folder = write_model(tmp_path / "m")
    spec = LoadSpec("m", str(folder), "cpu", "float32", 1 << 30)
    specs = [spec, replace(spec, kv_dtype="int8"), replace(spec, dtype="int8")]
    found = [fingerprint(one, "cpu", torch.float32, 512, 16) for one in specs]
    found.append(fingerprint(spec, "cpu", torch.bfloat16, 512, 16))
    assert len(set(found)) == len(found)
    assert fingerprint(spec, "cpu", torch.float32, 512, 16) == found[0]


def test_states_of_recurrent_layers_are_stored_with_the_rest(tmp_path: Path) -> None:
    cost = CostModel((0.0,) * 5, (), (), (), KvCost((GroupCost(64),), 16, state_bytes=640))
    states = (
        (0, StateGeometry(96, 3, "float32", (4, 16, 16))),
        (2, StateGeometry(64, 2, "bfloat16")),
    )
    stored = StoredProfile(
        format=FORMAT,
        fingerprint="some",
        memory_bytes=1 << 30,
        step_tokens=64,
        step_sequences=4,
        cost=cost,
        layers=(),
        states=states,
        prompts_differ=True,
    )
    save(str(tmp_path), stored)
    assert load(str(tmp_path), "some") == stored
