"""The body of OpenAI's `/v1/responses`, and the conversation that it means."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from penstock.errors import BadRequest, shortened
from penstock.server.fields.formats import ResponseFormat
from penstock.server.fields.generation import UNLIMITED, GenerationFields, SamplingFields
from penstock.server.fields.unsupported import Unsupported  # noqa: TC001 - msgspec reads it
from penstock.server.fields.whole_numbers import Count, Limit, SmallCount  # noqa: TC001
from penstock.server.http.free_form import (
    MAX_SMALL_BYTES,
    decode_free_form,
    decode_small,
    is_given,
    kept_as_text,
)
from penstock.server.pipeline.conversation import Conversation
from penstock.server.protocols.chat_messages import (
    TemplateArguments,
    template_arguments,
)
from penstock.server.protocols.openai.reasoning_fields import (
    Effort,
    Reasoning,
    ThinkingObject,
    wanted_thinking,
)
from penstock.server.protocols.openai.responses_input import JOINT, Item, MessagesOfItems
from penstock.server.protocols.tool_fields import (
    ToolChoice,
    check_tools,
    chosen_tools,
    convert_tools,
    function_tool,
    tools_schema,
)

if TYPE_CHECKING:
    from penstock.text.chat_format import ToolUse
    from penstock.text.grammars.grammar import Format
    from penstock.text.tools.dialect import Tool

MAX_METADATA = 16
LOGPROBS = "message.output_text.logprobs"  # the one `include` that means something here
# Run by OpenAI's own servers. The model is not shown what nobody here could run.
_HOSTED = ("web_search", "file_search", "code_interpreter", "image_generation", "mcp")


class TextFormat(ResponseFormat, kw_only=True):
    """`text.format`: as in chats, where a schema and its name stand one deeper."""

    name: str | None = None
    strict: bool | None = None

    def said(self) -> dict[str, Any]:
        """As the response repeats it."""
        inner = self.json_schema
        raw = self.schema if inner is None or is_given(self.schema) else inner.schema
        said: dict[str, Any] = {"type": self.type}
        if is_given(raw):
            said["schema"] = msgspec.json.decode(bytes(raw))
        if self.type == "json_schema":
            said["name"] = self.name if inner is None else self.name or inner.name
            said["strict"] = self.strict if inner is None else self.strict or inner.strict
        return said


class TextFields(msgspec.Struct):
    """`text`."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ResponseFields(SamplingFields, kw_only=True):
    """The body of a request: OpenAI's, and how to choose tokens as the other protocols have it."""

    also_unsupported = (
        "context_management", "enable_response_messages", "previous_input_messages", "prompt",
    )  # fmt: skip

    length_field = "max_output_tokens"
    length_aliases = (*SamplingFields.length_aliases, "max_tokens", "max_completion_tokens")

    input: str | list[Item]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    max_output_tokens: Limit | None = None
    max_tokens: Limit | None = None
    max_completion_tokens: Limit | None = None
    max_tool_calls: Count | None = None  # of tools that a server runs, of which there are none
    tools: Annotated[msgspec.Raw, Meta(extra_json_schema=tools_schema(type={"type": "string"}))] = (
        msgspec.field(default_factory=msgspec.Raw)
    )
    tool_choice: ToolChoice = msgspec.field(default_factory=msgspec.Raw)
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    reasoning_effort: Effort | None = None
    enable_thinking: bool | None = None
    thinking: bool | ThinkingObject | None = None
    thinking_budget: Limit | None = None
    thinking_token_budget: Limit | None = None
    thinking_budget_tokens: Limit | None = None
    reasoning_budget: Limit | None = None
    include_reasoning: bool | None = None
    text: TextFields | None = None
    metadata: Annotated[msgspec.Raw, kept_as_text(dict[str, str])] = msgspec.field(
        default_factory=msgspec.Raw
    )
    truncation: Literal["auto", "disabled"] | None = None
    conversation: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    include: list[str] | None = None
    top_logprobs: SmallCount | None = None
    chat_template_kwargs: TemplateArguments = msgspec.field(default_factory=msgspec.Raw)
    context_management: Unsupported = msgspec.field(default_factory=msgspec.Raw)
    enable_response_messages: Unsupported = msgspec.field(default_factory=msgspec.Raw)
    previous_input_messages: Unsupported = msgspec.field(default_factory=msgspec.Raw)
    prompt: Unsupported = msgspec.field(default_factory=msgspec.Raw)

    def check(self) -> None:
        """Refuse what this server does not do."""
        self.refuse_unsupported()
        if is_given(self.conversation):
            raise BadRequest(
                "`conversation` is not supported; use `previous_response_id`.",
                param="conversation",
            )
        if self.background and (self.stream or self.store is False):
            raise BadRequest("`background` needs `store` and does not stream.", param="background")
        self.said_metadata()

    def said_metadata(self) -> dict[str, str]:
        """What the client wants to find in the response again."""
        metadata = decode_small(self.metadata, dict[str, str], "metadata", MAX_SMALL_BYTES) or {}
        if len(metadata) > MAX_METADATA:
            raise BadRequest(
                f"`metadata` has {len(metadata)} entries; at most {MAX_METADATA} are allowed.",
                param="metadata",
            )
        return metadata

    def said_tool_choice(self) -> Any:
        """Which tools are to be called."""
        return decode_free_form(self.tool_choice, "tool_choice", MAX_SMALL_BYTES)

    def requested_tokens(self) -> int | None:
        """The longest answer; None: as many tokens as there is room for."""
        if self.max_output_tokens == 0:
            raise BadRequest(
                "`max_output_tokens` is 0; it must be at least 1.", param="max_output_tokens"
            )
        return None if self.max_output_tokens == UNLIMITED else self.max_output_tokens

    def alternatives(self) -> int | None:
        """How many log-probabilities beside the chosen token's; None: none at all."""
        wanted = LOGPROBS in (self.include or [])
        if self.top_logprobs and not wanted:
            raise BadRequest(
                f"`top_logprobs` needs `include` to have {LOGPROBS!r}.", param="top_logprobs"
            )
        return (self.top_logprobs or 0) if wanted else None

    def items(self) -> list[Item]:
        """The input as items."""
        if isinstance(self.input, str):
            return [Item(role="user", content=self.input)]
        return self.input

    def conversation_after(self, earlier: list[Item]) -> Conversation:
        """The same in the words of every protocol, behind what was said before."""
        return Conversation(
            fields=GenerationFields(
                max_tokens=self.requested_tokens(),
                **{name: getattr(self, name) for name in SamplingFields.__struct_fields__},
            ),
            messages=self._messages([*earlier, *self.items()]),
            max_tokens=self.requested_tokens(),
            logprobs=self.alternatives(),
            tools=self._tool_use(),
            format=self.one_format(self._own_format()),
            thinking=wanted_thinking(self),
            template_arguments=template_arguments(self.chat_template_kwargs),
            prompt_field="input",
        )

    def _own_format(self) -> Format | None:
        wanted = None if self.text is None else self.text.format
        return None if wanted is None else wanted.format("text.format")

    def _messages(self, items: list[Item]) -> list[dict[str, Any]]:
        turns = MessagesOfItems()
        if self.instructions:
            turns.messages.append({"role": "system", "content": self.instructions})
        for index, item in enumerate(items):
            turns.add(item, f"input[{index}]")
        return turns.whole()

    def _tool_use(self) -> ToolUse:
        return chosen_tools(
            function_tools(self.tools), self.said_tool_choice(), self.parallel_tool_calls
        )


_ANY_TEXT = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


class _FunctionTool(msgspec.Struct):
    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: dict[str, Any] | None = None  # of a custom tool's text
    tools: list[_FunctionTool] = []  # of a namespace


def namespaces(raw: msgspec.Raw) -> dict[str, tuple[str, str]]:
    """Namespace and name of the tools that have one, by the name that the model knows."""
    return {
        f"{space.name}{JOINT}{tool.name}": (space.name, tool.name)
        for space in convert_tools(raw, _FunctionTool)
        if space.type == "namespace"
        for tool in space.tools
    }


def function_tools(raw: msgspec.Raw) -> list[Tool]:
    """The functions among the tools, and custom tools as such."""
    tools = []
    for tool in _shown(raw):
        if tool.type == "custom":
            tools.append(_custom_tool(tool))
            continue
        if tool.type != "function":
            raise BadRequest(
                f"`tools` has one of the type {shortened(tool.type, 40)!r}; this server takes "
                "functions and custom tools.",
                param="tools",
            )
        tools.append(function_tool(tool.name, tool.description, tool.parameters, tool.strict))
    check_tools(tools)
    return tools


def _shown(raw: msgspec.Raw) -> list[_FunctionTool]:
    """The tools without a namespace around them; those that only OpenAI's servers can run are left
    out."""
    shown: list[_FunctionTool] = []
    for tool in convert_tools(raw, _FunctionTool):
        if tool.type == "namespace":
            for inner in tool.tools:
                inner.name = f"{tool.name}{JOINT}{inner.name}"
            shown += tool.tools
        elif not tool.type.startswith(_HOSTED):
            shown.append(tool)
    return shown


def _custom_tool(tool: _FunctionTool) -> Tool:
    """A tool that takes any text, which the model is shown as a function of one argument."""
    if tool.format is not None and tool.format.get("type") != "text":
        raise BadRequest(
            f"`tools` has the custom tool {shortened(tool.name, 40)!r} with a grammar, which is "
            "not supported; leave `format` out.",
            param="tools",
        )
    return function_tool(tool.name, tool.description, _ANY_TEXT, strict=True)


def custom_tools(raw: msgspec.Raw) -> frozenset[str]:
    """The names of those."""
    return frozenset(tool.name for tool in _shown(raw) if tool.type == "custom")


def said_tools(raw: msgspec.Raw) -> list[dict[str, Any]]:
    """The tools as the response repeats them."""
    custom = custom_tools(raw)
    said: list[dict[str, Any]] = []
    for tool in function_tools(raw):
        function = tool.definition["function"]
        if tool.name in custom:
            text = {"type": "custom", "format": {"type": "text"}}
            said.append({**text, **{n: function[n] for n in function if n != "parameters"}})
        else:
            said.append({"type": "function", "strict": tool.strict, **function})
    return said
