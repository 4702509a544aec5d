"""Pictures of every page at two widths, light and dark, of a server at work: readable and whole.

`PENSTOCK_PICTURES` names the folder for them, `PENSTOCK_PICTURES_WARM_S` for how long the server
works before. `make screenshots` takes some of them into the documentation.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from penstock.testing.browser import Tab, load_on
from penstock.testing.screenshots import PAGES, SIZES, THEMES, Look, faults, take

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser, Page

STARTER = "SmolLM2-135M-Instruct"
QUESTION = "Show a Python function that reverses a list, and say in two sentences how it works."
SAMPLING = {"max_tokens": "140", "temperature": "0"}
BENCH = {"kind": "bench", "model": STARTER, "clients": 2, "requests": 4, "input": 32, "output": 16}
CHANGED = {"server.keepalive_after_s": "5"}  # so that a setting shows that it was changed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    wanted = os.environ.get("PENSTOCK_PICTURES")
    made = Path(wanted) if wanted else tmp_path_factory.mktemp("pictures")
    made.mkdir(parents=True, exist_ok=True)
    return made


@pytest.fixture(scope="module")
def busy_url(real_url: str) -> Iterator[str]:
    """A server that has something to show on every page."""
    with load_on(real_url, STARTER):
        time.sleep(float(os.environ.get("PENSTOCK_PICTURES_WARM_S", "0")))
        too_long = [{"role": "user", "content": "word " * 30_000}]
        refused = httpx.post(
            f"{real_url}/v1/chat/completions",
            json={"model": STARTER, "messages": too_long},
            timeout=60,
        )
        assert refused.status_code == 400
        _set(real_url, CHANGED)
        for _ in range(2):
            _bench(real_url)
        yield real_url
        _set(real_url, dict.fromkeys(CHANGED))


@pytest.fixture(scope="module")
def storage(browser: Browser, busy_url: str) -> str:
    """What a browser keeps of a chat and two benchmarks: a script that puts it there."""
    page = browser.new_page()
    page.set_default_timeout(120_000)
    page.add_init_script(f"localStorage['penstock.sampling'] = {json.dumps(SAMPLING)!r}")
    page.goto(f"{busy_url}/#/chat")
    page.get_by_label("Message", exact=True).fill(QUESTION)
    page.get_by_label("Message", exact=True).press("Enter")
    page.locator("[data-figures]").wait_for()
    page.goto(f"{busy_url}/#/bench")
    page.locator(".bars").wait_for()
    kept: dict[str, str] = page.evaluate("({ ...localStorage })")
    page.close()
    return f"Object.assign(localStorage, {json.dumps(kept)})"


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("width", SIZES)
def test_every_page_is_whole_and_readable(
    browser: Browser, busy_url: str, storage: str, folder: Path, width: int, theme: str
) -> None:
    look = Look(width, theme)
    context = look.context(browser)
    context.set_default_timeout(60_000)
    context.add_init_script(storage)
    tab = Tab(context.new_page(), busy_url)
    tab.watch()
    found = {}
    for name, ready in PAGES.items():
        page = tab.show(name)
        page.locator(ready).first.wait_for()
        page.locator(".live.on").wait_for()
        if name == "models":
            _open_fit(page)
        take(page, name, look, folder)
        found[name] = faults(page)
    context.close()
    assert {name: wrong for name, wrong in found.items() if wrong} == {}
    assert tab.problems == []


def _open_fit(page: Page) -> None:
    page.get_by_role("button", name="Will it fit?").first.click()
    page.locator(".verdict").wait_for()


def _set(url: str, settings: dict[str, str] | dict[str, None]) -> None:
    httpx.patch(
        f"{url}/admin/api/settings", json={"settings": settings}, timeout=60
    ).raise_for_status()


def _bench(url: str) -> None:
    with httpx.Client(base_url=url, timeout=60) as client:
        for _ in range(30):  # its process waits for memory that other programs may have now
            if (begun := client.post("/admin/api/tasks", json=BENCH)).status_code != 503:
                break
            time.sleep(1)
        path = f"/admin/api/tasks/{begun.raise_for_status().json()['id']}"
        while (row := client.get(path).json())["state"] == "running":
            time.sleep(0.2)
    assert row["state"] == "done", row
