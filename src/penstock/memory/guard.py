"""Every number of the memory guard and where it came from: for the books, `doctor` and the log.

Pure over settings and readings. What a model measures of itself is not here; it is in
`/admin/api/memory` once the model is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.memory.clients.requests import floor_bytes
from penstock.memory.domains import RAM
from penstock.memory.ledger import Ledger
from penstock.memory.limits import (
    FORK_SERVER_BYTES,
    GPU_PROCESS_BYTES,
    RAM_PROCESS_BYTES,
    SERVER_BYTES,
    limit_setting,
    resolve_capacities,
    resolve_limits,
    resolve_spare,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.config import Config, MemorySettings
    from penstock.memory.domains import Domain
    from penstock.memory.readings.gauge import GpuReading, RamReading


@dataclass(frozen=True, slots=True)
class GuardNumber:
    """One number: `name` is of a domain, `origin` a setting, a reading or an estimate."""

    domain: Domain
    name: str
    bytes: int
    origin: str


def open_books(settings: MemorySettings, ram: RamReading, gpus: Sequence[GpuReading]) -> Ledger:
    """A ledger with the limits of this machine and these settings."""
    capacities = resolve_capacities(ram, gpus)
    spares = {domain: resolve_spare(settings.spare, size) for domain, size in capacities.items()}
    limits = resolve_limits(settings.limit, settings.gpu_limit, ram, gpus)
    return Ledger(limits, capacities, spares)


def guard_numbers(config: Config, ram: RamReading, gpus: Sequence[GpuReading]) -> list[GuardNumber]:
    """All of them, by domain."""
    settings = config.memory
    ledger = open_books(settings, ram, gpus)
    rows: list[GuardNumber] = []
    for domain, state in ledger.snapshot().items():
        knob = limit_setting(domain)
        value = settings.limit if domain.is_ram else settings.gpu_limit
        origin = f"{knob} = {value} ({config.origins.get(knob, 'default')})"
        spare_origin = f"memory.spare ({config.origins.get('memory.spare', 'default')})"
        rows += [
            GuardNumber(domain, "capacity", state.capacity_bytes, _capacity_origin(domain, ram)),
            GuardNumber(domain, "limit", state.limit_bytes, origin),
            GuardNumber(domain, "spare", state.spare_bytes, spare_origin),
        ]
    rows += _ram_numbers(ram, rows[1].bytes)
    for gpu in gpus:
        used = gpu.total_bytes - gpu.free_bytes
        rows.append(GuardNumber(gpu.domain, "used now", used, "the driver"))
        rows.append(
            GuardNumber(gpu.domain, "each worker", GPU_PROCESS_BYTES, "estimate, then read")
        )
    return rows


def _ram_numbers(ram: RamReading, limit: int) -> list[GuardNumber]:
    rows = [
        GuardNumber(
            RAM, "used now", ram.physical_bytes - ram.available_bytes, "MemAvailable of /proc"
        ),
        GuardNumber(RAM, "requests", floor_bytes(limit), "always kept for requests"),
        GuardNumber(RAM, "server", SERVER_BYTES, "estimate, then read"),
        GuardNumber(RAM, "fork server", FORK_SERVER_BYTES, "estimate, then read"),
        GuardNumber(RAM, "each worker", RAM_PROCESS_BYTES, "estimate, then measured at load"),
    ]
    rows += [
        GuardNumber(RAM, "control group", group.limit_bytes, f"{group.used_bytes} bytes used")
        for group in ram.groups
    ]
    return rows


def _capacity_origin(domain: Domain, ram: RamReading) -> str:
    if not domain.is_ram:
        return "the driver"
    if ram.cgroup_limit_bytes is not None and ram.cgroup_limit_bytes < ram.physical_bytes:
        return "the control group's limit"
    return "physical memory"


def guard_sentence(numbers: Sequence[GuardNumber]) -> str:
    """The numbers in one line."""
    parts = [
        f"{row.domain} {row.name} {row.bytes / (1 << 20):,.0f} MiB ({row.origin})"
        for row in numbers
    ]
    return "memory guard: " + "; ".join(parts)
