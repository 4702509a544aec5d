"""What the server does with each token of a stream: bytes to text, text to parts, parts to events.

    python -m benchmarks.rendering [--model FOLDER] [--rounds 5]

Eight streams, one token of each in turn, as steps bring them; per token of one stream, the median
over rounds. Text, and calls of tools read in the model's dialect, in each protocol. No engine and
no sockets.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from benchmarks.report import median, record, starter_folder
from penstock import wire
from penstock.catalog.card import read_card
from penstock.server.pipeline.generation import Job, Usage
from penstock.server.pipeline.pieces import AnswerReading, Piece
from penstock.server.protocols.anthropic import messages as anthropic
from penstock.server.protocols.ollama.answer import ChatAnswer
from penstock.server.protocols.ollama.fields import OllamaChatFields
from penstock.server.protocols.openai import chat
from penstock.server.protocols.openai.responses_answer import ResponseAnswer
from penstock.server.protocols.openai.responses_fields import ResponseFields
from penstock.server.protocols.tool_fields import openai_tool_use
from penstock.text.chat_format import ChatFormat, OutputSpec, Thinking
from penstock.text.parsing import Parsing
from penstock.text.stream import TextStream
from penstock.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from penstock.server.pipeline.answers import Answer

STREAMS = 8
CALLS = "".join(
    "<tool_call>\n"
    + json.dumps({"name": "weather", "arguments": {"city": f"City {number}", "days": number}})
    + "\n</tool_call>\n"
    for number in range(20)
)
PROSE = "A penstock is a pipe that carries water from a reservoir down to a turbine. " * 30
ASKED: dict[str, Any] = {
    "model": "x",
    "max_tokens": 999,
    "stream": True,
    "messages": [{"role": "user", "content": "?"}],
    "input": "?",
}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


def main() -> None:
    """Measure and print each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    folder = options.model or starter_folder()
    tokenizer = Tokenizer.from_folder(folder)
    figures: dict[str, float] = {}
    for kind, text in (("text", PROSE), ("calls", CALLS)):
        tokens = asyncio.run(tokenizer.encode_in_thread(text, add_special_tokens=False))
        job = _job(folder, tokenizer, [*TOOLS] if kind == "calls" else [])
        for name in ("chat", "messages", "responses", "ollama"):
            _round(job, name, tokens)  # warm
            times = [_round(job, name, tokens) for _ in range(options.rounds)]
            figures[f"{name}_{kind}_us"] = round(1e6 * median(times), 1)
    record("rendering", {**figures, "most_us": max(figures.values())})


def _job(folder: Path, tokenizer: Tokenizer, tools: list[dict[str, Any]]) -> Job:
    chat_format = ChatFormat.of(tokenizer)
    assert chat_format is not None
    fields = msgspec.convert({**ASKED, "tools": msgspec.Raw(b"")}, chat.ChatFields)
    use = openai_tool_use(msgspec.Raw(json.dumps(tools).encode()), None, None)
    plan = chat_format.answer("", use, None, Thinking())
    return Job(
        card=read_card(folder),
        tokenizer=tokenizer,
        prompts=[[1]],
        fields=fields,
        prompt_field="messages",
        max_tokens=None,
        sampling=wire.Sampling(),
        stop_token_ids=[],
        output=OutputSpec(plan.parser, plan.visible),
    )


def _renderer(job: Job, name: str) -> Answer:
    none: Any = None
    match name:
        case "chat":
            assert isinstance(job.fields, chat.ChatFields)
            return chat._Answer(job, job.fields, "fp")
        case "messages":
            return anthropic._Answer("id", job)
        case "responses":
            fields = msgspec.convert({**ASKED, "store": False}, ResponseFields)
            return ResponseAnswer(job, fields, "", none)
    asked = OllamaChatFields(model=job.card.name)
    return ChatAnswer(asked, job, none, none)


def _round(job: Job, name: str, tokens: list[int]) -> float:
    """Seconds for one token of one stream."""
    streams = [
        (
            AnswerReading(
                TextStream(job.tokenizer, visible=job.output.visible), Parsing(job.output.parser)
            ),
            _renderer(job, name),
        )
        for _ in range(STREAMS)
    ]
    said = [renderer.opening(Usage()) for _, renderer in streams]
    started = time.perf_counter()
    for token in tokens:
        for number, (reading, renderer) in enumerate(streams):
            piece = Piece(0)
            reading.absorb(piece, wire.Output(0, [token]), [])
            said[number] = renderer.events(piece)
    return (time.perf_counter() - started) / len(tokens) / STREAMS


if __name__ == "__main__":
    main()
