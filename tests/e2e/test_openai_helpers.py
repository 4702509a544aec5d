"""What the official `openai` package adds to plain requests, against the real starter model: its
parsers, accumulators and asynchronous client; and the forms, tools and stored answers it asks for.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from typing import TYPE_CHECKING, Any, Literal

import openai
import pydantic
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

MODEL = "SmolLM2-135M-Instruct"
HELLO: list[Any] = [{"role": "user", "content": "Say hello."}]
WEATHER: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]


class Weather(pydantic.BaseModel):
    """The weather of a city."""

    city: str = pydantic.Field(max_length=12)


class Population(pydantic.BaseModel):
    """How many people live in a city."""

    city: str = pydantic.Field(max_length=12)


class Colour(pydantic.BaseModel):
    colour: Literal["red", "green", "blue"]


TOOLS: list[Any] = [
    openai.pydantic_function_tool(Weather),
    openai.pydantic_function_tool(Population),
]
NAMED: Any = {"type": "function", "function": {"name": "Population"}}
FUNCTIONS: list[Any] = [{"type": "function", **tool["function"]} for tool in TOOLS]


@pytest.fixture(scope="module")
def client(real_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{real_url}/v1", api_key="none", max_retries=0, timeout=300
    ) as client:
        yield client


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(
        **{"model": MODEL, "messages": HELLO, "max_tokens": 12, "temperature": 0, **fields}
    )


# --- asynchronous ------------------------------------------------------------------------------


def test_asynchronous_chats(real_url: str) -> None:
    async def run() -> None:
        async with openai.AsyncOpenAI(
            base_url=f"{real_url}/v1", api_key="none", timeout=300
        ) as client:
            fields: Any = {"model": MODEL, "messages": HELLO, "max_tokens": 6, "temperature": 0}

            async def whole() -> Any:
                return (await client.chat.completions.create(**fields)).choices[0].message.content

            async def streamed() -> str:
                chunks = await client.chat.completions.create(**fields, stream=True)
                texts = [chunk.choices[0].delta.content or "" async for chunk in chunks]
                return "".join(texts)

            async def accumulated() -> str:
                async with client.chat.completions.stream(**fields) as stream:
                    texts = [event.delta async for event in stream if event.type == "content.delta"]
                return "".join(texts)

            async def completed() -> str:
                words = await client.completions.create(
                    model=MODEL, prompt="The capital of France is", max_tokens=1, temperature=0
                )
                return words.choices[0].text

            first, second, third, fourth = await asyncio.gather(
                whole(), streamed(), accumulated(), completed()
            )
            assert "hello" in first.lower()
            assert first == second == third
            assert fourth == " Paris"
            parsed = await client.chat.completions.parse(
                **{**fields, "max_tokens": 60}, response_format=Colour
            )
            assert isinstance(parsed.choices[0].message.parsed, Colour)

    asyncio.run(run())


def test_asynchronous_responses(real_url: str) -> None:
    async def run() -> None:
        async with openai.AsyncOpenAI(
            base_url=f"{real_url}/v1", api_key="none", timeout=300
        ) as client:
            fields: Any = {"model": MODEL, "input": "Say hello.", "temperature": 0}
            whole = await client.responses.create(**fields, max_output_tokens=6)
            events = await client.responses.create(**fields, max_output_tokens=6, stream=True)
            deltas = [e.delta async for e in events if e.type == "response.output_text.delta"]
            assert "".join(deltas) == whole.output_text
            async with client.responses.stream(
                **fields, max_output_tokens=60, text_format=Colour
            ) as stream:
                final = await stream.get_final_response()
            assert isinstance(final.output_parsed, Colour)
            assert (await client.responses.retrieve(final.id)).output_text == final.output_text
            await client.responses.delete(final.id)
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(final.id)

    asyncio.run(run())


# --- accumulators and parsers ------------------------------------------------------------------


def test_the_accumulator_of_a_chat(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model=MODEL,
        messages=[{"role": "user", "content": "Name a colour."}],
        max_tokens=60,
        temperature=0,
        response_format=Colour,
        logprobs=True,
        stream_options={"include_usage": True},
    ) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    deltas = [event for event in events if event.type == "content.delta"]
    [done] = [event for event in events if event.type == "content.done"]
    assert "".join(event.delta for event in deltas) == deltas[-1].snapshot == done.content
    assert isinstance(done.parsed, Colour)
    assert final.choices[0].message.parsed == done.parsed
    assert final.choices[0].finish_reason == "stop"
    [told] = [event for event in events if event.type == "logprobs.content.done"]
    assert "".join(entry.token for entry in told.content) == done.content
    assert final.usage is not None
    assert final.usage.completion_tokens >= len(told.content)


def test_calls_with_parsed_arguments(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model=MODEL,
        messages=WEATHER,
        max_tokens=60,
        temperature=0,
        tools=TOOLS,
        tool_choice=NAMED,
    )
    [call] = answer.choices[0].message.tool_calls or []
    assert call.function.name == "Population"
    assert isinstance(call.function.parsed_arguments, Population)
    assert answer.choices[0].finish_reason == "tool_calls"


def test_the_accumulator_of_a_response(client: openai.OpenAI) -> None:
    with client.responses.stream(
        model=MODEL,
        input="Name a colour.",
        max_output_tokens=60,
        temperature=0,
        text_format=Colour,
    ) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    [done] = [event for event in events if event.type == "response.output_text.done"]
    assert deltas[-1].snapshot == done.text == final.output_text
    assert isinstance(done.parsed, Colour)
    assert final.output_parsed == done.parsed
    assert events[-1].type == "response.completed"


# --- tools -------------------------------------------------------------------------------------


def test_no_call_where_none_is_allowed(client: openai.OpenAI) -> None:
    free = ask(client, messages=WEATHER, tools=TOOLS, tool_choice="none", max_tokens=4)
    assert free.choices[0].message.tool_calls is None
    assert free.choices[0].message.content
    # A tool that may not be called is not shown either.
    plain = ask(client, messages=WEATHER, max_tokens=1)
    assert free.usage.prompt_tokens == plain.usage.prompt_tokens
    shown = ask(client, messages=WEATHER, tools=TOOLS, tool_choice="auto", max_tokens=1)
    assert shown.usage.prompt_tokens > free.usage.prompt_tokens + 50


def test_the_result_of_a_call_is_told(client: openai.OpenAI) -> None:
    function = {"name": "Weather", "arguments": '{"city": "Paris"}'}
    messages = [
        *WEATHER,
        {
            "role": "assistant",
            "tool_calls": [{"id": "c", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "It is 31 degrees and sunny in Paris."},
    ]
    told = ask(client, messages=messages, tools=TOOLS, max_tokens=20)
    assert "31" in told.choices[0].message.content or "sunny" in told.choices[0].message.content


# --- forms, reasoning, ends --------------------------------------------------------------------

GRAMMAR = 'start: "It is " NUMBER " o\'clock."\nNUMBER: /1[0-2]|[1-9]/\n'
FORMS: list[Any] = [
    ({"response_format": {"type": "json_object"}}, None),
    ({"extra_body": {"guided_grammar": GRAMMAR}}, r"It is (1[0-2]|[1-9]) o'clock\."),
    ({"extra_body": {"structured_outputs": {"choice": ["yes", "no"]}}}, "yes|no"),
    ({"extra_body": {"structured_outputs": {"regex": "[ab]{3}"}}}, "[ab]{3}"),
    ({"extra_body": {"structured_outputs": {"json": {"enum": ["x", 1]}}}}, '"x"|1'),
    ({"extra_body": {"guided_json": {"type": "boolean"}}}, "true|false"),
]


@pytest.mark.parametrize(("fields", "pattern"), FORMS)
def test_forms(client: openai.OpenAI, fields: Any, pattern: str | None) -> None:
    answer = ask(client, **fields, max_tokens=15).choices[0]
    if pattern is None:
        assert answer.message.content.lstrip().startswith("{")
        assert answer.finish_reason == "length" or isinstance(
            json.loads(answer.message.content), dict
        )
    else:
        assert re.fullmatch(pattern, answer.message.content)
        assert answer.finish_reason == "stop"


def test_two_forms_at_once_are_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="only one"):
        ask(client, response_format={"type": "json_object"}, extra_body={"guided_regex": "a"})
    with pytest.raises(openai.BadRequestError, match="grammar"):
        ask(client, extra_body={"guided_grammar": "start: nowhere"})


def test_what_asks_for_reasoning_is_accepted_by_a_model_without(client: openai.OpenAI) -> None:
    plain = ask(client, max_tokens=5)
    asked = ask(
        client,
        max_tokens=5,
        reasoning_effort="high",
        extra_body={"thinking_budget": 3, "chat_template_kwargs": {"enable_thinking": True}},
    )
    assert asked.choices[0].message.content == plain.choices[0].message.content
    assert asked.usage.completion_tokens_details.reasoning_tokens == 0
    response = client.responses.create(
        model=MODEL,
        input="Say hello.",
        max_output_tokens=5,
        temperature=0,
        reasoning={"effort": "low", "summary": "auto"},
    )
    assert response.output_text == plain.choices[0].message.content
    assert response.reasoning is not None
    assert response.reasoning.effort == "low"


def test_a_stop_string_across_a_stream(client: openai.OpenAI) -> None:
    whole = ask(client).choices[0].message.content
    stop = whole[3:6]
    chunks = list(ask(client, stop=[stop], stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole[:3]
    assert chunks[-1].choices[0].finish_reason == "stop"


# --- responses ---------------------------------------------------------------------------------


def test_a_call_and_its_result_as_items(client: openai.OpenAI) -> None:
    with client.responses.stream(
        model=MODEL,
        input="What is the weather in Paris?",
        instructions="Be brief.",
        max_output_tokens=60,
        temperature=0,
        tools=FUNCTIONS,
        tool_choice={"type": "function", "name": "Weather"},
    ) as stream:
        events = list(stream)
        first = stream.get_final_response()
    [call] = first.output
    assert call.type == "function_call"
    assert call.name == "Weather"
    Weather.model_validate_json(call.arguments)
    pieces = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    assert len(pieces) > 2
    assert "".join(pieces) == call.arguments
    result: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."}]
    second = client.responses.create(
        model=MODEL,
        previous_response_id=first.id,
        input=result,
        max_output_tokens=4,
        tools=FUNCTIONS,
        tool_choice="none",
    )
    assert [item.type for item in second.output] == ["message"]
    assert second.output_text
    [asked] = client.responses.input_items.list(second.id).data
    assert asked.type == "function_call_output"


def test_stored_only_if_wanted(client: openai.OpenAI) -> None:
    kept = client.responses.create(model=MODEL, input="Hi.", max_output_tokens=1, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(kept.id)
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model=MODEL, input="Hi.", previous_response_id=kept.id)
    assert refused.value.param == "previous_response_id"


def test_in_the_background_and_cancelled(client: openai.OpenAI) -> None:
    started = client.responses.create(
        model=MODEL, input="Say hello.", max_output_tokens=5, temperature=0, background=True
    )
    assert started.status in {"queued", "in_progress"}
    deadline = time.monotonic() + 60
    while (done := client.responses.retrieve(started.id)).status in {"queued", "in_progress"}:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert "hello" in done.output_text.lower()
    long = client.responses.create(model=MODEL, input="Tell a long story.", background=True)
    assert client.responses.cancel(long.id).status == "cancelled"
    assert client.responses.retrieve(long.id).status == "cancelled"
    client.responses.delete(long.id)


def test_a_response_is_refused_in_the_packages_own_class(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as long:
        client.responses.create(model=MODEL, input="word " * 9000, stream=True)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as bad:
        client.responses.create(model=MODEL, input="x", text={"format": {"type": "json_schema",
            "name": "x", "schema": {"type": "array", "uniqueItems": True}}})  # fmt: skip
    assert "uniqueItems" in bad.value.message
