"""A real browser: Debian's chromium, driven by Playwright. Without it these tests are skipped,
except where CI could have installed it: there they fail."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from penstock.testing.browser import ADMIN_KEY, API_KEY, CHROMIUM, Tab, launched
from penstock.testing.fake_server import add_model, serving
from penstock.testing.system_tools import must_be_there

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from playwright.sync_api import Browser


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Say what is missing."""
    if CHROMIUM is None and not must_be_there():
        here = Path(__file__).parent
        for item in items:
            if here in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="needs chromium: apt install chromium"))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Not for longer: as long as Playwright runs, this thread has a running event loop."""
    assert CHROMIUM is not None, "chromium is missing (.ci/run installs it)"
    with launched() as browser:
        yield browser


@pytest.fixture
def open_tab(browser: Browser) -> Iterator[Callable[..., Tab]]:
    """Opens tabs in browsers of their own; at the end nothing went wrong in any."""
    tabs: list[Tab] = []

    def make(url: str, *, expected: tuple[str, ...] = (), width: int = 1280) -> Tab:
        context = browser.new_context(viewport={"width": width, "height": 800})
        context.set_default_timeout(60_000)  # other programs may take both cores
        tabs.append(Tab(context.new_page(), url, expected))
        tabs[-1].watch()
        return tabs[-1]

    yield make
    for tab in tabs:
        tab.page.context.close()
    assert [problem for tab in tabs for problem in tab.problems] == []


@pytest.fixture(scope="session")
def fake_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("browser")
    add_model(home, "fake")
    return home


@pytest.fixture(scope="session")
def open_url(fake_home: Path) -> Iterator[str]:
    """A server without keys, over a fake model."""
    with serving(fake_home) as server:
        yield server.url


@pytest.fixture(scope="session")
def keyed_url(fake_home: Path) -> Iterator[str]:
    """A server with both kinds of keys, over a fake model."""
    with serving(fake_home, server_api_keys=[API_KEY], server_admin_keys=[ADMIN_KEY]) as server:
        yield server.url
