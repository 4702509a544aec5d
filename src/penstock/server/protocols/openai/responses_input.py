"""The input items of `/v1/responses`, and the messages that they are to a chat template."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec

from penstock.errors import BadRequest, shortened
from penstock.server.protocols.chat_messages import ImageUrl, template_call
from penstock.server.protocols.content import (
    ContentPart,
    MediaContent,
    TemplateContent,
    TextContent,
    image_from_url,
    template_content,
    text_content,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

Shown = TypeVar("Shown", str, TemplateContent)

# Tools that OpenAI's own servers run leave these in histories. What they found is for their models
# only, or in the message that follows.
_HOSTED = frozenset(
    {
        "code_interpreter_call", "file_search_call", "image_generation_call",
        "mcp_approval_request", "mcp_approval_response", "mcp_list_tools", "web_search_call",
    }
)  # fmt: skip
ItemType = Literal[
    "message", "function_call", "function_call_output", "reasoning", "custom_tool_call",
    "custom_tool_call_output", "mcp_call", "item_reference", "code_interpreter_call",
    "file_search_call", "image_generation_call", "mcp_approval_request", "mcp_approval_response",
    "mcp_list_tools", "web_search_call",
]  # fmt: skip
JOINT = "__"  # between a namespace and the name of a tool in it, in the name the model knows


class Part(msgspec.Struct, omit_defaults=True):
    """A piece of a message or of reasoning: which it may be, the item's type says."""

    type: str = ""
    text: str | None = None
    refusal: str | None = None
    image_url: str | ImageUrl | None = None


class Item(msgspec.Struct, omit_defaults=True):
    """One item of the input. Which fields matter its type says; a message may leave it out."""

    type: ItemType = "message"
    role: Literal["user", "assistant", "system", "developer", "tool"] | None = None
    content: str | list[Part] | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | dict[str, Any] | None = None
    call_id: str | None = None
    tool_call_id: str | None = None  # the same, in a message of the role tool
    input: str | None = None  # of a custom tool
    output: str | list[Part] | None = None
    summary: list[Part] | None = None
    id: str | None = None
    status: str | None = None

    @property
    def is_reference(self) -> bool:
        """Whether it only names another."""
        bare = self.type == "message" and self.role is None and self.content is None
        return self.type == "item_reference" or (bare and self.id is not None)


@dataclass(slots=True)
class MessagesOfItems:
    """Items as messages: what the assistant thought, said and called is one message."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    # Of the assistant's turn that is going on: in pieces, since texts that grow are copied.
    _said: list[str] = field(default_factory=list)
    _thought: list[str] = field(default_factory=list)

    def whole(self) -> list[dict[str, Any]]:
        """All of them."""
        self._close()
        return self.messages

    def add(self, item: Item, where: str) -> None:
        match item.type:
            case "message":
                self._message(item, where)
            case "reasoning":
                self._assistant()
                self._thought.append("\n".join(_thoughts(item, where)))
            case "function_call" | "custom_tool_call":
                self._call(item, item.call_id, where)
            case "mcp_call":
                self._call(item, item.id, where)
                self._result(item.output or "", item.id, where)
            case "function_call_output" | "custom_tool_call_output":
                if item.call_id is None or item.output is None:
                    raise BadRequest(f"`{where}` needs `call_id` and `output`.", param=where)
                self._result(item.output, item.call_id, where)
            case "item_reference":
                raise BadRequest(f"`{where}` needs `id`.", param=where)
            case hosted:
                assert hosted in _HOSTED

    def _call(self, item: Item, call_id: str | None, where: str) -> None:
        if item.name is None or call_id is None:
            raise BadRequest(f"`{where}` needs `name` and `call_id`.", param=where)
        name = item.name
        if item.namespace is not None and item.namespace != name:
            name = f"{item.namespace}{JOINT}{name}"
        arguments = item.arguments or "{}"
        if item.type == "custom_tool_call":
            arguments = {"input": item.input or ""}
        call = template_call(name, arguments, call_id, where)
        self._assistant().setdefault("tool_calls", []).append(call)

    def _result(self, output: str | list[Part], call_id: str | None, where: str) -> None:
        content = _text(output, where)
        self._append({"role": "tool", "tool_call_id": call_id, "content": content})

    def _message(self, item: Item, where: str) -> None:
        if item.role is None:
            raise BadRequest(f"`{where}` needs `role` and `content`.", param=where)
        if item.role == "tool":
            self._result(item.content or "", item.tool_call_id or item.call_id, where)
            return
        if item.role == "assistant":
            self._assistant()
            self._said.append(_text(item.content or "", where))
            return
        shown = template_content if item.role == "user" else text_content
        content = _shown(item.content or "", where, shown)
        role = "system" if item.role == "developer" else item.role
        self._append({"role": role, "content": content})

    def _assistant(self) -> dict[str, Any]:
        """The assistant's turn that is going on, or a new one."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self._append({"role": "assistant", "content": ""})
        return self.messages[-1]

    def _append(self, message: dict[str, Any]) -> None:
        self._close()
        self.messages.append(message)

    def _close(self) -> None:
        """Put together what the assistant's turn has come to."""
        if self._said:
            self.messages[-1]["content"] = "".join(self._said)
        if self._thought:
            self.messages[-1]["reasoning_content"] = "".join(self._thought)
        self._said, self._thought = [], []


def _thoughts(item: Item, where: str) -> list[str]:
    parts = item.content if isinstance(item.content, list) else item.summary or []
    return [_needed(part.text, where, "text") for part in parts]


def _content(part: Part, where: str) -> ContentPart:
    match part.type:
        case "input_text" | "output_text" | "text":
            return TextContent(_needed(part.text, where, "text"))
        case "refusal":
            return TextContent(_needed(part.refusal, where, "refusal"))
        case "input_image" | "image_url" if part.image_url is not None:
            url = part.image_url if isinstance(part.image_url, str) else part.image_url.url
            return image_from_url(url, f"{where}.image_url")
        case "input_image" | "input_file" | "input_audio" | "image_url":
            return MediaContent(part.type, where)
    raise BadRequest(
        f"`{where}` is a part of the type {shortened(part.type)!r}; input_text, output_text, "
        "refusal, input_image and input_file are known.",
        param=where.partition(".content")[0],
    )


def _needed(text: str | None, where: str, name: str) -> str:
    if text is None:
        raise BadRequest(f"`{where}` has a part without `{name}`.", param=where)
    return text


def _text(content: str | list[Part], where: str) -> str:
    return _shown(content, where, text_content)


def _shown(
    content: str | list[Part], where: str, shown: Callable[[Iterable[ContentPart]], Shown]
) -> Shown | str:
    if isinstance(content, str):
        return content
    return shown(
        _content(part, f"{where}.content[{number}]") for number, part in enumerate(content)
    )
