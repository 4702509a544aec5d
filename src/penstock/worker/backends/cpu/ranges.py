"""Stable ranges of addresses in RAM, of which parts are backed by memory when they are needed.

A private mapping without access rights; `mprotect` commits, `madvise` gives back. Committed pages
count against RLIMIT_DATA, reserved ones do not. They are touched at once, so that committed memory
is memory really held, and a step's own peak can be told from it.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os

import torch
from torch import Tensor

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


_MADV_POPULATE_WRITE = 23  # Linux 5.14; not in the mmap module


class RamRange:
    """Anonymous private memory, inaccessible until committed."""

    def __init__(self, size: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        address = _libc.mmap(None, size, 0, flags, -1, 0)
        if address in (None, ctypes.c_void_p(-1).value):
            raise OSError(ctypes.get_errno(), f"cannot reserve {size} bytes of address space")
        self._address: int = address
        self._size = size

    def tensor(self) -> Tensor:
        buffer = (ctypes.c_char * self._size).from_address(self._address)
        return torch.frombuffer(buffer, dtype=torch.uint8)

    def commit(self, start: int, size: int, *, touch: bool = True) -> None:
        self._call("mprotect", start, size, mmap.PROT_READ | mmap.PROT_WRITE)
        if not touch:
            return
        if hasattr(mmap, "MADV_HUGEPAGE"):  # first touch is five times quicker; may be refused
            _libc.madvise(self._address + start, size, mmap.MADV_HUGEPAGE)
        if _libc.madvise(self._address + start, size, _MADV_POPULATE_WRITE):
            if ctypes.get_errno() in (errno.ENOMEM, errno.EFAULT):
                self.decommit(start, size)
                raise torch.OutOfMemoryError(f"no {size} bytes of memory are left for KV")
            ctypes.memset(self._address + start, 0, size)  # an older kernel

    def decommit(self, start: int, size: int) -> None:
        self._call("madvise", start, size, mmap.MADV_DONTNEED)
        self._call("mprotect", start, size, 0)

    def close(self) -> None:
        if self._address:
            _libc.munmap(self._address, self._size)
            self._address = 0

    def _call(self, name: str, start: int, size: int, argument: int) -> None:
        if getattr(_libc, name)(self._address + start, size, argument):
            code = ctypes.get_errno()
            if code == errno.ENOMEM:
                raise torch.OutOfMemoryError(f"{name} of {size} bytes of KV: out of memory")
            raise OSError(code, f"{name} of {size} bytes of KV: {os.strerror(code)}")
