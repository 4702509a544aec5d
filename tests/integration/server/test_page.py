"""The page at `/`: its files and headers, signing in, and who may not pretend to be it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import httpx
import pytest

from penstock.server.web.assets import files
from penstock.testing.fake_server import add_model, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    add_model(home, "fake")
    return home


@pytest.fixture(scope="module")
def plain(home: Path) -> Iterator[httpx.Client]:
    with serving(home) as server, httpx.Client(base_url=server.url, timeout=30) as client:
        yield client


@pytest.fixture(scope="module")
def keyed_url(home: Path) -> Iterator[str]:
    with serving(home, server_api_keys=["user"], server_admin_keys=["boss"]) as server:
        yield server.url


@pytest.fixture
def keyed(keyed_url: str) -> Iterator[httpx.Client]:
    """A browser without cookies that sends what browsers do."""
    own = {"origin": keyed_url, "sec-fetch-site": "same-origin"}
    with httpx.Client(base_url=keyed_url, timeout=30, headers=own) as client:
        yield client


@pytest.mark.parametrize("path", ["/", "/web/js/main.js", "/web/css/base.css", "/web/icon.svg"])
def test_files_have_a_strict_policy_and_an_etag(keyed_url: str, path: str) -> None:
    """Also where keys are needed: they hold nothing that is not in the package."""
    answer = httpx.get(keyed_url + path, headers=BROWSER)
    assert answer.status_code == 200
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    again = httpx.get(keyed_url + path, headers=BROWSER | {"if-none-match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_types_of_files() -> None:
    kinds = {name: file.media_type.partition(";")[0] for name, file in files().items()}
    assert kinds["index.html"] == "text/html"
    assert kinds["js/main.js"] == "text/javascript"
    assert kinds["css/chat.css"] == "text/css"
    assert kinds["icon.svg"] == "image/svg+xml"
    assert not any(name.endswith((".ts", ".json")) for name in kinds)


def test_the_page_names_no_other_server_and_has_nothing_inline() -> None:
    for name, file in files().items():
        text = file.content.decode()
        hosts = set(re.findall(r"https?://([\w.-]+)", text)) - {"www.w3.org"}
        assert hosts == set(), name
    index = files()["index.html"].content.decode()
    assert "<style" not in index
    assert not re.search(r"<script(?![^>]* src=)", index)
    assert not re.search(r"\s(on\w+|style)=", index)


def test_no_script_makes_markup_of_a_text() -> None:
    sinks = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|srcdoc")
    assert [name for name, file in files().items() if sinks.search(file.content.decode())] == []


@pytest.mark.parametrize(
    "name", ["", "nothing.js", "../assets.py", "%2e%2e/assets.py", "js", "js/types.d.ts"]
)
def test_nothing_else_of_the_disk_is_served(plain: httpx.Client, name: str) -> None:
    assert plain.get(f"/web/{name}").status_code == 404


def test_programs_get_at_the_front_what_they_did(plain: httpx.Client, keyed_url: str) -> None:
    assert plain.get("/").text == "Ollama is running"
    assert httpx.get(keyed_url).status_code == 401
    assert httpx.get(keyed_url, headers={"x-api-key": "user"}).text == "Ollama is running"


def test_without_keys_this_machine_is_admin(plain: httpx.Client) -> None:
    answer = plain.get("/web/session")
    assert answer.headers["cache-control"] == "no-store"
    seen = answer.json()
    assert (seen["role"], seen["needs_key"], seen["dashboard"]) == ("admin", False, "full")


@pytest.mark.parametrize(
    ("key", "role", "admin_status"), [("boss", "admin", 200), ("user", "client", 401)]
)
def test_signing_in_and_out(keyed: httpx.Client, key: str, role: str, admin_status: int) -> None:
    assert keyed.get("/web/session").json()["role"] is None
    assert keyed.get("/v1/models").status_code == 401
    answer = keyed.post("/web/session", json={"key": key})
    assert answer.status_code == 200
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert "Secure" not in cookie  # there is no TLS
    assert key not in cookie + answer.text
    assert keyed.get("/web/session").json()["role"] == role
    assert keyed.get("/v1/models").status_code == 200
    assert keyed.get("/admin/api/models").status_code == admin_status
    stolen = httpx.Cookies(keyed.cookies)
    assert "Max-Age=0" in keyed.delete("/web/session").headers["set-cookie"]
    keyed.cookies = stolen  # a copy of the cookie is worth nothing either
    assert keyed.get("/v1/models").status_code == 401


@pytest.mark.parametrize("key", ["", "boss ", "wrong", "b" * 3000])
def test_a_wrong_key(keyed: httpx.Client, key: str) -> None:
    answer = keyed.post("/web/session", json={"key": key})
    assert answer.status_code == 401
    assert "set-cookie" not in answer.headers
    assert "not one of this server's" in answer.json()["error"]["message"]


def test_the_cookie_is_secure_where_the_page_came_over_tls(keyed: httpx.Client) -> None:
    own = {"origin": "https://models.example", "host": "models.example"}
    answer = keyed.post("/web/session", json={"key": "boss"}, headers=own)
    assert "; Secure" in answer.headers["set-cookie"]


FOREIGN: list[dict[str, str]] = [
    {"origin": "https://evil.example", "sec-fetch-site": "cross-site"},
    {"origin": "null", "sec-fetch-site": "cross-site"},
    {"origin": "http://127.0.0.1:1", "sec-fetch-site": "same-site"},
    {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"},
    {"sec-fetch-site": "same-site", "sec-fetch-mode": "no-cors"},
    {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "iframe"},
]


@pytest.mark.parametrize("headers", FOREIGN)
def test_a_cookie_is_worth_nothing_to_other_pages(
    keyed: httpx.Client, headers: dict[str, str]
) -> None:
    """As if a browser had sent it with their requests, which SameSite forbids."""
    keyed.post("/web/session", json={"key": "boss"})
    for name in ("origin", "sec-fetch-site"):
        del keyed.headers[name]
    for method, path, statuses in (
        ("GET", "/admin/api/memory", {403}),
        ("POST", "/admin/api/memory/reset", {403}),
        ("GET", "/v1/models", {401}),
        ("POST", "/v1/chat/completions", {401}),
        ("GET", "/web/session", {403}),
        ("DELETE", "/web/session", {403}),
        ("POST", "/web/session", {403}),
    ):
        answer = keyed.request(method, path, headers=headers)
        assert answer.status_code in statuses, (method, path)
        assert "access-control-allow-origin" not in answer.headers


def test_a_change_without_an_origin_needs_the_key_itself(keyed: httpx.Client) -> None:
    keyed.post("/web/session", json={"key": "boss"})
    del keyed.headers["origin"]
    assert keyed.get("/admin/api/memory").status_code == 200
    assert keyed.post("/admin/api/memory/reset").status_code == 401


@pytest.mark.parametrize("headers", FOREIGN)
def test_without_keys_other_pages_get_nothing(plain: httpx.Client, headers: dict[str, str]) -> None:
    for path in ("/admin/api/memory", "/web/session", "/web/js/main.js"):
        assert plain.get(path, headers=headers).status_code == 403
    if "127.0.0.1" not in headers.get("origin", ""):  # programs' pages here may ask the models
        assert plain.get("/v1/models", headers=headers).status_code == 403


def test_a_link_on_another_page_leads_to_the_page(plain: httpx.Client) -> None:
    link = {
        "sec-fetch-site": "cross-site",
        "sec-fetch-mode": "navigate",
        "sec-fetch-dest": "document",
    }
    assert plain.get("/", headers=BROWSER | link).status_code == 200


@pytest.mark.parametrize("path", ["/", "/web/js/main.js", "/web/session", "/admin/api/memory"])
def test_an_unknown_host_name_gets_nothing(plain: httpx.Client, path: str) -> None:
    answer = plain.get(path, headers=BROWSER | {"host": "rebound.example"})
    assert answer.status_code == 403
    assert "server.hosts" in answer.json()["error"]["message"]


def test_a_read_only_page_changes_nothing(home: Path) -> None:
    with serving(home, server_dashboard="read-only") as server:
        own = {"origin": server.url, "sec-fetch-site": "same-origin"}
        with httpx.Client(base_url=server.url, timeout=30) as client:
            assert client.get("/web/session", headers=own).json()["dashboard"] == "read-only"
            assert client.get("/admin/api/memory", headers=own).status_code == 200
            for path in ("/admin/api/models/fake/load", "/admin/api/reload"):
                answer = client.post(path, headers=own)
                assert answer.status_code == 403
                assert "server.dashboard" in answer.json()["error"]["message"]
            assert client.post("/admin/api/models/fake/pin").status_code == 200  # no browser


def test_no_page(home: Path) -> None:
    with serving(home, server_dashboard="off", server_admin_keys=["boss"]) as server:
        own = {"origin": server.url, "sec-fetch-site": "same-origin"}
        with httpx.Client(base_url=server.url, timeout=30, headers=own) as client:
            assert "language models" in client.get("/", headers=BROWSER).text
            for path in ("/web/js/main.js", "/web/session"):
                assert client.get(path).status_code == 404
            assert client.post("/web/session", json={"key": "boss"}).status_code == 404


def test_a_session_ends_with_its_key(tmp_path: Path) -> None:
    """Keys are taken out of the file while the server runs."""
    add_model(tmp_path, "fake")
    file = tmp_path / "penstock.toml"
    file.write_text('[server]\nadmin_keys = ["old", "new"]\n', "utf-8")
    with serving(tmp_path) as server:
        own = {"origin": server.url, "sec-fetch-site": "same-origin"}
        with httpx.Client(base_url=server.url, timeout=30, headers=own) as client:
            client.post("/web/session", json={"key": "old"})
            assert client.get("/admin/api/memory").status_code == 200
            file.write_text('[server]\nadmin_keys = ["new"]\n', "utf-8")
            assert client.post("/admin/api/reload").status_code == 200
            assert client.get("/admin/api/memory").status_code == 401
