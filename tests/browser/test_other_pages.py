"""Pages of other origins can neither read nor change anything, with and without keys.

An attacker owns names that lead to this machine, serves pages on another port, and has the person's
browser open them. That every attack reached the server is seen in its counters.
"""

from __future__ import annotations

import http.server
import re
import threading
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx
import pytest

from penstock.testing.browser import ADMIN_KEY

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser, Page

# Each attack, and whether anything of an answer could be read.
ATTACKS = """async (target) => {
  const read = {};
  const attempt = async (name, path, options = {}) => {
    try {
      const answer = await fetch(target + path, options);
      read[name] = answer.type === "opaque" ? null : [answer.status, await answer.text()];
    } catch (error) {
      read[name] = null;
    }
  };
  const text = { method: "POST", headers: { "content-type": "text/plain" }, body: "{}" };
  await attempt("memory", "/admin/api/memory");
  await attempt("memory with cookies", "/admin/api/memory", { credentials: "include" });
  await attempt("memory blind", "/admin/api/memory", { mode: "no-cors", credentials: "include" });
  await attempt("models", "/v1/models");
  await attempt("load", "/admin/api/models/fake/load", { ...text, mode: "no-cors" });
  await attempt("load with cookies", "/admin/api/models/fake/load",
                { ...text, mode: "no-cors", credentials: "include" });
  await attempt("load as JSON", "/admin/api/models/fake/load",
                { ...text, headers: { "content-type": "application/json" } });
  await attempt("reload", "/admin/api/reload",
                { ...text, mode: "no-cors", credentials: "include" });
  await attempt("chat", "/v1/chat/completions", { ...text, mode: "no-cors",
    body: '{"model":"fake","messages":[{"role":"user","content":"hi"}]}', credentials: "include" });
  await attempt("session", "/web/session", { credentials: "include" });
  await attempt("sign in", "/web/session", { ...text, body: '{"key":"guess"}', mode: "no-cors" });
  await attempt("script", "/web/js/main.js", { mode: "no-cors" });
  read.stream = await new Promise((resolve) => {
    const source = new EventSource(target + "/admin/api/stream", { withCredentials: true });
    source.onmessage = source.onopen = () => resolve(["open"]);
    source.onerror = () => resolve(null);
  });
  return read;
}"""

FORM = """(target) => {
  const form = document.createElement("form");
  const action = target + "/admin/api/models/fake/load";
  Object.assign(form, { method: "post", enctype: "text/plain", action });
  const field = document.createElement("input");
  Object.assign(field, { name: '{"stream":false,"x":"', value: '"}' });
  form.append(field);
  document.body.append(form);
  form.submit();
}"""


@pytest.fixture(scope="module")
def evil_url() -> Iterator[str]:
    """A web server of the attacker, under a name of theirs."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content = b"<!doctype html><title>evil</title><body></body>"
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://evil.example:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(params=["no keys", "signed in"])
def victim(request: pytest.FixtureRequest, browser: Browser) -> Iterator[tuple[Page, str]]:
    """A browser whose owner may administer the server, and the server."""
    keyed = request.param == "signed in"
    url: str = request.getfixturevalue("keyed_url" if keyed else "open_url")
    context = browser.new_context()
    page = context.new_page()
    page.goto(f"{url}/#/memory")
    if keyed:
        page.get_by_label("Key", exact=True).fill(ADMIN_KEY)
        page.get_by_label("Key", exact=True).press("Enter")
    page.locator(".page.memory .books").wait_for()
    yield page, url
    context.close()


def _admin(url: str, path: str) -> httpx.Response:
    return httpx.get(url + path, headers={"x-api-key": ADMIN_KEY}, timeout=30)


def _state(url: str) -> tuple[object, int]:
    """What an attack could have changed: all that is said of models, but for the clock."""
    models = _admin(url, "/admin/api/models").json()
    for model in models:
        model.pop("idle_s", None)
    return models, len(_admin(url, "/admin/api/events").json())


def _refused(url: str) -> int:
    """How many requests were answered with 401 or 403."""
    counts = re.findall(
        r'^penstock_requests_total\{.*status="40[13]"\} ([\d.]+)$',
        _admin(url, "/metrics").text,
        re.MULTILINE,
    )
    return sum(int(float(count)) for count in counts)


def test_another_page_reads_and_changes_nothing(victim: tuple[Page, str], evil_url: str) -> None:
    mine, url = victim
    before, refused = _state(url), _refused(url)
    page = mine.context.new_page()
    page.goto(evil_url)
    read = page.evaluate(ATTACKS, url)
    assert {name: seen for name, seen in read.items() if seen is not None} == {}
    assert _state(url) == before
    assert _refused(url) >= refused + 12  # they arrived


def test_a_form_changes_nothing(victim: tuple[Page, str], evil_url: str) -> None:
    mine, url = victim
    before, refused = _state(url), _refused(url)
    page = mine.context.new_page()
    page.goto(evil_url)
    with page.expect_navigation(url=f"{url}/**"):
        page.evaluate(FORM, url)
    assert _state(url) == before
    assert _refused(url) == refused + 1


def test_a_rebound_name_reads_and_changes_nothing(victim: tuple[Page, str]) -> None:
    """The page came from the attacker's own server; then its name leads to ours."""
    mine, url = victim
    before = _state(url)
    rebound = f"http://rebound.example:{urlsplit(url).port}"
    page = mine.context.new_page()
    page.route(
        f"{rebound}/evil",
        lambda route: route.fulfill(body="<body></body>", content_type="text/html"),
    )
    page.goto(f"{rebound}/evil")
    read = page.evaluate(ATTACKS, rebound)
    answered = {name: seen[0] for name, seen in read.items() if seen is not None}
    for name in ("script", "session"):  # they are the same for everybody
        answered.pop(name, None)
    assert set(answered.values()) <= {401, 403}, answered
    for name in ("memory", "memory with cookies", "load", "reload", "chat", "models"):
        assert answered[name] in (401, 403), name
    assert read["stream"] is None
    assert _state(url) == before


def test_no_frame_holds_the_page(browser: Browser, open_url: str, evil_url: str) -> None:
    page = browser.new_page()
    page.goto(evil_url)
    with page.expect_response(f"{open_url}/") as answer:
        page.evaluate(
            "(src) => document.body.append(Object.assign(document.createElement('iframe'), {src}))",
            f"{open_url}/",
        )
    assert answer.value.status == 403
    page.close()
