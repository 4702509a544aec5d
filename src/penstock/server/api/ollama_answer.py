"""An answer in Ollama's protocol: one JSON document per line, durations in nanoseconds."""

from __future__ import annotations

import secrets
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.server.api.errors import OLLAMA
from penstock.server.api.generation import Finish
from penstock.text.parts import CallArguments, CallBegin, CallEnd, ReasoningDelta, TextDelta

if TYPE_CHECKING:
    from penstock.errors import PenstockError
    from penstock.server.api.generation import Piece, Usage


class OllamaAnswer:
    """Lines of JSON; the last one says why it ended and what it took."""

    media_type = "application/x-ndjson"

    def __init__(self, model: str) -> None:
        self._model = model
        self._started = time.monotonic_ns()
        self._first: int | None = None
        self._finish: Finish | None = None
        self._call: CallBegin | None = None
        self._arguments: list[str] = []

    @property
    def keep_alive(self) -> bytes:
        """A line that says nothing: their clients read every line as JSON, empty ones too."""
        return self._more("", "", [])

    def nothing(self, reason: str) -> dict[str, object]:
        """The answer of a request that asks for none."""
        return {**self._line("", "", []), "done": True, "done_reason": reason}

    def whole(self, pieces: list[Piece], usage: Usage) -> dict[str, object]:
        """The answer of a request that does not stream."""
        text, thought = "", ""
        calls: list[dict[str, Any]] = []
        for piece in pieces:
            more_text, more_thought, more_calls = self._read(piece)
            text, thought, calls = text + more_text, thought + more_thought, calls + more_calls
        return {**self._line(text, thought, calls), **self._end(usage)}

    def opening(self, usage: Usage) -> bytes:
        """Nothing: the first piece opens the stream."""
        return b""

    def events(self, piece: Piece) -> bytes:
        """A line per piece that says something; a call is told whole."""
        text, thought, calls = self._read(piece)
        if not text and not thought and not calls:
            return b""
        return self._more(text, thought, calls)

    async def closing(self, usage: Usage) -> bytes:
        """The figures."""
        return msgspec.json.encode({**self._line("", "", []), **self._end(usage)}) + b"\n"

    def failing(self, error: PenstockError) -> bytes:
        """One last line."""
        return OLLAMA.event(error, "")

    def _more(self, text: str, thought: str, calls: list[dict[str, Any]]) -> bytes:
        return msgspec.json.encode({**self._line(text, thought, calls), "done": False}) + b"\n"

    def _read(self, piece: Piece) -> tuple[str, str, list[dict[str, Any]]]:
        self._first = self._first or time.monotonic_ns()
        self._finish = piece.finish
        text, thought = "", ""
        calls: list[dict[str, Any]] = []
        for part in piece.parts:
            match part:
                case TextDelta(more):
                    text += more
                case ReasoningDelta(more):
                    thought += more
                case CallBegin():
                    self._call, self._arguments = part, []
                case CallArguments(more):
                    self._arguments.append(more)
                case CallEnd():
                    calls.append(self._whole_call())
        return text, thought, calls

    def _whole_call(self) -> dict[str, Any]:
        assert self._call is not None
        written = "".join(self._arguments)
        try:
            arguments = msgspec.json.decode(written, type=dict[str, Any])
        except (msgspec.MsgspecError, RecursionError):
            arguments = {"unparsed_arguments": written}
        call_id = self._call.id or f"call_{secrets.token_hex(12)}"
        return {"id": call_id, "function": {"name": self._call.name, "arguments": arguments}}

    def _head(self) -> dict[str, object]:
        return {"model": self._model, "created_at": datetime.now(UTC).isoformat()}

    def _line(self, text: str, thought: str, calls: list[dict[str, Any]]) -> dict[str, object]:
        raise NotImplementedError

    def _end(self, usage: Usage) -> dict[str, object]:
        now = time.monotonic_ns()
        first = self._first or now
        return {
            "done": True,
            "done_reason": "length" if self._finish is Finish.LENGTH else "stop",
            "total_duration": now - self._started,
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": first - self._started,
            "eval_count": usage.completion_tokens,
            "eval_duration": now - first,
        }


class ChatAnswer(OllamaAnswer):
    """Of `/api/chat`."""

    def _line(self, text: str, thought: str, calls: list[dict[str, Any]]) -> dict[str, object]:
        message: dict[str, object] = {"role": "assistant", "content": text}
        if thought:
            message["thinking"] = thought
        if calls:
            message["tool_calls"] = calls
        return {**self._head(), "message": message}


class GenerateAnswer(OllamaAnswer):
    """Of `/api/generate`."""

    def _line(self, text: str, thought: str, calls: list[dict[str, Any]]) -> dict[str, object]:
        line = {**self._head(), "response": text}
        if thought:
            line["thinking"] = thought
        return line
