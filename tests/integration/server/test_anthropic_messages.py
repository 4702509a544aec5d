"""Anthropic's protocol over a fake worker: bodies, events, errors."""

from __future__ import annotations

import json
import socket
import time
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from penstock.testing.fake_server import add_model, serving
from penstock.testing.fake_worker import FakeModel

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HI = [{"role": "user", "content": "hi"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TOOLS = [
    {
        "name": "weather",
        "description": "The weather.",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
        "cache_control": {"type": "ephemeral"},
    }
]
THINKER = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}assistant: <think>\n"
    "{# </think> <tool_call> #}"
)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    home: Path = tmp_path_factory.mktemp("home")
    add_model(home, "echo")
    add_model(home, "small", FakeModel(context=64))
    add_model(home, "caller", FakeModel(answer=f"I look.\n{CALL}", step_s=0.003))
    add_model(home, "thinker", FakeModel(answer=f"hm\n</think>\n\nWell.{CALL}"), THINKER)
    add_model(home, "dies-late", FakeModel(die_at_token=3))
    add_model(home, "slow-load", FakeModel(load_s=0.5))
    add_model(home, "too-large", FakeModel(load_error_code="model_exceeds_memory"))
    with (
        serving(home, models_default="echo", server_keepalive_after_s=0.15) as server,
        httpx.Client(base_url=server.url, timeout=30) as client,
    ):
        yield client


def ask(client: httpx.Client, status: int = 200, **fields: Any) -> Any:
    body = {"model": "echo", "max_tokens": 200, "messages": HI, **fields}
    answer = client.post("/v1/messages", json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


def stream(client: httpx.Client, **fields: Any) -> list[Any]:
    body = {"model": "echo", "max_tokens": 200, "messages": HI, "stream": True, **fields}
    with client.stream("POST", "/v1/messages", json=body) as answer:
        assert answer.status_code == 200
        lines = [line for line in answer.iter_lines() if line]
    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    assert [event["type"] for event in events] == names
    return events


def assembled(events: list[Any]) -> list[Any]:
    """The blocks of a stream, put together as a client does; checks the order of events."""
    blocks: list[Any] = []
    open_index: int | None = None
    for event in events:
        match event["type"]:
            case "content_block_start":
                assert open_index is None
                assert event["index"] == len(blocks)
                open_index = event["index"]
                blocks.append({**event["content_block"], "json": ""})
            case "content_block_delta":
                assert event["index"] == open_index
                kind, [name] = event["delta"].pop("type"), event["delta"]
                assert kind in {
                    "text_delta",
                    "thinking_delta",
                    "signature_delta",
                    "input_json_delta",
                }
                key = "json" if name == "partial_json" else name
                blocks[-1][key] += event["delta"][name]
            case "content_block_stop":
                assert event["index"] == open_index
                open_index = None
    assert open_index is None
    for block in blocks:
        text = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(text)
            block.pop("id")
    return blocks


def test_an_answer_and_its_usage(client: httpx.Client) -> None:
    answer = ask(client, max_tokens=4, metadata={"user_id": "u"}, system="be kind")
    assert answer["type"] == "message"
    assert answer["role"] == "assistant"
    assert answer["content"] == [{"type": "text", "text": "syst"}]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("max_tokens", None)
    assert answer["usage"] == {
        "input_tokens": len("system: be kind\nuser: hi\nassistant: "),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": 4,
    }


def test_system_blocks_and_cache_marks(client: httpx.Client) -> None:
    system = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}] * 2
    answer = ask(client, max_tokens=11, system=system)
    assert answer["content"][0]["text"] == "system: a\na"


def test_a_system_message_in_the_middle_stays_there(client: httpx.Client) -> None:
    messages = [*HI, {"role": "system", "content": "note"}, {"role": "user", "content": "go"}]
    answer = ask(client, max_tokens=31, messages=messages)
    assert answer["content"][0]["text"].startswith("user: hi\nsystem: note\nuser: go\n")


def test_stop_sequences_are_named(client: httpx.Client) -> None:
    answer = ask(client, stop_sequences=["xyz", ": h"])
    assert answer["content"] == [{"type": "text", "text": "user"}]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", ": h")
    events = stream(client, stop_sequences=[": h"])
    assert events[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": ": h"}


def test_the_events_of_a_stream(client: httpx.Client) -> None:
    events = stream(client, max_tokens=3)
    kinds = [event["type"] for event in events]
    assert kinds[:3] == ["message_start", "ping", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert events[0]["message"]["content"] == []
    assert events[0]["message"]["usage"]["input_tokens"] == len("user: hi\nassistant: ")
    assert assembled(events) == [{"type": "text", "text": "use"}]
    assert events[-2]["usage"]["output_tokens"] == 3


def test_calls_whole_and_streamed(client: httpx.Client) -> None:
    whole = ask(client, model="caller", tools=TOOLS)
    assert whole["stop_reason"] == "tool_use"
    call = whole["content"][1]
    assert call.pop("id").startswith("toolu_")
    expected = [
        {"type": "text", "text": "I look.\n"},
        {"type": "tool_use", "name": "weather", "input": {"city": "Paris"}},
    ]
    assert whole["content"] == expected
    events = stream(client, model="caller", tools=TOOLS)
    assert assembled(events) == expected
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    pieces = [e for e in events if "partial_json" in e.get("delta", {})]
    assert len(pieces) > 3  # arguments come as they are made


def test_without_tools_the_marks_are_text(client: httpx.Client) -> None:
    answer = ask(client, model="caller")
    assert answer["content"] == [{"type": "text", "text": f"I look.\n{CALL}"}]
    assert answer["stop_reason"] == "end_turn"


def test_thinking_is_a_block_of_its_own(client: httpx.Client) -> None:
    thinking = {"type": "enabled", "budget_tokens": 1024}
    whole = ask(client, model="thinker", tools=TOOLS, thinking=thinking)
    assert [block["type"] for block in whole["content"]] == ["thinking", "text", "tool_use"]
    assert whole["content"][0] == {"type": "thinking", "thinking": "hm\n", "signature": "penstock"}
    assert whole["content"][1]["text"] == "Well."
    blocks = assembled(stream(client, model="thinker", tools=TOOLS, thinking=thinking))
    whole["content"][2].pop("id")
    assert blocks == whole["content"]


def test_results_of_tools_become_tool_messages(client: httpx.Client) -> None:
    messages = [
        *HI,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t", "signature": "s"},
                {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "x"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_1",
                    "content": [{"type": "text", "text": "sunny"}],
                },
                {"type": "text", "text": "and?"},
            ],
        },
    ]
    text = ask(client, messages=messages, tools=TOOLS)["content"][0]["text"]
    assert text.startswith("user: hi\nassistant: \ntool: sunny\nuser: and?\n")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("no such city", "Error: no such city"),
        ([{"type": "text", "text": "error 404"}], "error 404"),
        (None, "Error: the tool failed."),
    ],
)
def test_a_tool_that_failed_is_said_to_have_failed(
    client: httpx.Client, content: Any, told: str
) -> None:
    use = {"type": "tool_use", "id": "t1", "name": "weather", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": content}
    history = [{"role": "user", "content": "q"}, {"role": "assistant", "content": [use]}]

    def heard(**mark: bool) -> str:
        messages = [*history, {"role": "user", "content": [{**result, **mark}]}]
        return str(ask(client, messages=messages, max_tokens=200)["content"][0]["text"])

    assert f"tool: {told}\n" in heard(is_error=True)
    assert heard(is_error=False) == heard()
    assert told == "error 404" or told not in heard()


def test_an_assistant_message_at_the_end_is_continued(client: httpx.Client) -> None:
    messages = [*HI, {"role": "assistant", "content": "Well,"}]
    count = client.post("/v1/messages/count_tokens", json={"model": "echo", "messages": messages})
    assert count.json() == {"input_tokens": len("user: hi\nassistant: Well,")}


def test_counting_runs_nothing(client: httpx.Client) -> None:
    body = {"model": "echo", "messages": HI, "system": "x"}
    answer = client.post("/v1/messages/count_tokens", json=body)
    assert answer.json() == {"input_tokens": len("system: x\nuser: hi\nassistant: ")}


@pytest.mark.parametrize(
    ("fields", "status", "kind", "words"),
    [
        ({"messages": []}, 400, "invalid_request_error", "messages"),
        ({"tools": {}}, 400, "invalid_request_error", "tools"),
        ({"system": [{"text": "x"}]}, 400, "invalid_request_error", "system"),
        ({"max_tokens": 0}, 400, "invalid_request_error", "max_tokens"),
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
        ({"temperature": 1.5}, 400, "invalid_request_error", "temperature"),
        ({"model": "nobody"}, 404, "not_found_error", "nobody"),
        ({"tool_choice": {"type": "any"}}, 400, "invalid_request_error", "tool_choice"),
        ({"tools": [{"type": "web_search_20250305", "name": "s"}]}, 400, "invalid_request_error",
         "web_search"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "x"}}, 400,
         "invalid_request_error", "tool_choice"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {
            "type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}]}]}, 400,
         "invalid_request_error", "text only"),
        ({"messages": [{"role": "user", "content": []}]}, 400, "invalid_request_error", "empty"),
    ],
)  # fmt: skip
def test_refusals_have_the_protocols_shape(
    client: httpx.Client, fields: Any, status: int, kind: str, words: str
) -> None:
    answer = ask(client, status, **fields)
    assert answer["type"] == "error"
    assert answer["request_id"]
    assert answer["error"]["type"] == kind
    assert words in answer["error"]["message"]


@pytest.mark.parametrize("inside", [b"1e400", b"9" * 5000, b'"\xff"', b'"\\ud83d!"'])
def test_tools_that_are_no_json_inside(client: httpx.Client, inside: bytes) -> None:
    messages = b'"messages": [{"role": "user", "content": "hi"}]'
    body = b'{"model": "echo", "max_tokens": 1, ' + messages + b', "tools": [' + inside + b"]}"
    answer = client.post("/v1/messages", content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("streaming", [False, True])
def test_a_prompt_too_long_is_said_in_their_words(client: httpx.Client, streaming: bool) -> None:
    messages = [{"role": "user", "content": "x" * 100}]
    answer = ask(client, 400, model="small", messages=messages, stream=streaming)
    prompt = len("user: \nassistant: ") + 100
    said = f"prompt is too long: {prompt + 1} tokens > 64 maximum"
    assert answer["error"]["message"].startswith(said)
    assert answer["error"]["penstock"]["reason"] == "window"


def test_threads_are_refused_so_that_their_client_does_without(client: httpx.Client) -> None:
    answer = ask(client, 400, thread={"type": "create"})
    assert answer["error"]["details"] == {"error_code": "thread_unsupported_request"}
    assert ask(client, thread=None, max_tokens=1)["content"]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
@pytest.mark.parametrize(
    "field",
    [
        {"mcp_servers": [{"type": "url", "url": "https://example.com", "name": "x"}]},
        {"container": "container_1"},
        {"container": {"skills": []}},
    ],
)
def test_what_only_anthropics_own_servers_have_is_refused(
    client: httpx.Client, path: str, field: Any
) -> None:
    body = {"model": "echo", "max_tokens": 5, "messages": HI}
    [name] = field
    refused = client.post(path, json={**body, **field})
    assert refused.status_code == 400
    assert f"`{name}` is not supported" in refused.json()["error"]["message"]
    assert client.post(path, json={**body, "container": None, "mcp_servers": []}).is_success


def test_an_unknown_address_below_it_too(client: httpx.Client) -> None:
    answer = client.get("/v1/messages/batches")
    assert answer.status_code == 404
    assert answer.json()["error"]["type"] == "not_found_error"


def test_a_stream_that_fails_ends_with_an_error_event(client: httpx.Client) -> None:
    events = stream(client, model="dies-late", max_tokens=9)
    assert events[-1]["type"] == "error"
    assert events[-1]["error"]["type"] == "overloaded_error"


def test_a_model_that_can_never_be_loaded_is_no_fault_of_ours(client: httpx.Client) -> None:
    assert ask(client, 507, model="too-large")["error"]["type"] == "api_error"


def test_a_silent_stream_pings(client: httpx.Client) -> None:
    events = stream(client, model="slow-load", max_tokens=1)
    kinds = [event["type"] for event in events]
    assert kinds[0] == "message_start"
    assert kinds.count("ping") >= 2


def test_overload_is_529_and_keys_come_in_both_headers(tmp_path: Path) -> None:
    add_model(tmp_path, "fake")
    with (
        serving(
            tmp_path,
            server_max_bodies=1_000_000,
            server_api_keys=["k"],
            server_queue_deadline_s=2,
        ) as server,
        httpx.Client(base_url=server.url) as client,
    ):
        body = {"model": "fake", "max_tokens": 1, "messages": HI}
        late = time.monotonic() + 60  # a load may take longer than a request waits
        while client.post("/v1/messages", json=body, headers={"x-api-key": "k"}).status_code == 529:
            assert time.monotonic() < late
        for headers in ({"x-api-key": "k"}, {"authorization": "Bearer k"}):
            assert client.post("/v1/messages", json=body, headers=headers).status_code == 200
        refused = client.post("/v1/messages", json=body, headers={"x-api-key": "no"})
        assert refused.status_code == 401
        assert refused.json()["error"]["type"] == "authentication_error"
        address = (client.base_url.host, client.base_url.port)
        with socket.create_connection(address) as slow:  # all that bodies may have is its own
            slow.sendall(
                b"POST /v1/messages HTTP/1.1\r\nhost: localhost\r\nx-api-key: k\r\n"
                b"content-length: 1000000\r\n\r\n" + b"x" * 999_000
            )
            time.sleep(0.2)
            body["messages"] = [{"role": "user", "content": "x" * 400_000}]
            full = client.post("/v1/messages", json=body, headers={"x-api-key": "k"})
        assert full.status_code == 529
        assert full.json()["error"]["type"] == "overloaded_error"
        assert int(full.headers["retry-after"]) >= 1
