"""The output of a response: items, and the events in which they come.

Parts go in one by one; events come out, and the items grow. A whole answer is the same without the
events. Ids of items are made of the response's, so that an item can be found by its own. Knows the
shape of items, no HTTP.
"""

from __future__ import annotations

import copy
import re
import secrets
from dataclasses import dataclass, field
from typing import Any

import msgspec

from penstock.text.parts import CallArguments, CallBegin, CallEnd, Part, ReasoningDelta, TextDelta

Event = dict[str, Any]
_ITEM = re.compile(r"(?:msg|fc|rs|ctc)_([0-9a-f]{48})[0-9a-f]{4,8}")
_LISTED = re.compile(r"resp_([0-9a-f]{48})_in_[0-9]{1,9}")  # of the input, by its place


@dataclass(slots=True)
class OutputItems:
    """What a response has put out so far."""

    namespaces: dict[str, tuple[str, str]] = field(default_factory=dict)  # of tools, by their names
    include_reasoning: bool = True
    key: str = ""  # of the response: its items are found by their ids
    custom: frozenset[str] = frozenset()  # tools whose one argument is any text
    items: list[dict[str, Any]] = field(default_factory=list)
    _kind: type[Part] | None = None  # of the item that is open
    _text: list[str] = field(default_factory=list)  # its text so far
    _logprobs: list[Event] = field(default_factory=list)  # of tokens whose text is still held back
    _ahead: int = 0  # bytes of tokens whose log-probability is told, but not yet their text

    def take_all(self, parts: list[Part], logprobs: list[Event]) -> list[Event]:
        """The events of the parts that a step gave, and of the log-probabilities of its tokens,
        whose text may come with them or later."""
        self._logprobs += logprobs
        events: list[Event] = []
        for part in parts:
            events += self.take(part)
            if not isinstance(part, TextDelta):
                self._logprobs = list(logprobs)  # text of the same step may follow
        return events

    def take(self, part: Part) -> list[Event]:
        """The events of one more part."""
        if not isinstance(part, TextDelta):
            self._logprobs = []  # reasoning and calls have no place for them
        match part:
            case TextDelta(text):
                opened = self._begin(TextDelta, self._message())
                if opened:
                    self._logprobs, self._ahead = _from_text(self._logprobs, text), 0
                logprobs = self._logprobs_of(text)
                self.items[-1]["content"][0]["logprobs"] += logprobs
                said = self._delta("response.output_text.delta", text, logprobs=logprobs)
                return [*opened, said]
            case ReasoningDelta() if not self.include_reasoning:
                return []
            case ReasoningDelta(text):
                opened = self._begin(ReasoningDelta, self._reasoning())
                return [*opened, self._delta("response.reasoning_text.delta", text)]
            case CallBegin():
                return [*self.finish(), *self._begin(CallBegin, self._call(part))]
            case CallArguments(text):
                self._text.append(text)
                if self.items[-1]["type"] == "custom_tool_call":
                    return []  # its text stands in JSON, and is told when it is whole
                return [self._event("response.function_call_arguments.delta", delta=text)]
            case CallEnd():
                return self.finish()

    def _logprobs_of(self, text: str) -> list[Event]:
        """Those of the tokens that this text begins or ends."""
        missing, taken = len(text.encode()) - self._ahead, 0
        while missing > 0 and taken < len(self._logprobs):
            missing -= len(self._logprobs[taken]["bytes"])
            taken += 1
        self._ahead = -min(missing, 0)
        logprobs, self._logprobs = self._logprobs[:taken], self._logprobs[taken:]
        return logprobs

    def finish(self, status: str = "completed") -> list[Event]:
        """The events that close the open item."""
        kind, self._kind = self._kind, None
        if kind is None:
            return []
        text, item = "".join(self._text), self.items[-1]
        self._text = []
        item["status"] = status
        if item["type"] == "custom_tool_call":
            item["input"] = text = _custom_input(text)
            events = [
                self._event("response.custom_tool_call_input.delta", delta=text),
                self._event("response.custom_tool_call_input.done", input=text),
            ]
        elif kind is CallBegin:
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
            extra: dict[str, Any] = {}
            if kind is TextDelta:
                part["logprobs"] += self._logprobs  # of tokens that had no text of their own
                extra["logprobs"] = part["logprobs"]
                self._logprobs = []
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
        part = copy.deepcopy(item["content"][0])
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
        custom = begin.name in self.custom
        item = {
            "id": self._id("ctc" if custom else "fc"),
            "type": "custom_tool_call" if custom else "function_call",
            "status": "in_progress",
            "call_id": begin.id or f"call_{secrets.token_hex(12)}",
            "name": begin.name,
            "input" if custom else "arguments": "",
        }
        if begin.name in self.namespaces:
            item["namespace"], item["name"] = self.namespaces[begin.name]
        return item

    def _id(self, kind: str) -> str:
        return f"{kind}_{self.key or secrets.token_hex(24)}{len(self.items):04x}"

    def _message(self) -> dict[str, Any]:
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return {
            "id": self._id("msg"),
            "type": "message",
            "role": "assistant",
            "status": "in_progress",
            "content": [part],
        }

    def _reasoning(self) -> dict[str, Any]:
        return {
            "id": self._id("rs"),
            "type": "reasoning",
            "status": "in_progress",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": ""}],
        }

    def _item_event(self, name: str) -> Event:
        return {"type": name, "output_index": len(self.items) - 1, "item": dict(self.items[-1])}


def _from_text(logprobs: list[Event], text: str) -> list[Event]:
    """Without those of marks before the text, which were held back until it was clear what they
    are."""
    start = b"".join(bytes(entry["bytes"]) for entry in logprobs).rfind(text.encode())
    kept: list[Event] = []
    end = 0
    for entry in logprobs:
        end += len(entry["bytes"])
        if end > start:
            kept.append(entry)
    return kept


def response_of(item_id: str) -> str | None:
    """The id of the response that has an item of that id; None: it is none of ours."""
    found = _ITEM.fullmatch(item_id) or _LISTED.fullmatch(item_id)
    return None if found is None else f"resp_{found[1]}"


def _custom_input(arguments: str) -> str:
    """What a custom tool is given; where the call was cut, what was written of it."""
    try:
        return msgspec.json.decode(arguments, type=dict[str, str])["input"]
    except (msgspec.MsgspecError, KeyError):
        return arguments
