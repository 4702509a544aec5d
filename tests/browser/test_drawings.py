"""What is drawn: events on the timeline, the line of requests, reasoning and tool calls."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from penstock.server.pipeline.model_texts import Texts
from penstock.testing.browser import API_KEY
from penstock.testing.fake_server import add_model, serving
from penstock.testing.fake_worker import FakeModel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from penstock.testing.browser import Tab

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
THINKER = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}assistant: <think>\n"
    "{# </think> <tool_call> #}"
)
# Rows of the stream, as if the server had sent them.
TELL = """async ([ago, rows]) => {
  const { take } = await import(location.origin + "/web/js/live.js");
  const { redraw } = await import(location.origin + "/web/js/shell.js");
  const at = Date.now() / 1000 - ago;
  const kind = (row) => (row.event ? "event" : "timeline");
  rows.forEach((row, number) => take(kind(row), { at: at + number, ...row }));
  redraw();
}"""

LONG_ROW = """async (row) => {
  const { take } = await import(location.origin + "/web/js/live.js");
  const { redraw } = await import(location.origin + "/web/js/shell.js");
  for (;;) {
    take("requests", { at: Date.now() / 1000, total: 1, waiting: 1, requests: [row] });
    redraw();
    await new Promise((resolve) => setTimeout(resolve, 200));
    const table = document.querySelector(".requests tbody tr")?.closest(".scroll");
    if (table) return table.scrollWidth - table.clientWidth;
  }
}"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    home: Path = tmp_path_factory.mktemp("drawings")
    add_model(home, "thinker", FakeModel(answer=f"Why not.\n</think>\n\nYes.{CALL}"), THINKER)
    add_model(home, "slow-to-load", FakeModel(load_s=2))
    add_model(home, "too-large", FakeModel(load_error_code="model_exceeds_memory"))
    with serving(home, models_default="thinker") as server:
        yield server.url


def ask(url: str, model: str, **fields: Any) -> httpx.Response:
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}], **fields}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)


def test_the_timeline_shows_what_happened(open_url: str, open_tab: Callable[..., Tab]) -> None:
    ask(open_url, "fake", max_tokens=4)
    too_long = [{"role": "user", "content": "x" * 9000}]
    refused = ask(open_url, "fake", messages=too_long)
    assert refused.status_code == 400
    page = open_tab(open_url).show("memory")
    loads = page.locator('[data-lane="loads"] .flag.up')
    loads.first.wait_for()  # with the second point
    assert "load, fake" in (loads.first.get_attribute("data-tip") or "")
    flag = page.locator('[data-lane="refused"] .flag.bad')
    assert refused.json()["error"]["code"] in (flag.first.get_attribute("data-tip") or "")
    assert page.locator('[data-lane="pressure"]').count() == 0
    shed = {"event": "shed", "domain": "ram", "act": "unused kv", "before_bytes": 3 << 20}
    short = {"event": "short", "domain": "ram"}
    page.evaluate(TELL, [5, [short, shed, {"event": "released", "domain": "ram"}]])
    page.evaluate(TELL, [5, [{"event": "short", "domain": "gpu0"}]])  # of another domain
    page.evaluate(TELL, [60, [{"event": "death", "model": "fake", "reason": "SIGKILL"}]])
    pressure = page.locator('[data-lane="pressure"] .flag')
    pressure.first.wait_for()
    assert pressure.count() == 1  # they came together
    assert "shed" in (pressure.get_attribute("class") or "").split()
    tip = pressure.get_attribute("data-tip") or ""
    assert [line.split("  ")[1].split(",")[0] for line in tip.split("\n")] == [
        "short", "shed", "released",
    ]  # fmt: skip
    assert "before 3.00 MiB" in tip
    pressure.hover(force=True)
    assert page.locator(".tip").text_content() == tip
    lane = page.get_by_role("img", name="pressure: ")
    assert "short, shed, released" in (lane.get_attribute("aria-label") or "")
    assert "SIGKILL" in str(page.locator('[data-lane="failed"] .flag').get_attribute("data-tip"))
    held = page.locator('[data-lane="pressure"] .held')
    last = httpx.get(f"{open_url}/admin/api/timeline").json()["points"][-1]
    before = held.count()
    domains = {"domains": {"ram": {**last["domains"]["ram"], "short": True}}}
    page.evaluate(TELL, [-60, [domains]])
    page.wait_for_function(
        "(count) => document.querySelectorAll('.lane .held').length > count", arg=before
    )
    assert "admission held" in (held.last.get_attribute("data-tip") or "")
    keys = page.locator(".flag-keys li").all_inner_texts()
    assert {"load", "shed", "refusal, failure"} <= set(keys)
    assert "released" not in keys  # none is drawn by itself


def test_events_are_filtered_and_held(open_url: str, open_tab: Callable[..., Tab]) -> None:
    page = open_tab(open_url).show("events")
    page.locator(".live.on").wait_for()
    rows = page.locator(".event-list li")
    page.evaluate(TELL, [9, [{"event": "shed", "act": "caches", "before_bytes": 3 << 20}]])
    page.evaluate(TELL, [8, [{"event": "hang", "model": "fake", "silent_s": 100.0}]])
    rows.filter(has_text="before 3.00 MiB").wait_for()
    page.get_by_label("Kind of event").select_option("hang")
    rows.filter(has_text="before 3.00 MiB").wait_for(state="detached")
    assert rows.all_inner_texts() == [rows.filter(has_text="silent 1 min 40 s").inner_text()]
    page.get_by_label("Kind of event").select_option("")
    page.get_by_label("Follow").uncheck()
    held = rows.count()
    page.evaluate(TELL, [7, [{"event": "shed", "act": "unused kv"}]])
    page.wait_for_timeout(300)  # it would have been drawn
    assert rows.count() == held
    page.get_by_label("Follow").check()
    rows.filter(has_text="unused kv").wait_for()
    assert rows.first.inner_text() == rows.filter(has_text="unused kv").inner_text()


def test_a_limit_far_below_the_machine_fills_the_drawings(
    fake_home: Path, open_tab: Callable[..., Tab]
) -> None:
    with serving(fake_home, memory_limit="3GiB") as server:
        page = open_tab(server.url).show("memory")
        top = page.locator(".scale span").first
        top.wait_for()
        machine = page.get_by_label("Whole machine")
        assert not machine.is_checked()
        assert top.inner_text() == "3.00 GiB"
        parts = page.locator(".domain .stacked").first.locator("rect:not(.mark)")
        assert page.locator(".stacked .mark").count() == 0
        assert sum(parts.evaluate_all("(all) => all.map((one) => one.width.baseVal.value)")) > 950
        machine.check()
        page.locator(".stacked .mark").first.wait_for()
        capacity = httpx.get(f"{server.url}/admin/api/memory").json()["domains"]["ram"]
        assert top.inner_text() == f"{capacity['capacity_bytes'] / (1 << 30):.1f} GiB"
        assert page.locator(".stacked .beyond").count() == 1


def test_a_model_that_never_fits(tmp_path: Path, open_tab: Callable[..., Tab]) -> None:
    add_model(tmp_path, "small")
    name = "random:qwen3-8b"
    with serving(tmp_path, memory_limit="3GiB") as server:
        for _ in range(2):  # the second time it is known, and when it would be tried again
            refused = httpx.post(f"{server.url}/admin/api/models/{name}/load", timeout=60)
            assert refused.status_code == 507
        page = open_tab(server.url).show("requests")
        rows = page.locator(".refusals li", has_text=refused.json()["error"]["message"])
        rows.first.wait_for()
        assert rows.locator("b", has_text=name).count() == rows.count()
        assert "try again" not in rows.first.inner_text()
        page = open_tab(server.url).show("models")
        page.locator(f'[data-model="{name}"]').get_by_role("button", name="Will it fit?").click()
        verdict = page.locator(".verdict.bad")
        verdict.wait_for()
        assert "the model alone leaves no KV within the limit of 3.00 GiB" in verdict.inner_text()


def test_requests_that_wait_have_a_place_and_say_what_for(
    url: str, open_tab: Callable[..., Tab]
) -> None:
    page = open_tab(url).show("requests")
    askers = [threading.Thread(target=ask, args=(url, "slow-to-load")) for _ in range(2)]
    for asker in askers:
        asker.start()
    rows = page.locator(".requests tbody tr", has_text="waits for the model")
    rows.nth(1).wait_for()
    tips = [row.locator(".state").get_attribute("data-tip") or "" for row in rows.all()]
    assert "No. 1 in the line of slow-to-load: it is next." in tips[0]
    assert "No. 2 in the line of slow-to-load: 1 goes before it." in tips[1]
    assert all(tip.startswith("Its model is being loaded") for tip in tips)
    assert page.locator(".requests th", has_text="Client").count() == 0  # all of this machine
    rows.first.locator(".state").focus()
    page.get_by_text("What the states mean").click()
    page.locator(".states dd", has_text="its model is being loaded").wait_for()
    for asker in askers:
        asker.join()


def test_a_row_of_long_figures_has_its_button_in_sight(
    open_url: str, open_tab: Callable[..., Tab]
) -> None:
    page = open_tab(open_url).show("requests")
    page.locator(".live.on").wait_for()
    row = {
        "id": "req-1", "model": "SmolLM2-135M-Instruct", "key": "loopback", "state": "queued",
        "waits_for": "model", "place": 12, "expected_start_s": 99.0, "priority": 0, "answers": 1,
        "prompt_tokens": 131_072, "cached_tokens": 131_072, "completion_tokens": 12_345,
        "max_tokens": 32_768, "tokens_per_s": 1234.5, "kv_bytes": 999 << 20, "bytes": 999 << 10,
        "preemptions": 12, "age_s": 599.0, "waited_s": None, "first_token_s": 99.0,
    }  # fmt: skip
    over = page.evaluate(LONG_ROW, row)
    assert over <= 0, f"{over} pixels are out of sight"


def test_requests_that_wait_for_a_tokenizer_are_told_of(
    url: str, open_tab: Callable[..., Tab], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Texts, "waiting", {"thinker": 2})
    page = open_tab(url).show("requests")
    page.get_by_text("2 wait for the tokenizer of thinker").wait_for()
    monkeypatch.undo()
    page.get_by_text("Nobody asks for anything").wait_for()


def test_requests_name_their_client(tmp_path: Path, open_tab: Callable[..., Tab]) -> None:
    add_model(tmp_path, "slow", FakeModel(step_s=0.05))
    with serving(tmp_path, server_api_keys=["other", API_KEY]) as server:
        page = open_tab(server.url, expected=("401",)).page
        page.goto(f"{server.url}/#/requests")
        page.get_by_label("Key", exact=True).fill(API_KEY)
        page.get_by_label("Key", exact=True).press("Enter")
        page.locator(".page.requests").wait_for()
        body = {"model": "slow", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 99}
        headers = {"x-api-key": API_KEY}
        address = f"{server.url}/v1/chat/completions"
        asker = threading.Thread(
            target=httpx.post, args=(address,), kwargs={"json": body, "headers": headers}
        )
        asker.start()
        page.locator('.requests td[data-label="Client"]', has_text="key 2").wait_for()
        page.get_by_role("button", name="Cancel").click()
        asker.join()


def test_reasoning_is_folded_and_a_tool_call_drawn(url: str, open_tab: Callable[..., Tab]) -> None:
    page = open_tab(url).show("chat")
    page.get_by_label("System prompt and sampling").click()
    page.get_by_text("Tools", exact=True).click()
    page.locator("[name=tools]").fill(json.dumps(TOOLS))
    page.get_by_label("Message", exact=True).fill("Is it warm?")
    page.get_by_label("Message", exact=True).press("Enter")
    page.locator("[data-figures]").wait_for()
    reasoning = page.locator("details.reasoning")
    assert not reasoning.locator("p").is_visible()
    reasoning.locator("summary").click()
    assert reasoning.locator("p").inner_text().strip() == "Why not."
    assert page.locator(".answer .body").inner_text().strip() == "Yes."
    tool = page.locator(".answer .tool")
    assert tool.locator("b").inner_text() == "weather"
    assert json.loads(tool.locator("pre").inner_text()) == {"city": "Paris"}
    assert page.locator(".answer .body + .tool").count() == 1  # in the order of the answer
    page.get_by_label("Message", exact=True).fill("And there?")  # a call in the history
    page.get_by_label("Message", exact=True).press("Enter")
    page.locator("[data-figures]").nth(1).wait_for()
    assert page.locator(".answer .problem").count() == 0


def test_before_the_first_question_the_chat_says_how_its_model_is(
    url: str, open_tab: Callable[..., Tab]
) -> None:
    httpx.post(f"{url}/admin/api/models/slow-to-load/unload").raise_for_status()
    page = open_tab(url).show("chat")
    page.get_by_label("Model", exact=True).select_option("slow-to-load")
    page.locator('[data-standing="absent"]', has_text="the first question loads it").wait_for()
    asker = threading.Thread(target=ask, args=(url, "slow-to-load"))
    asker.start()
    loading = page.locator('[data-standing="loading"]')
    loading.get_by_text("reading the weights").wait_for()
    assert loading.locator("progress").count() == 1
    asker.join()
    loading.wait_for(state="detached")
    assert page.locator("[data-standing]").count() == 0
    ask(url, "too-large")
    page.get_by_label("Model", exact=True).select_option("too-large")
    page.locator('[data-standing="failed"]', has_text="refuses to load").wait_for()
