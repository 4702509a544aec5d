"""The tools of a request and its `tool_choice`: which shapes a client may send.

It knows OpenAI's tools, and what all protocols' tools have in common.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from penstock.errors import BadRequest, shortened
from penstock.server.http.free_form import decode_free_form, field_error, kept_as_text
from penstock.text.chat_format import ToolUse
from penstock.text.tools.dialect import Tool

if TYPE_CHECKING:
    from collections.abc import Callable

Definition = TypeVar("Definition")

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

ToolChoice = Annotated[msgspec.Raw, kept_as_text(str | dict[str, Any])]


class _Function(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Tool(msgspec.Struct):
    function: _Function
    type: Literal["function"]


def _nested(definition: Any) -> Any:
    """A tool as chats have it, where a client has written it as responses have it."""
    if not isinstance(definition, dict) or "function" in definition or "name" not in definition:
        return definition
    function = {name: value for name, value in definition.items() if name != "type"}
    return {"type": definition.get("type", "function"), "function": function}


def _flat(definition: Any) -> Any:
    """A tool as responses have it, where a client has written it as chats have it."""
    if not isinstance(definition, dict) or not isinstance(definition.get("function"), dict):
        return definition
    return {"type": definition.get("type", "function"), **definition["function"]}


def openai_tool_use(raw: msgspec.Raw, choice: Any, parallel: bool | None) -> ToolUse:
    """The tools of a chat and what its `tool_choice` says of them."""
    return chosen_tools(_tools(raw), choice, parallel)


def chosen_tools(tools: list[Tool], choice: Any, parallel: bool | None) -> ToolUse:
    """What `tool_choice` says of the tools. Clients send the form of one protocol to another, so
    those of chats, responses and Anthropic's messages are known everywhere."""
    named: str | None = None
    if isinstance(choice, dict):
        parallel = parallel is not False and not choice.get("disable_parallel_tool_use")
        if choice.get("type") in ("auto", "any", "none", "required"):
            choice = choice["type"]
    match choice:
        case None | "auto" | "none":
            mode = choice or "auto"
        case "required" | "any":
            mode = "required"
        case {"type": "function" | "tool" | "custom", "name": str(named)} | {
            "type": "function",
            "function": {"name": str(named)},
        }:
            mode = "required"
        case {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto" | "required" as mode, "tools": list(allowed)},
        } | {
            "type": "allowed_tools",
            "mode": "auto" | "required" as mode,
            "tools": list(allowed),
        }:
            tools = only_allowed(tools, allowed)
        case _:
            raise BadRequest(
                '`tool_choice` is none, auto, required, {"type": "function", "name": ...}, the '
                'same with {"function": {"name": ...}}, or {"type": "allowed_tools", "mode": '
                '"auto" or "required", "tools": [...]}.',
                param="tool_choice",
            )
    return tool_use(tools, mode, named, parallel is not False)


def only_allowed(tools: list[Tool], allowed: list[Any]) -> list[Tool]:
    """Those of the tools that an `allowed_tools` choice names; the model is shown no others."""
    names = set()
    for choice in allowed:
        match choice:
            case {"type": "function" | "custom", "name": str(name)} | {
                "type": "function",
                "function": {"name": str(name)},
            }:
                names.add(name)
            case _:
                raise BadRequest(
                    "`tool_choice.tools` is a list of functions, each with its name.",
                    param="tool_choice",
                )
    if not names:
        raise BadRequest("`tool_choice` allows no tool; say none instead.", param="tool_choice")
    if unknown := names - {tool.name for tool in tools}:
        raise BadRequest(
            f"`tool_choice` names {min(unknown)[:80]!r}, which is not one of `tools`.",
            param="tool_choice",
        )
    return [tool for tool in tools if tool.name in names]


def tool_use(tools: list[Tool], mode: str, named: str | None, parallel: bool) -> ToolUse:
    """Tools and choice put together; refuses a choice that no tool answers to."""
    if mode == "none":
        return ToolUse()
    if mode == "required" and not tools:
        raise BadRequest("`tool_choice` needs `tools`.", param="tool_choice")
    if named is not None and named not in {tool.name for tool in tools}:
        raise BadRequest(
            f"`tool_choice` names {shortened(named)!r}, which is not one of `tools`.",
            param="tool_choice",
        )
    return ToolUse(tuple(tools), mode == "required", named, parallel)


def convert_tools(raw: msgspec.Raw, kind: type[Definition]) -> list[Definition]:
    """The definitions of `tools`, each of this kind; none where there are none."""
    return _converted(_shaped(raw, _flat), kind)


def _shaped(raw: msgspec.Raw, shape: Callable[[Any], Any]) -> Any:
    definitions = decode_free_form(raw, "tools", MAX_TOOLS_BYTES)
    return [*map(shape, definitions)] if isinstance(definitions, list) else definitions


def _converted(definitions: Any, kind: type[Definition]) -> list[Definition]:
    try:
        return msgspec.convert([] if definitions is None else definitions, list[kind])  # type: ignore[valid-type]
    except msgspec.ValidationError as error:
        refusal = field_error(error)
        raise BadRequest(
            f"`tools`: {refusal.message}", param=f"tools{_joined(refusal.param)}"
        ) from None


def function_tool(
    name: str, description: str | None, parameters: dict[str, Any] | None, strict: bool | None
) -> Tool:
    """A tool in the shape that templates know."""
    function: dict[str, Any] = {"name": name}
    if description is not None:
        function["description"] = description
    function["parameters"] = parameters or {"type": "object", "properties": {}}
    definition = {"type": "function", "function": function}
    return Tool(name, definition, function["parameters"], bool(strict))


def _tools(raw: msgspec.Raw) -> list[Tool]:
    # A template is shown what the client wrote, other fields included.
    definitions = _shaped(raw, _nested)
    definitions = [] if definitions is None else definitions
    checked = _converted(definitions, _Tool)
    tools = [
        Tool(each.function.name, shown, each.function.parameters or {}, bool(each.function.strict))
        for each, shown in zip(checked, definitions, strict=True)
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
                f"`tools[{index}]` has the name {shortened(name)!r}; a name has 1 to 128 letters, "
                "digits, dots, colons, underscores or hyphens.",
                param="tools",
            )
    if len(set(names)) < len(names):
        raise BadRequest("`tools` has a name twice.", param="tools")


def _joined(path: str | None) -> str:
    if not path:
        return ""
    return path if path.startswith("[") else f".{path}"
