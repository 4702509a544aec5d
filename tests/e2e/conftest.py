"""A server over a fake model for all of this folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from penstock.testing.fake_server import add_model, serving

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def fake_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    home = tmp_path_factory.mktemp("home")
    add_model(home, "fake")
    with serving(home) as server:
        yield server.url
