"""Calls of tools as every dialect writes them, for tests of how they are read."""

from __future__ import annotations

import json
from typing import Any

from penstock.text.tools.dialect import Tool

WEATHER = Tool(
    "weather",
    {"type": "function", "function": {"name": "weather"}},
    {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
)
TIME = Tool("time", {"type": "function", "function": {"name": "time"}})
TOOLS = (WEATHER, TIME)
ARGUMENTS = {"city": 'Paris "P" {x} </tool_call>', "days": 3}
JSON = json.dumps(ARGUMENTS)
PLAIN = {"city": "Paris\nFrance", "days": 3}

# (dialect, what the model writes, text before, arguments of `weather`); then comes `time`, empty.
EXAMPLES: list[tuple[str, str, str, dict[str, Any]]] = [
    (
        "hermes",
        f'Well.\n<tool_call>\n{{"name": "weather", "arguments": {JSON}}}\n</tool_call>\n'
        '<tool_call>\n{"arguments": {}, "name": "time"}\n</tool_call>',
        "Well.\n",
        ARGUMENTS,
    ),
    (
        "qwen_coder",
        "Well.\n<tool_call>\n<function=weather>\n<parameter=city>\nParis\nFrance\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n"
        "<function=time>\n</function>\n</tool_call>",
        "Well.\n",
        PLAIN,
    ),
    (
        "glm",
        "Well.<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris\nFrance</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>time\n"
        "</tool_call>",
        "Well.",
        PLAIN,
    ),
    (
        "minimax",
        'Well.<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Paris\nFrance'
        '</parameter>\n<parameter name="days">3</parameter>\n</invoke>\n<invoke name="time">\n'
        "</invoke>\n</minimax:tool_call>",
        "Well.",
        PLAIN,
    ),
    (
        "deepseek",
        f"Well.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{JSON}"
        "<｜tool▁call▁end｜><｜tool▁call▁begin｜>time<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
        "Well.",
        ARGUMENTS,
    ),
    (
        "deepseek",
        "Well.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
        f"{JSON}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>time\n```json\n"
        "{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "Well.",
        ARGUMENTS,
    ),
    (
        "kimi",
        "Well.<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
        f"<|tool_call_argument_begin|>{JSON}<|tool_call_end|><|tool_call_begin|>functions.time:1"
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        "Well.",
        ARGUMENTS,
    ),
    (
        "mistral",
        f'Well.[TOOL_CALLS] [{{"name": "weather", "arguments": {JSON}}}, '
        '{"name": "time", "arguments": {}}]',
        "Well.",
        ARGUMENTS,
    ),
    (
        "mistral",
        f"Well.[TOOL_CALLS]weather[ARGS]{JSON}[TOOL_CALLS]time[CALL_ID]abc123[ARGS]{{}}",
        "Well.",
        ARGUMENTS,
    ),
    (
        "llama_json",
        f'<|python_tag|>{{"name": "weather", "parameters": {JSON}}}; '
        '{"name": "time", "parameters": {}}',
        "",
        ARGUMENTS,
    ),
    (
        "llama_json",
        f'{{"name": "weather", "parameters": {JSON}}};{{"name": "time", "parameters": {{}}}}',
        "",
        ARGUMENTS,
    ),
    (
        "pythonic",
        '[weather(city="Paris \\"P\\" (x", days=3), time()]',
        "",
        {"city": 'Paris "P" (x', "days": 3},
    ),
    (
        "gemma",
        "Well.<start_function_call>call:weather{city:<escape>Paris, {x}<escape>,days:3}"
        "<end_function_call><start_function_call>call:time{}<end_function_call>",
        "Well.",
        {"city": "Paris, {x}", "days": 3},
    ),
    (
        "gemma",
        'Well.<|tool_call>call:weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>'
        "<|tool_call>call:time{}<tool_call|>",
        "Well.",
        {"city": "Paris", "days": 3},
    ),
]

HARMONY = (
    "<|channel|>analysis<|message|>Let me think.<|end|><|start|>assistant<|channel|>commentary "
    f"to=functions.weather <|constrain|>json<|message|>{JSON}<|call|>"
)

# Pieces of every dialect's marks, so that random texts come close to calls.
FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<function=weather>", "<parameter=city>", "</parameter>",
    "</function>", "weather", "time", "\n", " ", "<arg_key>", "</arg_key>", "<arg_value>",
    "</arg_value>", "<minimax:tool_call>", '<invoke name="', '">', "</invoke>",
    "</minimax:tool_call>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "```json", "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>", "functions.weather:0", "<|tool_call_argument_begin|>",
    "<|tool_call_end|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", '{"name": ',
    '"weather"', ', "arguments": ', ', "parameters": ', "{", "}", "[", "]", "(", ")", '"', "'",
    "\\", ",", ";", ":", "=", "<", "|", "call:", "<start_function_call>", "<end_function_call>",
    "<escape>", "<|channel|>", "analysis", "final", "<|message|>", "<|end|>", "<|start|>",
    "assistant", "to=functions.weather", "{}", "1", "ü",
]  # fmt: skip
