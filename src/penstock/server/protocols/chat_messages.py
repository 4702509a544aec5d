"""Chat messages: which shapes a client may send, and what a template is given.

It knows the OpenAI protocol's messages; it does not render them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from penstock.errors import BadRequest
from penstock.server.http.free_form import (
    MAX_ARGUMENTS_BYTES,
    MAX_SMALL_BYTES,
    check_nesting,
    decode_small,
    is_given,
    kept_as_text,
)
from penstock.server.protocols.content import (
    ContentPart,
    MediaContent,
    TemplateContent,
    TextContent,
    image_from_url,
    template_content,
    text_content,
)

TemplateArguments = Annotated[msgspec.Raw, kept_as_text(dict[str, Any])]


class TextPart(msgspec.Struct, tag_field="type", tag="text"):
    """A piece of text."""

    text: str


class InputTextPart(TextPart, tag_field="type", tag="input_text"):
    """The same as responses have it."""


class OutputTextPart(TextPart, tag_field="type", tag="output_text"):
    """The same of an assistant."""


class ThinkingPart(msgspec.Struct, tag_field="type", tag="thinking"):
    """What an assistant thought, among what it said."""

    thinking: str


class RefusalPart(msgspec.Struct, tag_field="type", tag="refusal"):
    """What an assistant said when it refused, sent back as history."""

    refusal: str


class ImageUrl(msgspec.Struct):
    """Where an image is; how closely it is looked at is the model's processor's to say."""

    url: str
    detail: str | None = None


class ImagePart(msgspec.Struct, tag_field="type", tag="image_url"):
    """An image."""

    image_url: ImageUrl | str


class InputImagePart(msgspec.Struct, tag_field="type", tag="input_image"):
    """The same as responses have it."""

    image_url: str


class AudioPart(msgspec.Struct, tag_field="type", tag="input_audio"):
    """A sound."""


class VideoPart(msgspec.Struct, tag_field="type", tag="video_url"):
    """A film."""


class FilePart(msgspec.Struct, tag_field="type", tag="file"):
    """A document."""


Part = (
    TextPart
    | InputTextPart
    | OutputTextPart
    | ThinkingPart
    | RefusalPart
    | ImagePart
    | InputImagePart
    | AudioPart
    | VideoPart
    | FilePart
)


class FunctionCall(msgspec.Struct):
    """The function that an assistant called; `arguments` is JSON in a string, or by some clients
    the object itself."""

    name: str
    arguments: Annotated[msgspec.Raw, kept_as_text(str | dict[str, Any])] = msgspec.field(
        default_factory=msgspec.Raw
    )


class ToolCall(msgspec.Struct):
    """One call of an assistant's message."""

    function: FunctionCall
    id: str | None = None
    type: Literal["function"] | None = None


class Message(msgspec.Struct):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[Part] | UnsetType | None = UNSET
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    function_call: FunctionCall | None = None  # what `tool_calls` was before there could be several
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    def calls(self) -> list[ToolCall]:
        """The calls that an assistant made, by either name."""
        if self.tool_calls or self.function_call is None:
            return self.tool_calls or []
        return [ToolCall(self.function_call)]


def template_arguments(raw: msgspec.Raw) -> dict[str, Any]:
    """`chat_template_kwargs`, which a client has the template told."""
    name = "chat_template_kwargs"
    arguments = decode_small(raw, dict[str, Any], name, MAX_SMALL_BYTES)
    check_nesting(arguments, name)
    return arguments or {}


def template_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """The messages as the templates of Hugging Face models expect them."""
    if not messages:
        raise BadRequest("`messages` is empty; there must be at least one.", param="messages")
    return [_template_message(message, index) for index, message in enumerate(messages)]


def refuse_two_ends(
    add_generation_prompt: bool | None, continue_final_message: bool | None
) -> None:
    """A prompt ends with the beginning of a new message or with the last one, not with both."""
    if add_generation_prompt and continue_final_message:
        raise BadRequest(
            "`add_generation_prompt` begins a new message and `continue_final_message` goes on "
            "with the last one; only one can be kept.",
            param="add_generation_prompt",
        )


def _template_message(message: Message, index: int) -> dict[str, Any]:
    where = f"messages[{index}]"
    # Templates know one name of each role.
    role = {"developer": "system", "function": "tool"}.get(message.role, message.role)
    result: dict[str, Any] = {"role": role, "content": _content(message, where)}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            result[name] = value
    if isinstance(message.content, list) and "reasoning_content" not in result:
        thoughts = [part.thinking for part in message.content if isinstance(part, ThinkingPart)]
        if thoughts:
            result["reasoning_content"] = "\n".join(thoughts)
    if calls := message.calls():
        result["tool_calls"] = [_template_call(call, where) for call in calls]
    return result


def _content(message: Message, where: str) -> TemplateContent:
    content = message.content
    if content is None:
        return ""
    if content is UNSET:
        if message.role == "assistant" and (message.calls() or message.reasoning_content):
            return ""
        raise BadRequest(
            f"`{where}.content` is missing; a {message.role} message needs it.",
            param=f"{where}.content",
        )
    if isinstance(content, str):
        return content
    parts = (
        _part(part, f"{where}.content[{number}]")
        for number, part in enumerate(content)
        if not isinstance(part, ThinkingPart)
    )
    return template_content(parts) if message.role == "user" else text_content(parts)


def _part(part: Part, where: str) -> ContentPart:
    match part:
        case TextPart(text=text) | RefusalPart(refusal=text):
            return TextContent(text)
        case ImagePart(image_url=ImageUrl(url=url)) | ImagePart(image_url=str(url)):
            return image_from_url(url, f"{where}.image_url")
        case InputImagePart(image_url=url):
            return image_from_url(url, f"{where}.image_url")
    return MediaContent(str(type(part).__struct_config__.tag), where)


def _template_call(call: ToolCall, where: str) -> dict[str, Any]:
    raw, param = call.function.arguments, f"{where}.tool_calls"
    arguments: str | dict[str, Any] = {}
    if bytes(memoryview(raw)[:1]) == b'"':
        arguments = decode_small(raw, str, param, len(memoryview(raw))) or ""
    elif is_given(raw):
        arguments = decode_small(raw, dict[str, Any], param, MAX_ARGUMENTS_BYTES) or {}
    return template_call(call.function.name, arguments, call.id, where)


def template_call(
    name: str, said: str | dict[str, Any], call_id: str | None, where: str
) -> dict[str, Any]:
    """A call as templates expect it, its arguments decoded where they are an object."""
    param = f"{where}.tool_calls"
    arguments: object = said
    if isinstance(said, str):
        if len(said) > MAX_ARGUMENTS_BYTES:
            raise BadRequest(
                f"`{param}` has arguments of {len(said)} characters; at most "
                f"{MAX_ARGUMENTS_BYTES} are allowed.",
                param=param,
            )
        try:
            decoded = msgspec.json.decode(said)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            pass  # a model wrote it; what is no JSON is shown to the template as it stands
        else:
            arguments = decoded if isinstance(decoded, dict) else said
    check_nesting(arguments, param)
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
