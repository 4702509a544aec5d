"""Harmony (gpt-oss): an answer is several messages, each on a channel.

    <|channel|>analysis<|message|>…thinking…<|end|>
    <|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{…}<|call|>
    <|start|>assistant<|channel|>final<|message|>…the answer…<|return|>

The tokens at the end of a call and of the answer end the generation, so they are not in the text.
"""  # noqa: E501 - lines of the model's own

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from penstock.text.parsing import CutShort
from penstock.text.parts import CallArguments, CallBegin, CallEnd, ReasoningDelta, TextDelta
from penstock.text.tools.dialect import CallRule, Marks, Tool

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.text.grammars.grammar import Grammar
    from penstock.text.parsing import Delta, Parse, Source

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
CONSTRAIN, END, CALL, RETURN = "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"
_ENDS = (END, CALL, RETURN, START)
_RECIPIENT = re.compile(r"to=(?:functions\.)?([^\s<]+)")
_HEADER_MAX = 512  # characters; a longer one is no header


class Harmony:
    """Channels."""

    name = "harmony"
    visible = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)

    def taught_by(self, template: str) -> bool:
        """Only this family has channels."""
        return CHANNEL in template and MESSAGE in template

    def parse(self, source: Source, tools: Sequence[Tool]) -> Parse[None]:
        """Messages by channel: analysis is reasoning, what has a recipient is a call."""
        mark: str | None = None
        while not source.ended or (yield from source.peek()):
            try:
                header, mark = yield from source.taken_until(MESSAGE, *_ENDS)
            except CutShort as short:
                yield from _cut_header(short.taken, is_first=mark is None)
                raise
            if mark != MESSAGE or len(header) > _HEADER_MAX:
                # Text without a header, or a header without a message.
                yield TextDelta(header.replace(CHANNEL, "") if mark is None else "")
                if mark is None:
                    return
                continue
            yield from _message(source, header)

    def calls(
        self, grammar: Grammar, tools: Sequence[Tool], most: int, marks: Marks, template: str
    ) -> CallRule:
        """One call: the token behind it ends the generation, so it is no part of the rule."""
        bodies = [
            f"{marks(f'commentary to=functions.{tool.name} ', CONSTRAIN, 'json', MESSAGE)} "
            f"{tool.arguments(grammar)}"
            for tool in tools
        ]
        return CallRule(CHANNEL, grammar.rule("call", " | ".join(bodies)))


def _cut_header(written: str, *, is_first: bool) -> Parse[None]:
    """What was cut off where a header stands: a call, once it says whom it calls; or the text of
    an answer that has no header."""
    if recipient := _RECIPIENT.search(written):
        if recipient.end() < len(written):
            yield CallBegin(recipient[1])
    elif is_first and CHANNEL not in written and not CHANNEL.startswith(written):
        yield TextDelta(written)


def _message(source: Source, header: str) -> Parse[None]:
    channel = header.partition(CHANNEL)[2] or header
    if recipient := _RECIPIENT.search(header):
        yield CallBegin(recipient[1])
        yield from source.until(CallArguments, *_ENDS)
        yield CallEnd()
        return
    kind: Delta = ReasoningDelta if channel.strip().startswith("analysis") else TextDelta
    if kind is ReasoningDelta:
        source.begin_reasoning()
    yield from source.until(kind, *_ENDS)
    if kind is ReasoningDelta:
        source.end_reasoning()
