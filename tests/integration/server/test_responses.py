"""OpenAI's Responses over a fake worker: items, events, the store, the background."""

from __future__ import annotations

import json
import sqlite3
import time
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from penstock.testing.fake_server import add_model, serving
from penstock.testing.fake_worker import FakeModel

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TOOLS = [{"type": "function", "name": "weather", "parameters": {"type": "object"}}]
THINKER = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}assistant: <think>\n"
    "{# </think> <tool_call> #}"
)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    add_model(home, "echo")
    add_model(home, "small", FakeModel(context=64))
    add_model(home, "thinker", FakeModel(answer=f"hm\n</think>\n\nWell.{CALL}"), THINKER)
    add_model(home, "in-a-space", FakeModel(answer=CALL.replace("weather", "sky__weather")))
    add_model(home, "dies-late", FakeModel(die_at_token=3))
    add_model(home, "slow", FakeModel(step_s=0.02))
    return home


@pytest.fixture(scope="module")
def client(home: Path) -> Iterator[httpx.Client]:
    with (
        serving(home, models_default="echo") as server,
        httpx.Client(base_url=server.url, timeout=30) as client,
    ):
        yield client


def ask(client: httpx.Client, status: int = 200, **fields: Any) -> Any:
    answer = client.post("/v1/responses", json={"model": "echo", "input": "hi", **fields})
    assert answer.status_code == status, answer.text
    return answer.json()


def stream(client: httpx.Client, **fields: Any) -> list[Any]:
    body = {"model": "echo", "input": "hi", "stream": True, **fields}
    with client.stream("POST", "/v1/responses", json=body) as answer:
        assert answer.status_code == 200
        lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
    events = [json.loads(line[6:]) for line in lines]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def text_of(response: Any) -> str:
    return "".join(
        part["text"]
        for item in response["output"]
        if item["type"] == "message"
        for part in item["content"]
    )


def until(client: httpx.Client, response_id: str, *states: str) -> Any:
    deadline = time.monotonic() + 15
    while True:
        response = client.get(f"/v1/responses/{response_id}").json()
        if response["status"] in states:
            return response
        assert time.monotonic() < deadline, response["status"]
        time.sleep(0.05)


def without_ids(items: list[Any]) -> list[Any]:
    return [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in items]


def test_an_answer_and_its_usage(client: httpx.Client) -> None:
    response = ask(client, max_output_tokens=4, instructions="be kind", metadata={"a": "b"})
    assert response["object"] == "response"
    assert (response["status"], text_of(response)) == ("incomplete", "syst")
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["usage"]["input_tokens"] == len("system: be kind\nuser: hi\nassistant: ")
    assert response["usage"]["output_tokens"] == 4
    assert response["metadata"] == {"a": "b"}


def test_items_in_all_shapes(client: httpx.Client) -> None:
    items = [
        {"role": "developer", "content": "d"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "q"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "t"}]},
        {
            "type": "message",
            "id": "m",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "a", "annotations": []}],
        },
        {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "sunny"},
    ]
    response = ask(client, input=items, tools=TOOLS)
    assert text_of(response).startswith("system: d\nuser: q\nassistant: a\ntool: sunny\n")


def test_reasoning_text_and_calls_are_items(client: httpx.Client) -> None:
    whole = ask(client, model="thinker", tools=TOOLS)
    assert whole["status"] == "completed"
    kinds = [item["type"] for item in whole["output"]]
    assert kinds == ["reasoning", "message", "function_call"]
    assert whole["output"][0]["content"] == [{"type": "reasoning_text", "text": "hm\n"}]
    assert whole["output"][2]["arguments"] == '{"city": "Paris"}'
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    events = stream(client, model="thinker", tools=TOOLS)
    last = events[-1]["response"]
    assert without_ids(last["output"]) == without_ids(whole["output"])


def test_tools_in_a_namespace(client: httpx.Client) -> None:
    space = {"type": "namespace", "name": "sky", "description": "d", "tools": TOOLS}
    response = ask(client, model="in-a-space", tools=[space, {"type": "web_search"}])
    [call] = response["output"]
    assert (call["namespace"], call["name"]) == ("sky", "weather")
    assert call["arguments"] == '{"city": "Paris"}'
    again = [
        {"role": "user", "content": "q"},
        call,
        {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"},
    ]
    assert "tool: sunny" in text_of(ask(client, input=again, tools=[space]))
    wrong = [{**space, "tools": [{"type": "shell", "name": "x"}]}]
    assert ask(client, 400, tools=wrong)["error"]["param"] == "tools"


def test_the_events_put_together_are_the_answer(client: httpx.Client) -> None:
    events = stream(client, model="thinker", tools=TOOLS)
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    final = events[-1]["response"]["output"]
    for index, item in enumerate(final):
        own = [event for event in events if event.get("output_index") == index]
        assert own[0]["type"] == "response.output_item.added"
        assert own[-1]["type"] == "response.output_item.done"
        assert own[-1]["item"] == item
        deltas = "".join(event["delta"] for event in own if event["type"].endswith(".delta"))
        said = item["arguments"] if "arguments" in item else item["content"][0]["text"]
        assert deltas == said
        assert {event.get("item_id", item["id"]) for event in own} == {item["id"]}


def test_a_response_is_continued_found_and_forgotten(client: httpx.Client) -> None:
    first = ask(client, max_output_tokens=4)
    second = ask(client, input="more", previous_response_id=first["id"], max_output_tokens=60)
    assert text_of(second).startswith("user: hi\nassistant: user\nuser: more\nassistant: ")
    third = stream(client, input="x", previous_response_id=second["id"], max_output_tokens=1)
    stored = client.get(f"/v1/responses/{third[-1]['response']['id']}").json()
    assert stored == third[-1]["response"]
    asked = client.get(f"/v1/responses/{second['id']}/input_items").json()
    [item] = asked["data"]
    assert item["content"] == [{"type": "input_text", "text": "more"}]
    assert item["status"] == "completed"
    assert client.delete(f"/v1/responses/{first['id']}").json()["deleted"] is True
    assert client.get(f"/v1/responses/{first['id']}").status_code == 404
    refused = ask(client, 400, previous_response_id=second["id"])
    assert refused["error"]["param"] == "previous_response_id"


def test_what_is_not_to_be_stored_is_not(client: httpx.Client) -> None:
    response = ask(client, store=False, max_output_tokens=1)
    assert client.get(f"/v1/responses/{response['id']}").status_code == 404


def test_the_store_survives_a_restart_and_is_bounded(home: Path) -> None:
    with serving(home) as server, httpx.Client(base_url=server.url, timeout=30) as client:
        kept = ask(client, max_output_tokens=2)
        slow = ask(client, model="slow", background=True, max_output_tokens=2000)
        until(client, slow["id"], "in_progress")
    flags = {"server_stored_responses": 2}
    with serving(home, **flags) as server, httpx.Client(base_url=server.url, timeout=30) as client:
        assert client.get(f"/v1/responses/{kept['id']}").json() == kept
        left = client.get(f"/v1/responses/{slow['id']}").json()
        assert left["status"] in ("cancelled", "failed")
        newer = [ask(client, max_output_tokens=1)["id"] for _ in range(2)]
        assert client.get(f"/v1/responses/{kept['id']}").status_code == 404
        assert all(client.get(f"/v1/responses/{each}").status_code == 200 for each in newer)


def test_in_the_background(client: httpx.Client) -> None:
    queued = ask(client, background=True, max_output_tokens=3)
    assert queued["status"] == "queued"
    done = until(client, queued["id"], "incomplete")
    assert text_of(done) == "use"
    failed = ask(client, model="dies-late", background=True, max_output_tokens=9)
    assert until(client, failed["id"], "failed")["error"]["code"] == "worker_restarted"


def test_what_runs_in_the_background_can_be_stopped(client: httpx.Client) -> None:
    queued = ask(client, model="slow", background=True, max_output_tokens=2000)
    stopped = client.post(f"/v1/responses/{queued['id']}/cancel").json()
    assert stopped["status"] == "cancelled"
    plain = ask(client, max_output_tokens=1)
    assert client.post(f"/v1/responses/{plain['id']}/cancel").status_code == 400


def test_responses_belong_to_the_key_that_made_them(tmp_path: Path) -> None:
    add_model(tmp_path, "fake")
    with (
        serving(tmp_path, server_api_keys=["a", "b"], models_default="fake") as server,
        httpx.Client(base_url=server.url, timeout=30) as client,
    ):
        mine, other = {"authorization": "Bearer a"}, {"authorization": "Bearer b"}
        body = {"input": "hi", "max_output_tokens": 1}
        made = client.post("/v1/responses", json=body, headers=mine).json()
        address = f"/v1/responses/{made['id']}"
        assert client.get(address, headers=other).status_code == 404
        assert client.delete(address, headers=other).status_code == 404
        assert client.get(address, headers=mine).status_code == 200


def test_they_stay_with_the_key_when_its_number_changes(tmp_path: Path) -> None:
    add_model(tmp_path, "fake")
    body = {"input": "hi", "max_output_tokens": 1}
    made: dict[str, str] = {}
    with (
        serving(tmp_path, server_api_keys=["a", "b"], models_default="fake") as server,
        httpx.Client(base_url=server.url, timeout=30) as client,
    ):
        for key in ("a", "b"):
            answer = client.post("/v1/responses", json=body, headers={"x-api-key": key})
            made[key] = answer.json()["id"]
    with (
        serving(tmp_path, server_api_keys=["b"]) as server,
        httpx.Client(base_url=server.url, headers={"x-api-key": "b"}) as client,
    ):
        assert client.get(f"/v1/responses/{made['a']}").status_code == 404
        assert client.get(f"/v1/responses/{made['b']}").status_code == 200
    kept = sqlite3.connect(tmp_path / "responses.db")
    owners = [owner for (owner,) in kept.execute("SELECT owner FROM responses")]
    kept.close()
    # A mark from which nobody has the key.
    assert len(set(owners)) == 2
    assert not {sha256(key.encode()).hexdigest()[:32] for key in made} & set(owners)


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"input": []}, 400, "input"),
        ({"input": [{"type": "function_call", "name": "x"}]}, 400, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, 400,
         "input[0].content[0]"),
        ({"background": True, "stream": True}, 400, "background"),
        ({"input": [{"type": "reasoning", "content": [{"x": 1}]}]}, 400, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "x"}]}]}, 400, "input[0]"),
        ({"conversation": "c"}, 400, "conversation"),
        ({"tools": {}}, 400, "tools"),
        ({"tools": [{"type": "computer"}]}, 400, "tools"),
        ({"text": {"format": {"type": "xml"}}}, 400, "text.format"),
        ({"text": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, 400,
         "text.format.schema"),
        ({"tool_choice": "required"}, 400, "tool_choice"),
        ({"model": "nobody"}, 404, "model"),
        ({"model": "small", "input": "x" * 99, "stream": True}, 400, "input"),
    ],
)  # fmt: skip
def test_refusals(client: httpx.Client, fields: Any, status: int, param: str) -> None:
    assert ask(client, status, **fields)["error"]["param"] == param


def test_a_stream_that_fails_says_so(client: httpx.Client) -> None:
    events = stream(client, model="dies-late")
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["error"]["code"] == "worker_restarted"


def test_log_probabilities_of_the_text(client: httpx.Client) -> None:
    wanted: Any = {
        "include": ["message.output_text.logprobs"], "top_logprobs": 2, "max_output_tokens": 3,
    }  # fmt: skip
    response = ask(client, **wanted)
    [part] = response["output"][0]["content"]
    assert [entry["token"] for entry in part["logprobs"]] == ["u", "s", "e"]
    assert part["logprobs"][0]["logprob"] == -0.5
    assert len(part["logprobs"][0]["top_logprobs"]) == 2
    events = stream(client, **wanted)
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [e for delta in deltas for e in delta["logprobs"]] == part["logprobs"]
    [done] = [event for event in events if event["type"] == "response.output_text.done"]
    assert done["logprobs"] == part["logprobs"]
    [added] = [event for event in events if event["type"] == "response.content_part.added"]
    assert added["part"]["logprobs"] == []
    assert ask(client, 400, top_logprobs=2)["error"]["param"] == "top_logprobs"


def test_log_probabilities_of_reasoning_and_calls_are_not_told(client: httpx.Client) -> None:
    response = ask(client, model="thinker", tools=TOOLS, include=["message.output_text.logprobs"])
    [message] = [item for item in response["output"] if item["type"] == "message"]
    named = "".join(entry["token"] for entry in message["content"][0]["logprobs"])
    assert named.strip() == "Well."


def test_the_input_is_counted(client: httpx.Client) -> None:
    counted = client.post("/v1/responses/input_tokens", json={"model": "echo", "input": "hi"})
    expected = len("user: hi\nassistant: ")
    assert counted.json() == {"object": "response.input_tokens", "input_tokens": expected}
    assert ask(client, max_output_tokens=1)["usage"]["input_tokens"] == expected
    bad = client.post("/v1/responses/input_tokens", json={"model": "echo", "input": 3})
    assert bad.status_code == 400


def test_every_item_has_a_status(client: httpx.Client) -> None:
    response = ask(client, model="thinker", tools=TOOLS)
    assert [item["status"] for item in response["output"]] == ["completed"] * 3


def test_allowed_tools(client: httpx.Client) -> None:
    tools = [*TOOLS, {"type": "function", "name": "secret", "parameters": {"type": "object"}}]
    choice: Any = {
        "type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "weather"}],
    }  # fmt: skip
    shown = text_of(ask(client, tools=tools, tool_choice=choice, max_output_tokens=200))
    assert "weather" in shown
    assert "secret" not in shown
    for wrong in ({"type": "function", "name": "nobody"}, {"type": "mcp"}):
        refused = ask(client, 400, tools=tools, tool_choice={**choice, "tools": [wrong]})
        assert refused["error"]["param"] == "tool_choice"


def test_what_is_to_be_truncated_is_refused_when_it_is_too_long(client: httpx.Client) -> None:
    """`auto` changes nothing where the input fits; where it does not, nothing is dropped."""
    assert ask(client)["truncation"] == "disabled"
    assert ask(client, truncation="auto")["truncation"] == "auto"
    for stream in (False, True):
        error = ask(client, 400, model="small", input="a" * 200, truncation="auto", stream=stream)[
            "error"
        ]
        assert error["param"] == "truncation"
        assert error["code"] == "context_length_exceeded"
        assert "drops nothing" in error["message"]
    error = ask(client, 400, model="small", input="a" * 200)["error"]
    assert error["param"] == "input"


def test_a_bound_on_tools_of_the_server_is_repeated(client: httpx.Client) -> None:
    assert ask(client, max_tool_calls=3)["max_tool_calls"] == 3


def test_template_arguments_of_responses(client: httpx.Client) -> None:
    refused = ask(client, 400, chat_template_kwargs={"messages": []})
    assert "messages" in refused["error"]["message"]


def test_reasoning_that_is_not_told_has_no_log_probabilities(client: httpx.Client) -> None:
    told = ask(client, model="thinker", include=["message.output_text.logprobs"],
               include_reasoning=False)  # fmt: skip
    [message] = [item for item in told["output"] if item["type"] == "message"]
    part = message["content"][0]
    assert "".join(entry["token"] for entry in part["logprobs"]).startswith(part["text"])


def in_background(client: httpx.Client, key: str, body_bytes: int = 0) -> int:
    """Ask for one that takes long, in a body of that size."""
    fields = {"model": "slow", "input": "hi", "background": True, "max_output_tokens": 4000}
    body = json.dumps(fields).encode().ljust(body_bytes)
    return client.post("/v1/responses", content=body, headers={"x-api-key": key}).status_code


def test_a_client_has_a_share_of_the_background(home: Path) -> None:
    with (
        serving(home, server_api_keys=["a", "b"]) as server,
        httpx.Client(base_url=server.url, timeout=30) as client,
    ):
        assert [in_background(client, "a") for _ in range(33)] == [200] * 32 + [503]
        assert in_background(client, "b") == 200


def test_large_ones_in_the_background_lock_nobody_out(home: Path) -> None:
    flags = {"server_api_keys": ["a", "b"], "server_max_bodies": 8 << 20}  # 40 MiB for requests
    with serving(home, **flags) as server, httpx.Client(base_url=server.url, timeout=20) as client:
        statuses = [in_background(client, "a", 5_000_000) for _ in range(7)]
        assert statuses == [200] * 2 + [503] * 5
        body = json.dumps({"model": "echo", "input": "hi"}).encode().ljust(3_000_000)
        answer = client.post("/v1/responses", content=body, headers={"x-api-key": "b"})
        assert answer.status_code == 200
        assert in_background(client, "b", 5_000_000) == 200
