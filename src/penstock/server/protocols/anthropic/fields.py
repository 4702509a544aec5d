"""The body of Anthropic's `/v1/messages`, and the conversation that it means."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from penstock.errors import BadRequest, NoThreads, shortened
from penstock.server.fields.formats import schema_format
from penstock.server.fields.generation import GenerationFields, Name, TopP
from penstock.server.fields.unsupported import Unsupported, refuse_fields
from penstock.server.fields.whole_numbers import Count, Positive, WholeNumbers
from penstock.server.http.free_form import is_given
from penstock.server.pipeline.conversation import Conversation
from penstock.server.protocols.anthropic.blocks import (
    AnthropicMessage,
    PlainText,
    template_messages,
)
from penstock.server.protocols.tool_fields import (
    NAME_SCHEMA,
    check_tools,
    convert_tools,
    function_tool,
    tool_use,
    tools_schema,
)
from penstock.text.chat_format import Thinking, ToolUse

if TYPE_CHECKING:
    from penstock.text.grammars.grammar import Format
    from penstock.text.tools.dialect import Tool


# Tools that clients run, but that they need not describe to Anthropic's models.
_RUN_BY_CLIENTS = ("bash_", "computer_", "memory_", "text_editor_")


class ToolChoice(msgspec.Struct):
    """`tool_choice`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingFields(WholeNumbers):
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


class CountFields(WholeNumbers, kw_only=True):
    """What is counted: everything that becomes part of the prompt."""

    model: Name | None = None
    messages: list[AnthropicMessage]
    system: str | list[PlainText] | None = None
    tools: Annotated[msgspec.Raw, Meta(extra_json_schema=tools_schema(name=NAME_SCHEMA))] = (
        msgspec.field(default_factory=msgspec.Raw)
    )
    tool_choice: ToolChoice | None = None
    thinking: ThinkingFields | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    thread: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    container: Unsupported = msgspec.field(default_factory=msgspec.Raw)
    mcp_servers: Unsupported = msgspec.field(default_factory=msgspec.Raw)

    def conversation(self) -> Conversation:
        """The same in the words of every protocol."""
        refuse_fields(self, ("container", "mcp_servers"))
        if is_given(self.thread):
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
            messages += template_messages(message, f"messages[{index}]")
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

    max_tokens: Positive
    stream: bool | None = None
    temperature: TopP | None = None
    top_p: TopP | None = None
    top_k: Count | None = None
    stop_sequences: list[str] | None = None
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
    tools = []
    for index, tool in enumerate(convert_tools(raw, _AnthropicTool)):
        if tool.type not in (None, "custom"):
            raise BadRequest(_refusal(index, tool.type), param="tools")
        tools.append(function_tool(tool.name, tool.description, tool.input_schema, tool.strict))
    check_tools(tools)
    return tools


def _refusal(index: int, kind: str) -> str:
    head = f"`tools[{index}]` is of the type {shortened(kind)!r}, "
    if kind.startswith(_RUN_BY_CLIENTS):
        return head + (
            "whose schema only Anthropic's models know; describe the tool by `name`, `description` "
            "and `input_schema`, without a `type`."
        )
    return head + (
        "which Anthropic's own servers run; this server only offers tools that the client runs."
    )
