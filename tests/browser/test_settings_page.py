"""Settings on the page: every one with its origin; those that may change are changed there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx

from penstock.testing.fake_server import serving

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from penstock.testing.browser import Tab


def setting(url: str, key: str) -> dict[str, Any]:
    rows = httpx.get(f"{url}/admin/api/settings").json()["settings"]
    return next((dict(row) for row in rows if row["key"] == key), {})


def test_every_setting_is_there_and_some_are_changed(
    open_url: str, open_tab: Callable[..., Tab]
) -> None:
    page = open_tab(open_url, expected=("400",)).show("settings")
    page.locator('[data-key="cache.share"]').wait_for()
    keys = [row["key"] for row in httpx.get(f"{open_url}/admin/api/settings").json()["settings"]]
    shown = page.locator(".setting").evaluate_all("(rows) => rows.map((row) => row.dataset.key)")
    assert sorted(shown) == sorted(keys)
    port = page.locator('[data-key="server.port"]')
    assert "flag --port" in port.inner_text()
    assert port.locator("input, select").count() == 0
    assert "after a restart" in port.inner_text()

    body = page.locator('[data-key="server.max_body"]')
    assert body.locator("input").input_value() == "32MiB"
    body.locator("input").fill("much")
    body.locator("input").press("Tab")
    page.get_by_text("a size is bytes, or a number with a unit").wait_for()
    body.locator("input").fill("1.5 GiB")
    body.locator("input").press("Tab")
    body.get_by_text("changed here").wait_for()
    assert setting(open_url, "server.max_body")["value"] == 3 << 29
    body.get_by_role("button", name="Undo").click()
    body.get_by_text("changed here").wait_for(state="detached")
    assert setting(open_url, "server.max_body")["origin"] == "default"

    page.get_by_label("share", exact=True).select_option("true")
    page.get_by_label("Only what is set").check()
    page.locator('[data-key="cache.share"]', has_text="changed here").wait_for()
    page.locator('[data-key="server.host"]').wait_for(state="detached")
    assert setting(open_url, "cache.share")["value"] is True
    page.get_by_role("button", name="Undo the change of cache.share").click()
    page.locator('[data-key="cache.share"]').wait_for(state="detached")


def test_a_model_s_own_settings(open_url: str, open_tab: Callable[..., Tab]) -> None:
    page = open_tab(open_url).show("models")
    card = page.locator('[data-model="fake"]')
    card.get_by_role("button", name="Settings").click()
    ttl = card.get_by_label("ttl", exact=True)
    ttl.fill("10m")
    ttl.press("Tab")
    card.locator('[data-key="models.fake.ttl"]', has_text="changed here").wait_for()
    assert setting(open_url, "models.fake.ttl")["value"] == 600
    assert setting(open_url, "models.ttl")["value"] is None
    assert ttl.input_value() == "600 s"
    assert card.get_by_label("default", exact=True).count() == 0  # that is no model's own
    card.get_by_role("button", name="Undo the change of models.fake.ttl").click()
    card.get_by_text("changed here").wait_for(state="detached")
    assert setting(open_url, "models.fake.ttl").get("value") is None


def test_a_read_only_page_changes_nothing(fake_home: Path, open_tab: Callable[..., Tab]) -> None:
    with serving(fake_home, server_dashboard="read-only", memory_limit="1536MiB") as server:
        page = open_tab(server.url).show("settings")
        page.locator('[data-key="cache.share"]').wait_for()
        assert page.locator('[data-key="memory.limit"] output').inner_text() == "1536MiB"
        assert page.locator(".setting input, .setting select").count() == 0
