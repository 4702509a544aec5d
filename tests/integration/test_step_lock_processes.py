"""The step lock between processes: real forks, real deaths."""

from __future__ import annotations

import os
import signal
import time
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING

from penstock.worker.backends.cpu import step_lock
from penstock.worker.backends.cpu.step_lock import CpuStepLock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import pytest


@contextmanager
def forked(act: Callable[[], None]) -> Iterator[int]:
    """A child that does `act`, ended with the block."""
    pid = os.fork()
    if pid == 0:
        try:
            act()
        finally:
            os._exit(0)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@contextmanager
def holder(shared: CpuStepLock) -> Iterator[int]:
    """A child that has the turn and keeps it."""
    told, tell = os.pipe()

    def hold() -> None:
        os.write(tell, b"y" if shared.take() else b"n")
        time.sleep(60)

    with forked(hold) as pid:
        assert os.read(told, 1) == b"y"
        yield pid
    os.close(told)
    os.close(tell)


def test_processes_compute_one_after_the_other_and_in_turn() -> None:
    shared = CpuStepLock()
    told, tell = os.pipe()
    ready, say_ready = os.pipe()
    may_begin, begin_both = os.pipe()

    def work(name: bytes) -> None:
        os.write(say_ready, name)
        os.read(may_begin, 1)
        for _ in range(20):
            taken = shared.take()
            os.write(tell, name.upper() if taken else b"!")
            time.sleep(0.005)
            os.write(tell, name)
            shared.give()

    with forked(lambda: work(b"a")), forked(lambda: work(b"b")):
        for _ in range(2):
            os.read(ready, 1)
        os.write(begin_both, b"go")
        seen = b""
        while len(seen) < 80:
            seen += os.read(told, 80)
    had = [seen[place : place + 2] for place in range(0, 80, 2)]
    assert set(had) == {b"Aa", b"Bb"}, seen  # nobody began before the other had ended
    begin = max(had.index(b"Aa"), had.index(b"Bb"))
    end = min(40 - had[::-1].index(b"Aa"), 40 - had[::-1].index(b"Bb"))
    while_both = had[begin:end]
    assert len(while_both) >= 10, seen
    swaps = sum(one != other for one, other in pairwise(while_both))
    assert swaps >= len(while_both) - 3, seen  # whoever has had the turn comes behind


def test_the_turn_of_a_process_that_died_is_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_lock, "PATIENCE_S", 60.0)
    shared = CpuStepLock()
    with holder(shared):
        pass
    for _ in range(2):  # and it is whole afterwards
        begun = time.monotonic()
        assert shared.take()
        assert time.monotonic() - begun < step_lock.PATIENCE_S / 2  # it did not wait
        shared.give()


def test_who_has_waited_long_enough_goes_on_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_lock, "PATIENCE_S", 1.5)
    monkeypatch.setattr(step_lock, "_BUSY_S", 60.0)
    shared = CpuStepLock()
    assert not shared.crowded
    with holder(shared) as pid:
        os.kill(pid, signal.SIGSTOP)
        begun = time.monotonic()
        assert not shared.take()
        assert 1.5 <= time.monotonic() - begun < 10.0
        assert shared.crowded
        monkeypatch.setattr(step_lock, "PATIENCE_S", 60.0)
        begun = time.monotonic()
        assert not shared.take()  # nor does it wait again at once
        assert time.monotonic() - begun < 30
    time.sleep(1.6)
    assert shared.take()
    shared.give()


def test_what_went_wrong_in_a_step_does_not_keep_the_turn() -> None:
    shared = CpuStepLock()
    assert shared.take()
    assert shared.take()  # as if it had not been given back
    shared.give()
    shared.give()
    with holder(shared):  # asserts that it has it
        pass


def test_who_has_not_computed_for_long_knows_that_others_do() -> None:
    shared = CpuStepLock()
    with holder(shared):
        assert shared.crowded  # before it has wanted a turn itself
