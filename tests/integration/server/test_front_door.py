"""Who may come in, how large, and what every refusal looks like."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import httpx
import pytest

from penstock.config import ConfigError
from penstock.memory.clients.json_weight import BODY_FACTOR
from penstock.testing.fake_server import add_model, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LIMIT = 100_000


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    add_model(home, "fake")
    return home


@pytest.fixture(scope="module")
def client(home: Path) -> Iterator[httpx.Client]:
    with (
        serving(home, server_max_body=LIMIT, server_hosts="my.host") as server,
        httpx.Client(base_url=server.url, timeout=30) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def keyed(home: Path) -> Iterator[httpx.Client]:
    with (
        serving(home, server_api_keys=["first", "second"], server_host="127.0.0.1") as server,
        httpx.Client(base_url=server.url, timeout=30) as client,
    ):
        yield client


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer first"},
        {"authorization": "bearer second"},
        {"x-api-key": "second"},
    ],
)
def test_a_key_opens(keyed: httpx.Client, headers: dict[str, str]) -> None:
    assert keyed.get("/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize("path", ["/", "/v1/models", "/metrics", "/ready", "/nowhere"])
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer third"},
        {"authorization": "Bearer"},
        {"authorization": "Basic first"},
        {"authorization": "first"},
        {"x-api-key": "firs"},
    ],
)
def test_nothing_else_does(keyed: httpx.Client, path: str, headers: dict[str, str]) -> None:
    answer = keyed.get(path, headers=headers)
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"


def test_health_is_open_and_keys_free_the_host(keyed: httpx.Client) -> None:
    assert keyed.get("/health", headers={"host": "any.name"}).status_code == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.com"])
def test_other_machines_need_a_key(home: Path, host: str) -> None:
    with pytest.raises(ConfigError, match="--api-key"), serving(home, server_host=host):
        pass


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "127.0.0.1.evil", "]["])
def test_a_foreign_host_name_is_refused(client: httpx.Client, host: str) -> None:
    answer = client.get("/v1/models", headers={"host": host})
    assert answer.status_code == 403
    assert "server.hosts" in answer.json()["error"]["message"]


@pytest.mark.parametrize("host", ["localhost", "localhost:1", "127.0.0.1", "[::1]:80", "my.host"])
def test_our_own_names_are_not(client: httpx.Client, host: str) -> None:
    assert client.get("/v1/models", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    ("origin", "status"),
    [("http://evil.example", 403), ("null", 403), ("http://localhost:3000", 200)],
)
def test_a_web_page_is_refused_by_its_origin(
    client: httpx.Client, origin: str, status: int
) -> None:
    answer = client.get("/v1/models", headers={"origin": origin})
    assert answer.status_code == status
    assert answer.headers.get("access-control-allow-origin") == (origin if status == 200 else None)


def test_named_origins_may_read(home: Path) -> None:
    origin = "https://app.example"
    with (
        serving(home, server_cors_origins=[origin]) as server,
        httpx.Client(base_url=server.url) as client,
    ):
        answer = client.get("/v1/models", headers={"origin": origin})
        assert answer.headers["access-control-allow-origin"] == origin
        other = client.get("/v1/models", headers={"origin": "https://other.example"})
        assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize("size", [LIMIT + 1, 10 * LIMIT])
def test_a_body_over_the_limit(client: httpx.Client, size: int) -> None:
    body = b"x" * size
    pieces = (body[start : start + 10_000] for start in range(0, size, 10_000))
    for content in (body, pieces):  # with a length, and in chunks
        try:
            answer = client.post("/v1/completions", content=content)
        except httpx.WriteError:
            assert size > 2 * LIMIT  # far too large is not read to its end
            continue
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "request_too_large"
        assert str(LIMIT) in answer.json()["error"]["message"]


def test_a_body_at_the_limit_is_read(client: httpx.Client) -> None:
    answer = client.post("/v1/completions", content=b" " * LIMIT)
    assert answer.status_code == 400


def test_bodies_held_at_once_are_bounded(home: Path) -> None:
    with (
        serving(home, server_max_bodies=1000) as server,
        httpx.Client(base_url=server.url) as client,
    ):
        answer = client.post("/v1/completions", content=b" " * 1001)
        assert answer.status_code == 413  # it could never be held
        assert answer.json()["error"]["penstock"]["limit_bytes"] == BODY_FACTOR * 1000
        for _ in range(3):  # what was refused or answered is not held any more
            assert client.post("/v1/completions", content=b" " * 1000).status_code == 400


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nowhere", 404, "not_found"),
        ("POST", "/v1/embeddingz", 404, "not_found"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("POST", "/v1/models/fake", 405, "method_not_allowed"),
    ],
)
def test_unknown_addresses(
    client: httpx.Client, method: str, path: str, status: int, code: str
) -> None:
    answer = client.request(method, path)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert error["code"] == code
    assert set(error) == {"message", "type", "param", "code"}
    assert (status == 405) == ("allow" in answer.headers)


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", "/v1/responses/input_tokens", "POST"),
        ("PUT", "/v1/responses/resp_1", "GET, DELETE"),
        ("PUT", "/web/session", "GET, POST, DELETE"),
        ("OPTIONS", "/v1/models/fake", "GET"),
    ],
)
def test_an_address_tells_its_own_methods(
    client: httpx.Client, method: str, path: str, allow: str
) -> None:
    answer = client.request(method, path)
    assert (answer.status_code, answer.headers["allow"]) == (405, allow)


def test_request_ids(client: httpx.Client) -> None:
    assert client.get("/health", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == (
        "mine-1"
    )
    for strange in ("a b", "x" * 200, "é"):
        answer = client.get("/health", headers=[(b"x-request-id", strange.encode("latin-1"))])
        assert answer.headers["x-request-id"].startswith("req-")


def test_the_front_page_says_what_it_is(client: httpx.Client) -> None:
    page = client.get("/", headers={"accept": "text/html,*/*"})
    assert "<title>Penstock</title>" in page.text
    assert client.get("/").text == "Ollama is running"  # what its clients look for
    head = client.head("/")
    assert (head.status_code, head.content) == (200, b"")


def test_text_with_a_token_that_the_model_has_no_place_for(tmp_path: Path) -> None:
    folder = add_model(tmp_path, "fake")
    settings = json.loads((folder / "config.json").read_text("utf-8"))
    settings["vocab_size"] = ord("z")  # its tokenizer knows one more
    (folder / "config.json").write_text(json.dumps(settings), "utf-8")
    with serving(tmp_path) as server, httpx.Client(base_url=server.url) as client:
        body = {"model": "fake", "max_tokens": 1}
        for path, prompt in (
            ("/v1/completions", {"prompt": "abcz"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "abcz"}]}),
        ):
            answer = client.post(path, json={**body, **prompt})
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["param"] == next(iter(prompt))
            assert "token id" in answer.json()["error"]["message"]
        assert client.post("/v1/completions", json={**body, "prompt": "abc"}).status_code == 200
