"""Who is taken to hang, and who only takes long."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.memory.events import Events
from penstock.server.residency import watchdog as module
from penstock.server.residency.watchdog import Watchdog

HANG_S = 60.0


class World:
    """One worker under watch, looked at every half second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, loading: bool = False) -> None:
        self.now = 0.0
        self.cpu_s: float | None = 1.0
        self.ended: list[str] = []
        self.events = Events()
        monkeypatch.setattr(module, "read_cpu_s", lambda pid: self.cpu_s)
        ready = SimpleNamespace(load_s=3.0, image_s=0.0)
        self.client = SimpleNamespace(
            expects=True, longest_step_s=0.5, ready=ready, open_requests=1
        )
        self.worker: Any = SimpleNamespace(
            pid=7,
            alive=True,
            end_expected=False,
            words_heard=0,
            ready=SimpleNamespace(done=lambda: not loading),
            client=self.client,
            hang="",
            end_hung=self.end,
        )
        self.dog = Watchdog(HANG_S, self.events, lambda: self.now)
        self.look()

    def end(self, why: str) -> None:
        self.worker.hang = why
        self.ended.append(why)

    def look(self, after_s: float = 0.5) -> None:
        self.now += after_s
        self.dog.read([self.worker])
        self.dog.judge({"m": self.worker})

    def wait(self, seconds: float) -> bool:
        """Look for so long; whether it was ended."""
        for _ in range(int(seconds / 0.5)):
            self.look()
        return bool(self.ended)


def test_silence_with_work_to_do_is_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    assert not world.wait(HANG_S - 1)
    assert world.wait(2)
    assert "no step for 60 s" in world.ended[0]
    [row] = world.events.rows()
    assert (row["event"], row["model"], row["pid"], row["requests"]) == ("hang", "m", 7, 1)


def test_every_word_is_a_sign_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    for _ in range(5):
        assert not world.wait(HANG_S - 1)
        world.worker.words_heard += 1


@pytest.mark.parametrize("measured", ["step", "load", "image"])
def test_long_steps_are_measured_by_the_longest(
    monkeypatch: pytest.MonkeyPatch, measured: str
) -> None:
    world = World(monkeypatch)
    if measured == "step":
        world.client.longest_step_s = 50.0
    elif measured == "load":
        world.client.ready.load_s = 50.0
    else:
        world.client.ready.image_s = 50.0
    assert not world.wait(4 * 50 - 1)
    assert world.wait(2)


def test_an_idle_worker_may_be_silent_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.client.expects = False
    assert not world.wait(10 * HANG_S)
    world.client.expects = True  # the silence begins with the work
    assert not world.wait(HANG_S - 1)


def test_time_in_which_the_server_itself_stood_still_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch)
    world.look(after_s=3600)
    assert not world.wait(HANG_S - 20)


def test_a_load_that_computes_without_a_word_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, loading=True)
    for _ in range(20):
        assert not world.wait(HANG_S - 1)
        assert world.cpu_s is not None
        world.cpu_s += 0.01
    assert world.wait(HANG_S + 1)
    assert "no progress" in world.ended[0]


def test_a_load_of_which_nothing_can_be_read_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, loading=True)
    world.cpu_s = None
    assert not world.wait(10 * HANG_S)


def test_one_that_ends_anyway_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.worker.end_expected = True
    assert not world.wait(10 * HANG_S)
