"""The official `anthropic` package against `penstock serve` with the real starter model."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import anthropic
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

MODEL = "SmolLM2-135M-Instruct"
HELLO: list[Any] = [{"role": "user", "content": "Say hello."}]
TOOL: Any = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def client(real_url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(
        base_url=real_url, api_key="none", max_retries=0, timeout=300
    ) as client:
        yield client


def test_an_answer_and_the_same_as_a_stream(client: anthropic.Anthropic) -> None:
    fields: Any = {"model": MODEL, "max_tokens": 6, "messages": HELLO}
    fields["extra_body"] = {"temperature": 0}
    whole = client.messages.create(**fields)
    assert whole.content[0].type == "text"
    assert "hello" in whole.content[0].text.lower()
    with client.messages.stream(**fields) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text
    assert [block.type for block in final.content] == ["text"]
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens
    counted = client.messages.count_tokens(model=MODEL, messages=HELLO)
    found = whole.usage.cache_read_input_tokens or 0  # by whoever said hello before
    assert counted.input_tokens == whole.usage.input_tokens + found


def test_a_call_that_must_be_made(client: anthropic.Anthropic) -> None:
    with client.messages.stream(
        model=MODEL,
        max_tokens=60,
        messages=[{"role": "user", "content": "What is the weather in Paris?"}],
        tools=[TOOL],
        tool_choice={"type": "tool", "name": "weather"},
        extra_body={"temperature": 0},
    ) as stream:
        message = stream.get_final_message()
    [call] = message.content
    assert message.stop_reason == "tool_use"
    assert call.type == "tool_use"
    assert isinstance(call.input, dict)
    assert list(call.input) == ["city"]
    results: list[Any] = [
        {"role": "user", "content": "What is the weather in Paris?"},
        {"role": "assistant", "content": message.content},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "Sunny, 20 C."}],
        },
    ]
    answer = client.messages.create(model=MODEL, max_tokens=3, messages=results, tools=[TOOL])
    found = answer.usage.cache_read_input_tokens or 0
    assert found >= 128  # the turn before: its prompt has 146 tokens
    assert answer.usage.input_tokens + found > message.usage.input_tokens


def test_stop_sequences_and_prefixes(client: anthropic.Anthropic) -> None:
    messages: list[Any] = [
        {"role": "user", "content": "Count from one to five in words."},
        {"role": "assistant", "content": "one, two, three,"},
    ]
    answer = client.messages.create(
        model=MODEL,
        max_tokens=12,
        messages=messages,
        stop_sequences=["five"],
        extra_body={"temperature": 0},
    )
    assert answer.content[0].type == "text"
    assert answer.content[0].text.strip().startswith("four")
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "five")


def test_errors_have_the_packages_own_classes(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="nobody", max_tokens=1, messages=HELLO)
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: .* > 8192 maximum"):
        client.messages.create(
            model=MODEL, max_tokens=1, messages=[{"role": "user", "content": "word " * 9000}]
        )


def test_asynchronous(real_url: str) -> None:
    async def ask() -> str:
        async with (
            anthropic.AsyncAnthropic(base_url=real_url, api_key="none", timeout=300) as client,
            client.messages.stream(model=MODEL, max_tokens=4, messages=HELLO) as stream,
        ):
            return "".join([text async for text in stream.text_stream])

    assert asyncio.run(ask())
