"""The C library's heap of this process: what it keeps for later can be given back."""

from __future__ import annotations

import ctypes

_libc = ctypes.CDLL(None)


def trim_heap() -> None:
    """Give back what has been freed: after a long text is tokenised that is most of it."""
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)
