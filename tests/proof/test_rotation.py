"""Models twice as large as the limit, asked in random order: all answered, none refused.

Every unload settles within a second of its decision, and what the server's processes hold after the
last is what they held after the first round, within 1 %.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import pytest

from penstock.testing import rotation
from penstock.testing.served import served

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.proof

REQUESTS = int(os.environ.get("PENSTOCK_PROOF_REQUESTS", "200"))
LIMIT = 2150 << 20
CONFIG = """
[models]
kv_min_tokens = 8192
device = "cpu"

[models."random:tiny-llama"]

[models.starter-5]
dtype = "bfloat16"
"""


def test_two_hundred_requests_over_twice_the_limit(starter_folder: Path, tmp_path: Path) -> None:
    names = [f"starter-{number}" for number in range(6)]
    rotation.add_names(starter_folder, tmp_path / "models", names)
    config = tmp_path / "penstock.toml"
    config.write_text(CONFIG)
    flags = (f"--memory={LIMIT}", f"--config={config}")
    with served(tmp_path, tmp_path / "serve.log", *flags) as server:
        run = rotation.rotate(server, LIMIT, [*names, "random:tiny-llama"], REQUESTS)
    sys.stdout.write(f"{run}\n")
    rotation.check(run)
