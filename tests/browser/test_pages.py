"""Every page with a real server and model under load: what it shows is what the server says."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from penstock.testing.browser import load_on

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.testing.browser import Tab

STARTER = "SmolLM2-135M-Instruct"
# What the page shows while it shows one row of memory and one of models, together with those rows.
READ_BOOKS = """async () => {
  const rows = { memory: new Map(), models: new Map() };
  const source = new EventSource("admin/api/stream?kinds=memory,models");
  for (const kind of ["memory", "models"]) {
    source.addEventListener(kind, ({ data }) => {
      const row = JSON.parse(data);
      rows[kind].set(String(row.at), row);
    });
  }
  for (let tries = 0; tries < 300; tries += 1) {
    await new Promise((resolve) => setTimeout(resolve, 50));
    const root = document.querySelector("[data-at]");
    const memory = rows.memory.get(root?.getAttribute("data-at"));
    const models = rows.models.get(root?.getAttribute("data-models-at"));
    if (!memory || !models) continue;
    source.close();
    const all = (selector) => [...root.querySelectorAll(`[data-domain="ram"] ${selector}`)]
      .map((cell) => Number(cell.dataset.bytes));
    return { memory, models: models.models, parts: all(".books td.part[data-bytes]"),
             sums: all(".books td.sum"), purposes: all(".books td.purpose"),
             booked: all(".books td.booked"), kv: all('[data-of="kv-used"]'),
             read: all('[data-of="read"]'), free: all('[data-of="free"]'),
             others: all('[data-of="others"]') };
  }
  return null;
}"""


@pytest.fixture
def busy_url(real_url: str) -> Iterator[str]:
    with load_on(real_url, STARTER):
        yield real_url


def test_the_memory_page_adds_up_to_the_ledger(busy_url: str, open_tab: Callable[..., Tab]) -> None:
    page = open_tab(busy_url).show("memory")
    page.locator(".books td.booked").wait_for()
    kv_seen = set()
    for number in range(30):
        seen: dict[str, Any] | None = page.evaluate(READ_BOOKS)
        assert seen is not None, "the page showed no row of the stream"
        domain = seen["memory"]["domains"]["ram"]
        held = [size for owner in domain["owners"].values() for size in owner.values()]
        assert sorted(seen["parts"]) == sorted(held)
        assert sum(seen["parts"]) == sum(seen["sums"]) == sum(seen["purposes"])
        assert seen["booked"] == [domain["booked_bytes"]] == [sum(held)]
        assert seen["read"] == [domain["read_bytes"]]
        assert seen["free"] == [domain["free_bytes"]]
        assert seen["others"] == [domain["external_bytes"]]
        assert seen["kv"] == [sum(row.get("kv_used_bytes", 0) for row in seen["models"])]
        kv_seen.update(seen["kv"])
        if number >= 2 and len(kv_seen) > 1:
            break
        page.wait_for_timeout(1000)  # a further row
    assert max(kv_seen) > 0
    assert len(kv_seen) > 1  # requests ran meanwhile
    page.locator(".stacked rect.p-weights").first.hover(force=True)
    tip = page.locator(".tip").inner_text()
    assert STARTER in tip
    assert re.search(r"[\d,]+ bytes", tip)


def test_models_are_unloaded_and_loaded(real_url: str, open_tab: Callable[..., Tab]) -> None:
    page = open_tab(real_url).show("models")
    card = page.locator(f'[data-model="{STARTER}"]')
    card.locator('[data-state="ready"]').wait_for()
    card.get_by_role("button", name="Unload").click()
    card.locator('[data-state="absent"]').wait_for()
    [row] = _get(real_url, "/admin/api/models")
    assert (row["name"], row["state"], row["bytes"]) == (STARTER, "absent", 0)
    card.get_by_role("button", name="Load", exact=True).click()
    card.locator('[data-state="ready"]').wait_for(timeout=120_000)
    [row] = _get(real_url, "/admin/api/models")
    assert (row["name"], row["state"]) == (STARTER, "ready")
    card.get_by_role("button", name="Pin", exact=True).click()
    card.get_by_role("button", name="Unpin").click()
    card.get_by_role("button", name="Pin", exact=True).wait_for()


def test_what_fits_is_asked_with_sliders(real_url: str, open_tab: Callable[..., Tab]) -> None:
    page = open_tab(real_url).show("models")
    card = page.locator(f'[data-model="{STARTER}"]')
    card.get_by_role("button", name="Will it fit?").click()
    card.get_by_text("Fits.").wait_for()
    context = card.get_by_role("slider", name="Context")
    context.fill("2048")
    card.get_by_role("slider", name="At once").fill("3")
    card.get_by_text("with 3 at once").wait_for()
    query = f"/admin/api/plan?model={STARTER}&context=2048&concurrency=3"
    most = _get(real_url, query)["concurrency_at_context"]
    # What fits depends on what other programs take meanwhile; the page and this ask apart.
    card.get_by_text(re.compile(r"At most \d+ at once at 2,048 tokens")).wait_for()
    assert most > 0


def test_requests_are_shown_and_cancelled(busy_url: str, open_tab: Callable[..., Tab]) -> None:
    page = open_tab(busy_url).show("requests")
    rows = page.locator(".requests tbody tr")
    rows.first.wait_for()
    first = rows.first.get_attribute("data-key")
    with page.expect_response("**/cancel") as answer:
        rows.first.get_by_role("button", name="Cancel").click()
    assert answer.value.status in (200, 404)  # it may just have ended
    page.locator(f'.requests tr[data-key="{first}"]').wait_for(state="detached")


def test_a_refusal_shows_up_with_its_numbers(real_url: str, open_tab: Callable[..., Tab]) -> None:
    page = open_tab(real_url).show("requests")
    body = {"model": STARTER, "messages": [{"role": "user", "content": "word " * 30_000}]}
    refused = httpx.post(f"{real_url}/v1/chat/completions", json=body, timeout=60)
    numbers = refused.json()["error"]["penstock"]
    row = page.locator(".refusals li").first
    row.get_by_text(refused.json()["error"]["message"]).wait_for()
    shown = row.inner_text()
    for name in ("needed_tokens", "limit_tokens"):
        assert f"{numbers[name]:,}" in shown


def test_a_chat_streams(real_url: str, open_tab: Callable[..., Tab]) -> None:
    tab = open_tab(real_url)
    page = tab.show("chat")
    page.get_by_label("System prompt and sampling").click()
    page.get_by_label("Max tokens").fill("60")
    page.get_by_label("Message", exact=True).fill("What is a penstock? Answer at length.")
    page.evaluate(
        """() => {
          window.seen = new Set();
          new MutationObserver(() => {
            const body = document.querySelector(".answer .body");
            if (body) window.seen.add(body.textContent.length);
          }).observe(document.body, { childList: true, subtree: true, characterData: true });
        }"""
    )
    page.get_by_label("Message", exact=True).press("Enter")
    figures = page.locator("[data-figures]")
    figures.wait_for()
    assert page.evaluate("window.seen.size") > 5  # it grew piece by piece
    assert re.fullmatch(
        r"first token [\d.]+ m?s · [\d.]+ tok/s · \d+ tokens · prompt of \d+, [\d.]+ % cached.*",
        figures.inner_text(),
    )
    page.get_by_label("Regenerate").click()
    running = page.locator('.answer[aria-busy="true"]')
    running.wait_for()
    page.locator('.answer[aria-busy="false"] [data-figures]').wait_for()
    assert " 0 % cached" not in figures.inner_text()  # the same prompt again
    page.get_by_label("Regenerate").click()
    running.wait_for()
    page.locator(".question").hover()  # an edited question ends the answer that is under way
    page.get_by_label("Edit", exact=True).click()
    page.get_by_label("Edit the message").fill("Say hello.")
    page.locator(".editing").get_by_role("button", name="Send").click()
    page.locator(".question", has_text="Say hello.").wait_for()
    page.locator('.answer[aria-busy="false"] [data-figures]').wait_for()
    page.reload()
    page.locator(".question", has_text="Say hello.").wait_for()  # it stayed in the browser


def test_an_answer_is_stopped(real_url: str, open_tab: Callable[..., Tab]) -> None:
    page = open_tab(real_url).show("chat")
    page.get_by_label("Message", exact=True).fill("Count to a thousand in words.")
    page.get_by_label("Message", exact=True).press("Enter")
    page.locator(".answer .body", has_text=re.compile(r"\w")).wait_for()
    page.get_by_role("button", name="Stop").click()
    page.get_by_text("· stopped").wait_for()


def test_a_refused_chat_says_why(real_url: str, open_tab: Callable[..., Tab]) -> None:
    tab = open_tab(real_url, expected=("400",))
    page = tab.show("chat")
    page.get_by_label("Message", exact=True).fill("word " * 30_000)
    page.get_by_label("Message", exact=True).press("Enter")
    problem = page.locator(".answer .problem")
    problem.wait_for()
    assert "limit tokens" in problem.inner_text().lower()


def test_cache_events_and_bench(busy_url: str, open_tab: Callable[..., Tab]) -> None:
    tab = open_tab(busy_url, expected=("503",))
    page = tab.show("cache")
    page.locator(".bar", has_text=STARTER).wait_for()
    page.get_by_role("button", name="Verify").click()
    panel = page.locator(".panel", has_text="Verify")
    panel.locator(".pill:not(.busy)").wait_for(timeout=60_000)
    assert panel.locator(".pill").inner_text() == "done", panel.inner_text()
    page.get_by_role("button", name="Clear").click()
    page.locator("dialog").get_by_role("button", name="Cancel").click()
    page.get_by_role("button", name="Clear").click()
    page.locator("dialog").get_by_role("button", name="Clear").click()
    cleared = page.locator(".panel", has_text="Clear").locator(".pill:not(.busy)")
    cleared.wait_for(timeout=60_000)
    assert cleared.inner_text() == "done"

    page = tab.show("events")
    page.locator(".event-list li", has_text="loaded").first.wait_for()
    page.get_by_label("Search events").fill("nothing has this")
    page.get_by_text("None matches.").wait_for()
    page.get_by_label("Search events").fill(STARTER)
    page.locator(".event-list li").first.wait_for()

    page = tab.show("bench")
    page.get_by_label("Clients").fill("2")
    page.get_by_label("Requests").fill("4")
    page.get_by_label("Tokens out").fill("8")
    page.get_by_role("button", name="Run").click()
    chart = page.get_by_text("Tokens per second")
    full = page.locator(".notice.bad", has_text="for the clients of a bench")
    for _ in range(30):  # its process waits for memory that other programs may have now
        chart.or_(full).first.wait_for(timeout=60_000)
        if chart.count():
            break
        full.wait_for(state="detached")
        page.get_by_role("button", name="Run").click()
    page.locator(".bar", has_text="64→8").wait_for()


def test_the_keyboard_and_the_theme(real_url: str, open_tab: Callable[..., Tab]) -> None:
    page = open_tab(real_url).show("memory")
    page.keyboard.press("3")
    page.locator(".page.models").wait_for()
    page.keyboard.press("1")
    page.locator(".page.chat").wait_for()
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "prompt"
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.get_by_label("Light or dark").click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before
    page.reload()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before


def _get(url: str, path: str) -> Any:
    return httpx.get(url + path, timeout=60).json()
