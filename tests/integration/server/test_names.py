"""A model answers to each of its names on every route, and to none; its settings are its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx
import pytest

from penstock.config import ConfigError
from penstock.testing.fake_server import TEMPLATE, add_model, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SETTINGS = """
[models]
default = "quick"
max_tokens = 7
[models."org/fake"]
alias = ["gpt-4", "quick"]
max_tokens = 20
template_arguments = { mood = "calm" }
"""
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    home = tmp_path_factory.mktemp("names")
    add_model(home, "org/fake", template="{{ mood }} " + TEMPLATE)
    add_model(home, "other")
    (home / "penstock.toml").write_text(SETTINGS, "utf-8")
    with serving(home) as server, httpx.Client(base_url=server.url, timeout=30) as client:
        yield client


def ask(client: httpx.Client, path: str, **body: object) -> Any:
    return client.post(path, json=body).raise_for_status().json()


@pytest.mark.parametrize("number", ["x", "0", "-1", "", "²", "9" * 5000])
@pytest.mark.parametrize("field", ["context", "concurrency"])
def test_a_plan_for_no_number(client: httpx.Client, field: str, number: str) -> None:
    answer = client.get(f"/admin/api/plan?{field}={number}&model=quick")
    if number:
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == field
    else:  # nothing was said
        assert answer.status_code == 200


@pytest.mark.parametrize("name", ["org/fake", "gpt-4", "quick", None])
def test_every_route_knows_every_name(client: httpx.Client, name: str | None) -> None:
    named = {} if name is None else {"model": name}
    assert ask(client, "/v1/chat/completions", **CHAT, **named)["model"] == "org/fake"
    assert ask(client, "/v1/completions", prompt="a", **named)["model"] == "org/fake"
    assert ask(client, "/v1/responses", input="a", **named)["model"] == "org/fake"
    assert ask(client, "/v1/plan", **CHAT, **named)["model"] == "org/fake"
    plan = client.get("/admin/api/plan", params=named).raise_for_status().json()
    assert plan["model"] == "org/fake"
    if name is not None:  # these protocols want one
        anthropic = {**CHAT, **named}
        assert ask(client, "/v1/messages", max_tokens=3, **anthropic)["model"] == "org/fake"
        assert ask(client, "/v1/messages/count_tokens", **anthropic)["input_tokens"]
        # Ollama says the name that was asked for.
        assert ask(client, "/api/chat", stream=False, **CHAT, **named)["model"] == name
        assert ask(client, "/api/generate", stream=False, prompt="a", **named)["model"] == name
        assert ask(client, "/api/show", **named)["capabilities"]
        shown = client.get(f"/v1/models/{name}").raise_for_status().json()
        assert (shown["id"], shown["root"]) == (name, "org/fake")


def test_every_name_is_listed(client: httpx.Client) -> None:
    rows = {row["id"]: row for row in client.get("/v1/models").json()["data"]}
    assert set(rows) == {"org/fake", "gpt-4", "quick", "other"}
    assert rows["gpt-4"]["root"] == "org/fake"
    assert rows["org/fake"]["aliases"] == ["gpt-4", "quick"]
    tags = {row["name"] for row in client.get("/api/tags").json()["models"]}
    assert tags == set(rows)


def test_settings_hold_where_the_client_is_silent(client: httpx.Client) -> None:
    def tokens(**body: object) -> int:
        answer = ask(client, "/v1/chat/completions", **CHAT, **body)
        return int(answer["usage"]["completion_tokens"])

    assert [tokens(), tokens(max_tokens=3), tokens(model="other")] == [20, 3, 7]
    assert ask(client, "/v1/completions", prompt="abc")["usage"]["completion_tokens"] == 20

    def said(**body: object) -> str:
        answer = ask(client, "/v1/chat/completions", **CHAT, **body, max_tokens=6)
        return str(answer["choices"][0]["message"]["content"])

    assert said() == "calm u"
    assert said(chat_template_kwargs={"mood": "wild"}) == "wild u"


def test_a_default_model_that_was_unloaded_is_no_reason_to_send_nothing(
    client: httpx.Client,
) -> None:
    assert client.post("/admin/api/models/quick/unload").json()["unloaded"]
    assert "org/fake" not in client.get("/ready").raise_for_status().json()["models"]
    assert ask(client, "/v1/completions", prompt="x")["model"] == "org/fake"
    assert "org/fake" in client.get("/ready").raise_for_status().json()["models"]


def test_an_alias_is_no_models_name(tmp_path: Path) -> None:
    add_model(tmp_path, "a")
    add_model(tmp_path, "b")
    (tmp_path / "penstock.toml").write_text("[models.a]\nalias = ['b']\n", "utf-8")
    with pytest.raises(ConfigError, match="is an alias of 'a'"), serving(tmp_path):
        pass


def test_a_model_that_comes_to_have_the_name_of_an_alias_is_hidden(tmp_path: Path) -> None:
    add_model(tmp_path, "a")
    (tmp_path / "penstock.toml").write_text("[models.a]\nalias = ['b']\n", "utf-8")
    with serving(tmp_path) as server, httpx.Client(base_url=server.url, timeout=30) as client:
        add_model(tmp_path, "b")
        add_model(tmp_path, "new")
        rows = [(row["id"], row["root"]) for row in client.get("/v1/models").json()["data"]]
        assert rows == [("a", "a"), ("b", "a"), ("new", "new")]
        assert ask(client, "/v1/completions", prompt="x", model="b")["model"] == "a"
        assert ask(client, "/v1/completions", prompt="x", model="new")["model"] == "new"
