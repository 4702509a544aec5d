"""The real model held to 300 generated schemas, and made to call tools 200 times."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import jsonschema
import openai
import pytest

from penstock.testing.schemas import bounds_texts, schemas

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

pytestmark = pytest.mark.proof

MODEL = "SmolLM2-135M-Instruct"
SCHEMAS = 300
CALLS = 100
AT_ONCE = 16
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Looks up the {name} of a place.",
            "parameters": {
                "type": "object",
                "properties": {
                    "place": {"type": "string", "maxLength": 24},
                    "days": {"type": "integer", "minimum": 1, "maximum": 14},
                },
                "required": ["place"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("weather", "traffic", "population")
]


async def _all(count: int, work: Callable[[int], Awaitable[bool]]) -> list[bool]:
    """Which of `count` ended by themselves; a few run at once."""
    turns = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> bool:
        async with turns:
            return await work(number)

    return await asyncio.gather(*(one(number) for number in range(count)))


def test_answers_end_by_themselves_and_keep_to_their_schema(
    real_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    made = schemas(SCHEMAS, seed=1)

    async def run() -> list[bool]:
        async with openai.AsyncOpenAI(
            base_url=f"{real_url}/v1", api_key="none", timeout=600
        ) as client:

            async def work(number: int) -> bool:
                answer = await client.chat.completions.create(
                    model=MODEL,
                    messages=[{"role": "user", "content": "Give an example of the data."}],
                    max_tokens=200,
                    seed=number,
                    response_format={
                        "type": "json_schema",
                        "json_schema": {"name": "x", "schema": made[number], "strict": True},
                    },
                )
                [choice] = answer.choices
                if choice.finish_reason != "stop":
                    return False
                jsonschema.validate(json.loads(choice.message.content or ""), made[number])
                return True

            return await _all(SCHEMAS, work)

    ended = asyncio.run(run())
    bounded = [end for end, schema in zip(ended, made, strict=True) if bounds_texts(schema)]
    with capsys.disabled():
        print(  # noqa: T201
            f"\n{sum(ended)} of {SCHEMAS} ended by themselves, of those whose schema bounds its "
            f"texts {sum(bounded)} of {len(bounded)}; all valid"
        )
        for number in [number for number, end in enumerate(ended) if not end]:
            print(f"not ended: {number}: {json.dumps(made[number])[:400]}")  # noqa: T201
    assert len(bounded) > SCHEMAS * 0.8
    assert sum(bounded) >= len(bounded) * 0.99


@pytest.mark.parametrize("choice", ["required", "named"])
def test_a_call_that_must_be_made_is_made_and_valid(real_url: str, choice: str) -> None:
    async def run() -> list[bool]:
        async with openai.AsyncOpenAI(
            base_url=f"{real_url}/v1", api_key="none", timeout=600
        ) as client:

            async def work(number: int) -> bool:
                named: Any = {"type": "function", "function": {"name": "traffic"}}
                answer = await client.chat.completions.create(
                    model=MODEL,
                    messages=[{"role": "user", "content": f"Question {number}: how is Paris?"}],
                    max_tokens=80,
                    seed=number,
                    tools=TOOLS,
                    tool_choice="required" if choice == "required" else named,
                    parallel_tool_calls=False,
                )
                [call] = answer.choices[0].message.tool_calls or []
                assert answer.choices[0].finish_reason == "tool_calls"
                assert call.type == "function"
                names = [tool["function"]["name"] for tool in TOOLS]
                assert call.function.name in (names if choice == "required" else ["traffic"])
                schema = TOOLS[0]["function"]["parameters"]
                jsonschema.validate(json.loads(call.function.arguments), schema)
                return True

            return await _all(CALLS, work)

    assert all(asyncio.run(run()))
