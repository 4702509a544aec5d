"""Chat messages: which shapes a client may send, and what a template is given.

It knows the OpenAI protocol's messages and tools; it does not render them.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from penstock.errors import BadRequest
from penstock.server.api.exchange import field_error
from penstock.server.api.limits import check_nesting, decode_free_form
from penstock.text.manner import ToolUse
from penstock.text.tools.dialect import Tool

# Decoded JSON is some ten times its text; no real list of tools is near this.
MAX_TOOLS_BYTES = 1 << 20
MAX_TOOLS = 512
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
NAME_SCHEMA = {"type": "string", "pattern": f"^{_NAME.pattern}$"}


def tools_schema(**fields: object) -> dict[str, object]:
    """How a list of tools is described whose text is kept until its size is known."""
    item = {"type": "object", "properties": fields, "required": list(fields)}
    return {"type": ["array", "null"], "items": item, "maxItems": MAX_TOOLS}


_FUNCTION_SCHEMA = {"type": "object", "properties": {"name": NAME_SCHEMA}, "required": ["name"]}
OpenAITools = Annotated[
    msgspec.Raw,
    Meta(extra_json_schema=tools_schema(type={"const": "function"}, function=_FUNCTION_SCHEMA)),
]


class TextPart(msgspec.Struct, tag_field="type", tag="text"):
    """A piece of text."""

    text: str


class RefusalPart(msgspec.Struct, tag_field="type", tag="refusal"):
    """What an assistant said when it refused, sent back as history."""

    refusal: str


class ImagePart(msgspec.Struct, tag_field="type", tag="image_url"):
    """An image."""


class AudioPart(msgspec.Struct, tag_field="type", tag="input_audio"):
    """A sound."""


class VideoPart(msgspec.Struct, tag_field="type", tag="video_url"):
    """A film."""


class FilePart(msgspec.Struct, tag_field="type", tag="file"):
    """A document."""


Part = TextPart | RefusalPart | ImagePart | AudioPart | VideoPart | FilePart


class FunctionCall(msgspec.Struct):
    """The function that an assistant called; `arguments` is JSON in a string."""

    name: str
    arguments: str = "{}"


class ToolCall(msgspec.Struct):
    """One call of an assistant's message."""

    function: FunctionCall
    id: str | None = None
    type: Literal["function"] = "function"


class Message(msgspec.Struct):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class _Function(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Tool(msgspec.Struct):
    function: _Function
    type: Literal["function"]


def template_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """The messages as the templates of Hugging Face models expect them."""
    if not messages:
        raise BadRequest("`messages` is empty; there must be at least one.", param="messages")
    return [_template_message(message, index) for index, message in enumerate(messages)]


def _template_message(message: Message, index: int) -> dict[str, Any]:
    where = f"messages[{index}]"
    # Templates know the older name of the same role.
    role = "system" if message.role == "developer" else message.role
    result: dict[str, Any] = {"role": role, "content": _text(message, where)}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            result[name] = value
    if message.tool_calls:
        result["tool_calls"] = [template_call(call, where) for call in message.tool_calls]
    return result


def _text(message: Message, where: str) -> str:
    content = message.content
    if content is None:
        if message.role == "assistant" and (message.tool_calls or message.reasoning_content):
            return ""
        raise BadRequest(
            f"`{where}.content` is missing; a {message.role} message needs it.",
            param=f"{where}.content",
        )
    if isinstance(content, str):
        return content
    texts = []
    for number, part in enumerate(content):
        if isinstance(part, TextPart):
            texts.append(part.text)
        elif isinstance(part, RefusalPart):
            texts.append(part.refusal)
        else:
            kind = msgspec.inspect.type_info(type(part)).tag  # type: ignore[attr-defined]
            raise BadRequest(
                f"`{where}.content[{number}]` is of the type {kind!r}; this model takes text only.",
                param=f"{where}.content[{number}]",
            )
    return "\n".join(texts)


def template_call(call: ToolCall, where: str) -> dict[str, Any]:
    """A call as templates expect it, its arguments decoded where they are an object."""
    arguments: object = call.function.arguments
    try:
        decoded = msgspec.json.decode(call.function.arguments)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        pass  # a model wrote it; what is no JSON is shown to the template as it stands
    else:
        if isinstance(decoded, dict):
            check_nesting(decoded, f"{where}.tool_calls")
            arguments = decoded
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.function.name, "arguments": arguments},
    }


def openai_tool_use(
    raw: msgspec.Raw, choice: str | dict[str, Any] | None, parallel: bool | None
) -> ToolUse:
    """The tools of a chat and what its `tool_choice` says of them."""
    tools = _tools(raw)
    named: str | None = None
    match choice:
        case None | "auto" | "required" | "none":
            mode = choice or "auto"
        case {"type": "function", "function": {"name": str(named)}}:
            mode = "required"
        case _:
            raise BadRequest(
                "`tool_choice` is none, auto, required or "
                '{"type": "function", "function": {"name": ...}}.',
                param="tool_choice",
            )
    return tool_use(tools, mode, named, parallel is not False)


def tool_use(tools: list[Tool], mode: str, named: str | None, parallel: bool) -> ToolUse:
    """Tools and choice put together; refuses a choice that no tool answers to."""
    if mode == "none":
        return ToolUse()
    if mode == "required" and not tools:
        raise BadRequest("`tool_choice` needs `tools`.", param="tool_choice")
    if named is not None and named not in {tool.name for tool in tools}:
        raise BadRequest(
            f"`tool_choice` names {named[:80]!r}, which is not one of `tools`.", param="tool_choice"
        )
    return ToolUse(tuple(tools), mode == "required", named, parallel)


def _tools(raw: msgspec.Raw) -> list[Tool]:
    definitions = decode_free_form(raw, "tools", MAX_TOOLS_BYTES)
    if definitions is None:
        return []
    try:
        checked = msgspec.convert(definitions, list[_Tool])
    except msgspec.ValidationError as error:
        refusal = field_error(error)
        raise BadRequest(
            f"`tools`: {refusal.message}", param=f"tools{_joined(refusal.param)}"
        ) from None
    tools = [
        Tool(
            tool.function.name,
            definition,
            tool.function.parameters or {},
            bool(tool.function.strict),
        )
        for tool, definition in zip(checked, definitions, strict=True)
    ]
    check_tools(tools)
    return tools


def check_tools(tools: list[Tool]) -> None:
    """Refuse lists that no model can use."""
    if len(tools) > MAX_TOOLS:
        raise BadRequest(
            f"`tools` has {len(tools)} entries; at most {MAX_TOOLS} are allowed.", param="tools"
        )
    names = [tool.name for tool in tools]
    for index, name in enumerate(names):
        if not _NAME.fullmatch(name):
            raise BadRequest(
                f"`tools[{index}]` has the name {name[:80]!r}; a name has 1 to 128 letters, "
                "digits, dots, colons, underscores or hyphens.",
                param="tools",
            )
    if len(set(names)) < len(names):
        raise BadRequest("`tools` has a name twice.", param="tools")


def _joined(path: str | None) -> str:
    if not path:
        return ""
    return path if path.startswith("[") else f".{path}"
