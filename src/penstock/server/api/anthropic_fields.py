"""The body of Anthropic's `/v1/messages`, and the conversation that it means."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from penstock.errors import BadRequest, NoThreads
from penstock.server.api.conversation import Conversation
from penstock.server.api.exchange import field_error
from penstock.server.api.fields import Count, GenerationFields, Share
from penstock.server.api.formats import schema_format
from penstock.server.api.limits import check_nesting, decode_free_form
from penstock.server.api.messages import (
    MAX_TOOLS_BYTES,
    NAME_SCHEMA,
    check_tools,
    tool_use,
    tools_schema,
)
from penstock.text.manner import Thinking, ToolUse
from penstock.text.tools.dialect import Tool

if TYPE_CHECKING:
    from penstock.text.grammar import Format


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
    input: dict[str, Any]


class ImageBlock(msgspec.Struct, tag_field="type", tag="image"):
    """An image."""


class DocumentBlock(msgspec.Struct, tag_field="type", tag="document"):
    """A document."""


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


Block = (
    TextBlock
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


class ToolChoice(msgspec.Struct):
    """`tool_choice`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingFields(msgspec.Struct):
    """`thinking`."""

    type: str  # whatever else it says, only "disabled" means that there is to be none
    budget_tokens: Count | None = None


class OutputFormat(msgspec.Struct):
    """The form of the answer."""

    type: str
    schema: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)


class OutputConfig(msgspec.Struct):
    """`output_config`."""

    format: OutputFormat | None = None
    effort: str | None = None


class CountFields(msgspec.Struct, kw_only=True):
    """What is counted: everything that becomes part of the prompt."""

    model: str | None = None
    messages: list[AnthropicMessage]
    system: str | list[PlainText] | None = None
    tools: Annotated[msgspec.Raw, Meta(extra_json_schema=tools_schema(name=NAME_SCHEMA))] = (
        msgspec.field(default_factory=msgspec.Raw)
    )
    tool_choice: ToolChoice | None = None
    thinking: ThinkingFields | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    thread: dict[str, Any] | None = None

    def conversation(self) -> Conversation:
        """The same in the words of every protocol."""
        if self.thread is not None:
            raise NoThreads(
                "`thread` is not supported; send the whole conversation every time.",
                param="thread",
            )
        fields = self.settings()
        continues = bool(self.messages) and self.messages[-1].role == "assistant"
        return Conversation(
            fields=fields,
            messages=self._messages(),
            max_tokens=fields.max_tokens,
            tools=self._tool_use(),
            format=self._format(),
            thinking=self._thinking(),
            continues=continues,
        )

    def settings(self) -> GenerationFields:
        """How to choose tokens."""
        return GenerationFields(model=self.model)

    def _messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        system = self.system
        if isinstance(system, list):
            system = "\n".join(block.text for block in system)
        if system:
            messages.append({"role": "system", "content": system})
        for index, message in enumerate(self.messages):
            messages += _template_messages(message, f"messages[{index}]")
        return messages

    def _tool_use(self) -> ToolUse:
        tools = _tools(self.tools)
        choice = self.tool_choice
        if choice is None:
            return tool_use(tools, "auto", None, True)
        parallel = not choice.disable_parallel_tool_use
        if choice.type == "tool" and choice.name is None:
            raise BadRequest("`tool_choice.name` is missing.", param="tool_choice")
        mode = {"any": "required", "tool": "required"}.get(choice.type, choice.type)
        return tool_use(tools, mode, choice.name if choice.type == "tool" else None, parallel)

    def _format(self) -> Format | None:
        wanted, param = self.output_format, "output_format"
        if self.output_config is not None and self.output_config.format is not None:
            wanted, param = self.output_config.format, "output_config.format"
        if wanted is None:
            return None
        if wanted.type != "json_schema":
            raise BadRequest(f"`{param}.type` can only be json_schema.", param=param)
        return schema_format(wanted.schema, f"{param}.schema")

    def _thinking(self) -> Thinking:
        effort = None if self.output_config is None else self.output_config.effort
        if self.thinking is None:
            return Thinking(effort=effort)
        if self.thinking.type == "disabled":
            return Thinking(enabled=False)
        return Thinking(True, effort, self.thinking.budget_tokens)


class MessagesFields(CountFields, kw_only=True):
    """The body of a request."""

    max_tokens: Annotated[int, Meta(ge=1, le=2**63 - 1)]
    stream: bool | None = None
    temperature: Share | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    stop_sequences: list[str] | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None

    def settings(self) -> GenerationFields:
        """How to choose tokens."""
        return GenerationFields(
            model=self.model,
            stream=self.stream,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop=[stop for stop in self.stop_sequences or [] if stop],
        )


class _AnthropicTool(msgspec.Struct):
    name: str
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: str | None = None
    strict: bool | None = None


def _tools(raw: msgspec.Raw) -> list[Tool]:
    definitions = decode_free_form(raw, "tools", MAX_TOOLS_BYTES)
    try:
        checked = msgspec.convert([] if definitions is None else definitions, list[_AnthropicTool])
    except msgspec.ValidationError as error:
        raise BadRequest(f"`tools`: {field_error(error).message}", param="tools") from None
    tools = []
    for index, tool in enumerate(checked):
        if tool.type not in (None, "custom"):
            raise BadRequest(
                f"`tools[{index}]` is of the type {tool.type!r}, which Anthropic's own servers "
                "run; this server only offers tools that the client runs.",
                param="tools",
            )
        function: dict[str, Any] = {"name": tool.name}
        if tool.description is not None:
            function["description"] = tool.description
        function["parameters"] = tool.input_schema or {"type": "object", "properties": {}}
        definition = {"type": "function", "function": function}
        tools.append(Tool(tool.name, definition, function["parameters"], bool(tool.strict)))
    check_tools(tools)
    return tools


def _template_messages(message: AnthropicMessage, where: str) -> list[dict[str, Any]]:
    """One message may be several to a template: results of tools have a role of their own."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    sorted_out = _Sorted()
    for number, block in enumerate(message.content):
        sorted_out.add(block, f"{where}.content[{number}]")
    messages = sorted_out.messages(message.role)
    if not messages:
        raise BadRequest(f"`{where}.content` is empty.", param=where)
    return messages


@dataclass(slots=True)
class _Sorted:
    """The blocks of a message by what they are to a template."""

    results: list[dict[str, Any]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)

    def add(self, block: Block, where: str) -> None:
        match block:
            case ThinkingBlock(thinking=thinking):
                self.thoughts.append(thinking)
            case RedactedThinkingBlock():
                pass
            case ToolUseBlock(id=call_id, name=name, input=arguments):
                check_nesting(arguments, where)
                function = {"name": name, "arguments": arguments}
                self.calls.append({"id": call_id, "type": "function", "function": function})
            case ToolResultBlock(tool_use_id=call_id, content=content):
                text = _result_text(content, where)
                self.results.append({"role": "tool", "tool_call_id": call_id, "content": text})
            case _:
                self.texts.append(_block_text(block, where))

    def messages(self, role: str) -> list[dict[str, Any]]:
        if not self.texts and not self.thoughts and not self.calls:
            return self.results
        message: dict[str, Any] = {"role": role, "content": "\n".join(self.texts)}
        if self.thoughts:
            message["reasoning_content"] = "\n".join(self.thoughts)
        if self.calls:
            message["tool_calls"] = self.calls
        return [*self.results, message]


def _result_text(content: str | list[ResultBlock] | None, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(
        _block_text(block, f"{where}.content[{number}]") for number, block in enumerate(content)
    )


def _block_text(block: object, where: str) -> str:
    match block:
        case TextBlock(text=text):
            return text
        case SearchResultBlock(content=content, title=title, source=source):
            return "\n".join([title, source, *(part.text for part in content)]).strip()
    kind = "image" if isinstance(block, ImageBlock) else "document"
    raise BadRequest(f"`{where}` is of the type {kind!r}; this model takes text only.", param=where)
