"""Signing in with a key, and what of it a script can see."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.testing.browser import ADMIN_KEY, API_KEY

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.testing.browser import Tab

REFUSED = ("401",)  # browsers note every refused request


def test_an_admin_signs_in_and_out(keyed_url: str, open_tab: Callable[..., Tab]) -> None:
    page = open_tab(keyed_url, expected=REFUSED).page
    page.goto(f"{keyed_url}/#/memory")
    page.get_by_label("Key", exact=True).fill("wrong")
    page.get_by_role("button", name="Sign in").click()
    page.get_by_text("The key is not one of this server's.").wait_for()
    page.get_by_label("Key", exact=True).fill(ADMIN_KEY)
    page.get_by_label("Key", exact=True).press("Enter")
    page.locator(".page.memory .books").wait_for()
    assert ADMIN_KEY not in page.url
    seen = page.evaluate(
        "document.cookie + JSON.stringify(localStorage) + JSON.stringify(sessionStorage)"
        " + document.documentElement.outerHTML"
    )
    assert ADMIN_KEY not in seen
    assert page.evaluate("document.cookie") == ""
    [cookie] = page.context.cookies()
    assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
    assert ADMIN_KEY not in cookie["value"]
    page.reload()
    page.locator(".page.memory .books").wait_for()  # the session goes on
    page.get_by_role("button", name="Sign out").click()
    page.get_by_label("Key", exact=True).wait_for()
    assert page.context.cookies() == []
    page.reload()
    page.get_by_label("Key", exact=True).wait_for()


def test_a_client_has_the_chat_only(keyed_url: str, open_tab: Callable[..., Tab]) -> None:
    page = open_tab(keyed_url, expected=REFUSED).page
    page.goto(f"{keyed_url}/#/memory")
    page.get_by_label("Key", exact=True).fill(API_KEY)
    page.get_by_role("button", name="Sign in").click()
    page.locator(".page.chat").wait_for()
    assert page.locator(".side li").all_inner_texts() == ["Chat"]
    page.get_by_label("Message", exact=True).fill("hello")
    page.get_by_label("Message", exact=True).press("Enter")
    page.locator("[data-figures]").wait_for()
    status = page.evaluate("fetch('admin/api/memory').then((answer) => answer.status)")
    assert status == 401


def test_a_session_that_ends_leads_back_to_the_key(
    keyed_url: str, open_tab: Callable[..., Tab]
) -> None:
    page = open_tab(keyed_url, expected=REFUSED).page
    page.goto(f"{keyed_url}/#/models")
    page.get_by_label("Key", exact=True).fill(ADMIN_KEY)
    page.get_by_label("Key", exact=True).press("Enter")
    page.locator('[data-model="fake"]').wait_for()
    page.context.clear_cookies()
    page.get_by_role("button", name="Will it fit?").click()
    page.get_by_label("Key", exact=True).wait_for()
