"""The governor: reads memory on its own clock, updates the ledger, and sheds what is short.

Each turn takes the readings in a thread, tells the ledger what others use, lets the server
reconcile what is booked with what was read, and where a domain is short walks one ordered list of
acts until it is not. A domain that was short is held (nobody starts or grows there) until there is
room with something over, or for a while no shortage: so it neither flutters nor sticks.

It never waits for admission, and admission never waits for it: they meet in the ledger and in the
set of held domains. It knows no models and no processes; those are behind `Act` and `Watch`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from penstock.memory.domains import RAM

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from penstock.memory.domains import Domain
    from penstock.memory.events import Events
    from penstock.memory.ledger import Ledger, Snapshot
    from penstock.memory.readings.gauge import GpuReading, ProcessReading, RamReading

log = logging.getLogger(__name__)

BUSY_S = 0.25
IDLE_S = 0.5  # others may take memory while nothing runs here
SHORT_S = 0.1
RELEASE_TURNS = 8  # without a shortage, after which a domain is let go even without room over
_ACT_S = 5.0  # an act that takes longer is left to itself


@dataclass(frozen=True, slots=True)
class Readings:
    """Everything read in one turn."""

    ram: RamReading
    gpus: Sequence[GpuReading]
    # The server, the fork server and each worker, by owner.
    processes: Mapping[str, ProcessReading]
    gpu_own_bytes: Mapping[Domain, int] = field(default_factory=dict)  # as far as we know


@dataclass(frozen=True, slots=True)
class Act:
    """One entry of the shed list: tries to make so many bytes of room in a domain."""

    name: str
    shed: Callable[[Domain, int], Awaitable[None]]


class Watch(Protocol):
    """What the governor looks at, and who keeps the books true to it."""

    def reader(self) -> Callable[[], Readings]:
        """Takes all figures: blocking, called in a thread. It is made on the event loop and holds
        copies of all tables, which others change meanwhile."""

    def reconcile(self, readings: Readings) -> None:
        """Let the books follow what was read."""

    def busy(self) -> bool:
        """Whether memory may be moving."""


def outside(readings: Readings) -> dict[Domain, tuple[int, int]]:
    """(external, capacity) of each domain: by the bound that leaves the least."""
    own = sum(process.unbacked_bytes for process in readings.processes.values())
    ram = readings.ram
    bounds = [(ram.physical_bytes, ram.physical_bytes - ram.available_bytes)]
    bounds += [(group.limit_bytes, group.used_bytes) for group in ram.groups]
    others = [(max(used - own, 0), capacity) for capacity, used in bounds]
    result = {RAM: min(others, key=lambda bound: bound[1] - bound[0])}
    for gpu in readings.gpus:
        used, own = gpu.total_bytes - gpu.free_bytes, readings.gpu_own_bytes.get(gpu.domain, 0)
        result[gpu.domain] = max(used - own, 0), gpu.total_bytes
    return result


class Governor:
    """The watch over one server's memory."""

    def __init__(
        self,
        ledger: Ledger,
        watch: Watch,
        acts: Sequence[Act],
        held: set[Domain],  # shared with those who must not start or grow anything meanwhile
        events: Events,
    ) -> None:
        self.events = events
        self.readings: Readings | None = None  # the latest
        self._ledger = ledger
        self._watch = watch
        self._acts = acts
        self._held = held
        self._calm: dict[Domain, int] = {}  # turns since a held domain was last short
        # Of its own: the event loop's threads may all be taken by requests for many seconds.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="governor")
        self._failure = ""  # of the latest turn

    async def run(self) -> None:
        """Turn until cancelled; a turn that fails is not the last one."""
        try:
            while True:
                interval_s = await self._try_turn()
                await asyncio.sleep(interval_s)
        finally:
            self._thread.shutdown(wait=False)

    async def _try_turn(self) -> float:
        """One turn, whatever comes of it; seconds until the next."""
        try:
            await self.turn()
            interval_s = self.interval_s()
        except Exception as error:  # the edge of a task of its own, at which nobody else looks
            # Told once: what fails at every turn would fill the log.
            if (failure := repr(error)) != self._failure:
                log.exception("a turn of the governor failed; it goes on with the next one")
            self._failure = failure
            return IDLE_S
        self._failure = ""
        return interval_s

    def interval_s(self) -> float:
        """Until the next turn: shortly while something is wrong, seldom while nothing runs."""
        if self._held:
            return SHORT_S
        return BUSY_S if self._watch.busy() else IDLE_S

    async def turn(self) -> None:
        """One reading and what follows from it."""
        loop = asyncio.get_running_loop()
        readings = await loop.run_in_executor(self._thread, self._watch.reader())
        self.readings = readings
        for domain, (external, capacity) in outside(readings).items():
            if domain in self._ledger.snapshot():
                self._ledger.observe(domain, external, capacity)
        self._watch.reconcile(readings)
        for domain in self._ledger.snapshot():
            await self._mend(domain)

    async def _mend(self, domain: Domain) -> None:
        state = self._ledger.snapshot()[domain]
        if state.short:
            self._calm[domain] = 0
            if domain not in self._held:
                self._held.add(domain)
                self._note("short", domain)
            await self._shed(domain)
        elif domain in self._held:
            self._calm[domain] = self._calm.get(domain, 0) + 1
            roomy = state.free_bytes >= state.spare_bytes
            if self._calm[domain] >= RELEASE_TURNS or (roomy and self._calm[domain] > 1):
                self._held.discard(domain)
                self._note("released", domain)

    async def _shed(self, domain: Domain) -> None:
        """Walk the list until the shortage is covered, and the spare once more for quiet."""
        for act in self._acts:
            state = self._ledger.snapshot()[domain]
            if not state.short:
                return
            wanted = state.spare_bytes - state.free_bytes
            before = state.booked_bytes
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_ACT_S):
                    await act.shed(domain, wanted)
            after = self._ledger.snapshot()[domain].booked_bytes
            if after != before:
                self._note(
                    "shed", domain, act=act.name, wanted_bytes=wanted, before_bytes=before,
                    after_bytes=after,
                )  # fmt: skip

    def _note(self, kind: str, domain: Domain, **fields: object) -> None:
        state = self._ledger.snapshot()[domain]
        self.events.add(
            kind,
            domain=str(domain),
            booked_bytes=state.booked_bytes,
            external_bytes=state.external_bytes,
            capacity_bytes=state.capacity_bytes,
            **fields,
        )


def memory_rows(snapshot: Snapshot, readings: Readings | None) -> dict[str, object]:
    """The books and the readings side by side, for `/admin/api/memory`."""
    domains = {
        str(domain): {
            "limit_bytes": state.limit_bytes,
            "capacity_bytes": state.capacity_bytes,
            "spare_bytes": state.spare_bytes,
            "external_bytes": state.external_bytes,
            "booked_bytes": state.booked_bytes,
            "free_bytes": max(state.free_bytes, 0),
            "short": state.short,
            "purposes": {purpose.value: size for purpose, size in state.purposes().items()},
            "owners": {
                owner: {purpose.value: size for purpose, size in held.items()}
                for owner, held in state.owners.items()
            },
        }
        for domain, state in snapshot.items()
    }
    processes = {} if readings is None else readings.processes
    return {
        "domains": domains,
        "processes": {
            owner: {
                "resident_bytes": reading.resident_bytes,
                "private_bytes": reading.private_bytes,
                "anonymous_bytes": reading.anonymous_bytes,
            }
            for owner, reading in processes.items()
        },
    }
