"""Threads that come after others, and are as before afterwards."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from penstock.worker import priority

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="nice is of a process elsewhere")


def nice(thread: int = 0) -> int:
    return os.getpriority(os.PRIO_PROCESS, thread)


def test_threads_that_a_load_starts_are_as_usual_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usual = nice()
    if not priority._can_return(usual):
        pytest.skip("this user may not raise a priority again")
    loading = min(usual + priority.LOADING_NICE, 19)  # the lowest priority there is
    over = threading.Event()
    started = threading.Thread(target=over.wait)
    with priority.behind_others():
        assert nice() == loading
        started.start()
        assert started.native_id is not None
        assert nice(started.native_id) == loading
    assert nice() == nice(started.native_id) == usual
    over.set()
    started.join()
    monkeypatch.setattr(priority, "_can_return", lambda usual: False)
    with priority.behind_others():
        assert nice() == usual
