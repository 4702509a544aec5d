"""Tasks: progress, ends of every kind, and how many there may be."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import pytest

from penstock.errors import Overloaded, PullFailed
from penstock.server.observe.tasks import AT_ONCE, Task, Tasks

if TYPE_CHECKING:
    from collections.abc import Callable


def run_one(work: Callable[[Task], object]) -> dict[str, object]:
    async def run() -> dict[str, object]:
        tasks, ended = Tasks(), asyncio.Event()
        task = tasks.begin(tasks.new("pull", "hf:a/b", "bytes"), work, ended.set)
        await ended.wait()
        assert tasks.find(task.id) is task
        return tasks.rows()[0]

    return asyncio.run(run())


def test_progress_and_result_are_shown() -> None:
    def work(task: Task) -> object:
        task.report("files", 3, 7)
        return {"name": "b"}

    row = run_one(work)
    assert (row["phase"], row["done"], row["total"]) == ("files", 3, 7)
    assert (row["state"], row["result"], row["error"]) == ("done", {"name": "b"}, None)


@pytest.mark.parametrize(
    ("failure", "code"),
    [(PullFailed("no network"), "pull_failed"), (OSError("disk"), "internal_error")],
)
def test_a_failure_is_shown(failure: Exception, code: str) -> None:
    def work(_: Task) -> object:
        raise failure

    row = run_one(work)
    assert row["state"] == "failed"
    assert isinstance(row["error"], dict)
    assert row["error"]["code"] == code


def test_a_cancelled_one_ends_at_its_next_report() -> None:
    def work(task: Task) -> object:
        assert task.cancel()
        task.report("files", 1, 2)
        raise AssertionError

    row = run_one(work)
    assert (row["state"], row["done"]) == ("cancelled", 0)


def test_only_so_many_run_at_once_and_few_are_kept() -> None:
    async def run() -> None:
        tasks, go = Tasks(), threading.Event()
        for _ in range(AT_ONCE):
            tasks.begin(tasks.new("pull", "x", "bytes"), lambda _: go.wait(10))
        with pytest.raises(Overloaded):
            tasks.begin(tasks.new("pull", "x", "bytes"), lambda _: None)
        go.set()
        for _ in range(50):
            ended = asyncio.Event()
            while True:
                try:
                    tasks.begin(tasks.new("pull", "y", "bytes"), lambda _: None, ended.set)
                    break
                except Overloaded:
                    await asyncio.sleep(0.01)
            await ended.wait()
        assert len(tasks.rows()) <= 33

    asyncio.run(run())
