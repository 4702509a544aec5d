"""The body of OpenAI's `/v1/responses`, and the conversation that it means."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from penstock.errors import BadRequest
from penstock.server.api.conversation import Conversation
from penstock.server.api.exchange import field_error
from penstock.server.api.fields import GenerationFields, Share
from penstock.server.api.formats import schema_format
from penstock.server.api.limits import decode_free_form
from penstock.server.api.messages import (
    MAX_TOOLS_BYTES,
    FunctionCall,
    ToolCall,
    check_tools,
    template_call,
    tool_use,
    tools_schema,
)
from penstock.text.grammar import Format
from penstock.text.manner import Thinking, ToolUse
from penstock.text.tools.dialect import Tool

Result = TypeVar("Result")

MAX_METADATA = 16
# Run by OpenAI's own servers. The model is not shown what nobody here could run.
_HOSTED = ("web_search", "file_search", "code_interpreter", "image_generation", "mcp")
_JOINT = "__"  # between a namespace and the name of a tool in it, in the name the model knows


class InputText(msgspec.Struct, tag_field="type", tag="input_text"):
    """A piece of what somebody said."""

    text: str


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    """A piece of what the assistant said."""

    text: str


class Refusal(msgspec.Struct, tag_field="type", tag="refusal"):
    """What it said when it refused."""

    refusal: str


class InputImage(msgspec.Struct, tag_field="type", tag="input_image"):
    """An image."""


class InputFile(msgspec.Struct, tag_field="type", tag="input_file"):
    """A document."""


Content = InputText | OutputText | Refusal | InputImage | InputFile


class ReasoningText(msgspec.Struct):
    """A piece of reasoning or of its summary."""

    text: str
    type: str = "reasoning_text"


class Item(msgspec.Struct, omit_defaults=True):
    """One item of the input. Which fields matter its type says; a message may leave it out."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    call_id: str | None = None
    output: str | list[Content] | None = None
    summary: list[ReasoningText] | None = None
    id: str | None = None
    status: str | None = None


class TextFormat(msgspec.Struct):
    """`text.format`."""

    type: str
    name: str | None = None
    schema: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    strict: bool | None = None


class TextFields(msgspec.Struct):
    """`text`."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningFields(msgspec.Struct):
    """`reasoning`."""

    effort: str | None = None
    summary: str | None = None


class ResponseFields(msgspec.Struct, kw_only=True):
    """The body of a request."""

    model: str | None = None
    input: str | list[Item]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=2**63 - 1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Share | None = None
    tools: Annotated[msgspec.Raw, Meta(extra_json_schema=tools_schema(type={"type": "string"}))] = (
        msgspec.field(default_factory=msgspec.Raw)
    )
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningFields | None = None
    text: TextFields | None = None
    metadata: dict[str, str] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    conversation: str | dict[str, Any] | None = None

    def check(self) -> None:
        """Refuse what this server does not do."""
        if self.conversation is not None:
            raise BadRequest(
                "`conversation` is not supported; use `previous_response_id`.",
                param="conversation",
            )
        if self.background and (self.stream or self.store is False):
            raise BadRequest("`background` needs `store` and does not stream.", param="background")
        if len(self.metadata or {}) > MAX_METADATA:
            raise BadRequest(f"`metadata` has over {MAX_METADATA} entries.", param="metadata")

    def items(self) -> list[Item]:
        """The input as items."""
        if isinstance(self.input, str):
            return [Item(role="user", content=self.input)]
        return self.input

    def conversation_after(self, earlier: list[Item]) -> Conversation:
        """The same in the words of every protocol, behind what was said before."""
        return Conversation(
            fields=GenerationFields(
                model=self.model,
                stream=self.stream,
                temperature=self.temperature,
                top_p=self.top_p,
                max_tokens=self.max_output_tokens,
            ),
            messages=self._messages([*earlier, *self.items()]),
            max_tokens=self.max_output_tokens,
            tools=self._tool_use(),
            format=self._format(),
            thinking=Thinking(effort=None if self.reasoning is None else self.reasoning.effort),
            prompt_field="input",
        )

    def _messages(self, items: list[Item]) -> list[dict[str, Any]]:
        turns = _Turns()
        if self.instructions:
            turns.messages.append({"role": "system", "content": self.instructions})
        for index, item in enumerate(items):
            turns.add(item, f"input[{index}]")
        return turns.messages

    def _tool_use(self) -> ToolUse:
        tools = function_tools(self.tools)
        named: str | None = None
        match self.tool_choice:
            case None | "auto" | "required" | "none":
                mode = self.tool_choice or "auto"
            case {"type": "function", "name": str(named)}:
                mode = "required"
            case _:
                raise BadRequest(
                    '`tool_choice` is none, auto, required or {"type": "function", "name": ...}.',
                    param="tool_choice",
                )
        return tool_use(tools, mode, named, self.parallel_tool_calls is not False)

    def _format(self) -> Format | None:
        wanted = None if self.text is None else self.text.format
        match None if wanted is None else wanted.type:
            case None | "text":
                return None
            case "json_object":
                return Format("json_object", None, "text.format")
            case "json_schema":
                assert wanted is not None
                return schema_format(wanted.schema, "text.format.schema")
        raise BadRequest(
            "`text.format.type` is text, json_object or json_schema.", param="text.format"
        )


class _FunctionTool(msgspec.Struct):
    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    tools: list[_FunctionTool] = []  # of a namespace


def _decoded_tools(raw: msgspec.Raw) -> list[_FunctionTool]:
    definitions = decode_free_form(raw, "tools", MAX_TOOLS_BYTES)
    try:
        return msgspec.convert([] if definitions is None else definitions, list[_FunctionTool])
    except msgspec.ValidationError as error:
        raise BadRequest(f"`tools`: {field_error(error).message}", param="tools") from None


def namespaces(raw: msgspec.Raw) -> dict[str, tuple[str, str]]:
    """Namespace and name of the tools that have one, by the name that the model knows."""
    return {
        f"{space.name}{_JOINT}{tool.name}": (space.name, tool.name)
        for space in _decoded_tools(raw)
        if space.type == "namespace"
        for tool in space.tools
    }


def function_tools(raw: msgspec.Raw) -> list[Tool]:
    """The functions among the tools; those that only OpenAI's servers can run are left out."""
    checked: list[_FunctionTool] = []
    for tool in _decoded_tools(raw):
        if tool.type == "namespace":
            for inner in tool.tools:
                inner.name = f"{tool.name}{_JOINT}{inner.name}"
            checked += tool.tools
        elif not tool.type.startswith(_HOSTED):
            checked.append(tool)
    tools = []
    for tool in checked:
        if tool.type != "function":
            raise BadRequest(
                f"`tools` has one of the type {tool.type[:40]!r}; this server takes functions.",
                param="tools",
            )
        function: dict[str, Any] = {"name": tool.name}
        if tool.description is not None:
            function["description"] = tool.description
        function["parameters"] = tool.parameters or {"type": "object", "properties": {}}
        definition = {"type": "function", "function": function}
        tools.append(Tool(tool.name, definition, function["parameters"], bool(tool.strict)))
    check_tools(tools)
    return tools


@dataclass(slots=True)
class _Turns:
    """Items as messages: what the assistant thought, said and called is one message."""

    messages: list[dict[str, Any]] = field(default_factory=list)

    def add(self, item: Item, where: str) -> None:
        match item.type:
            case "message":
                self._message(item, where)
            case "reasoning":
                message = self._assistant()
                thought = "\n".join(part.text for part in _thoughts(item, where))
                message["reasoning_content"] = message.get("reasoning_content", "") + thought
            case "function_call":
                if item.name is None or item.call_id is None:
                    raise BadRequest(f"`{where}` needs `name` and `call_id`.", param=where)
                name = item.name
                if item.namespace is not None and item.namespace != name:
                    name = f"{item.namespace}{_JOINT}{name}"
                function = FunctionCall(name, item.arguments or "{}")
                call = template_call(ToolCall(function, item.call_id), where)
                self._assistant().setdefault("tool_calls", []).append(call)
            case "function_call_output":
                if item.call_id is None or item.output is None:
                    raise BadRequest(f"`{where}` needs `call_id` and `output`.", param=where)
                text = _text(item.output, where)
                self.messages.append(
                    {"role": "tool", "tool_call_id": item.call_id, "content": text}
                )

    def _message(self, item: Item, where: str) -> None:
        if item.role is None or item.content is None:
            raise BadRequest(f"`{where}` needs `role` and `content`.", param=where)
        content = item.content
        if isinstance(content, list):
            content = _text(_converted(content, list[Content], where), where)
        if item.role == "assistant":
            message = self._assistant()
            message["content"] += content
            return
        role = "system" if item.role == "developer" else item.role
        self.messages.append({"role": role, "content": content})

    def _assistant(self) -> dict[str, Any]:
        """The assistant's turn that is going on, or a new one."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": ""})
        return self.messages[-1]


def _thoughts(item: Item, where: str) -> list[ReasoningText]:
    if isinstance(item.content, list):
        return _converted(item.content, list[ReasoningText], where)
    return item.summary or []


def _converted(content: list[dict[str, Any]], kind: type[Result], where: str) -> Result:
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        raise BadRequest(f"`{where}`: {error}.", param=where) from None


def _text(content: str | list[Content], where: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for number, part in enumerate(content):
        match part:
            case InputText(text=text) | OutputText(text=text) | Refusal(refusal=text):
                texts.append(text)
            case _:
                raise BadRequest(
                    f"`{where}.content[{number}]` is an image or a file; this model takes text "
                    "only.",
                    param=f"{where}.content[{number}]",
                )
    return "\n".join(texts)
