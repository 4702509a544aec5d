"""What an answer is made of once its text is understood: the events every protocol renders.

An answer is text, reasoning and calls of tools, in the order in which the model wrote them. Deltas
put together are the whole. Knows no protocol and no dialect.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby


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
    """The present call is complete; one that was cut off has no end."""


Part = TextDelta | ReasoningDelta | CallBegin | CallArguments | CallEnd


def merged(parts: list[Part]) -> list[Part]:
    """The same with neighbouring deltas of one kind joined and empty ones left out."""
    result: list[Part] = []
    for kind, neighbours in groupby(parts, type):
        if issubclass(kind, TextDelta | ReasoningDelta | CallArguments):
            if text := "".join(part.text for part in neighbours):  # type: ignore[union-attr]
                last = result[-1] if result else None
                if type(last) is kind:  # only empty ones of another kind between them
                    result[-1] = kind(last.text + text)
                else:
                    result.append(kind(text))
        else:
            result += neighbours
    return result
