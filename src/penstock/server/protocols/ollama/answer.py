"""An answer in Ollama's protocol: one JSON document per line, durations in nanoseconds."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.memory.clients.requests import TOKEN_BYTES
from penstock.server.http.errors import OLLAMA
from penstock.server.http.threads import run_in_thread_if_large
from penstock.server.pipeline.answers import Answer
from penstock.server.pipeline.pieces import FinishReason
from penstock.server.protocols.logprobs import chat_logprobs
from penstock.server.protocols.ollama.fields import OllamaGenerateFields
from penstock.text.parts import CallArguments, CallBegin, CallEnd, ReasoningDelta, TextDelta

if TYPE_CHECKING:
    from penstock.errors import PenstockError
    from penstock.memory.clients.requests import RequestMemory
    from penstock.server.pipeline.generation import Generation, Job, Usage
    from penstock.server.pipeline.pieces import Piece
    from penstock.server.protocols.ollama.fields import OllamaRequest


@dataclass(slots=True)
class _Said:
    """What one line says."""

    text: str = ""
    thought: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[dict[str, object]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.text or self.thought or self.calls or self.logprobs)

    def add(self, other: _Said) -> None:
        self.text += other.text
        self.thought += other.thought
        self.calls += other.calls
        self.logprobs += other.logprobs


class OllamaAnswer(Answer):
    """Lines of JSON; the last one says why it ended and what it took."""

    media_type = "application/x-ndjson"

    def __init__(
        self, fields: OllamaRequest, job: Job, memory: RequestMemory, generation: Generation
    ) -> None:
        self._model = fields.model  # as it was asked for: their clients compare
        self._job = job
        self._generation = generation
        self._memory = memory
        self._logprobs = bool(fields.logprobs)
        self._finish: FinishReason | None = None
        self._call: CallBegin | None = None
        self._arguments: list[str] = []

    @property
    def keep_alive(self) -> bytes:
        """A line that says nothing: their clients read every line as JSON, empty ones too."""
        return self._more(_Said())

    @classmethod
    def nothing(cls, model: str, reason: str) -> dict[str, object]:
        """The answer of a request that asks for none."""
        return {**_head(model), **cls._content(_Said()), "done": True, "done_reason": reason}

    def document(self, choices: list[list[Piece]], usage: Usage) -> dict[str, object]:
        """All of it in one line."""
        [pieces] = choices
        said = _Said()
        for piece in pieces:
            said.add(self._read(piece))
        return {**self._line(said), **self._end()}

    def events(self, piece: Piece) -> bytes:
        """A line per piece that says something; a call is told whole."""
        said = self._read(piece)
        return self._more(said) if said else b""

    async def closing(self, usage: Usage) -> bytes:
        """The figures."""
        last = {**self._line(_Said()), **self._end()}
        line = await run_in_thread_if_large(
            TOKEN_BYTES * usage.total_tokens, partial(msgspec.json.encode, last)
        )
        return line + b"\n"

    def failing(self, error: PenstockError) -> bytes:
        """One last line."""
        return OLLAMA.event(error, "")

    def _more(self, said: _Said) -> bytes:
        return msgspec.json.encode({**self._line(said), "done": False}) + b"\n"

    def _read(self, piece: Piece) -> _Said:
        self._finish = piece.finish
        said = _Said()
        if self._logprobs:
            said.logprobs = chat_logprobs(self._job.tokenizer, piece)
        for part in piece.parts:
            match part:
                case TextDelta(more):
                    said.text += more
                case ReasoningDelta(more):
                    said.thought += more
                case CallBegin():
                    self._call, self._arguments = part, []
                case CallArguments(more):
                    self._arguments.append(more)
                case CallEnd():
                    said.calls.append(self._whole_call())
        return said

    def _whole_call(self) -> dict[str, Any]:
        assert self._call is not None
        written = "".join(self._arguments)
        try:
            arguments = msgspec.json.decode(written, type=dict[str, Any])
        except (msgspec.MsgspecError, RecursionError):
            arguments = {"unparsed_arguments": written}
        call_id = self._call.id or f"call_{secrets.token_hex(12)}"
        return {"id": call_id, "function": {"name": self._call.name, "arguments": arguments}}

    def _line(self, said: _Said) -> dict[str, object]:
        line = {**_head(self._model), **self._content(said)}
        if said.logprobs:
            line["logprobs"] = said.logprobs
        return line

    @staticmethod
    def _content(said: _Said) -> dict[str, object]:
        raise NotImplementedError

    def _end(self) -> dict[str, object]:
        """Why it ended, and how long what has taken."""
        generation, now = self._generation, time.monotonic()
        submitted = generation.progress.submitted or now
        first = generation.progress.first_token or now
        last = generation.progress.last_token or first
        if last == first:
            last = now  # one token, or several at once: until the answer was whole
        return {
            "done": True,
            "done_reason": "length" if self._finish is FinishReason.LENGTH else "stop",
            "total_duration": _nanoseconds(now - generation.started),
            "load_duration": _nanoseconds(generation.load_s),
            "prompt_eval_count": generation.usage.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(first - submitted),
            "eval_count": generation.usage.completion_tokens,
            "eval_duration": max(_nanoseconds(last - first), 1),
        }


class ChatAnswer(OllamaAnswer):
    """Of `/api/chat`."""

    @staticmethod
    def _content(said: _Said) -> dict[str, object]:
        message: dict[str, object] = {"role": "assistant", "content": said.text}
        if said.thought:
            message["thinking"] = said.thought
        if said.calls:
            message["tool_calls"] = said.calls
        return {"message": message}


class GenerateAnswer(OllamaAnswer):
    """Of `/api/generate`; its last line has the tokens of prompt and answer, to go on from."""

    def __init__(
        self, fields: OllamaRequest, job: Job, memory: RequestMemory, generation: Generation
    ) -> None:
        super().__init__(fields, job, memory, generation)
        raw = isinstance(fields, OllamaGenerateFields) and bool(fields.raw)
        self._tokens: list[int] | None = None if raw else []

    @staticmethod
    def _content(said: _Said) -> dict[str, object]:
        line: dict[str, object] = {"response": said.text}
        if said.thought:
            line["thinking"] = said.thought
        return line

    def _read(self, piece: Piece) -> _Said:
        if self._tokens is not None:
            self._memory.grow_now(TOKEN_BYTES * len(piece.tokens))
            self._tokens += piece.tokens
        return super()._read(piece)

    def _end(self) -> dict[str, object]:
        if self._tokens is None:
            return super()._end()
        return {**super()._end(), "context": [*self._job.prompts[0], *self._tokens, *self._eos()]}

    def _eos(self) -> list[int]:
        """The token that ended the answer is no part of it, but of what comes before the next."""
        eos, tokenizer = None, self._job.tokenizer
        if self._finish is FinishReason.STOP and tokenizer.eos_token is not None:
            eos = tokenizer.token_id(tokenizer.eos_token)
        return [] if eos is None else [eos]


def _head(model: str) -> dict[str, object]:
    return {"model": model, "created_at": datetime.now(UTC).isoformat()}


def _nanoseconds(seconds: float) -> int:
    return max(0, round(1e9 * seconds))
