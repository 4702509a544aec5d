"""Blocks of Anthropic's messages that other servers' models and tools leave in histories."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx
import pytest

from penstock.testing.fake_server import add_model, serving

if TYPE_CHECKING:
    from collections.abc import Iterator

ASKED = {"role": "user", "content": "news?"}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    home = tmp_path_factory.mktemp("home")
    add_model(home, "echo")
    with (
        serving(home, models_default="echo") as server,
        httpx.Client(base_url=server.url, timeout=30) as client,
    ):
        yield client


def ask(client: httpx.Client, *messages: Any, status: int = 200, **fields: Any) -> Any:
    body = {"max_tokens": 400, "messages": list(messages), **fields}
    answer = client.post("/v1/messages", json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


def echoed(client: httpx.Client, *messages: Any) -> str:
    """The prompt, as the template has it."""
    return str(ask(client, *messages)["content"][0]["text"])


@pytest.mark.parametrize(
    "source",
    [
        {"type": "text", "media_type": "text/plain", "data": "Water falls."},
        {"type": "content", "content": "Water falls."},
        {"type": "content", "content": [{"type": "text", "text": "Water falls."}]},
    ],
)
def test_documents_of_text(client: httpx.Client, source: Any) -> None:
    document = {"type": "document", "source": source, "title": "Mills", "context": "A book.",
                "citations": {"enabled": False}}  # fmt: skip
    question = {"type": "text", "text": "What falls?"}
    said = echoed(client, {"role": "user", "content": [document, question]})
    assert "user: Mills\nA book.\nWater falls.\nWhat falls?" in said


@pytest.mark.parametrize("kind", ["base64", "url", "file"])
def test_documents_that_are_files(client: httpx.Client, kind: str) -> None:
    source = {
        "type": kind,
        "media_type": "application/pdf",
        "data": "x",
        "url": "x",
        "file_id": "x",
    }
    content = [{"type": "document", "source": source}]
    refused = ask(client, {"role": "user", "content": content}, status=400)
    assert "'document', which is not served" in refused["error"]["message"]


def test_what_tools_of_their_servers_leave(client: httpx.Client) -> None:
    use = {
        "type": "server_tool_use",
        "id": "srvtoolu_1",
        "name": "web_search",
        "input": {"query": "x"},
    }
    results = [
        {"type": f"{name}_tool_result", "tool_use_id": "srvtoolu_1", "content": []}
        for name in ("web_search", "web_fetch", "code_execution", "bash_code_execution",
                     "text_editor_code_execution", "tool_search")
    ]  # fmt: skip
    text = {"type": "text", "text": "None."}
    told = {"role": "assistant", "content": [use, *results, text]}
    plain = {"role": "assistant", "content": "None."}
    assert echoed(client, ASKED, told, ASKED) == echoed(client, ASKED, plain, ASKED)
    nothing = {"role": "assistant", "content": [use]}
    assert "assistant: \nuser" in echoed(client, ASKED, nothing, ASKED)


def test_tools_that_their_servers_called(client: httpx.Client) -> None:
    use = {"type": "mcp_tool_use", "id": "m", "name": "look", "server_name": "s", "input": {}}
    result = {"type": "mcp_tool_result", "tool_use_id": "m", "is_error": False,
              "content": [{"type": "text", "text": "seen"}]}  # fmt: skip
    said = {"type": "text", "text": "I saw it."}
    told = echoed(client, ASKED, {"role": "assistant", "content": [use, result, said]}, ASKED)
    assert "assistant: \ntool: seen\nassistant: I saw it.\n" in told


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("bash_20250124", "whose schema only Anthropic's models know"),
        ("text_editor_20250728", "whose schema only Anthropic's models know"),
        ("memory_20250818", "whose schema only Anthropic's models know"),
        ("web_search_20250305", "which Anthropic's own servers run"),
        ("code_execution_20250825", "which Anthropic's own servers run"),
    ],
)
def test_why_their_tools_are_refused(client: httpx.Client, kind: str, why: str) -> None:
    refused = ask(client, ASKED, status=400, tools=[{"type": kind, "name": "bash"}])
    assert why in refused["error"]["message"]
