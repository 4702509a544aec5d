"""The engine's own bookkeeping, with an executor whose steps are in flight until taken."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import pytest

from penstock.memory.cost import Measured, fit
from penstock.memory.domains import RAM
from penstock.testing.fake_kv import FakeKv
from penstock.wire import Output, Sampling, Submit, frame, to_worker, token_ids
from penstock.worker.backends.caps import NoCap
from penstock.worker.core import engine as engine_module
from penstock.worker.core.backend import StepResult
from penstock.worker.core.engine import GenerateEngine
from penstock.worker.core.plan import StepLimits
from penstock.worker.core.profile import Profile, ServedModel
from penstock.worker.core.step_memory import StepMemory

if TYPE_CHECKING:
    from penstock.wire import Failure, Ready
    from penstock.worker.core.plan import Plan

MIB = 1 << 20


@dataclass
class Flight:
    """A step that a device works on."""

    plan: Plan
    taken: bool = False
    wants_host: bool = False
    late: set[int] = field(default_factory=set)

    def result(self) -> StepResult:
        self.taken = True
        ids = [piece.request_id for piece in self.plan.slices]
        return StepResult({number: Output(number, tokens=[7]) for number in ids})


class Device:
    """An executor whose steps are in flight until they are taken."""

    crowded = waits = False
    held: tuple[int, ...] = ()

    def __init__(self) -> None:
        self.flights: list[Flight] = []

    def launch(self, plan: Plan, after: object) -> Flight:
        self.flights.append(Flight(plan))
        return self.flights[-1]

    def admit(self, request: Submit) -> None:
        pass

    def ready(self, request_id: int) -> bool:
        return True

    def failure(self, request_id: int) -> Failure | None:
        return None

    def poll(self, wait_s: float = 0.0) -> None:
        pass

    def forget(self, request_id: int) -> None:
        pass

    def out_of_memory(self, error: BaseException) -> bool:
        return isinstance(error, MemoryError)


class Meter:
    """Memory of which nothing is ever held."""

    includes_host = True

    def held(self) -> int:
        return 0

    def begin_step(self, rows: int) -> None:
        pass

    def peak(self) -> int:
        return 0

    def drop_caches(self) -> None:
        pass


class Clock:
    now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(engine_module, "time", clock)
    return clock


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def engine(device: Device, clock: Clock) -> GenerateEngine:
    kv = FakeKv(64, 16)
    limits = StepLimits(64, 4, 16, 8)
    cost = fit([Measured(64, 4, 256, 8, MIB)], kv.cache.cost)
    profile = Profile(cost, limits, 8 * MIB, 0, kv.cache.limit_bytes, 0)
    memory = StepMemory(profile, Meter(), NoCap())
    served = ServedModel(window=256, vocabulary=100, domain=RAM)
    return GenerateEngine(device, kv.cache, memory, profile, served, cast("Ready", None))


def ask(number: int) -> Submit:
    return Submit(number, prompt=[1, 2, 3], max_tokens=50, sampling=Sampling(temperature=0))


def test_a_step_in_flight_is_work_until_it_is_taken(
    engine: GenerateEngine, device: Device, clock: Clock
) -> None:
    engine.submit(ask(1))
    engine.step()
    assert not device.flights[0].taken
    clock.now += 0.01
    engine.cancel(1)
    assert engine.has_work(), "the loop would sleep with a step in flight"
    assert engine.step() == [], "nobody asks for it any more"
    assert device.flights[0].taken
    assert engine.status().step_s == pytest.approx(0.01)
    assert not engine.has_work()


def test_idle_time_is_no_part_of_a_steps_length(
    engine: GenerateEngine, device: Device, clock: Clock
) -> None:
    engine.submit(ask(1))
    engine.step()
    clock.now += 0.01
    engine.cancel(1)
    while engine.has_work():  # as the loop does, until it waits for a message
        engine.step()
    clock.now += 3600.0
    engine.submit(ask(2))
    engine.step()
    assert engine.status().step_s < 1, "an hour without work was taken for a step"
    clock.now += 0.02
    outputs = engine.step()
    assert [output.id for output in outputs] == [2]
    assert engine.status().step_s == pytest.approx(0.02)
    assert engine.status().steps == 2
    engine.check()


def test_choices_of_one_prompt_have_its_tokens_and_their_ends_in_common(
    engine: GenerateEngine,
) -> None:
    how = Sampling(temperature=0)
    for number in (1, 2):
        wanted = Submit(number, token_ids([1, 2, 3]), 50, how, token_ids(range(90, 110)))
        asked = to_worker.decode(frame(wanted)[4:])
        assert isinstance(asked, Submit)
        engine.submit(asked)
    one, other = (engine._scheduler.find(number) for number in (1, 2))
    assert one is not None
    assert other is not None
    assert one.request.prompt is other.request.prompt
    assert one.request.stop_token_ids is other.request.stop_token_ids
    assert one.stops is other.stops
    assert one.stops == set(range(90, 100))
