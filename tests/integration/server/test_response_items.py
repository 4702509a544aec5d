"""Items of responses: named by their ids, custom tools, what other servers leave in histories."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from penstock.testing.fake_server import add_model, serving
from penstock.testing.fake_worker import FakeModel

if TYPE_CHECKING:
    from collections.abc import Iterator

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
PATCH = '<tool_call>\n{"name": "patch", "arguments": {"input": "*** \\"x\\""}}\n</tool_call>'
TOOLS = [{"type": "function", "name": "weather", "parameters": {"type": "object"}}]
CUSTOM = [{"type": "custom", "name": "patch", "description": "Patches."}]
KEYS = ("key-of-one-client", "key-of-another-client")


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    home = tmp_path_factory.mktemp("home")
    add_model(home, "echo")
    add_model(home, "caller", FakeModel(answer=CALL))
    add_model(home, "patches", FakeModel(answer=PATCH))
    with (
        serving(home, models_default="echo", server_api_keys=list(KEYS)) as server,
        httpx.Client(base_url=server.url, timeout=30) as client,
    ):
        yield client


def ask(client: httpx.Client, status: int = 200, key: str = KEYS[0], **fields: Any) -> Any:
    answer = client.post(
        "/v1/responses",
        json={"model": "echo", "input": "hi", "max_output_tokens": 90, **fields},
        headers={"authorization": f"Bearer {key}"},
    )
    assert answer.status_code == status, answer.text
    return answer.json()


def echoed(client: httpx.Client, *items: Any) -> str:
    """The prompt, as the template has it."""
    said = ask(client, input=list(items), max_output_tokens=400)
    return str(said["output"][0]["content"][0]["text"])


# --- references ---


def test_items_named_by_their_id(client: httpx.Client) -> None:
    asked = {"role": "user", "content": "the weather"}
    first = ask(client, model="caller", input=[asked], tools=TOOLS)
    [call] = first["output"]
    listed = client.get(
        f"/v1/responses/{first['id']}/input_items",
        headers={"authorization": f"Bearer {KEYS[0]}"},
    ).json()
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
    whole = echoed(client, asked, call, result)
    assert "tool: sunny" in whole
    named = [
        {"type": "item_reference", "id": listed["data"][0]["id"]},
        {"id": call["id"]},  # OpenAI's clients may leave the type out
        result,
    ]
    assert echoed(client, *named) == whole
    # What was named is stored as it was: it outlives the response that it comes from.
    again = ask(client, input=named)
    client.delete(
        f"/v1/responses/{first['id']}", headers={"authorization": f"Bearer {KEYS[0]}"}
    ).raise_for_status()
    ask(client, 404, input=named)
    more = ask(client, input="and now?", previous_response_id=again["id"])
    assert more["usage"]["input_tokens"] > again["usage"]["input_tokens"]


def test_items_that_cannot_be_named(client: httpx.Client) -> None:
    stored = ask(client)["output"][0]["id"]
    unstored = ask(client, store=False)["output"][0]["id"]
    unknown = [unstored, stored[:-4] + "0007", "msg_1", "rs_" + "0" * 52, "x" * 500]
    for item_id in unknown:
        item = {"type": "item_reference", "id": item_id}
        error = ask(client, 404, input=[{"role": "user", "content": "hi"}, item])["error"]
        assert error["param"] == "input[1].id"
    reference = {"type": "item_reference", "id": stored}
    ask(client, input=[reference])
    ask(client, 404, key=KEYS[1], input=[reference])
    assert "again" in ask(client, 400, input=[reference, reference])["error"]["message"]
    ask(client, 400, input=[{"type": "item_reference"}])


def test_ids_of_a_stream_are_those_that_are_stored(client: httpx.Client) -> None:
    body = {"model": "caller", "input": "hi", "tools": TOOLS, "stream": True}
    headers = {"authorization": f"Bearer {KEYS[0]}"}
    with client.stream("POST", "/v1/responses", json=body, headers=headers) as answer:
        lines = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
    [added] = [line["item"]["id"] for line in lines if line["type"].endswith("item.added")]
    assert {line["item_id"] for line in lines if "item_id" in line} == {added}
    assert len(added) <= 64  # the most that OpenAI's ids have
    ask(client, input=[{"type": "item_reference", "id": added}])


# --- custom tools ---


def test_a_custom_tool_is_called_with_text(client: httpx.Client) -> None:
    said = ask(
        client, model="patches", tools=CUSTOM, tool_choice={"type": "custom", "name": "patch"}
    )
    [call] = said["output"]
    assert (call["type"], call["name"], call["input"]) == ("custom_tool_call", "patch", '*** "x"')
    assert said["tools"][0]["type"] == "custom"
    result = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "done"}
    text = echoed(client, {"role": "user", "content": "fix it"}, call, result)
    assert "tool: done" in text
    named = {"type": "item_reference", "id": call["id"]}
    assert echoed(client, {"role": "user", "content": "fix it"}, named, result) == text


def test_a_custom_tool_streams_its_text(client: httpx.Client) -> None:
    body = {"model": "patches", "input": "hi", "tools": CUSTOM, "stream": True}
    headers = {"authorization": f"Bearer {KEYS[0]}"}
    with client.stream("POST", "/v1/responses", json=body, headers=headers) as answer:
        lines = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
    told = [line for line in lines if "custom_tool_call_input" in line["type"]]
    assert [line["type"].rpartition(".")[2] for line in told] == ["delta", "done"]
    assert told[0]["delta"] == told[1]["input"] == '*** "x"'
    assert lines[-1]["response"]["output"][0]["input"] == '*** "x"'


def test_a_custom_tool_with_a_grammar_is_refused(client: httpx.Client) -> None:
    ask(client, tools=[{**CUSTOM[0], "format": {"type": "text"}}])
    grammar = {"type": "grammar", "syntax": "regex", "definition": "a"}
    error = ask(client, 400, tools=[{**CUSTOM[0], "format": grammar}])["error"]
    assert "grammar" in error["message"]


# --- histories of other servers ---


def test_a_message_of_a_tool(client: httpx.Client) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"}
    for name in ("tool_call_id", "call_id"):
        result = {"role": "tool", name: "c", "content": [{"type": "text", "text": "sunny"}]}
        assert "tool: sunny" in echoed(client, call, result)


def test_parts_as_chats_have_them(client: httpx.Client) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "input_text", "text": "two"}]
    assert "user: one\ntwo" in echoed(client, {"role": "user", "content": parts})
    image = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}]
    assert "text only" in str(ask(client, 400, input=[{"role": "user", "content": image}]))


def test_what_hosted_tools_leave(client: httpx.Client) -> None:
    asked = {"role": "user", "content": "news?"}
    said = {"role": "assistant", "content": [{"type": "output_text", "text": "None."}]}
    hosted = [
        {"type": "web_search_call", "id": "ws_1", "status": "completed",
         "action": {"type": "search", "query": "news"}},
        {"type": "file_search_call", "id": "fs_1", "queries": ["x"], "results": []},
        {"type": "code_interpreter_call", "id": "ci_1", "code": "1", "container_id": "c",
         "outputs": []},
        {"type": "mcp_list_tools", "id": "mcpl_1", "server_label": "x", "tools": []},
        {"type": "image_generation_call", "id": "ig_1", "result": "abc"},
    ]  # fmt: skip
    assert echoed(client, asked, *hosted, said, asked) == echoed(client, asked, said, asked)
    called = {"type": "mcp_call", "id": "mcp_1", "name": "look", "arguments": "{}",
              "server_label": "x", "output": "seen"}  # fmt: skip
    assert "tool: seen" in echoed(client, asked, called)
    assert "compaction" in str(ask(client, 400, input=[{"type": "compaction", "id": "c"}]))
