"""How many threads a step uses beside programs that want some of the cores."""

from __future__ import annotations

import os
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.worker.backends.cpu.thread_count import (
    LOOK_S,
    PROVEN_S,
    CountedSteps,
    LinuxCores,
    ThreadCount,
)

STEP_S = 0.02


class Machine:
    """Cores of which other programs use `busy`; steps take their time on it."""

    def __init__(self, cores: int) -> None:
        self.cores = cores
        self.busy = 0.0
        self.now_s = self.waits_s = self.free_s = 0.0
        self.applied: list[int] = []
        self.threads = ThreadCount(cores, self, self.applied.append, lambda: self.now_s)

    def waited_s(self) -> float:
        return self.waits_s

    def idle_s(self) -> float:
        return self.free_s

    def steps(self, seconds: float) -> None:
        for _ in range(round(seconds / STEP_S)):
            self.threads.begin()
            self.now_s += STEP_S
            wanted = self.threads.now + self.busy
            self.waits_s += STEP_S * min(self.threads.now, max(0.0, wanted - self.cores))
            self.free_s += STEP_S * max(0.0, self.cores - wanted)
            self.threads.end()


def test_alone_all_cores_are_used() -> None:
    machine = Machine(4)
    machine.steps(30)
    assert machine.threads.now == 4
    assert machine.applied == []


@pytest.mark.parametrize(("cores", "busy", "threads"), [(2, 1, 1), (8, 3, 5), (8, 8, 1), (2, 2, 1)])
def test_threads_leave_cores_to_others_and_come_back(cores: int, busy: int, threads: int) -> None:
    machine = Machine(cores)
    machine.busy = busy
    machine.steps(0.5)
    assert machine.threads.now == threads
    machine.steps(10)
    assert machine.threads.now == threads
    machine.busy = 0
    machine.steps(LOOK_S * 2 + 0.2)
    assert machine.threads.now == cores


def test_a_program_that_comes_and_goes_is_looked_at_less_and_less() -> None:
    """What changes faster than it is looked at is not followed at every turn."""
    machine = Machine(2)
    for _ in range(60):
        machine.busy = 1
        machine.steps(0.5)
        machine.busy = 0
        machine.steps(1.5)
    assert len(machine.applied) < 60
    machine.steps(40)
    assert machine.threads.now == 2
    machine.steps(PROVEN_S)
    machine.busy = 1
    machine.steps(0.5)
    machine.busy = 0
    machine.steps(LOOK_S * 2 + 0.2)
    assert machine.threads.now == 2  # it is quick again


def test_after_a_pause_the_first_step_knows_that_cores_were_idle() -> None:
    machine = Machine(2)
    machine.busy = 1
    machine.steps(1)
    machine.now_s += 60
    machine.free_s += 2 * 60
    machine.busy = 0
    machine.steps(STEP_S)
    assert machine.threads.now == 2


@given(st.integers(1, 9), st.lists(st.tuples(st.floats(0, 12), st.floats(0, 5)), max_size=8))
def test_never_none_and_never_more_than_there_may_be(
    cores: int, phases: list[tuple[float, float]]
) -> None:
    machine = Machine(cores)
    for busy, seconds in phases:
        machine.busy = busy
        machine.steps(seconds)
    assert all(1 <= threads <= cores for threads in machine.applied)


class Lock:
    """Notes what is done with it."""

    crowded = True

    def __init__(self) -> None:
        self.done: list[str] = []

    def take(self) -> bool:
        self.done.append("take")
        return False

    def give(self) -> None:
        self.done.append("give")


def test_the_lock_is_passed_on() -> None:
    machine, lock = Machine(2), Lock()
    steps = CountedSteps(lock, machine.threads)
    assert steps.crowded
    assert steps.take() is False
    steps.give()
    assert lock.done == ["take", "give"]


@pytest.mark.skipif(not LinuxCores.readable(), reason="no /proc with schedstat")
def test_readings_of_this_machine() -> None:
    cores = LinuxCores()
    begun, waited, idle = time.monotonic(), cores.waited_s(), cores.idle_s()
    time.sleep(0.1)
    assert cores.waited_s() >= waited
    idled = cores.idle_s() - idle
    tick, passed = 0.02, time.monotonic() - begun
    assert 0 <= idled <= len(os.sched_getaffinity(0)) * (passed + tick)
