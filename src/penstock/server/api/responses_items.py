"""The output of a response: items, and the events in which they come.

Parts go in one by one; events come out, and the items grow. A whole answer is the same without the
events. Knows the shape of items, no HTTP.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Any

from penstock.text.parts import CallArguments, CallBegin, CallEnd, Part, ReasoningDelta, TextDelta

Event = dict[str, Any]


@dataclass(slots=True)
class OutputItems:
    """What a response has put out so far."""

    namespaces: dict[str, tuple[str, str]] = field(default_factory=dict)  # of tools, by their names
    items: list[dict[str, Any]] = field(default_factory=list)
    _kind: type[Part] | None = None  # of the item that is open
    _text: list[str] = field(default_factory=list)  # its text so far

    def take(self, part: Part) -> list[Event]:
        """The events of one more part."""
        match part:
            case TextDelta(text):
                opened = self._begin(TextDelta, _message())
                return [*opened, self._delta("response.output_text.delta", text, logprobs=[])]
            case ReasoningDelta(text):
                opened = self._begin(ReasoningDelta, _reasoning())
                return [*opened, self._delta("response.reasoning_text.delta", text)]
            case CallBegin():
                return [*self.finish(), *self._begin(CallBegin, self._call(part))]
            case CallArguments(text):
                self._text.append(text)
                return [self._event("response.function_call_arguments.delta", delta=text)]
            case CallEnd():
                return self.finish()

    def finish(self, status: str = "completed") -> list[Event]:
        """The events that close the open item."""
        kind, self._kind = self._kind, None
        if kind is None:
            return []
        text, item = "".join(self._text), self.items[-1]
        self._text = []
        item["status"] = status
        if kind is CallBegin:
            item["arguments"] = text
            events = [
                self._event(
                    "response.function_call_arguments.done", arguments=text, name=item["name"]
                )
            ]
        else:
            part = item["content"][0]
            part["text"] = text
            name = "output_text" if kind is TextDelta else "reasoning_text"
            extra: dict[str, Any] = {"logprobs": []} if kind is TextDelta else {}
            events = [
                self._event(f"response.{name}.done", content_index=0, text=text, **extra),
                self._event("response.content_part.done", content_index=0, part=part),
            ]
        return [*events, self._item_event("response.output_item.done")]

    def _begin(self, kind: type[Part], item: dict[str, Any]) -> list[Event]:
        if self._kind is kind:
            return []
        closed = self.finish()
        self._kind = kind
        self.items.append(item)
        added = self._item_event("response.output_item.added")
        if kind is CallBegin:
            return [*closed, added]
        # The part that the first deltas fill; the item says nothing of it yet.
        part = dict(item["content"][0])
        added["item"] = {**item, "content": []}
        opened = self._event("response.content_part.added", content_index=0, part=part)
        return [*closed, added, opened]

    def _delta(self, name: str, text: str, **extra: object) -> Event:
        self._text.append(text)
        return self._event(name, content_index=0, delta=text, **extra)

    def _event(self, kind: str, /, **content: object) -> Event:
        place = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        return {"type": kind, **place, **content}

    def _call(self, begin: CallBegin) -> dict[str, Any]:
        item = {
            "id": f"fc_{secrets.token_hex(12)}",
            "type": "function_call",
            "status": "in_progress",
            "call_id": begin.id or f"call_{secrets.token_hex(12)}",
            "name": begin.name,
            "arguments": "",
        }
        if begin.name in self.namespaces:
            item["namespace"], item["name"] = self.namespaces[begin.name]
        return item

    def _item_event(self, name: str) -> Event:
        return {"type": name, "output_index": len(self.items) - 1, "item": dict(self.items[-1])}


def _message() -> dict[str, Any]:
    part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    return {
        "id": f"msg_{secrets.token_hex(12)}",
        "type": "message",
        "role": "assistant",
        "status": "in_progress",
        "content": [part],
    }


def _reasoning() -> dict[str, Any]:
    return {
        "id": f"rs_{secrets.token_hex(12)}",
        "type": "reasoning",
        "status": "in_progress",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": ""}],
    }
