"""What tests of every kind share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

STARTER = "SmolLM2-135M-Instruct"


@pytest.fixture(scope="session")
def starter_folder() -> Path:
    """The folder of the starter model, which `make test` and `make proof` pull first."""
    home = Path(os.environ.get("PENSTOCK_HOME", "~/.penstock")).expanduser()
    folder = home / "models" / STARTER
    if not (folder / "model.safetensors").exists():
        pytest.fail(f"The model {STARTER} is not in {home}: run make model.")
    return folder


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Torch on one thread: tiny operations gain nothing from two, and where other processes want
    the cores two threads wait for each other most of the time."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
