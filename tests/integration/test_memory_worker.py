"""A worker's memory in real processes: caps, real allocation failures, grants that move, sheds."""

from __future__ import annotations

import os
import platform
import random
import socket
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import msgspec
import pytest

from penstock.memory.readings.control_group import remove_group
from penstock.memory.readings.gauge import read_process
from penstock.server.processes.fork_server_client import WORKER_ENVIRONMENT
from penstock.testing import tiny
from penstock.testing.exactness import Mode, poisoned_blocks, run, start_engine
from penstock.testing.measured_steps import measured_steps
from penstock.wire import (
    Cancel,
    Finish,
    FrameReader,
    Freed,
    Grant,
    LoadFailed,
    LoadSpec,
    Output,
    Ready,
    Sampling,
    Shed,
    Shutdown,
    Status,
    Step,
    Submit,
    ToWorker,
    frame,
    from_worker,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.testing.envelope import MeasuredStep
    from penstock.wire import FromWorker

pytestmark = pytest.mark.usefixtures("one_thread")

MIB = 1 << 20
HERE = Path(__file__).parent
# Wide enough that a step of 256 rows takes mappings of its own, which a limit can refuse.
WIDE = {"hidden_size": 256, "intermediate_size": 6144, "num_hidden_layers": 2}
SERVE = """
import socket, sys, msgspec, torch
torch.set_num_threads(1)
from penstock.wire import LoadSpec
from penstock.worker import loop
spec = msgspec.json.decode(sys.argv[2], type=LoadSpec)
sys.exit(loop.run(socket.socket(fileno=int(sys.argv[1])), spec, sys.argv[3]))
"""


@dataclass
class Worker:
    """The server's end of a worker, without a server."""

    process: subprocess.Popen[bytes]
    sock: socket.socket
    frames: FrameReader = field(default_factory=FrameReader)
    arrived: list[FromWorker] = field(default_factory=list)
    status: Status | None = None

    def send(self, message: ToWorker) -> None:
        self.sock.sendall(frame(message))

    def next(self) -> FromWorker:
        while not self.arrived:
            data = self.sock.recv(1 << 18)
            assert data, "the worker died"
            self.arrived += [from_worker.decode(body) for body in self.frames.feed(data)]
        message = self.arrived.pop(0)
        if isinstance(message, Step):
            self.status = message.status
        return message

    def wait_for(self, kind: type[FromWorker]) -> FromWorker:
        while not isinstance(message := self.next(), kind):
            pass
        return message

    def answers(self, count: int) -> dict[int, Output]:
        """All tokens of the next `count` requests to end, with how they ended."""
        merged: dict[int, Output] = {}
        while sum(output.finish is not None for output in merged.values()) < count:
            message = self.next()
            for output in message.outputs if isinstance(message, Step) else ():
                known = merged.setdefault(output.id, Output(output.id))
                known.tokens += output.tokens
                known.finish, known.failure = output.finish, output.failure
        return merged


@contextmanager
def worker(
    folder: Path, engine: str = "penstock.worker.loading", tight: str = "never", **more: object
) -> Iterator[tuple[Worker, Ready]]:
    options = {"memory_bytes": 160 * MIB, "step_tokens": 256, "step_sequences": 8, **more}
    spec = LoadSpec(folder.name, str(folder), "cpu", "float32", threads=1, **options)  # type: ignore[arg-type]
    ours, theirs = socket.socketpair()
    ours.settimeout(120)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", SERVE, str(theirs.fileno()), msgspec.json.encode(spec), engine],
            pass_fds=[theirs.fileno()],
            env={
                **os.environ,
                **WORKER_ENVIRONMENT,
                "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]),
                "PENSTOCK_TIGHT": tight,
            },
        )
    with ours, process:
        end = Worker(process, ours)
        group: str | None = None
        try:
            ready = end.wait_for(Ready | LoadFailed)  # type: ignore[arg-type]
            assert isinstance(ready, Ready), ready
            group = ready.outer_cap
            yield end, ready
            end.send(Shutdown())
            assert process.wait(30) == 0
        finally:
            process.kill()
            process.wait()
            if group is not None:  # what a server does when it reaps its worker
                assert remove_group(process.pid)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save("llama", tmp_path_factory.mktemp("models") / "wide", **WIDE)


def greedy(number: int, length: int, count: int, **more: object) -> Submit:
    prompt = tiny.prompt(length, number)
    return Submit(number, prompt, count, Sampling(temperature=0), **more)  # type: ignore[arg-type]


REQUESTS = ((1, 300, 12), (2, 40, 20), (3, 150, 16))


def ask_all(end: Worker) -> dict[int, Output]:
    for number, length, count in REQUESTS:
        end.send(greedy(number, length, count))
    return end.answers(len(REQUESTS))


@pytest.fixture(scope="module")
def undisturbed(wide: Path) -> dict[int, list[int]]:
    with worker(wide, "tight_engine") as (end, _):
        answers = ask_all(end)
        assert end.status is not None and end.status.oom_steps == 0
    assert all(answer.finish is Finish.LENGTH for answer in answers.values())
    return {number: answer.tokens for number, answer in answers.items()}


def test_a_real_allocation_failure_is_retried_and_changes_no_token(
    wide: Path, undisturbed: dict[int, list[int]]
) -> None:
    with worker(wide, "tight_engine", tight="once") as (end, _):
        answers = ask_all(end)
        assert end.status is not None
        assert end.status.oom_steps == 1, "memory did not run out: the test tests nothing"
    assert {number: answer.tokens for number, answer in answers.items()} == undisturbed


def test_a_request_that_never_finds_memory_fails_alone(
    wide: Path, undisturbed: dict[int, list[int]]
) -> None:
    with worker(wide, "tight_engine", tight="1") as (end, _):
        answers = ask_all(end)
        failed = answers.pop(1)
        assert failed.finish is Finish.ERROR and failed.failure is not None
        assert failed.failure.code == "overloaded"
        assert failed.failure.numbers is not None and failed.failure.numbers["reason"] == "memory"
        assert {number: answer.tokens for number, answer in answers.items()} == {
            number: tokens for number, tokens in undisturbed.items() if number != 1
        }
        end.send(greedy(9, 40, 4))  # the model lives on
        assert end.answers(1)[9].finish is Finish.LENGTH


def test_a_worker_stays_within_its_grant_and_gives_memory_back(wide: Path) -> None:
    with worker(wide, kv_tokens=None) as (end, ready):
        assert ready.kv_bytes + ready.step_bytes <= 160 * MIB
        held = read_process(end.process.pid)
        assert held is not None
        for number in range(1, 9):
            end.send(greedy(number, 400, 100))
        highest = 0
        answers: dict[int, Output] = {}
        while len(answers) < 8:
            message = end.next()
            reading = read_process(end.process.pid)
            assert reading is not None
            highest = max(highest, reading.private_bytes)
            for output in message.outputs if isinstance(message, Step) else ():
                assert output.failure is None
                if output.finish is not None:
                    answers[output.id] = output
        assert highest <= ready.process_bytes + ready.kv_bytes + ready.step_bytes
        end.send(Shed(ready.kv_bytes // 2))
        freed = end.wait_for(Freed)
        assert isinstance(freed, Freed)
        assert freed.kv_bytes <= ready.kv_bytes // 2 + ready.kv_bytes // 64
        end.send(Grant(ready.kv_bytes, ready.step_bytes))
        freed = end.wait_for(Freed)
        assert isinstance(freed, Freed) and freed.kv_bytes == ready.kv_bytes
        end.send(greedy(20, 400, 4))
        assert end.answers(1)[20].finish is Finish.LENGTH


def test_a_second_load_applies_the_stored_profile(wide: Path, tmp_path: Path) -> None:
    with worker(wide, profile_dir=str(tmp_path)) as (_, first):
        pass
    assert len(list(tmp_path.iterdir())) == 1
    with worker(wide, profile_dir=str(tmp_path)) as (end, second):
        assert second.cost == first.cost
        end.send(greedy(1, 40, 4))
        assert end.answers(1)[1].finish is Finish.LENGTH


def test_a_step_grant_too_small_for_the_smallest_step_fails_requests_not_the_worker(
    wide: Path,
) -> None:
    with worker(wide) as (end, ready):
        end.send(Grant(ready.kv_bytes, 1 << 10))
        end.wait_for(Freed)
        end.send(greedy(1, 100, 4))
        failed = end.answers(1)[1]
        assert failed.failure is not None and failed.failure.code == "overloaded"
        end.send(Grant(ready.kv_bytes, ready.step_bytes))
        end.wait_for(Freed)
        end.send(greedy(2, 100, 4))
        end.send(Cancel(77))
        assert end.answers(1)[2].finish is Finish.LENGTH


# In this process: the same engine, its arena moved about while requests run.

PROMPTS = [tiny.prompt(length, seed) for seed, length in enumerate((90, 17, 140, 60))]


def test_grants_that_move_under_running_requests_change_no_token(tmp_path: Path) -> None:
    folder = tiny.save("llama", tmp_path / "llama")
    mode = Mode("moving", step_tokens=64, step_sequences=4)
    expected = run(start_engine(folder, mode, memory_bytes=24 * MIB), PROMPTS, 40)
    moved = random.Random(1)
    with poisoned_blocks():
        engine = start_engine(folder, mode, memory_bytes=24 * MIB)
        most, step_bytes = engine.kv.limit_bytes, engine.ready().step_bytes
        answers: list[list[int]] = [[] for _ in PROMPTS]
        for number, prompt in enumerate(PROMPTS):
            engine.submit(Submit(number, list(prompt), 40, Sampling(temperature=0)))
        freed = 0
        while engine.has_work():
            for output in engine.step():
                assert output.failure is None
                answers[output.id] += output.tokens
            kv_bytes = moved.choice([0, most // 8, most // 3, most])
            freed += engine.grant(Grant(kv_bytes, step_bytes)).bytes
            if moved.random() < 0.2:
                engine.shed(most // 4)
            engine.check()
            assert engine.status().kv_committed_bytes <= engine.kv.limit_bytes
    assert answers == expected
    assert freed > 0 and engine.status().preemptions > 0


def test_memory_that_is_never_found_ends_requests_and_not_the_loop(tmp_path: Path) -> None:
    engine = start_engine(tiny.save("llama", tmp_path / "llama"), Mode("m"), memory_bytes=64 * MIB)
    for number, prompt in enumerate(PROMPTS):
        engine.submit(Submit(number, list(prompt), 4, Sampling(temperature=0)))
    plan = engine._scheduler.plan

    def failing(*_: object) -> NoReturn:
        raise MemoryError

    engine._scheduler.plan = failing  # type: ignore[method-assign, assignment]
    outputs = engine.step()
    assert sorted(output.id for output in outputs) == list(range(len(PROMPTS)))
    assert all(output.failure and output.failure.code == "overloaded" for output in outputs)
    engine._scheduler.plan = plan  # type: ignore[method-assign]
    engine.check()
    assert not engine.has_work()
    (tokens,) = run(engine, [PROMPTS[1]], 4)  # in the KV that was found before
    assert len(tokens) == 4


def _above(steps: list[MeasuredStep]) -> dict[str, MeasuredStep]:
    return {step.shape: step for step in steps if step.measured_bytes > step.predicted_bytes}


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
def test_the_envelope_is_true_and_tight_for_shapes_that_were_not_profiled(
    architecture: str, tmp_path: Path
) -> None:
    # The margin for noise does not shrink with the model.
    changes = WIDE | {"intermediate_size": 12288}
    if architecture == "qwen3_moe":
        changes |= {"moe_intermediate_size": 6144, "num_experts": 4}
    folder = tiny.save(architecture, tmp_path / architecture, **changes)
    spec = LoadSpec(
        *(folder.name, str(folder), "cpu", "float32", 256 * MIB),
        step_tokens=512,
        step_sequences=16,
        threads=1,
        capped=False,
    )
    found = measured_steps(spec, 60)
    # Where a heap puts things is partly chance: in a fresh process the same shape is not above.
    if above := _above(found):
        assert len(above) <= 3, above
        assert not above.keys() & _above(measured_steps(spec, 60)).keys()
    # Steps of 60 and of 25 MB, beside which the margin for noise counts differently.
    most = 1.3 if architecture == "llama" else 1.5
    ratios = sorted(step.predicted_bytes / step.measured_bytes for step in found[-6:])
    assert ratios[3] <= most, found[-6:]


_REPLACED = """
import random, torch
from penstock.worker.backends.cpu.meter import RamMeter
torch.set_num_threads(1)
meter, chance = RamMeter(), random.Random(1)
held = [torch.ones(size) for size in [390_000, 390_000, 390_000, 130_000, 1_200_000] * 4]
meter.mark()
before = meter.held()
for _ in range(3000):
    place = chance.randrange(len(held))
    size = held[place].numel()
    held[place] = None
    held[place] = torch.ones(size)
print(meter.peak() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
def test_a_tensor_finds_the_place_of_the_one_before() -> None:
    """22 to 24 MiB of holes; with glibc's lists of small free pieces it would be 53 to 56."""
    done = subprocess.run(
        [sys.executable, "-c", _REPLACED],
        stdout=subprocess.PIPE,
        timeout=120,
        check=True,
        env={**os.environ, **WORKER_ENVIRONMENT},
    )
    assert int(done.stdout) < 36 * MIB
