"""Who may administer a server, and which web pages may use it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx
import pytest

from penstock.testing.fake_server import add_model, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

INFERENCE = ["/v1/models", "/v1/chat/completions", "/api/tags", "/v1/messages"]
ADMIN = [
    ("GET", "/admin/api/models"),
    ("GET", "/admin/api/memory"),
    ("GET", "/admin/api/requests"),
    ("GET", "/admin/api/events"),
    ("GET", "/admin/api/refusals"),
    ("GET", "/admin/api/timeline"),
    ("GET", "/admin/api/settings"),
    ("GET", "/admin/api/tasks"),
    ("GET", "/admin/api/cache"),
    ("GET", "/admin/api/catalog"),
    ("PATCH", "/admin/api/settings"),
    ("POST", "/admin/api/requests/none/cancel"),
    ("GET", "/admin/api/plan?model=fake"),
    ("POST", "/admin/api/models/fake/load"),
    ("POST", "/admin/api/models/fake/unload"),
    ("POST", "/admin/api/models/fake/pin"),
    ("POST", "/admin/api/reload"),
    ("POST", "/admin/api/memory/reset"),
]
REFUSED = (401, 403)  # what is let in may still be wrong
LOCAL_PAGES = [
    "http://localhost:3000",
    "https://127.0.0.1:5173",
    "http://[::1]:9",
    "http://tauri.localhost",
    "tauri://localhost",
    "app://obsidian.md",
    "app://.",
    "vscode-webview://0a1b2c",
    "capacitor://localhost",
]
FOREIGN_PAGES = [
    "https://evil.example",
    "null",
    "file://",
    "http://localhost.evil.example",
    "http://127.0.0.1.evil.example",
    "https://notlocalhost",
    "chrome-extension://abc",
    "http://[::1",
]


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
def keyed(home: Path) -> Iterator[httpx.Client]:
    with (
        serving(home, server_api_keys=["user"], server_admin_keys=["boss", "deputy"]) as server,
        httpx.Client(base_url=server.url, timeout=30) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def no_admin_key(home: Path) -> Iterator[httpx.Client]:
    settings: dict[str, object] = {
        "server_api_keys": ["user"],
        "server_open_probes": True,
        "server_cors_origins": ["https://app.example"],
    }
    with (
        serving(home, **settings) as server,
        httpx.Client(base_url=server.url, timeout=30) as client,
    ):
        yield client


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


@pytest.mark.parametrize(("method", "path"), ADMIN)
def test_only_an_admin_key_administers(keyed: httpx.Client, method: str, path: str) -> None:
    for key in ("", "user", "other"):
        answer = keyed.request(method, path, headers=bearer(key))
        assert answer.status_code == 401, (key, path)
        assert "server.admin_keys" in answer.json()["error"]["message"]
    for key in ("boss", "deputy"):
        assert keyed.request(method, path, headers=bearer(key)).status_code not in REFUSED


def test_an_admin_key_opens_the_rest_too(keyed: httpx.Client) -> None:
    assert keyed.get("/v1/models", headers=bearer("user")).status_code == 200
    assert keyed.get("/v1/models", headers={"x-api-key": "boss"}).status_code == 200
    assert keyed.get("/v1/models").status_code == 401


@pytest.mark.parametrize(("method", "path"), ADMIN)
def test_without_admin_keys_only_this_machine_does(
    plain: httpx.Client, no_admin_key: httpx.Client, method: str, path: str
) -> None:
    assert plain.request(method, path).status_code not in REFUSED
    assert no_admin_key.request(method, path).status_code == 401
    allowed = no_admin_key.request(method, path, headers=bearer("user"))
    assert allowed.status_code not in REFUSED
    for name, value in (
        ("x-forwarded-for", "192.0.2.7"),
        ("forwarded", "for=192.0.2.7"),
        ("x-real-ip", "192.0.2.7"),
        ("host", "models.example"),
    ):
        answer = no_admin_key.request(method, path, headers={**bearer("user"), name: value})
        assert answer.status_code == 403, name
        assert "server.admin_keys" in answer.json()["error"]["message"]


@pytest.mark.parametrize("origin", LOCAL_PAGES + FOREIGN_PAGES)
@pytest.mark.parametrize("key", ["", "boss"])
def test_no_page_but_its_own_administers(
    plain: httpx.Client, keyed: httpx.Client, origin: str, key: str
) -> None:
    client = keyed if key else plain
    for method, path in ADMIN:
        answer = client.request(method, path, headers={**bearer(key), "origin": origin})
        assert answer.status_code == 403
        assert "access-control-allow-origin" not in answer.headers
        question = {"origin": origin, "access-control-request-method": method}
        answer = client.request("OPTIONS", path, headers=question)
        assert answer.status_code == 403
        assert "access-control-allow-origin" not in answer.headers
    own = str(client.base_url).rstrip("/")
    answer = client.get("/admin/api/models", headers={**bearer(key), "origin": own})
    assert answer.status_code == 200


@pytest.mark.parametrize("origin", LOCAL_PAGES)
def test_pages_of_this_machine_may_ask_the_models(plain: httpx.Client, origin: str) -> None:
    answer = plain.get("/v1/models", headers={"origin": origin})
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == origin
    assert "origin" in answer.headers["vary"]
    wrong = plain.post("/v1/chat/completions", headers={"origin": origin}, content=b"{")
    assert wrong.status_code == 400
    assert wrong.headers["access-control-allow-origin"] == origin  # so that it can be read
    for path in INFERENCE:
        question = {
            "origin": origin,
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type",
            "access-control-request-private-network": "true",
        }
        answer = plain.request("OPTIONS", path, headers=question)
        assert answer.status_code == 204
        assert answer.headers["access-control-allow-origin"] == origin
        assert answer.headers["access-control-allow-headers"] == "authorization,content-type"
        assert "POST" in answer.headers["access-control-allow-methods"]
        assert answer.headers["access-control-allow-private-network"] == "true"


@pytest.mark.parametrize("origin", FOREIGN_PAGES)
def test_other_pages_may_not(plain: httpx.Client, origin: str) -> None:
    for path in INFERENCE:
        headers = {"origin": origin, "access-control-request-method": "POST"}
        for method in ("GET", "POST", "OPTIONS"):
            answer = plain.request(method, path, headers=headers)
            assert answer.status_code == 403
            assert "access-control-allow-origin" not in answer.headers


def test_with_keys_only_named_pages_may(no_admin_key: httpx.Client) -> None:
    named = {"origin": "https://app.example"}
    question = {**named, "access-control-request-method": "POST"}
    answer = no_admin_key.request("OPTIONS", "/v1/chat/completions", headers=question)
    assert answer.status_code == 204  # without a key: browsers send none
    refused = no_admin_key.get("/v1/models", headers=named)
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://app.example"
    for origin in ("http://localhost:3000", "https://evil.example"):
        question = {"origin": origin, "access-control-request-method": "POST"}
        answer = no_admin_key.request("OPTIONS", "/v1/chat/completions", headers=question)
        assert answer.status_code == 403
        answer = no_admin_key.get("/v1/models", headers={**bearer("user"), "origin": origin})
        assert "access-control-allow-origin" not in answer.headers


def test_probes_can_be_open(no_admin_key: httpx.Client, keyed: httpx.Client) -> None:
    for path in ("/ready", "/metrics"):
        assert no_admin_key.get(path).status_code == 200
        assert keyed.get(path).status_code == 401
