"""Answers held to generated schemas, with dice for a model: whatever is drawn must validate.

`tests/proof` has the same on the real model.
"""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest

from penstock.testing.schemas import schemas
from penstock.text.grammar import Format, checked_grammar
from penstock.wire import Sampling, Submit
from penstock.worker.engine.grammar import Grammars
from penstock.worker.scheduling.sequence import Sequence

STOP = 256
TOKENS = [bytes([value]) for value in range(256)] + [b"<stop>"]
_SPACE = b" \t\r\n"


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(TOKENS, [STOP])


def drawn(grammars: Grammars, schema: dict[str, Any], source: random.Random, number: int) -> str:
    """A text that the schema's masks allow; white space and long texts are not liked."""
    grammar = checked_grammar(Format("json_schema", schema))
    sequence = Sequence(Submit(number, [1], 9, Sampling(), [STOP], grammar=grammar), 0)
    grammars.add(sequence.request)
    while True:
        pending = grammars.begin([sequence])
        assert pending is not None
        masks = pending.result()
        assert not masks.failed
        bits = np.unpackbits(masks.bits[0].view(np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits[: len(TOKENS)]).tolist()
        assert allowed
        if STOP in allowed:
            break
        wanted = [token for token in allowed if token not in _SPACE] or allowed
        closers = [token for token in wanted if token in b'"]}']
        wanted = closers if closers and source.random() < 0.5 else wanted
        sequence.tokens.append(source.choice(wanted))
    grammars.remove(number)
    return bytes(sequence.tokens[1:]).decode()


def test_whatever_is_drawn_validates(grammars: Grammars) -> None:
    source = random.Random(5)
    for number, schema in enumerate(schemas(150)):
        text = drawn(grammars, schema, source, number)
        jsonschema.validate(json.loads(text), schema)
