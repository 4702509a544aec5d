"""The official `openai` package against `penstock serve` with the real starter model."""

from __future__ import annotations

import json
import math
import re
import time
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pydantic
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

MODEL = "SmolLM2-135M-Instruct"
KV_BYTES_PER_TOKEN = 30 * 3 * 64 * 2 * 4  # layers, heads, values, K and V, float32
HELLO: list[Any] = [{"role": "user", "content": "Say hello."}]
PARIS = "The capital of France is"


@pytest.fixture(scope="module")
def client(real_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{real_url}/v1", api_key="none", max_retries=0, timeout=300
    ) as client:
        yield client


def running(client: openai.OpenAI) -> float:
    """Requests that the worker has in hand, by its own figures."""
    text = httpx.get(str(client.base_url).replace("/v1/", "/metrics"), timeout=60).text
    return sum(
        float(line.split()[-1])
        for line in text.splitlines()
        if line.startswith(("penstock_running{", "penstock_waiting{"))
    )


def test_models(client: openai.OpenAI) -> None:
    assert MODEL in [model.id for model in client.models.list()]
    assert client.models.retrieve(MODEL).model_dump()["max_model_len"] == 8192


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=6, temperature=0
    )
    [choice] = answer.choices
    assert choice.message.role == "assistant"
    assert "hello" in (choice.message.content or "").lower()
    assert choice.finish_reason in {"stop", "length"}
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.completion_tokens <= 6


def test_a_stream_says_the_same_as_a_whole_answer(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=6, temperature=0)
    stream = client.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        max_tokens=6,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_completions_with_echo_and_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=PARIS, max_tokens=2, temperature=0, echo=True, logprobs=2
    )
    [choice] = answer.choices
    assert choice.text.startswith(f"{PARIS} Paris")
    assert choice.logprobs is not None
    tokens, numbers = choice.logprobs.tokens, choice.logprobs.token_logprobs
    assert tokens is not None
    assert numbers is not None
    assert "".join(tokens) == choice.text
    assert len(numbers) == len(tokens) == len(choice.logprobs.text_offset or [])
    # The client's type says float, but the first token of a prompt has no probability.
    assert list(numbers)[:1] == [None]
    assert all(number <= 0 for number in numbers[1:])


def test_prompts_as_texts_and_as_token_ids(client: openai.OpenAI) -> None:
    texts = client.completions.create(
        model=MODEL, prompt=[PARIS, "One, two,"], max_tokens=2, temperature=0
    )
    assert [choice.index for choice in texts.choices] == [0, 1]
    assert texts.choices[0].text.startswith(" Paris")
    ids = client.completions.create(model=MODEL, prompt=[504, 3575, 282, 4649], max_tokens=1)
    assert ids.usage is not None
    assert ids.usage.prompt_tokens == 4


def test_n_with_a_seed_is_repeatable_and_varied(client: openai.OpenAI) -> None:
    def ask() -> list[str]:
        answer = client.completions.create(
            model=MODEL, prompt="My favourite word is", max_tokens=6, n=3, seed=7, temperature=1.5
        )
        return [choice.text for choice in answer.choices]

    first = ask()
    assert first == ask()
    assert len(set(first)) > 1


def test_logprobs_of_a_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=2, temperature=0, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    for entry in logprobs.content:
        top = entry.top_logprobs
        assert len(top) == 3
        assert top[0].token == entry.token  # greedy
        assert [other.logprob for other in top] == sorted(
            (other.logprob for other in top), reverse=True
        )
        assert sum(math.exp(other.logprob) for other in top) <= 1.0001
        assert bytes(entry.bytes or []).decode() == entry.token


def test_what_repeats_itself_is_guessed_and_told(client: openai.OpenAI) -> None:
    words = " one two three four five six seven"
    asked: dict[str, Any] = {
        "model": MODEL,
        "prompt": words * 8,
        "max_tokens": 42,
        "temperature": 0,
    }
    guessed = client.completions.create(**asked)
    assert guessed.usage is not None and guessed.usage.completion_tokens_details is not None
    details = guessed.usage.completion_tokens_details
    assert (details.accepted_prediction_tokens or 0) > 20
    assert guessed.choices[0].text == (words * 7)[: len(guessed.choices[0].text)]
    # Under a grammar that allows everything there are no guesses, and the answer is the same.
    plain = client.completions.create(**asked, extra_body={"regex": "(.|\\n)*"})
    assert plain.usage is not None and plain.usage.completion_tokens_details is not None
    assert plain.usage.completion_tokens_details.accepted_prediction_tokens == 0
    assert plain.choices[0].text == guessed.choices[0].text


def test_stop(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=PARIS, max_tokens=8, temperature=0, stop=["is", "ris"]
    )
    assert answer.choices[0].text == " Pa"
    assert answer.choices[0].finish_reason == "stop"


def test_logit_bias_decides(client: openai.OpenAI) -> None:
    the = 504  # of this model's vocabulary
    answer = client.completions.create(
        model=MODEL, prompt=PARIS, max_tokens=2, temperature=0, logit_bias={str(the): 100}
    )
    assert answer.choices[0].text == "TheThe"


def test_errors_have_the_packages_own_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="nobody", messages=HELLO)
    assert unknown.value.code == "model_not_found"
    assert MODEL in unknown.value.message
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=MODEL, messages=HELLO, temperature=9)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=MODEL, prompt=[1] * 8192)
    assert long.value.code == "context_length_exceeded"
    assert isinstance(long.value.body, dict)
    assert long.value.body["penstock"] == {
        "reason": "window",
        "domain": "ram",
        "needed_tokens": 8193,
        "limit_tokens": 8192,
        "needed_bytes": (8192 + 16) * KV_BYTES_PER_TOKEN,  # in whole blocks
        "limit_bytes": 8192 * KV_BYTES_PER_TOKEN,
    }


def test_a_client_that_leaves_cancels(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        max_tokens=4000,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    stream.close()
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.5).completions.create(
            model=MODEL, prompt=PARIS, max_tokens=4000, extra_body={"ignore_eos": True}
        )
    # Another request's step refreshes the figures.
    for _ in range(20):
        client.completions.create(model=MODEL, prompt=PARIS, max_tokens=1)
        if running(client) == 0:
            return
        time.sleep(0.1)
    pytest.fail("the requests of clients that left are still running")


class _Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=12)
    age: int = pydantic.Field(ge=0, le=120)


def test_structured_output_with_the_packages_helper(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model=MODEL,
        messages=[{"role": "user", "content": "Invent a person."}],
        max_tokens=60,
        temperature=0,
        response_format=_Person,
    )
    person = answer.choices[0].message.parsed
    assert person is not None
    assert 0 <= person.age <= 120


def test_other_forms(client: openai.OpenAI) -> None:
    chosen = client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=9, extra_body={"guided_choice": ["red", "blue"]}
    )
    assert chosen.choices[0].message.content in {"red", "blue"}
    matched = client.completions.create(
        model=MODEL, prompt=PARIS, max_tokens=9, extra_body={"guided_regex": "[0-9]{3}-[a-c]"}
    )
    assert re.fullmatch("[0-9]{3}-[a-c]", matched.choices[0].text)
    with pytest.raises(openai.BadRequestError, match="uniqueItems"):
        client.chat.completions.create(
            model=MODEL,
            messages=HELLO,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "array", "uniqueItems": True}},
            },
        )


def test_a_required_call_streams_its_arguments(client: openai.OpenAI) -> None:
    tool: Any = {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 20}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
    with client.chat.completions.stream(
        model=MODEL,
        messages=[{"role": "user", "content": "What is the weather in Paris?"}],
        max_tokens=60,
        tools=[tool],
        tool_choice="required",
        parallel_tool_calls=False,
    ) as stream:
        kinds = [event.type for event in stream]
        [choice] = stream.get_final_completion().choices
    assert kinds.count("tool_calls.function.arguments.delta") > 2
    assert choice.finish_reason == "tool_calls"
    [call] = choice.message.tool_calls or []
    assert list(json.loads(call.function.arguments)) == ["city"]


def test_responses_whole_streamed_and_continued(client: openai.OpenAI) -> None:
    first = client.responses.create(
        model=MODEL, input="Say hello.", max_output_tokens=6, temperature=0
    )
    assert "hello" in first.output_text.lower()
    with client.responses.stream(
        model=MODEL, input="Say hello.", max_output_tokens=6, temperature=0
    ) as stream:
        events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1]
    assert last.type == f"response.{first.status}"
    assert last.type in {"response.completed", "response.incomplete"}
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == first.output_text
    second = client.responses.create(
        model=MODEL, input="Again.", previous_response_id=first.id, max_output_tokens=2
    )
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens
    assert client.responses.retrieve(second.id).output == second.output
    client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(second.id)


def test_a_response_of_a_given_form(client: openai.OpenAI) -> None:
    parsed = client.responses.parse(
        model=MODEL, input="Invent a person.", max_output_tokens=60, text_format=_Person
    )
    assert parsed.output_parsed is not None
