"""By what a stored profile is found."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from msgspec.structs import replace

from penstock.testing.model_folders import write_model
from penstock.wire import LoadSpec
from penstock.worker.profiling.store import fingerprint

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
