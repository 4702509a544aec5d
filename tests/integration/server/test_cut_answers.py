"""An answer that its token limit cuts off, in every protocol, whole and streamed: it says so, shows
no half mark-up and no half character, and no call that is not whole seems to be.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from penstock.testing.fake_server import add_model, serving
from penstock.testing.fake_worker import FakeModel

if TYPE_CHECKING:
    from collections.abc import Iterator

SAID = "Grüße 🙂.\n"
ARGUMENTS = '{"city": "Zürich", "days": 3}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
ANSWER = (SAID + CALL).encode()
HI = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "weather", "parameters": SCHEMA}
OPENAI_TOOLS = [{"type": "function", "function": FUNCTION}]


@dataclass
class Seen:
    """What a client makes of an answer."""

    text: str
    calls: list[tuple[Any, bool]]  # arguments as the protocol has them, and whether it is whole
    ending: str | None
    status: str | None = None


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    home = tmp_path_factory.mktemp("home")
    add_model(home, "caller", FakeModel(answer=ANSWER.decode()))
    with serving(home) as server, httpx.Client(base_url=server.url, timeout=30) as client:
        yield client


def post(client: httpx.Client, path: str, body: dict[str, Any]) -> list[Any]:
    """The answer's documents: one, or the events of a stream."""
    answer = client.post(path, json={"model": "caller", **body})
    assert answer.status_code == 200, answer.text
    if not body["stream"]:
        return [answer.json()]
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


def chat(client: httpx.Client, tokens: int, stream: bool) -> Seen:
    body = {"messages": HI, "tools": OPENAI_TOOLS, "max_tokens": tokens, "stream": stream}
    choices = [event["choices"][0] for event in post(client, "/v1/chat/completions", body)]
    said = [choice["delta" if stream else "message"] for choice in choices]
    calls: dict[int, str] = {}
    for index, call in ((n, c) for each in said for n, c in enumerate(each.get("tool_calls", []))):
        place = call.get("index", index)
        calls[place] = calls.get(place, "") + call["function"]["arguments"]
    text = "".join(each.get("content") or "" for each in said)
    whole = [(arguments, arguments == ARGUMENTS) for arguments in calls.values()]
    return Seen(text, list(whole), choices[-1]["finish_reason"])


def messages(client: httpx.Client, tokens: int, stream: bool) -> Seen:
    tools = [{"name": "weather", "input_schema": SCHEMA}]
    body = {"messages": HI, "tools": tools, "max_tokens": tokens, "stream": stream}
    events = post(client, "/v1/messages", body)
    if not stream:
        blocks = events[0]["content"]
        text = "".join(block.get("text", "") for block in blocks)
        inputs = [block["input"] for block in blocks if block["type"] == "tool_use"]
        calls = [(each, "unparsed_arguments" not in each) for each in inputs]
        return Seen(text, calls, events[0]["stop_reason"])
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    text = "".join(delta.get("text", "") for delta in deltas)
    written = "".join(delta.get("partial_json", "") for delta in deltas)
    starts = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    begun = any(block["type"] == "tool_use" for block in starts)
    assert len(starts) == sum(event["type"] == "content_block_stop" for event in events)
    ending = next(event["delta"] for event in events if event["type"] == "message_delta")
    return Seen(text, [(written, written == ARGUMENTS)] * begun, ending["stop_reason"])


def responses(client: httpx.Client, tokens: int, stream: bool) -> Seen:
    tools = [{"type": "function", **FUNCTION}]
    body = {"input": "hi", "tools": tools, "max_output_tokens": tokens, "stream": stream}
    events = post(client, "/v1/responses", {**body, "store": False})
    response = events[-1]["response"] if stream else events[0]
    if stream:
        deltas = [event for event in events if event["type"].endswith(".delta")]
        for item in response["output"]:
            said = [each["delta"] for each in deltas if each["item_id"] == item["id"]]
            shown = item.get("arguments", None)
            assert "".join(said) == (item["content"][0]["text"] if shown is None else shown)
    items = response["output"]
    text = "".join(item["content"][0]["text"] for item in items if item["type"] == "message")
    calls = [
        (item["arguments"], item["status"] == "completed")
        for item in items
        if item["type"] == "function_call"
    ]
    details = response["incomplete_details"]
    return Seen(text, calls, details and details["reason"], response["status"])


def ollama(client: httpx.Client, tokens: int, stream: bool) -> Seen:
    options = {"num_predict": tokens}
    body = {"messages": HI, "tools": OPENAI_TOOLS, "options": options, "stream": stream}
    lines = post(client, "/api/chat", body)
    text = "".join(line["message"]["content"] for line in lines)
    made = [call for line in lines for call in line["message"].get("tool_calls", [])]
    return Seen(
        text, [(call["function"]["arguments"], True) for call in made], lines[-1]["done_reason"]
    )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("ask", "ending"),
    [
        (chat, "length"),
        (messages, "max_tokens"),
        (responses, "max_output_tokens"),
        (ollama, "length"),
    ],
)
def test_a_cut_answer_is_honest(client: httpx.Client, ask: Any, ending: str, stream: bool) -> None:
    stride = 2 if ask is chat else 5
    complete = ANSWER.index(b"}}") + 1  # the tokens of a call whose arguments are whole
    for tokens in range(1, len(ANSWER), stride):
        seen: Seen = ask(client, tokens, stream)
        assert seen.ending == ending
        expected = ANSWER[:tokens].decode(errors="ignore")
        # A text's last line end may be that before a call.
        assert SAID.startswith(seen.text)
        assert seen.text.strip() == expected.partition("<")[0].strip(), tokens
        assert "\ufffd" not in json.dumps([seen.text, seen.calls], ensure_ascii=False)
        whole = [call for call, is_whole in seen.calls if is_whole]
        assert len(whole) == (tokens >= complete), tokens
        if ask is responses:
            assert seen.status == "incomplete"
        if begun := [call for call, is_whole in seen.calls if not is_whole]:
            [arguments] = begun
            written = arguments["unparsed_arguments"] if isinstance(arguments, dict) else arguments
            assert ARGUMENTS.startswith(written)
            assert tokens < complete
    assert ask(client, len(ANSWER) + 9, stream).ending != ending


def test_completions_end_in_no_half_character(client: httpx.Client) -> None:
    for tokens in range(1, 12):
        body = {"model": "caller", "prompt": "hi", "max_tokens": tokens}
        answer = client.post("/v1/completions", json=body).json()["choices"][0]
        assert answer["text"] == ANSWER[:tokens].decode(errors="ignore")
        assert answer["finish_reason"] == "length"


def test_a_stop_string_inside_a_call_leaves_no_half_mark_up(client: httpx.Client) -> None:
    body = {"model": "caller", "messages": HI, "tools": OPENAI_TOOLS, "max_tokens": 500}
    for stop in ("_call>\n{", '"name"', "/tool", "</tool_call>"):
        answer = client.post("/v1/chat/completions", json={**body, "stop": stop}).json()
        choice = answer["choices"][0]
        assert choice["message"]["content"].strip() == SAID.strip(), stop
        assert bool(choice["message"].get("tool_calls")) == ("/tool" in stop)
