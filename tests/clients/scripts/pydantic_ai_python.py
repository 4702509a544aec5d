"""pydantic-ai by OpenAI's chat and responses and by Anthropic's messages: text, stream, output."""

import asyncio
import os
from typing import Literal

from anthropic import AsyncAnthropic
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

URL, MODEL = os.environ["URL"], os.environ["MODEL"]
SHORT = {"max_tokens": 200}


class Person(BaseModel):
    """Somebody."""

    name: Literal["Ada", "Grace"]
    swims: bool


async def main() -> None:
    openai = OpenAIProvider(base_url=f"{URL}/v1", api_key="none")
    anthropic = AnthropicProvider(anthropic_client=AsyncAnthropic(base_url=URL, api_key="none"))
    models = (
        OpenAIChatModel(MODEL, provider=openai),
        OpenAIResponsesModel(MODEL, provider=openai),
        AnthropicModel(MODEL, provider=anthropic),
    )
    for model in models:
        agent = Agent(model, model_settings=SHORT)
        first = await agent.run("Say hello.")
        assert first.output
        async with agent.run_stream("Again.", message_history=first.all_messages()) as stream:
            assert await stream.get_output()
        person = await Agent(model, output_type=Person, model_settings=SHORT).run("Invent one.")
        assert isinstance(person.output, Person)


asyncio.run(main())
