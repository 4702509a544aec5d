"""What was read of our own processes, by domain."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.memory.domains import RAM

if TYPE_CHECKING:
    from penstock.memory.governor import Readings


def own_bytes(readings: Readings | None) -> dict[str, int]:
    """Memory that no file backs, of all our processes; nothing before the first reading."""
    return {domain: sum(owners.values()) for domain, owners in own_bytes_by_owner(readings).items()}


def own_bytes_by_owner(readings: Readings | None) -> dict[str, dict[str, int]]:
    """The same by domain and owner. Of a GPU we know what all workers hold together; processes
    that come and go under an owner, as the matchers of a grammar host do, are summed."""
    if readings is None:
        return {}
    ram: dict[str, int] = {}
    for process, reading in readings.processes.items():
        owner = process.partition(", process ")[0]
        ram[owner] = ram.get(owner, 0) + reading.unbacked_bytes
    gpus = {str(domain): {"workers": size} for domain, size in readings.gpu_own_bytes.items()}
    return {str(RAM): ram, **gpus}
