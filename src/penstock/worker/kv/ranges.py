"""Stable ranges of addresses, of which parts are backed by memory when they are needed.

RAM: a private mapping without access rights; `mprotect` commits, `madvise` gives back. Committed
pages count against RLIMIT_DATA, reserved ones do not. They are touched at once, so that committed
memory is memory really held, and a step's own peak can be told from it.
GPU: CUDA's virtual memory management.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from typing import Any, Protocol

import torch
from torch import Tensor

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


_MADV_POPULATE_WRITE = 23  # Linux 5.14; not in the mmap module


class Range(Protocol):
    """A stable range of device memory of which parts can be committed."""

    def tensor(self) -> Tensor:
        """The whole range as bytes."""

    def commit(self, start: int, size: int, *, touch: bool = True) -> None:
        """Back a part with memory; untouched, it may come only when it is written to."""

    def decommit(self, start: int, size: int) -> None: ...

    def close(self) -> None: ...


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


class CudaRange:
    """CUDA virtual memory: addresses under which physical memory is mapped piece by piece."""

    def __init__(self, size: int, device: torch.device) -> None:
        from cuda.bindings import driver

        torch.cuda.init()  # type: ignore[no-untyped-call]
        torch.zeros(1, device=device)  # the context must exist and be current
        self._driver = driver
        self._device = device
        self._index = device.index or 0
        self._size = size
        self._properties = _allocation_properties(driver, self._index)
        self._address = int(_checked(driver.cuMemAddressReserve(size, 0, 0, 0)))
        self._handles: dict[int, tuple[int, Any]] = {}  # start -> (size, physical memory)

    def tensor(self) -> Tensor:
        return torch.as_tensor(_CudaBytes(self._address, self._size), device=self._device)

    def commit(self, start: int, size: int, *, touch: bool = True) -> None:
        driver = self._driver
        result, handle = driver.cuMemCreate(size, self._properties, 0)
        if result == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise torch.OutOfMemoryError(f"the GPU has no {size} bytes left for KV")
        _checked((result,))
        _checked(driver.cuMemMap(self._address + start, size, 0, handle, 0))
        access = driver.CUmemAccessDesc()
        access.location = self._properties.location
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        _checked(driver.cuMemSetAccess(self._address + start, size, [access], 1))
        self._handles[start] = (size, handle)
        _checked(driver.cuMemsetD8(self._address + start, 0, size))

    def decommit(self, start: int, size: int) -> None:
        torch.cuda.synchronize(self._device)  # the step in flight may still read it
        held, handle = self._handles.pop(start)
        assert held == size, "memory is returned in the pieces it was committed in"
        _checked(self._driver.cuMemUnmap(self._address + start, size))
        _checked(self._driver.cuMemRelease(handle))

    def close(self) -> None:
        for start, (size, _) in list(self._handles.items()):
            self.decommit(start, size)
        _checked(self._driver.cuMemAddressFree(self._address, self._size))


class _CudaBytes:
    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _allocation_properties(driver: Any, index: int) -> Any:
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = index
    return properties


def _checked(result: tuple[Any, ...]) -> Any:
    if int(result[0]):
        raise RuntimeError(f"CUDA driver call failed: {result[0]}")
    return result[1] if len(result) > 1 else None


def open_range(size: int, device: torch.device) -> Range:
    """Reserve addresses on a device; nothing is committed yet."""
    return CudaRange(size, device) if device.type == "cuda" else RamRange(size)


def page_bytes(device: torch.device) -> int:
    """The unit in which a device's memory is committed."""
    # 2 MiB is the granularity of CUDA's virtual memory, and a huge page of RAM.
    return 2 << 20 if device.type == "cuda" else mmap.PAGESIZE
