"""Addresses as clients write them, and what one address says to two protocols."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx
import pytest

from penstock.server.routes import ROUTES, canonical_path
from penstock.testing.fake_server import add_model, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ANTHROPIC = {"anthropic-version": "2023-06-01"}
HI: dict[str, Any] = {"model": "a", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    home: Path = tmp_path_factory.mktemp("home")
    for name in ("a", "b", "c", "d"):
        add_model(home, name)
    (home / "penstock.toml").write_text("[models.b]\nmax_context = 100\n")
    with serving(home) as server, httpx.Client(base_url=server.url, timeout=30) as client:
        yield client


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/chat/completions", {**HI, "max_tokens": 2}),
        ("/v1/chat/completions/", {**HI, "max_tokens": 2}),
        ("/completions", {"model": "a", "prompt": "x", "max_tokens": 2}),
        ("/responses/", {"model": "a", "input": "x", "max_output_tokens": 2}),
        ("/messages", {**HI, "max_tokens": 2}),
        ("/messages/count_tokens/", HI),
        ("/api/chat/", {**HI, "stream": False, "options": {"num_predict": 2}}),
        ("/models", None),
        ("/models/a", None),
        ("/v1/models/", None),
        ("/health/", None),
    ],
)
def test_v1_and_slashes_are_optional(client: httpx.Client, path: str, body: Any) -> None:
    answer = client.get(path) if body is None else client.post(path, json=body)
    assert answer.status_code == 200, answer.text


def test_a_refusal_has_the_style_of_its_protocol_however_it_is_addressed(
    client: httpx.Client,
) -> None:
    refused = client.post("/messages/", json=HI)
    assert refused.status_code == 400
    assert refused.json()["type"] == "error"


@pytest.mark.parametrize("path", ["/v1/v1/models", "/admin/models", "/nothing/", "/embedding"])
def test_what_is_nowhere_stays_there(client: httpx.Client, path: str) -> None:
    assert client.get(path).status_code == 404


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.path}")
def test_every_route_is_reached_by_its_own_address(route: Any) -> None:
    assert canonical_path(route.path) == route.path


def test_the_fingerprint_is_of_a_model_and_its_settings(client: httpx.Client) -> None:
    def fingerprint(path: str, body: Any) -> str:
        return str(client.post(path, json={**body, "max_tokens": 1}).json()["system_fingerprint"])

    chats = {name: fingerprint("/v1/chat/completions", {**HI, "model": name}) for name in "ab"}
    assert chats["a"] != chats["b"]
    assert fingerprint("/v1/chat/completions", HI) == chats["a"]
    assert fingerprint("/v1/completions", {"model": "a", "prompt": "x"}) == chats["a"]
    body = {**HI, "max_tokens": 1, "stream": True}
    assert (
        f'"system_fingerprint":"{chats["a"]}"'
        in client.post("/v1/chat/completions", json=body).text
    )


def test_models_as_anthropic_lists_them(client: httpx.Client) -> None:
    page = client.get("/v1/models", headers=ANTHROPIC).json()
    assert [model["id"] for model in page["data"]] == ["a", "b", "c", "d"]
    assert page["data"][0]["type"] == "model"
    assert page["data"][0]["created_at"].endswith("Z")
    assert page["data"][0]["display_name"] == "a"
    assert (page["first_id"], page["last_id"], page["has_more"]) == ("a", "d", False)
    own = client.get("/v1/models/b", headers=ANTHROPIC).json()
    assert own == page["data"][1]
    assert client.get("/v1/models/b").json()["object"] == "model"


@pytest.mark.parametrize(
    ("query", "ids", "more"),
    [
        ("limit=2", ["a", "b"], True),
        ("limit=2&after_id=b", ["c", "d"], False),
        ("limit=1&before_id=c", ["b"], True),
        ("before_id=c", ["a", "b"], False),
        ("after_id=d", [], False),
    ],
)
def test_pages_of_models(client: httpx.Client, query: str, ids: list[str], more: bool) -> None:
    page = client.get(f"/v1/models?{query}", headers=ANTHROPIC).json()
    assert [model["id"] for model in page["data"]] == ids
    assert page["has_more"] is more


@pytest.mark.parametrize("query", ["limit=0", "limit=x", "limit=9999", "limit=²"])
def test_a_page_that_cannot_be(client: httpx.Client, query: str) -> None:
    refused = client.get(f"/v1/models?{query}", headers=ANTHROPIC)
    assert refused.status_code == 400
    assert refused.json()["error"]["type"] == "invalid_request_error"


def test_an_unknown_model_as_anthropic_says_it(client: httpx.Client) -> None:
    missing = client.get("/v1/models/nobody", headers=ANTHROPIC)
    assert missing.status_code == 404
    assert missing.json()["error"]["type"] == "not_found_error"


@pytest.mark.parametrize("path", ["*", "", "a", "//"])
def test_any_address_has_a_form(path: str) -> None:
    """`OPTIONS *` and lines that are hardly HTTP have no slash at their beginning."""
    assert isinstance(canonical_path(path), str)
