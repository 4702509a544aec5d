"""What it costs the server to read and render one token of one stream, and a mask to be made.

    python -m benchmarks.reading

No model runs: the parsers get text in pieces of four characters, as tokens come. Prints
microseconds per token; 100 are allowed.
"""

from __future__ import annotations

import json
import time
from functools import partial

import numpy as np

from penstock.server.http.errors import event
from penstock.testing.grammar_hosts import LocalHost, checked_grammar
from penstock.text.grammars.grammar import Format
from penstock.text.parsing import Parse, Parsing, Source
from penstock.text.reasoning import FAMILIES, read_reasoning
from penstock.text.tools import DIALECTS
from penstock.text.tools.dialect import Tool
from penstock.wire import Sampling, Submit
from penstock.worker.engine.grammar import Grammars
from penstock.worker.engine.requests import RequestState

TOKENS = 4000
TOOL = Tool("weather", {"type": "function", "function": {"name": "weather"}})
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "%s"}}\n</tool_call>'


def reading(parse: partial[Parse[None]], text: str) -> float:
    """Microseconds per token of a text."""
    parsing = Parsing(parse)
    pieces = [text[start : start + 4] for start in range(0, len(text), 4)]
    started = time.perf_counter()
    for piece in pieces:
        for part in parsing.push(piece):
            event({"choices": [{"index": 0, "delta": {"content": getattr(part, "text", "")}}]})
    parsing.finish()
    return 1e6 * (time.perf_counter() - started) / len(pieces)


def thinking(source: Source, dialect: str) -> Parse[None]:
    """Reasoning, then text and calls."""
    yield from read_reasoning(source, FAMILIES[0], opened=True)
    chosen = next(each for each in DIALECTS if each.name == dialect)
    yield from chosen.parse(source, (TOOL,))


def masks() -> float:
    """Microseconds for one mask of JSON, mean over an object of many texts."""
    tokens = [bytes([value]) for value in range(256)] + [b"<stop>"]
    host = LocalHost.of_tokens(tokens, [256])
    grammars = Grammars(len(tokens), host.worker_end)
    grammar = host.key(checked_grammar(Format("json_object")))
    sequence = RequestState(Submit(1, [1], 9, Sampling(), [256], grammar=grammar))
    grammars.add(sequence.request)
    text = json.dumps({f"key {number}": "some text" for number in range(40)}).encode()
    times = []
    for token in text:
        started = time.perf_counter()
        assert grammars.begin([sequence])
        grammars.collect(1)
        times.append(time.perf_counter() - started)
        sequence.extend([token])
    host.close()
    return 1e6 * float(np.mean(times))


def main() -> None:
    """Print the table."""
    plain = "Some ordinary words, and a < b. " * (TOKENS // 8)
    for dialect in DIALECTS:
        cost = reading(partial(dialect.parse, tools=(TOOL,)), plain)
        print(f"text, {dialect.name:12} {cost:6.1f} µs per token")
    long_call = CALL % ("Paris " * (TOKENS * 4 // 6))
    print(f"a long call           {reading(partial(thinking, dialect='hermes'), long_call):6.1f}")
    thought = plain + "</think>" + long_call
    print(f"reasoning and a call  {reading(partial(thinking, dialect='hermes'), thought):6.1f}")
    print(f"a mask                {masks():6.1f} µs")


if __name__ == "__main__":
    main()
