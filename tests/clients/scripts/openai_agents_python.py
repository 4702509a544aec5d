"""openai-agents by responses and by chat: an agent that must call a tool, and a typed output."""

import asyncio
import os
from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

MODEL = os.environ["MODEL"]
set_tracing_disabled(True)
client = AsyncOpenAI(base_url=os.environ["URL"] + "/v1", api_key="none")
calls = []


@function_tool
def weather(city: Literal["Oslo", "Rome"]) -> str:
    """The weather in a city."""
    calls.append(city)
    return f"It is sunny in {city}."


class Person(BaseModel):
    """Somebody."""

    name: Literal["Ada", "Grace"]
    swims: bool


async def main() -> None:
    for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
        model = kind(MODEL, client)
        plain = Agent(
            "plain", model=model, model_settings=ModelSettings(max_tokens=200, temperature=0)
        )
        assert (await Runner.run(plain, "Say hello.")).final_output
        streamed = Runner.run_streamed(plain, "Say hello.")
        assert [event async for event in streamed.stream_events()]
        forced = ModelSettings(max_tokens=200, tool_choice="weather", parallel_tool_calls=False)
        caller = Agent(
            "caller", model=model, tools=[weather], model_settings=forced,
            tool_use_behavior="stop_on_first_tool",
        )  # fmt: skip
        before = len(calls)
        done = await Runner.run(caller, "How is the weather in Rome?")
        assert len(calls) == before + 1
        assert "sunny" in done.final_output
        typed = Agent(
            "typed",
            model=model,
            output_type=Person,
            model_settings=ModelSettings(max_tokens=200, temperature=0),
        )
        assert isinstance((await Runner.run(typed, "Invent one.")).final_output, Person)


asyncio.run(main())
