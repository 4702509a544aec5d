"""Stable ranges of GPU addresses, under which memory is mapped when it is needed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor

PAGE_BYTES = 2 << 20  # the granularity of CUDA's virtual memory


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
