"""What an answer is made of once its text is understood: the events every protocol renders.

An answer is text, reasoning and calls of tools, in the order in which the model wrote them. Deltas
put together are the whole. Knows no protocol and no dialect.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of what the model thought before it answered."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """The model calls a tool; the arguments follow. `id` is the model's own, where it has one."""

    name: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the present call's arguments: JSON, in pieces."""

    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The present call is complete."""


Part = TextDelta | ReasoningDelta | CallBegin | CallArguments | CallEnd


def merged(parts: list[Part]) -> list[Part]:
    """The same with neighbouring deltas of one kind joined and empty ones left out."""
    result: list[Part] = []
    for part in parts:
        if isinstance(part, TextDelta | ReasoningDelta | CallArguments):
            if not part.text:
                continue
            last = result[-1] if result else None
            if type(last) is type(part):
                result[-1] = type(part)(last.text + part.text)
                continue
        result.append(part)
    return result
