"""What does not fit a model's window is refused at the door, with the window as it is served."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from penstock.testing.fake_server import add_model, serving

if TYPE_CHECKING:
    from pathlib import Path

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0],
    "long_factor": [4.0],
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 2.0,
    "original_max_position_embeddings": 4096,
}


@pytest.mark.parametrize(("rope", "window"), [(LONGROPE, 64), (YARN, 8192)])
def test_the_door_knows_the_window(tmp_path: Path, rope: dict[str, Any], window: int) -> None:
    folder = add_model(tmp_path, "m")
    stated = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**stated, "rope_parameters": rope}))
    with serving(tmp_path) as server:
        model = httpx.get(f"{server.url}/v1/models/m").json()
        assert model["max_model_len"] == window
        body = {"model": "m", "prompt": "x" * (window + 1), "max_tokens": 1}
        begun = time.monotonic()
        refused = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        assert refused.status_code == 400, refused.text
        assert refused.json()["error"]["code"] == "context_length_exceeded"
        assert str(window) in refused.json()["error"]["message"]
        assert time.monotonic() - begun < 30, "it is not waited for"
