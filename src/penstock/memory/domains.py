"""Domains: memory that is booked apart, as the RAM of a host or the memory of one of its devices.

`str(domain)` is its name in answers, metrics, logs and errors: `ram`, `gpu:0`, and for another host
`node1/gpu:0`. No other module spells these names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Self


@dataclass(frozen=True, slots=True, order=True)
class Domain:
    """One memory of one host; the empty host is this one."""

    device: str
    host: str = ""

    def __str__(self) -> str:
        return f"{self.host}/{self.device}" if self.host else self.device

    @classmethod
    def gpu(cls, index: int, host: str = "") -> Self:
        """The memory of one GPU."""
        return cls(f"gpu:{index}", host)

    @property
    def is_ram(self) -> bool:
        """Whether processes of the host have their own memory there."""
        return self.device == "ram"


RAM = Domain("ram")


def domain_of(device: str) -> Domain:
    """The memory that a device computes in; `device` as torch spells it: `cpu`, `cuda:N`."""
    kind, _, index = device.partition(":")
    return RAM if kind == "cpu" else Domain.gpu(int(index or 0))
