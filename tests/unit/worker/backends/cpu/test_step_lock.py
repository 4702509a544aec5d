"""The step lock when nobody else wants it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.worker.backends.cpu.step_lock import CpuStepLock

if TYPE_CHECKING:
    import pytest


def test_a_turn_that_nobody_else_wants_is_had_at_once() -> None:
    shared = CpuStepLock()
    for _ in range(100):
        assert shared.take()
        shared.give()
    assert not shared.crowded


def test_without_such_locks_everybody_computes_when_they_like(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("penstock.worker.backends.cpu.step_lock.ctypes.CDLL", lambda _: object())
    shared = CpuStepLock()
    assert not shared.take()
    assert not shared.crowded
