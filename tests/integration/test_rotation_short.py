"""The short form of the rotation under `make proof`: one of five models fits at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock import shapes
from penstock.testing import rotation
from penstock.testing.served import served

if TYPE_CHECKING:
    from pathlib import Path

LIMIT = 1250 << 20
SETTINGS = {
    "PENSTOCK_MODELS_KV_MIN_TOKENS": "2200",  # of 256 KiB
    "PENSTOCK_MODELS_STEP_TOKENS": "64",
    "PENSTOCK_MODELS_STEP_SEQUENCES": "8",
    "PENSTOCK_MODELS_MAX_CONTEXT": "256",
}


def test_models_take_turns_in_memory_for_one(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    shapes.write_folder("random:big-kv", source)
    names = ["a", "b", "c", "d", "e"]
    rotation.add_names(source, tmp_path / "models", names)
    flags = (f"--memory={LIMIT}", "--device=cpu")
    with served(tmp_path, tmp_path / "serve.log", *flags, environment=SETTINGS) as server:
        run = rotation.rotate(server, LIMIT, names, 12)
    print(run)  # noqa: T201 - shown when it fails
    rotation.check(run)
