"""The same text as transformers renders, for every shape of message and two kinds of template."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from penstock.text.template import ChatTemplate

if TYPE_CHECKING:
    from pathlib import Path

SYSTEM = {"role": "system", "content": "Be brief. <b> & 'é'"}
USER = {"role": "user", "content": "What is the weather in Paris?"}
PARTS = {
    "role": "user",
    "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "2"}],
}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "call_1",
            "type": "function",
            "function": {"name": "weather", "arguments": {"city": "Paris", "days": [1, 2.5, None]}},
        }
    ],
}
RESULT = {
    "role": "tool",
    "tool_call_id": "call_1",
    "name": "weather",
    "content": '{"sky": "clear"}',
}
THOUGHT = {"role": "assistant", "content": "Clear.", "reasoning_content": "The sky is clear."}
DEVELOPER = {"role": "developer", "content": "Use the metric system."}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": 'The weather of a city: "now".',
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": [USER],
    "system": [SYSTEM, USER],
    "system in the middle": [USER, THOUGHT, SYSTEM, USER],
    "developer": [DEVELOPER, USER],
    "parts": [PARTS],
    "call and result": [SYSTEM, USER, CALL, RESULT],
    "thought": [USER, THOUGHT, USER],
}
CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}{{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages %}
    {%- if message.content is string %}{%- set content = message.content %}
    {%- else %}{%- set content = message.content | map(attribute='text') | join(' ') %}{%- endif %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + content }}
        {{- '\\n</tool_response><|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.reasoning_content is defined and loop.index0 == ns.last - 1 %}
            {{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
HEADERS = """\
{{- bos_token }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}{{- tools | tojson(indent=4) }}
{%- endif %}
{% for message in messages %}
    {%- if 'tool_calls' in message %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' ~ call.name ~ '", "parameters": ' ~ call.arguments | tojson ~ '}' }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {%- set content = message['content'] %}
        {{- content | trim if content is string else content | tojson }}
    {%- endif %}
    {{- '<|eot_id|>' }}
{%- endfor %}
"""


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("source", [CHATML, HEADERS], ids=["chatml", "headers"])
@pytest.mark.parametrize("opened", [True, False])
def test_the_same_text(
    source: str, name: str, tools: list[dict[str, Any]] | None, opened: bool
) -> None:
    messages = CONVERSATIONS[name]
    ours = ChatTemplate(source, bos_token="<s>", eos_token="</s>")
    [theirs], _ = render_jinja_template(
        [messages],
        tools=tools,
        chat_template=source,
        add_generation_prompt=opened,
        bos_token="<s>",
        eos_token="</s>",
    )
    assert ours.render(messages, tools=tools, add_generation_prompt=opened) == theirs


def test_the_starters_own(starter_folder: Path) -> None:
    settings = json.loads((starter_folder / "tokenizer_config.json").read_text())
    source = settings["chat_template"]
    ours = ChatTemplate(source, bos_token="<|im_start|>", eos_token="<|im_end|>")
    for messages in ([USER], [SYSTEM, USER], [USER, {"role": "assistant", "content": "Hm"}, USER]):
        [theirs], _ = render_jinja_template(
            [messages], chat_template=source, add_generation_prompt=True
        )
        assert ours.render(messages) == theirs
