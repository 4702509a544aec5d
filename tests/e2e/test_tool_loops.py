"""The `openai` package's own loop around tools, which leaves it to the model whether to call: over
a fake model that calls once and then answers.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import openai
import pydantic
import pytest
from openai.lib.responses_tool_runner import (
    AsyncRegisteredFunction,
    AsyncResponsesToolRunner,
    RegisteredFunction,
    ResponsesToolRunner,
)

from penstock.testing.fake_server import add_model, serving
from penstock.testing.fake_worker import FakeModel

if TYPE_CHECKING:
    from collections.abc import Iterator

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
SAID = "It is sunny in Paris."


class Weather(pydantic.BaseModel):
    city: str


TOOL = openai.pydantic_responses_function_tool(Weather, name="weather", description="The weather.")
ASKED: Any = {"model": "caller", "input": "What is the weather in Paris?"}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    home = tmp_path_factory.mktemp("home")
    add_model(home, "caller", FakeModel(answer=CALL, answer_to={"tool: sunny": SAID}))
    with serving(home) as server:
        yield f"{server.url}/v1"


@pytest.mark.parametrize("stream", [False, True])
def test_the_runner_of_responses(url: str, stream: bool) -> None:
    cities: list[str] = []

    def weather(arguments: Weather) -> str:
        cities.append(arguments.city)
        return "sunny"

    runner = ResponsesToolRunner(functions=[RegisteredFunction.from_tool(TOOL, execute=weather)])
    with openai.OpenAI(base_url=url, api_key="none") as client:
        final = runner.run(client, ASKED, stream=stream, eager=stream, max_steps=3)
    assert cities == ["Paris"]
    assert final.output_text == SAID
    assert final.status == "completed"


def test_the_same_awaited(url: str) -> None:
    cities: list[str] = []

    async def weather(arguments: Weather) -> str:
        cities.append(arguments.city)
        return "sunny"

    async def run() -> str:
        function = AsyncRegisteredFunction.from_tool(TOOL, execute=weather)
        runner = AsyncResponsesToolRunner(functions=[function])
        async with openai.AsyncOpenAI(base_url=url, api_key="none") as client:
            return (await runner.run(client, ASKED, max_steps=3)).output_text

    assert asyncio.run(run()) == SAID
    assert cities == ["Paris"]
