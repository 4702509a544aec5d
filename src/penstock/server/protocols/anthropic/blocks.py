"""The messages of Anthropic's protocol, in blocks, and what they are to a chat template."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from penstock.errors import BadRequest
from penstock.images import SentImage
from penstock.server.http.free_form import MAX_ARGUMENTS_BYTES, decode_free_form
from penstock.server.protocols.content import (
    ContentPart,
    MediaContent,
    TextContent,
    image_from_base64,
    image_from_url,
    template_content,
    text_content,
)

if TYPE_CHECKING:
    from collections.abc import Sequence


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    """A piece of text; `cache_control` and the like are accepted and change nothing."""

    text: str


class PlainText(msgspec.Struct):
    """The same where no other kind of block may stand."""

    type: Literal["text"]
    text: str


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    """What the model thought in an earlier turn."""

    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(msgspec.Struct, tag_field="type", tag="redacted_thinking"):
    """Reasoning of another server's model, which nobody here can read."""

    data: str | None = None


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use"):
    """A call that the model made."""

    id: str
    name: str
    input: Annotated[msgspec.Raw, Meta(extra_json_schema={"type": "object"})]


class ImageBase64(msgspec.Struct, tag_field="type", tag="base64"):
    """An image's file."""

    data: str
    media_type: str | None = None


class ImageAddress(msgspec.Struct, tag_field="type", tag="url"):
    """Where an image is."""

    url: str


class ImageFile(msgspec.Struct, tag_field="type", tag="file"):
    """An image that Anthropic's servers have."""


class ImageBlock(msgspec.Struct, tag_field="type", tag="image"):
    """An image."""

    source: ImageBase64 | ImageAddress | ImageFile


class TextSource(msgspec.Struct, tag_field="type", tag="text"):
    """A document's text."""

    data: str


class ContentSource(msgspec.Struct, tag_field="type", tag="content"):
    """The same in blocks."""

    content: str | list[TextBlock | ImageBlock]


class Base64Source(msgspec.Struct, tag_field="type", tag="base64"):
    """A file's bytes."""


class UrlSource(msgspec.Struct, tag_field="type", tag="url"):
    """Where a file is."""


class FileSource(msgspec.Struct, tag_field="type", tag="file"):
    """A file that Anthropic's servers have."""


class DocumentBlock(msgspec.Struct, tag_field="type", tag="document"):
    """A document; one that is text can be read by any model."""

    source: TextSource | ContentSource | Base64Source | UrlSource | FileSource | None = None
    title: str | None = None
    context: str | None = None


class SearchResultBlock(msgspec.Struct, tag_field="type", tag="search_result"):
    """A search result with its source."""

    content: list[PlainText] = []
    title: str = ""
    source: str = ""


ResultBlock = TextBlock | ImageBlock | DocumentBlock | SearchResultBlock


class ToolResultBlock(msgspec.Struct, tag_field="type", tag="tool_result"):
    """What a call gave."""

    tool_use_id: str
    content: str | list[ResultBlock] | None = None
    is_error: bool | None = None


class McpToolUseBlock(ToolUseBlock, tag_field="type", tag="mcp_tool_use"):
    """The same, of a tool that Anthropic's servers have called."""


class McpToolResultBlock(ToolResultBlock, tag_field="type", tag="mcp_tool_result"):
    """What that call gave."""


class ServerToolUseBlock(msgspec.Struct, tag_field="type", tag="server_tool_use"):
    """What one of Anthropic's own tools was asked."""


class WebSearchResultBlock(msgspec.Struct, tag_field="type", tag="web_search_tool_result"):
    """What it found, encrypted for their models."""


class WebFetchResultBlock(msgspec.Struct, tag_field="type", tag="web_fetch_tool_result"):
    """The same of a page."""


class CodeResultBlock(msgspec.Struct, tag_field="type", tag="code_execution_tool_result"):
    """The same of a program."""


class BashResultBlock(msgspec.Struct, tag_field="type", tag="bash_code_execution_tool_result"):
    """The same of a command."""


class EditorResultBlock(
    msgspec.Struct, tag_field="type", tag="text_editor_code_execution_tool_result"
):
    """The same of a file."""


class ToolSearchResultBlock(msgspec.Struct, tag_field="type", tag="tool_search_tool_result"):
    """The same of tools."""


# What tools of Anthropic's servers leave in histories is left out: the text that follows says what
# came of it, and the rest is for their models only.
HostedBlock = (
    ServerToolUseBlock
    | WebSearchResultBlock
    | WebFetchResultBlock
    | CodeResultBlock
    | BashResultBlock
    | EditorResultBlock
    | ToolSearchResultBlock
)
Block = (
    HostedBlock
    | McpToolUseBlock
    | McpToolResultBlock
    | TextBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ToolUseBlock
    | ToolResultBlock
    | ImageBlock
    | DocumentBlock
    | SearchResultBlock
)


class AnthropicMessage(msgspec.Struct):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


def template_messages(message: AnthropicMessage, where: str) -> list[dict[str, Any]]:
    """One message may be several to a template: results of tools have a role of their own."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    if not message.content:
        raise BadRequest(f"`{where}.content` is empty.", param=where)
    messages: list[dict[str, Any]] = []
    sorted_out = _Sorted()
    for number, block in enumerate(message.content):
        if isinstance(block, McpToolResultBlock):
            # It stands in the message of the call, before what was made of it.
            messages += sorted_out.messages(message.role)
            sorted_out = _Sorted()
        sorted_out.add(block, f"{where}.content[{number}]")
    messages += sorted_out.messages(message.role)
    return messages or [{"role": message.role, "content": ""}]


@dataclass(slots=True)
class _Sorted:
    """The blocks of a message by what they are to a template."""

    results: list[dict[str, Any]] = field(default_factory=list)
    parts: list[ContentPart] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)

    def add(self, block: Block, where: str) -> None:
        if isinstance(block, HostedBlock):
            return
        match block:
            case ThinkingBlock(thinking=thinking):
                self.thoughts.append(thinking)
            case RedactedThinkingBlock():
                pass
            case ToolUseBlock(id=call_id, name=name, input=raw):
                arguments = decode_free_form(raw, f"{where}.input", MAX_ARGUMENTS_BYTES)
                if not isinstance(arguments, dict):
                    raise BadRequest(f"`{where}.input` is not an object.", param=f"{where}.input")
                function = {"name": name, "arguments": arguments}
                self.calls.append({"id": call_id, "type": "function", "function": function})
            case ToolResultBlock(tool_use_id=call_id, content=content, is_error=failed):
                text = self._result(content, where)
                # Templates have no place for it, so the model is told in words.
                if failed and not text.lower().startswith("error"):
                    text = f"Error: {text}" if text else "Error: the tool failed."
                self.results.append({"role": "tool", "tool_call_id": call_id, "content": text})
            case _:
                self.parts.append(_part(block, where))

    def _result(self, content: str | Sequence[ResultBlock] | None, where: str) -> str:
        """What a call gave, in words; its images stand behind it in the message, since templates
        have no place for them in a result."""
        if content is None or isinstance(content, str):
            return content or ""
        parts = [_part(block, f"{where}.content[{n}]") for n, block in enumerate(content)]
        images = [part for part in parts if isinstance(part, SentImage)]
        self.parts += images
        return text_content(part for part in parts if not isinstance(part, SentImage))

    def messages(self, role: str) -> list[dict[str, Any]]:
        if not self.parts and not self.thoughts and not self.calls:
            return self.results
        shown = template_content if role == "user" else text_content
        message: dict[str, Any] = {"role": role, "content": shown(self.parts)}
        if self.thoughts:
            message["reasoning_content"] = "\n".join(self.thoughts)
        if self.calls:
            message["tool_calls"] = self.calls
        return [*self.results, message]


def _result_text(content: str | Sequence[Block] | None, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return text_content(
        _part(block, f"{where}.content[{number}]") for number, block in enumerate(content)
    )


def _part(block: Block, where: str) -> ContentPart:
    match block:
        case TextBlock(text=text):
            return TextContent(text)
        case ImageBlock(source=ImageBase64(data=data)):
            return image_from_base64(data, f"{where}.source")
        case ImageBlock(source=ImageAddress(url=url)):
            return image_from_url(url, f"{where}.source")
        case DocumentBlock(source=TextSource(data=text)):
            return _document(block, text)
        case DocumentBlock(source=ContentSource(content=content)):
            return _document(block, _result_text(content, where))
        case SearchResultBlock(content=content, title=title, source=source):
            return TextContent("\n".join([title, source, *(part.text for part in content)]).strip())
    return MediaContent(str(type(block).__struct_config__.tag), where)


def _document(block: DocumentBlock, text: str) -> TextContent:
    head = (each for each in (block.title, block.context) if each)
    return TextContent("\n".join([*head, text]))
