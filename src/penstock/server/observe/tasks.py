"""Long work that an operator has begun: it runs in a thread, tells how far it is, can be ended.

A task's work reports its progress now and then; one that is to end raises there. Knows nothing of
what the work is.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from penstock.errors import Cancelled, InternalError, Overloaded, PenstockError

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)

AT_ONCE = 2
_KEPT = 32


class State(Enum):
    """Where a task is."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(slots=True)
class Task:
    """One piece of work."""

    id: str
    kind: str
    subject: str  # what it is done to
    unit: str
    state: State = State.RUNNING
    phase: str = ""
    done: int = 0
    total: int = 0
    began_at: float = field(default_factory=time.time)
    ended_at: float | None = None
    result: object = None
    error: PenstockError | None = None
    _ending: threading.Event = field(default_factory=threading.Event)

    def report(self, phase: str, done: int, total: int) -> None:
        """How far it is; called by the work, in its thread. Raises if it is to end."""
        if self._ending.is_set():
            raise Cancelled(f"The task {self.id} ({self.kind} {self.subject}) was cancelled.")
        self.phase, self.done, self.total = phase, done, total

    def cancel(self) -> bool:
        """Have it end at its next report; False if it has ended."""
        self._ending.set()
        return self.state is State.RUNNING

    def end(self, error: PenstockError | None) -> None:
        """It is over."""
        self.ended_at, self.error = time.time(), error
        if error is None:
            self.state = State.DONE
        else:
            self.state = State.CANCELLED if isinstance(error, Cancelled) else State.FAILED

    def row(self) -> dict[str, object]:
        """What `/admin/api/tasks` shows."""
        error = self.error
        return {
            "id": self.id,
            "kind": self.kind,
            "subject": self.subject,
            "state": self.state.value,
            "phase": self.phase,
            "done": self.done,
            "total": self.total,
            "unit": self.unit,
            "began_at": round(self.began_at, 3),
            "ended_at": None if self.ended_at is None else round(self.ended_at, 3),
            "result": self.result,
            "error": None if error is None else {"message": error.message, "code": error.code},
        }


class Tasks:
    """Those of one server; the oldest that have ended are forgotten."""

    def __init__(self) -> None:
        self._tasks: dict[str, Task] = {}
        self._numbers = itertools.count(1)
        self._running: set[asyncio.Task[None]] = set()

    def begin(
        self, task: Task, work: Callable[[Task], object], after: Callable[[], None] = lambda: None
    ) -> Task:
        """Have the work done in a thread, and `after` called on the event loop when it is over;
        `Overloaded` if too much is being done already."""
        if len(self._running) >= AT_ONCE:
            raise Overloaded(
                f"{AT_ONCE} tasks run already, which is the most at a time; wait for one or "
                "cancel it.",
                retry_after_s=30,
            )
        self._tasks[task.id] = task
        ended = [old.id for old in self._tasks.values() if old.state is not State.RUNNING]
        for old in ended[: max(0, len(self._tasks) - _KEPT)]:
            del self._tasks[old]
        running = asyncio.get_running_loop().create_task(_run(task, work))
        self._running.add(running)  # the loop itself keeps tasks only weakly
        running.add_done_callback(self._running.discard)
        running.add_done_callback(lambda _: after())
        return task

    def new(self, kind: str, subject: str, unit: str) -> Task:
        """A task that has not begun."""
        return Task(f"task-{next(self._numbers)}", kind, subject, unit)

    def find(self, task_id: str) -> Task | None:
        """One of those that are kept."""
        return self._tasks.get(task_id)

    def rows(self) -> list[dict[str, object]]:
        """All that are kept, the latest last."""
        return [task.row() for task in self._tasks.values()]

    def close(self) -> None:
        """Tell all of them to end; nobody waits for it."""
        for task in self._tasks.values():
            task.cancel()


async def _run(task: Task, work: Callable[[Task], object]) -> None:
    error: PenstockError | None = None
    try:
        task.result = await asyncio.to_thread(work, task)
    except PenstockError as failure:
        error = failure
    except OSError as failure:
        error = InternalError(f"The task {task.id} ({task.kind}) failed: {failure}.")
    except Exception as failure:  # the edge of a task of its own: the operator looks at its row
        log.exception("a task failed", extra={"fields": {"id": task.id, "kind": task.kind}})
        error = InternalError(f"The task {task.id} failed by our own fault: {failure!r}.")
    task.end(error)
