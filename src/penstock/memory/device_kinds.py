"""Defaults by kind of device (cpu, cuda): dtype, largest step, tile size.

A kind is the first word of a device's name (`cpu`, `cuda:0`). What a device computes with is in the
worker's backends, one for each kind here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """What all devices of a kind have in common."""

    name: str
    dtypes: tuple[str, ...]  # computed in as stored; weights of other types in the first of them
    step: tuple[int, int] = (1024, 64)  # tokens and sequences of the largest step
    large_bytes: int | None = None  # with so much memory a device has `large_step`
    large_step: tuple[int, int] = step
    tile_bytes: int = 16 << 20  # of packed weights that are de-quantised at a time

    def dtype_for(self, stored: str) -> str:
        """The type to compute in, for weights of a type."""
        return stored if stored in self.dtypes else self.dtypes[0]

    def encoder_dtype_for(self, stored: str) -> str:
        """The same for encoders, many of which overflow in float16 or come out worse for it."""
        dtype = self.dtype_for(stored)
        return "float32" if dtype == "float16" else dtype

    def step_within(self, limit_bytes: int) -> tuple[int, int]:
        """Tokens and sequences of the largest step, where so much memory may be used."""
        large = self.large_bytes is not None and limit_bytes >= self.large_bytes
        return self.large_step if large else self.step


# Narrower types are slower on CPUs without instructions for them.
CPU = DeviceKind("cpu", dtypes=("float32",))
# A large GPU needs thousands of rows to be busy, and has the memory for them; likewise of outputs.
CUDA = DeviceKind(
    "cuda",
    dtypes=("bfloat16", "float16"),
    large_bytes=16 << 30,
    large_step=(8192, 128),
    tile_bytes=64 << 20,
)

_KINDS = {kind.name: kind for kind in (CPU, CUDA)}


def kind_name(device: str) -> str:
    """The first word of a device's name, or of `auto`."""
    return device.partition(":")[0]


def kind_of(device: str) -> DeviceKind:
    """The kind of a device that settings may name."""
    return _KINDS[kind_name(device)]
