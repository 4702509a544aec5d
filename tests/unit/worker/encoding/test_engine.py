"""The encode engine over an encoder that computes nothing, and readings of which every byte is
known."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from penstock.errors import BadRequest, ContextTooLong, InternalError, Overloaded
from penstock.memory.cost import KvCost, Measured, fit
from penstock.memory.domains import RAM
from penstock.wire import Encoding, Finish, Grant, Output, Ready, Sampling, Submit, token_ids
from penstock.worker.backends.caps import NoCap
from penstock.worker.core.plan import StepLimits
from penstock.worker.core.profile import Profile, ServedModel
from penstock.worker.core.step_memory import StepMemory
from penstock.worker.encoding.engine import EncodeEngine, StepVectors

if TYPE_CHECKING:
    from penstock.worker.encoding.packing import PackedStep

MIB = 1 << 20
TOKENS, SEQUENCES, LONGEST = 100, 4, 300
TOKEN = MIB // 10  # bytes of a step for each
STEP = LONGEST * TOKEN


class Readings:
    includes_host, noise_bytes, floor_bytes = False, 0, 0

    def __init__(self) -> None:
        self.rows = 0

    def held(self) -> int:
        return 0

    def begin_step(self, rows: int) -> None:
        self.rows = rows

    def mark(self) -> None: ...

    def peak(self) -> int:
        return self.rows * TOKEN

    def drop_caches(self) -> None: ...


@dataclass
class FakeEncoder:
    """Answers each text with its own first token."""

    steps: list[tuple[int, ...]] = field(default_factory=list)
    holds: int = LONGEST  # tokens that there is memory for, whatever is thought
    broken: set[int] = field(default_factory=set)  # first tokens that give no number
    crowded: bool = False

    def encode(self, step: PackedStep) -> StepVectors:
        self.steps.append(tuple(text.request_id for text in step.texts))
        if step.tokens > self.holds:
            raise MemoryError
        return StepVectors(
            [
                None if text.tokens[0] in self.broken else bytes([text.tokens[0]])
                for text in step.texts
            ]
        )

    def out_of_memory(self, error: BaseException) -> bool:
        return isinstance(error, MemoryError)


def _engine(encoder: FakeEncoder) -> EncodeEngine:
    points = [Measured(size, 1, size, 0, size * TOKEN) for size in (1, LONGEST)]
    points.append(Measured(TOKENS, SEQUENCES, TOKENS, 0, TOKENS * TOKEN))
    profile = Profile(
        fit(points, KvCost((), 1)), StepLimits(TOKENS, SEQUENCES, 1, 0), STEP, 0, 0, 0
    )
    memory = StepMemory(profile, Readings(), NoCap())
    ready = Ready(
        pid=0,
        device="cpu",
        dtype="float32",
        weight_bytes=0,
        context=LONGEST,
        load_s=0.0,
        cost=profile.cost,
        process_bytes=0,
        step_bytes=STEP,
        step_tokens=TOKENS,
    )
    engine = EncodeEngine(encoder, memory, profile, ServedModel(LONGEST, 50, RAM), ready)
    engine.grant(Grant(0, STEP))
    return engine


def _text(number: int, length: int, priority: int = 0, first: int = 1) -> Submit:
    ids = token_ids([first] + [2] * (length - 1))
    return Submit(number, ids, 0, Sampling(), priority=priority, encoding=Encoding())


def _all(engine: EncodeEngine) -> list[Output]:
    found: list[Output] = []
    while engine.has_work():
        found += engine.step()
    return found


def test_a_step_takes_the_first_in_line_and_whoever_fits_beside_it() -> None:
    encoder = FakeEncoder()
    engine = _engine(encoder)
    for number, length in enumerate((60, 50, 30, 10, 5)):
        engine.submit(_text(number, length))
    assert len(_all(engine)) == 5
    # 50 does not fit beside 60; 30 and 10 do. Equal lengths would be neighbours: shortest first.
    assert encoder.steps == [(3, 2, 0), (4, 1)]
    assert engine.status().prompt_tokens == 155


def test_a_step_has_no_more_texts_than_it_may() -> None:
    encoder = FakeEncoder()
    engine = _engine(encoder)
    for number in range(2 * SEQUENCES + 1):
        engine.submit(_text(number, 2))
    _all(engine)
    assert [len(step) for step in encoder.steps] == [SEQUENCES, SEQUENCES, 1]


def test_a_text_longer_than_a_step_goes_alone() -> None:
    encoder = FakeEncoder()
    engine = _engine(encoder)
    for number, length in enumerate((LONGEST, 5, 200)):
        engine.submit(_text(number, length))
    _all(engine)
    assert encoder.steps == [(0,), (1,), (2,)]


def test_the_queues_word_decides_who_is_first() -> None:
    encoder = FakeEncoder()
    engine = _engine(encoder)
    for number, priority in enumerate((1, 1, 0)):
        engine.submit(_text(number, 90, priority))
    engine.submit(_text(3, 90))
    engine.cancel(1)
    _all(engine)
    assert encoder.steps == [(2,), (3,), (0,)]


def test_without_memory_a_step_is_halved_and_grows_again() -> None:
    encoder = FakeEncoder(holds=25)
    engine = _engine(encoder)
    for number in range(SEQUENCES):
        engine.submit(_text(number, 10))
    outputs = engine.step()
    assert [output.finish for output in outputs] == [Finish.STOP] * 2
    assert encoder.steps == [(0, 1, 2, 3), (0, 1)]
    assert engine.status().oom_steps == 1
    encoder.holds = LONGEST
    for number in range(10, 14):
        engine.submit(_text(number, 10))
    _all(engine)
    assert [len(step) for step in encoder.steps[2:]] == [4, 2]


def test_a_text_that_fails_alone_is_failed_with_numbers_and_others_are_not() -> None:
    encoder = FakeEncoder(holds=50)
    engine = _engine(encoder)
    engine.submit(_text(0, 80))
    engine.submit(_text(1, 10))
    outputs = {output.id: output for output in _all(engine)}
    failure = outputs[0].failure
    assert failure is not None and failure.code == Overloaded.code
    assert failure.numbers is not None and failure.numbers["reason"] == "memory"
    assert outputs[1].vector == b"\x01"


def test_what_is_granted_bounds_a_step() -> None:
    encoder = FakeEncoder()
    engine = _engine(encoder)
    engine.grant(Grant(0, 40 * TOKEN))
    for number in range(3):
        engine.submit(_text(number, 20))
    engine.submit(_text(3, 60))
    outputs = {output.id: output for output in _all(engine)}
    assert all(len(step) < 3 for step in encoder.steps)
    failure = outputs[3].failure
    assert failure is not None and "its step does not fit" in failure.message


def test_what_is_not_a_number_is_an_error_of_that_text() -> None:
    encoder = FakeEncoder(broken={7})
    engine = _engine(encoder)
    engine.submit(_text(0, 5, first=7))
    engine.submit(_text(1, 5))
    outputs = {output.id: output for output in _all(engine)}
    failure = outputs[0].failure
    assert failure is not None and failure.code == InternalError.code
    assert "not a number" in failure.message
    assert outputs[1].finish is Finish.STOP


def test_what_can_never_run_is_refused() -> None:
    engine = _engine(FakeEncoder())
    with pytest.raises(ContextTooLong, match="301 tokens does not fit the 300"):
        engine.submit(_text(0, LONGEST + 1))
    with pytest.raises(ContextTooLong):
        engine.submit(Submit(0, token_ids(()), 0, Sampling(), encoding=Encoding()))
    with pytest.raises(BadRequest, match="token 50"):
        engine.submit(_text(0, 3, first=50))
    with pytest.raises(BadRequest, match="generates no text"):
        engine.submit(Submit(0, token_ids([1]), 1, Sampling()))
    assert not engine.has_work()


def test_a_probe_is_a_real_step_and_fails_with_it() -> None:
    encoder = FakeEncoder()
    engine = _engine(encoder)
    engine.probe()
    assert encoder.steps == [(-1,)]
    encoder.broken = {0}
    with pytest.raises(RuntimeError, match="no vector"):
        engine.probe()
    assert not engine.has_work()
