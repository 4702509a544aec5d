"""LangChain by OpenAI's, Anthropic's and Ollama's packages: invoke, stream, tools, a schema."""

import os
from typing import Literal

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_ollama import ChatOllama, OllamaLLM
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

URL, MODEL = os.environ["URL"], os.environ["MODEL"]


@tool
def weather(city: Literal["Oslo", "Rome"]) -> str:
    """The weather in a city."""
    return f"It is sunny in {city}."


class Person(BaseModel):
    """Somebody."""

    name: Literal["Ada", "Grace"]
    swims: bool


openai = ChatOpenAI(base_url=f"{URL}/v1", api_key="none", model=MODEL, max_tokens=200)
responses = ChatOpenAI(
    base_url=f"{URL}/v1", api_key="none", model=MODEL, max_tokens=200, use_responses_api=True
)
anthropic = ChatAnthropic(base_url=URL, api_key="none", model=MODEL, max_tokens=200)
ollama = ChatOllama(base_url=URL, model=MODEL, num_predict=200, keep_alive="10m")
for chat in (openai, responses, anthropic, ollama):
    assert chat.invoke("Say hello.").text, chat
    assert len(list(chat.stream("Say hello."))) > 2, chat
for chat in (openai, responses, anthropic):
    asked = [HumanMessage("How is the weather in Rome?")]
    forced = chat.bind_tools([weather], tool_choice="weather")
    message = forced.invoke(asked)
    [call] = message.tool_calls
    result = weather.invoke(call)
    assert isinstance(result, ToolMessage)
    chat.bind_tools([weather]).invoke([*asked, message, result])
assert isinstance(openai.with_structured_output(Person).invoke("Invent a person."), Person)
assert isinstance(ollama.with_structured_output(Person).invoke("Invent a person."), Person)
assert isinstance(anthropic.with_structured_output(Person).invoke("Invent a person."), Person)
assert ollama.bind_tools([weather]).invoke("Hello.").response_metadata["eval_duration"] > 0
assert OllamaLLM(base_url=URL, model=MODEL, num_predict=10).invoke("Say hello.")
assert OpenAI(base_url=f"{URL}/v1", api_key="none", model=MODEL, max_tokens=5).invoke("One, two,")
