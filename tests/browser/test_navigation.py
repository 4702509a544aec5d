"""Getting about: the menu on phones, signing out, and a server that has gone."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import httpx
import pytest

from penstock.server.web import session
from penstock.testing.browser import ADMIN_KEY, API_KEY
from penstock.testing.fake_server import FakeServer, add_model, serving
from penstock.testing.fake_worker import FakeModel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from playwright.sync_api import Page

    from penstock.testing.browser import Tab

REST = ["Cache", "Bench", "Events", "Settings"]
FOCUSED = "document.activeElement.textContent"


def sign_in(tab: Tab, key: str) -> Page:
    tab.page.goto(f"{tab.url}/#/chat")
    tab.page.get_by_label("Key", exact=True).fill(key)
    tab.page.get_by_label("Key", exact=True).press("Enter")
    tab.page.locator(".page.chat").wait_for()
    return tab.page


def test_on_a_phone_further_pages_are_behind_more(
    open_url: str, open_tab: Callable[..., Tab]
) -> None:
    page = open_tab(open_url, width=390).show("memory")
    more = page.get_by_role("button", name="More")
    links = page.locator("#more-pages a")
    assert not links.first.is_visible()
    more.click()
    page.wait_for_function(f"() => {FOCUSED} === 'Cache'")
    assert more.get_attribute("aria-expanded") == "true"
    assert links.all_inner_texts() == REST
    steps = (("ArrowDown", "Bench"), ("End", "Settings"), ("ArrowDown", "Cache"), ("Home", "Cache"))
    for key, name in (*steps, ("ArrowUp", "Settings")):
        page.keyboard.press(key)
        assert page.evaluate(FOCUSED) == name
    page.keyboard.press("Escape")
    page.wait_for_function("() => document.activeElement.id === 'more'")
    assert not links.first.is_visible()
    more.click()
    page.mouse.click(100, 300)
    links.first.wait_for(state="hidden")
    for name in REST:
        more.click()
        page.get_by_role("link", name=name).click()
        page.locator(f".page.{name.lower()}").wait_for()
        links.first.wait_for(state="hidden")
        assert "here" in (more.get_attribute("class") or "").split()
    bar = page.locator(".pages > li").evaluate_all("(all) => all.map((one) => one.clientWidth)")
    assert sum(bar) <= 390
    assert min(bar) >= 60  # wide enough for a thumb


def test_a_wide_window_has_all_pages_at_the_side(
    open_url: str, open_tab: Callable[..., Tab]
) -> None:
    page = open_tab(open_url).show("memory")
    assert not page.get_by_role("button", name="More").is_visible()
    assert page.locator(".side a:visible").count() == 9  # eight pages, and the name


def test_a_wrong_key_is_answered_late_and_others_are_not(
    keyed_url: str, open_tab: Callable[..., Tab], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "WRONG_KEY_S", 5.0)
    page = open_tab(keyed_url, expected=("401",)).page
    page.goto(f"{keyed_url}/#/memory")
    page.get_by_label("Key", exact=True).fill("wrong")
    begun = time.monotonic()
    page.get_by_role("button", name="Sign in").click()
    page.get_by_role("button", name="Checking the key").wait_for()
    begun_right = time.monotonic()
    right = httpx.post(f"{keyed_url}/web/session", json={"key": ADMIN_KEY}, timeout=20)
    assert right.status_code == 200
    assert time.monotonic() - begun_right < session.WRONG_KEY_S
    page.get_by_text("The key is not one of this server's.").wait_for()
    assert time.monotonic() - begun >= session.WRONG_KEY_S
    assert page.get_by_label("Key", exact=True).get_attribute("aria-invalid") == "true"


@pytest.mark.parametrize(("key", "name"), [(ADMIN_KEY, "an admin key"), (API_KEY, "API key 1")])
def test_signing_out_names_the_key_and_asks_only_if_something_is_lost(
    keyed_url: str, open_tab: Callable[..., Tab], key: str, name: str
) -> None:
    page = sign_in(open_tab(keyed_url, expected=("401",)), key)
    out = page.get_by_role("button", name=f"Sign out ({name})")
    page.get_by_label("Message", exact=True).fill("half a question")
    out.click()
    dialog = page.locator("dialog")
    dialog.get_by_text("A message is written and not sent.").wait_for()
    dialog.get_by_role("button", name="Cancel").click()
    dialog.wait_for(state="detached")
    assert page.get_by_label("Message", exact=True).input_value() == "half a question"
    page.get_by_label("Message", exact=True).fill("")
    out.click()
    page.get_by_label("Key", exact=True).wait_for()
    assert page.context.cookies() == []


def test_a_session_that_has_ended_names_its_key(
    keyed_url: str, open_tab: Callable[..., Tab]
) -> None:
    page = sign_in(open_tab(keyed_url, expected=("401",)), API_KEY)
    page.context.clear_cookies()
    page.get_by_label("Message", exact=True).fill("hello")
    page.get_by_label("Message", exact=True).press("Enter")
    page.get_by_text("The session of API key 1 has ended").wait_for()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FakeServer]:
    add_model(tmp_path, "fake", FakeModel())
    with serving(tmp_path) as server:
        yield server


def test_a_server_that_has_gone_is_said_to_have_with_what_to_do(
    server: FakeServer, tmp_path: Path, open_tab: Callable[..., Tab]
) -> None:
    page = open_tab(server.url, expected=("ERR_",)).show("memory")
    page.locator(".live.on").wait_for()
    port = int(server.url.rpartition(":")[2])
    assert page.locator(".lost").count() == 0
    server.stop()
    alert = page.get_by_role("alert").filter(has_text=f"No answer from 127.0.0.1:{port} since")
    alert.wait_for()
    assert "penstock serve" in alert.inner_text()
    assert page.locator(".books").count() > 0  # what was known stays
    with serving(tmp_path, server_port=port):
        alert.get_by_role("button", name="Try now").click()
        page.locator(".live.on").wait_for()
        alert.wait_for(state="detached")
