"""Chat messages: which shapes a client may send, and what a template is given.

It knows the OpenAI protocol's messages and tools; it does not render them.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from penstock.errors import BadRequest
from penstock.server.api.exchange import field_error
from penstock.server.api.fields import check_nesting

# Decoded JSON is some ten times its text; no real list of tools is near this.
MAX_TOOLS_BYTES = 4 << 20


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
        result["tool_calls"] = [_template_call(call, where) for call in message.tool_calls]
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


def _template_call(call: ToolCall, where: str) -> dict[str, Any]:
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


def template_tools(
    raw: msgspec.Raw, choice: str | dict[str, Any] | None
) -> list[dict[str, Any]] | None:
    """The tools that the template is to show, None for none."""
    text = bytes(raw)
    if text in (b"", b"null"):
        if choice not in (None, "none", "auto"):
            raise BadRequest("`tool_choice` needs `tools`.", param="tool_choice")
        return None
    if len(text) > MAX_TOOLS_BYTES:
        raise BadRequest(
            f"`tools` has {len(text)} bytes; at most {MAX_TOOLS_BYTES} are allowed.", param="tools"
        )
    try:
        tools = msgspec.json.decode(text, type=list[dict[str, Any]])
        check_nesting(tools, "tools")
        msgspec.convert(tools, list[_Tool])
    except msgspec.ValidationError as error:
        refusal = field_error(error)
        raise BadRequest(
            f"`tools`: {refusal.message}", param=f"tools{_joined(refusal.param)}"
        ) from None
    if choice == "none":
        return None
    if choice not in (None, "auto"):
        raise BadRequest(
            f"`tool_choice` {choice if isinstance(choice, str) else 'of a named tool'!r} cannot be "
            "enforced; auto and none can.",
            param="tool_choice",
        )
    return tools or None


def _joined(path: str | None) -> str:
    if not path:
        return ""
    return path if path.startswith("[") else f".{path}"
