"""What the official `anthropic` package adds to plain requests, against the real starter model: its
accumulators, parser, tool runner and asynchronous client.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Literal

import anthropic
import pydantic
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

MODEL = "SmolLM2-135M-Instruct"
HELLO: list[Any] = [{"role": "user", "content": "Say hello."}]
PARIS: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
GREEDY: Any = {"temperature": 0}
TOOL: Any = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


class Colour(pydantic.BaseModel):
    colour: Literal["red", "green", "blue"]


@pytest.fixture(scope="module")
def client(real_url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(
        base_url=real_url, api_key="none", max_retries=0, timeout=300
    ) as client:
        yield client


def test_the_events_of_the_accumulator(client: anthropic.Anthropic) -> None:
    with client.messages.stream(
        model=MODEL, max_tokens=6, messages=HELLO, extra_body=GREEDY
    ) as stream:
        events = list(stream)
        text = stream.get_final_text()
    kinds = [event.type for event in events]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    texts = [event for event in events if event.type == "text"]
    assert "".join(event.text for event in texts) == texts[-1].snapshot == text
    assert "hello" in text.lower()
    [stopped] = [event for event in events if event.type == "content_block_stop"]
    assert stopped.content_block.type == "text"
    last = events[-1]
    assert last.type == "message_stop"
    assert last.message.usage.output_tokens == 6
    raw = client.messages.create(
        model=MODEL, max_tokens=2, messages=HELLO, extra_body=GREEDY, stream=True
    )
    assert [event.type for event in raw][-1] == "message_stop"


def test_arguments_come_in_pieces(client: anthropic.Anthropic) -> None:
    with client.messages.stream(
        model=MODEL,
        max_tokens=60,
        messages=PARIS,
        tools=[TOOL],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        extra_body=GREEDY,
    ) as stream:
        pieces = [event for event in stream if event.type == "input_json"]
        message = stream.get_final_message()
    [call] = message.content
    assert call.type == "tool_use"
    assert len(pieces) > 2
    assert pieces[-1].snapshot == call.input
    assert isinstance(call.input, dict)
    assert isinstance(call.input["city"], str)


def test_no_call_where_none_is_allowed(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(
        model=MODEL, max_tokens=4, messages=PARIS, tools=[TOOL], tool_choice={"type": "none"}
    )
    assert [block.type for block in answer.content] == ["text"]


def test_parsed_output(client: anthropic.Anthropic) -> None:
    messages: list[Any] = [{"role": "user", "content": "Name a colour."}]
    parsed = client.messages.parse(
        model=MODEL, max_tokens=30, messages=messages, output_format=Colour, extra_body=GREEDY
    )
    assert isinstance(parsed.parsed_output, Colour)
    assert parsed.stop_reason == "end_turn"
    with client.messages.stream(
        model=MODEL, max_tokens=30, messages=messages, output_format=Colour, extra_body=GREEDY
    ) as stream:
        assert stream.get_final_message().parsed_output == parsed.parsed_output


# --- the tool runner ---------------------------------------------------------------------------


def _finish(params: Any) -> Any:
    """The next turn may not call again."""
    return {**params, "tool_choice": {"type": "none"}, "max_tokens": 4}


def test_the_tool_runner(client: anthropic.Anthropic) -> None:
    asked: list[str] = []

    @anthropic.beta_tool
    def weather(city: str) -> str:
        """The weather of a city.

        Args:
            city: Its name.
        """
        asked.append(city)
        return "Sunny, 20 degrees."

    runner = client.beta.messages.tool_runner(
        model=MODEL,
        max_tokens=60,
        messages=PARIS,
        tools=[weather],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        extra_body=GREEDY,
    )
    turns = []
    for message in runner:
        turns.append(message)
        runner.set_messages_params(_finish)
    assert [turn.stop_reason for turn in turns] == ["tool_use", "max_tokens"]
    assert len(asked) == 1
    [call] = turns[0].content
    assert call.type == "tool_use"
    assert call.input == {"city": asked[0]}
    assert [block.type for block in turns[1].content] == ["text"]
    # The whole conversation came back: the question, the call, its result.
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "Sunny, 20 degrees."}
    messages: list[Any] = [
        *PARIS,
        {"role": "assistant", "content": [call.to_dict()]},
        {"role": "user", "content": [result]},
    ]
    replayed = client.messages.count_tokens(model=MODEL, messages=messages)
    usage = turns[1].usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == replayed.input_tokens


def test_the_tool_runner_streams_and_awaits(real_url: str) -> None:
    asked: list[str] = []

    @anthropic.beta_async_tool
    async def weather(city: str) -> str:
        """The weather of a city."""
        asked.append(city)
        return "Rain."

    async def run() -> list[Any]:
        async with anthropic.AsyncAnthropic(
            base_url=real_url, api_key="none", timeout=300
        ) as client:
            runner = client.beta.messages.tool_runner(
                model=MODEL,
                max_tokens=60,
                messages=PARIS,
                tools=[weather],
                tool_choice={"type": "tool", "name": "weather"},
                stream=True,
                extra_body=GREEDY,
            )
            turns = []
            async for stream in runner:
                turns.append(await stream.get_final_message())
                runner.set_messages_params(_finish)
            return turns

    turns = asyncio.run(run())
    assert len(asked) == 1
    assert [turn.stop_reason for turn in turns] == ["tool_use", "max_tokens"]


# --- the rest ----------------------------------------------------------------------------------


def test_asynchronous_requests(real_url: str) -> None:
    async def run() -> None:
        async with anthropic.AsyncAnthropic(
            base_url=real_url, api_key="none", timeout=300
        ) as client:
            fields: Any = {"model": MODEL, "max_tokens": 6, "messages": HELLO}

            async def streamed() -> str:
                async with client.messages.stream(**fields, extra_body=GREEDY) as stream:
                    return await stream.get_final_text()

            whole, text, counted, parsed = await asyncio.gather(
                client.messages.create(**fields, extra_body=GREEDY),
                streamed(),
                client.messages.count_tokens(model=MODEL, messages=HELLO),
                client.messages.parse(
                    **{**fields, "max_tokens": 30}, output_format=Colour, extra_body=GREEDY
                ),
            )
            assert whole.content[0].type == "text"
            assert whole.content[0].text == text
            assert counted.input_tokens == whole.usage.input_tokens + (
                whole.usage.cache_read_input_tokens or 0
            )
            assert isinstance(parsed.parsed_output, Colour)

    asyncio.run(run())


def test_what_is_accepted(client: anthropic.Anthropic) -> None:
    """Fields of their servers that change nothing here, or nothing for a model without thoughts."""
    plain: Any = {"model": MODEL, "max_tokens": 5, "messages": HELLO, "extra_body": GREEDY}
    marked: Any = {"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}
    answer = client.messages.create(
        **plain,
        system=[marked],
        metadata={"user_id": "u"},
        thinking={"type": "enabled", "budget_tokens": 1024},
        service_tier="auto",
    )
    same = client.messages.create(**plain, system="Be kind.", thinking={"type": "disabled"})
    assert answer.content == same.content
    assert answer.usage.cache_creation_input_tokens == 0
    total = [m.usage.input_tokens + (m.usage.cache_read_input_tokens or 0) for m in (answer, same)]
    assert total[0] == total[1]
    assert answer._request_id


def test_refusals_have_the_packages_own_classes_and_shape(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError) as bad:
        client.messages.create(
            model=MODEL, max_tokens=1, messages=HELLO, extra_body={"temperature": 9}
        )
    assert isinstance(bad.value.body, dict)
    assert bad.value.body["type"] == "error"
    assert bad.value.body["error"]["type"] == bad.value.type == "invalid_request_error"
    assert bad.value.request_id == bad.value.body["request_id"]
    with pytest.raises(anthropic.NotFoundError) as unknown:
        client.messages.count_tokens(model="nobody", messages=HELLO)
    assert unknown.value.type == "not_found_error"
    # Before the first byte: the stream is never entered.
    with (
        pytest.raises(anthropic.BadRequestError, match="fetches nothing"),
        client.messages.stream(
            model=MODEL,
            max_tokens=1,
            messages=[
                {
                    "role": "user",
                    "content": [{"type": "image", "source": {"type": "url", "url": "http://x/"}}],
                }
            ],
        ),
    ):
        pytest.fail("the stream was opened")
    with pytest.raises(anthropic.BadRequestError, match="whole conversation"):
        client.beta.messages.thread(model=MODEL, max_tokens=1).send(HELLO[0])
