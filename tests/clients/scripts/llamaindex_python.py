"""LlamaIndex by OpenAILike and Ollama: complete, chat, stream, a schema."""

import os
from typing import Literal

from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.llms.ollama import Ollama
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

URL, MODEL = os.environ["URL"], os.environ["MODEL"]


class Person(BaseModel):
    """Somebody."""

    name: Literal["Ada", "Grace"]
    swims: bool


like = OpenAILike(
    model=MODEL,
    api_base=f"{URL}/v1",
    api_key="none",
    is_chat_model=True,
    is_function_calling_model=True,
    context_window=8192,
    max_tokens=200,
)
ollama = Ollama(
    model=MODEL, base_url=URL, request_timeout=120, context_window=8192,
    additional_kwargs={"num_predict": 200}, keep_alive="10m",
)  # fmt: skip
for llm in (like, ollama):
    assert llm.complete("Say hello.").text
    history = [ChatMessage(role="user", content="Say hello.")]
    said = llm.chat(history)
    assert said.message.content
    history += [said.message, ChatMessage(role="user", content="Again.")]
    assert "".join(piece.delta or "" for piece in llm.stream_chat(history))
    prompt = PromptTemplate("Invent a person.")
    assert isinstance(llm.structured_predict(Person, prompt), Person)
