"""Pieces of an answer: one worker output as text, parts and log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from penstock import wire
from penstock.text.parts import CallBegin, Part, merged

if TYPE_CHECKING:
    from penstock.text.parsing import Parsing
    from penstock.text.stream import TextStream


class FinishReason(Enum):
    """Why an answer ended."""

    STOP = "stop"
    STOP_STRING = "stop_string"
    LENGTH = "length"
    CALLS = "calls"  # by itself, and it calls tools


@dataclass(slots=True)
class Piece:
    """What one step gave one choice; `text` lags behind `tokens` where a stop string may come."""

    choice: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)  # without the token that ended the answer
    offsets: list[int] = field(default_factory=list)  # where each token's text begins in the answer
    logprobs: list[wire.TokenLogprobs] = field(default_factory=list)  # one per token, if asked for
    # All of the prompt's, with the choice's first piece, if asked for.
    prompt_logprobs: list[wire.TokenLogprobs | None] | None = None
    parts: list[Part] = field(default_factory=list)  # what the text says
    finish: FinishReason | None = None
    stop_string: str | None = None  # which one ended it


@dataclass(slots=True)
class AnswerReading:
    """One answer being read: tokens to text, text to parts."""

    stream: TextStream
    parsing: Parsing
    _called: bool = False
    _reasoning_tokens: int = 0  # told so far

    def absorb(self, piece: Piece, output: wire.Output, stop_token_ids: wire.TokenIds) -> None:
        """Fill `piece` with what `output` brings."""
        stream, tokens = self.stream, output.tokens
        if output.finish is wire.Finish.STOP and tokens and tokens[-1] in stop_token_ids:
            # The token that ends an answer is no part of its text.
            tokens = tokens[:-1]
        before = len(stream.offsets)
        piece.text = stream.push(tokens)
        if output.finish is not None and not stream.stopped:
            piece.text += stream.finish(cut=output.finish is wire.Finish.LENGTH)
            length = output.finish is wire.Finish.LENGTH and not stream.stopped
            piece.finish = FinishReason.LENGTH if length else FinishReason.STOP
        if stream.stopped:
            piece.finish, piece.stop_string = FinishReason.STOP_STRING, stream.matched
        piece.offsets = stream.offsets[before:]
        # A stop string leaves the tokens behind it out.
        piece.tokens = tokens[: len(piece.offsets)]
        piece.logprobs = (output.logprobs or [])[: len(piece.offsets)]
        self._parse(piece)

    def more_reasoning_tokens(self) -> int:
        """Reasoning tokens since the last call; negative where text that was held back has turned
        out to be none."""
        before = self._reasoning_tokens
        self._reasoning_tokens = self.parsing.reasoning_tokens(self.stream.offsets)
        return self._reasoning_tokens - before

    def _parse(self, piece: Piece) -> None:
        if piece.text:
            piece.parts = self.parsing.push(piece.text)
        if piece.finish is not None:
            cut = piece.finish is not FinishReason.STOP
            piece.parts = merged([*piece.parts, *self.parsing.finish(cut=cut)])
        self._called = self._called or any(isinstance(part, CallBegin) for part in piece.parts)
        if self._called and piece.finish is FinishReason.STOP:
            piece.finish = FinishReason.CALLS
