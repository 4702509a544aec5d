"""The cap on this process's memory, as a protocol; which errors say that an allocation failed."""

from __future__ import annotations

from typing import Protocol

import torch

# What torch's CPU allocator and C++ itself say; they have no type of their own in Python.
_OUT_OF_MEMORY_TEXTS = ("DefaultCPUAllocator: can't allocate memory", "std::bad_alloc")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, and nothing worse."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return type(error) is RuntimeError and any(text in str(error) for text in _OUT_OF_MEMORY_TEXTS)


class Cap(Protocol):
    """A bound on what this process may hold beyond what it held when `set_base` was called."""

    control_group: str | None  # the one of its own that this process is in, if any

    def set_base(self) -> None:
        """What is held now, KV aside, is the base from which grants count."""

    def move(self, kv_bytes: int, step_bytes: int) -> None:
        """Let the arena and the steps have this much from now on."""

    def allow_fragmentation(self, taken_bytes: int) -> int:
        """Unused memory has been given back and `taken_bytes` are held beyond the base: add
        fragmented address space to the limit. By how much the limit has moved."""


class NoCap:
    """Where several engines share a process, as in tests."""

    control_group: str | None = None

    def set_base(self) -> None:
        pass

    def move(self, kv_bytes: int, step_bytes: int) -> None:
        pass

    def allow_fragmentation(self, taken_bytes: int) -> int:
        return 0
