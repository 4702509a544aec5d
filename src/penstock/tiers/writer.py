"""Blocks on their way to the disk: a queue bounded in bytes, and the thread that empties it.

Offering never waits. Every accepted offer ends in exactly one call of its `release`, from whatever
thread ends it, and the owner must leave the bytes as they are until then. A release may offer, but
must not wait for the writer.

    queued ──▶ writing ──▶ saved         (or present, no room, failed)
       └──────────┴──▶ cancelled         when it is closed

A disk that fails costs hits, not answers: what is queued is let go, offers are refused for a
while, longer each time, then tried again. Each change for the worse or better is one event.
Whatever else goes wrong in the thread, for want of memory say, is taken for such a failure.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.tiers.store import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.tiers.disk import DiskTier
    from penstock.tiers.format import Payload

    Release = Callable[[Outcome], None]

log = logging.getLogger(__name__)

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
_REFRESH_S = 60.0


@dataclass(slots=True, eq=False)
class _Item:
    key: bytes
    payloads: Sequence[Payload]
    release: Release
    size: int
    offered_ns: int
    released: bool = False


class Writer:
    """Saves what it is offered, in order, in a thread of its own."""

    def __init__(
        self,
        tier: DiskTier,
        queue_bytes: int,
        notify: Callable[[str], None] = lambda event: None,
        *,
        first_pause_s: float = _FIRST_PAUSE_S,
        refresh_s: float = _REFRESH_S,
    ) -> None:
        self._tier = tier
        self._limit = queue_bytes
        self._notify = notify
        self._refresh_s = refresh_s
        self._first_pause_s = first_pause_s
        self._changed = threading.Condition()
        self._queue: OrderedDict[bytes, _Item] = OrderedDict()
        self._current: _Item | None = None
        self._bytes = 0
        self._closed = False
        self._pause_s = 0.0  # above zero while the disk fails
        self._retry_at = 0.0
        self._refresh_at = time.monotonic() + refresh_s
        # What has been told of and still holds.
        self._dropping = self._no_room = False
        self._failing_with: str | None = None
        self._counts: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._run, name="disk-writer", daemon=True)
        self._thread.start()
        if tier.problem:
            notify(tier.problem)

    def offer(
        self,
        key: bytes,
        payloads: Sequence[Payload],
        release: Release,
        since_ns: int | None = None,
    ) -> bool:
        """Take it for saving, if there is room in the queue and it is not there or on its way. A
        clear after `since_ns`, now unless given, is one of this block too."""
        size = sum(payload.data.nbytes for payload in payloads)
        with self._changed:
            if self._closed or time.monotonic() < self._retry_at:
                self._counts["refused"] += 1
                return False
            if self._tier.contains(key) or self._on_its_way(key):
                return False
            if self._bytes + size <= self._limit:
                self._queue[key] = _Item(key, payloads, release, size, since_ns or time.time_ns())
                self._bytes += size
                self._counts["accepted"] += 1
                self._changed.notify_all()
                return True
            self._counts["dropped"] += 1
            told, self._dropping = self._dropping, True
        if not told:
            self._tell(
                f"The disk cache cannot keep up: more than {self._limit} bytes would wait to be "
                "written, and further blocks are not kept until there is room."
            )
        return False

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that was accepted has ended; False if the time was too short."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._queue and self._current is None, timeout_s
            )

    def close(self, timeout_s: float = 5.0) -> bool:
        """Cancel what waits or is being written and end the thread; False if it hangs in a system
        call.

        What must be kept is flushed before. A thread that hangs still holds one item, and
        releases it when the disk answers.
        """
        with self._changed:
            self._closed = True
            waiting = list(self._queue.values())
            self._queue.clear()
            self._bytes -= sum(item.size for item in waiting)
            self._changed.notify_all()
        self._let_go(waiting, Outcome.CANCELLED)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def stats(self) -> dict[str, Any]:
        """Counts since the start (accepted, dropped, refused and each outcome), and the queue."""
        with self._changed:
            names = ("accepted", "dropped", "refused", *(outcome.value for outcome in Outcome))
            return {name.replace(" ", "_"): self._counts[name] for name in names} | {
                "queued_bytes": self._bytes,
                "queue_limit_bytes": self._limit,
                "failing": self._pause_s > 0,
            }

    # --- the thread ---

    def _run(self) -> None:
        try:
            while not self._closed:
                try:
                    if (item := self._next()) is not None:
                        self._finish(item, self._save(item))
                except Exception as error:  # noqa: BLE001 - the edge of a thread
                    self._fail(error)
        finally:
            # Also when there is no memory even to fail: nothing may wait for a dead thread.
            with self._changed:
                died, self._closed = not self._closed, True
                left = [i for i in (self._current, *self._queue.values()) if i and not i.released]
                self._current = None
                self._queue.clear()
                self._bytes = 0
                self._changed.notify_all()
            self._let_go(left, Outcome.CANCELLED)
            if died:
                self._tell("The disk cache keeps nothing more until the model is loaded again.")

    def _next(self) -> _Item | None:
        while True:
            with self._changed:
                idle_s = max(0.0, self._refresh_at - time.monotonic())
                self._changed.wait_for(lambda: self._queue or self._closed, idle_s)
                if self._closed:
                    return None
                if self._queue and time.monotonic() < self._refresh_at:
                    _, item = self._queue.popitem(last=False)
                    self._current = item
                    return item
            self._refresh()

    def _refresh(self) -> None:
        # Counted from its end, but also if there is none.
        self._refresh_at = time.monotonic() + self._refresh_s
        before = self._tier.problem
        self._tier.refresh()
        if self._tier.problem != before:
            self._tell(self._tier.problem or "The cache directory can be used again.")
        self._refresh_at = time.monotonic() + self._refresh_s

    def _save(self, item: _Item) -> Outcome:
        return self._tier.save(
            item.key,
            item.payloads,
            offered_ns=item.offered_ns,
            wanted=lambda: not self._closed,
        )

    def _finish(self, item: _Item, outcome: Outcome) -> None:
        event = None
        with self._changed:
            if outcome is Outcome.SAVED:
                if self._failing_with is not None:
                    event = "The disk cache writes again."
                self._pause_s = self._retry_at = 0.0
                self._failing_with, self._no_room = None, False
            elif outcome is Outcome.NO_ROOM and not self._no_room:
                self._no_room = True
                event = (
                    f"The disk cache has no room for a block of {item.size} bytes; it may hold "
                    "cache.size or a share of the free disk, and other files there count too."
                )
        self._let_go([item], outcome)
        if event:
            self._tell(event)
        self._end()

    def _fail(self, error: Exception) -> None:
        reason = error.strerror if isinstance(error, OSError) else None
        reason = reason or str(error) or type(error).__name__
        with self._changed:
            self._pause_s = min(max(2 * self._pause_s, self._first_pause_s), _LONGEST_PAUSE_S)
            self._retry_at = time.monotonic() + self._pause_s
            told, self._failing_with = self._failing_with == reason, reason
            current = self._current
            left = [i for i in (current, *self._queue.values()) if i and not i.released]
            self._queue.clear()
            self._bytes = 0 if current is None else current.size
        self._let_go(left, Outcome.FAILED)
        if not told:
            self._tell(
                f"The disk cache cannot write to {self._tier.store.directory}: {reason}. Nothing "
                "is kept there until it works again, which is tried now and then; requests go on."
            )
        self._end()

    def _end(self) -> None:
        """Last of all, so that after a flush every release has been called."""
        with self._changed:
            if self._current is not None:
                self._bytes -= self._current.size
                self._current = None
            if self._dropping and self._bytes <= self._limit // 2:
                self._dropping = False
            self._changed.notify_all()

    def _on_its_way(self, key: bytes) -> bool:
        return key in self._queue or (self._current is not None and self._current.key == key)

    def _let_go(self, items: Sequence[_Item], outcome: Outcome) -> None:
        problem = None
        for item in items:
            item.released = True
            try:
                item.release(outcome)
            except Exception as error:  # noqa: BLE001 - one owner's mistake is not the others'
                problem = error
        with self._changed:
            self._counts[outcome.value] += len(items)
        if problem is not None:
            log.error("the owner of a block could not take it back", exc_info=problem)

    def _tell(self, words: str) -> None:
        try:
            self._notify(words)
        except Exception:
            log.exception("nobody could be told: %s", words)
