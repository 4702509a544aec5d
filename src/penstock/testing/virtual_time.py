"""An event loop whose clock moves only when it is told to: hours pass in no time, always alike.

`advance(s)` runs everything that is due within `s` seconds, in order, and returns when nothing is
left to do until then. Work for threads is done on the spot. No sockets, no processes.
"""

from __future__ import annotations

import asyncio
import selectors
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor


class _Clockwork(selectors.SelectSelector):
    """Waits by moving the clock; stops the loop at the end of the time it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.until = self.now
        self.stop: Callable[[], None] = lambda: None

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or self.now + timeout > self.until:
            self.now = self.until
            self.stop()
        elif timeout > 0:
            self.now += timeout
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop in virtual time."""

    def __init__(self) -> None:
        self._clockwork = _Clockwork()
        super().__init__(self._clockwork)
        self._clockwork.stop = self.stop
        self.failures: list[dict[str, Any]] = []  # what nobody caught
        self.set_exception_handler(lambda _, context: self.failures.append(context))

    def time(self) -> float:
        return self._clockwork.now

    def advance(self, seconds: float = 0.0) -> None:
        """Let so much time pass; everything that can happen by then has happened."""
        self._clockwork.until = self._clockwork.now + seconds
        self.run_forever()

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the caller's
            done.set_exception(error)
        return done
