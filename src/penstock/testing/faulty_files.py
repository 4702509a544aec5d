"""The disk tier's system calls, failing where a test wants them to.

A fault strikes one call: an error of the disk, half a read or write, or a crash of the process.
After a crash every further call crashes too, so that no cleaning up happens, and what the process
had open is closed, as the kernel would.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.tiers.files import Files
from penstock.tiers.format import space

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_CALLS = frozenset(name for name in vars(Files) if not name.startswith("_"))
CRASH, SHORT = "crash", "short"
ERRORS = ("ENOSPC", "EIO", "EDQUOT", "EROFS")


class Crash(BaseException):
    """The process is gone; nothing may catch this but the test."""


@dataclass(slots=True)
class Fault:
    """What happens (a name of errno, `short` or `crash`), and after how many more calls."""

    kind: str
    after: int
    struck: str | None = None  # the call it has happened to


class FaultyFiles(Files):
    """A directory on a disk of `capacity_bytes`, in which calls can be made to fail."""

    def __init__(self, directory: Path, capacity_bytes: int | None = None) -> None:
        super().__init__(directory)
        self.fault: Fault | None = None
        self.broken: dict[str, str] = {}  # calls that fail until further notice, and how
        self.clock_ticks = True  # otherwise no change shows in the directory's time
        self.before_each: Callable[..., None] = lambda name, *arguments: None
        self.after_each: Callable[[str], None] = lambda name: None
        self._capacity_bytes = capacity_bytes
        self._dead = False
        self._opened: set[int] = set()

    def __getattribute__(self, name: str) -> Any:
        attribute = super().__getattribute__(name)
        return partial(self._call, name, attribute) if name in _CALLS else attribute

    def directory_mark(self) -> int:
        return super().directory_mark() if self.clock_ticks else 0

    def free_bytes(self) -> int:
        if self._capacity_bytes is None:
            return super().free_bytes()
        return self._capacity_bytes - directory_bytes(self.directory)

    def crash(self) -> None:
        """The process dies here."""
        self._dead = True
        for descriptor in self._opened:
            os.close(descriptor)
        self._opened.clear()

    def _call(self, name: str, real: Callable[..., Any], *arguments: Any) -> Any:
        if self._dead:
            raise Crash
        self.before_each(name, *arguments)
        if name in self.broken:
            self._strike(Fault(self.broken[name], 0), name, real, arguments)
        fault = self.fault
        if fault is not None and fault.struck is None:
            if fault.after == 0:
                return self._strike(fault, name, real, arguments)
            fault.after -= 1
        return self._real(name, real, arguments)

    def _strike(
        self, fault: Fault, name: str, real: Callable[..., Any], arguments: tuple[Any, ...]
    ) -> Any:
        fault.struck = name
        if fault.kind == CRASH:
            self.crash()
            raise Crash
        if fault.kind == SHORT:
            return self._real(name, real, _half(name, arguments))
        if name == "close":  # the descriptor is gone all the same
            self._real(name, real, arguments)
        number = getattr(errno, fault.kind)
        raise OSError(number, os.strerror(number))

    def _real(self, name: str, real: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        result = real(*arguments)
        if name == "open":
            self._opened.add(result)
        elif name == "close":
            self._opened.discard(arguments[0])
        self.after_each(name)
        return result


def _half(name: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same call for half the bytes, if it is one that has any."""
    if name == "write":
        descriptor, data, offset = arguments
        return descriptor, memoryview(data)[: max(1, len(data) // 2)], offset
    if name == "read":
        descriptor, (buffer,), offset = arguments
        return descriptor, [buffer[: max(1, len(buffer) // 2)]], offset
    return arguments


def directory_bytes(directory: Path) -> int:
    """What every file below the directory takes, by a walk that shares no code with the tier."""
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            total += space(os.lstat(os.path.join(folder, name)).st_size)  # noqa: PTH118
    return total
