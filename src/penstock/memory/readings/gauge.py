"""Readings of memory: the machine, its control groups, one process, the GPUs.

Only reads, and never fails for want of a source: what cannot be read is None or empty. Knows no
limits and no books. GPUs are read through the driver's own library (NVML), not through torch.
"""

from __future__ import annotations

import ctypes
import os
import time
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import BadRequest
from penstock.memory.device_kinds import CPU, CUDA
from penstock.memory.domains import Domain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

PROC = Path("/proc")
# A v1 group without a limit shows the largest multiple of the page size below 2^63.
_NO_LIMIT_V1 = 1 << 60


@dataclass(frozen=True, slots=True)
class GroupReading:
    """A control group with a limit, our own or one above it."""

    limit_bytes: int
    used_bytes: int  # by all processes in it, less what the kernel can drop: clean file pages


@dataclass(frozen=True, slots=True)
class RamReading:
    """The machine's memory and the control group this process is in."""

    physical_bytes: int
    available_bytes: int  # what the kernel thinks could be had without swapping
    groups: tuple[GroupReading, ...] = ()  # those with a limit, from ours to the root

    @property
    def cgroup_limit_bytes(self) -> int | None:
        """The tightest limit on the way to the root."""
        return min((group.limit_bytes for group in self.groups), default=None)

    @property
    def capacity_bytes(self) -> int:
        """The most that this process and its children can ever have."""
        if self.cgroup_limit_bytes is None:
            return self.physical_bytes
        return min(self.physical_bytes, self.cgroup_limit_bytes)


@dataclass(frozen=True, slots=True)
class ProcessReading:
    """Memory of one process."""

    resident_bytes: int
    private_bytes: int  # what its exit would certainly give back
    # Not backed by a file, also where a child still shares it: so pages of the fork server are
    # counted once, whatever its children do.
    anonymous_bytes: int
    private_dirty_bytes: int  # what a child has of its own
    # Its share of what no file backs: over a tree of processes these add up to all of it, once.
    unbacked_bytes: int


@dataclass(frozen=True, slots=True)
class GpuReading:
    """One GPU, under the number that a worker knows it by."""

    index: int
    name: str
    uuid: str
    total_bytes: int
    free_bytes: int
    # What each process holds there, by its id; empty where the driver does not tell.
    processes: Mapping[int, int] = field(default_factory=dict)

    @property
    def domain(self) -> Domain:
        """Its memory in the books."""
        return Domain.gpu(self.index)


def read_ram(proc: Path = PROC) -> RamReading:
    """The machine's figures now."""
    fields = _kib_fields(proc / "meminfo")
    physical = fields.get("MemTotal") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    groups: list[GroupReading] = []
    for group, (limit_file, used_file) in memory_groups(proc):
        limit, used = _integer(group / limit_file), _integer(group / used_file)
        if limit is not None and limit < _NO_LIMIT_V1:
            groups.append(GroupReading(limit, max((used or 0) - _droppable(group), 0)))
    return RamReading(
        physical_bytes=physical,
        available_bytes=fields.get("MemAvailable", physical),
        groups=tuple(groups),
    )


def read_process(pid: int, proc: Path = PROC) -> ProcessReading | None:
    """A process's figures now; None once it is gone."""
    fields = _kib_fields(proc / str(pid) / "smaps_rollup")
    if "Rss" not in fields:
        return None
    return ProcessReading(
        resident_bytes=fields["Rss"],
        private_bytes=fields["Private_Clean"] + fields["Private_Dirty"],
        anonymous_bytes=fields["Anonymous"],
        private_dirty_bytes=fields["Private_Dirty"],
        unbacked_bytes=(
            fields["Pss_Anon"] + fields.get("Pss_Shmem", 0)
            if "Pss_Anon" in fields
            else fields["Private_Dirty"]
        ),
    )


def children_of(pid: int, proc: Path = PROC) -> tuple[int, ...]:
    """The processes that one of a single thread has started."""
    try:
        text = (proc / str(pid) / "task" / str(pid) / "children").read_text()
    except OSError:
        return ()
    return tuple(map(int, text.split()))


class ProcessGauge:
    """One process, read again and again.

    A reading walks all of its pages, some 20 ms for each GiB, in which a model's step wants the
    core. At most a hundredth of the time goes into walks; between them the kernel's own counters
    tell by how much the process has grown or shrunk, in pages of its own.
    """

    def __init__(
        self, pid: int, proc: Path = PROC, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.pid = pid
        self._proc = proc
        self._clock = clock
        self._walked: ProcessReading | None = None
        self._counted = 0  # at the walk
        self._walk_after = 0.0

    def read(self) -> ProcessReading | None:
        """Its figures now; None once it is gone."""
        counted = self._count()
        if counted is None:
            return None
        began = self._clock()
        if self._walked is None or began >= self._walk_after:
            self._walked = read_process(self.pid, self._proc)
            self._counted = counted
            ended = self._clock()
            self._walk_after = ended + 99 * (ended - began)
            return self._walked
        grown = counted - self._counted
        return ProcessReading(
            **{name: max(0, size + grown) for name, size in asdict(self._walked).items()}
        )

    def _count(self) -> int | None:
        """Bytes that no file backs, as the kernel keeps count of them."""
        fields = _kib_fields(self._proc / str(self.pid) / "status")
        return fields["RssAnon"] + fields.get("RssShmem", 0) if "RssAnon" in fields else None


def read_gpus(environment: Mapping[str, str] = os.environ) -> tuple[GpuReading, ...]:
    """The GPUs that a worker would see, in its order; empty without a driver or a CUDA torch."""
    if not _torch_has_cuda():
        return ()
    try:
        devices = list(_nvml_devices(ctypes.CDLL("libnvidia-ml.so.1")))
    except (OSError, AttributeError):
        return ()
    return visible_gpus(devices, environment.get("CUDA_VISIBLE_DEVICES"))


def visible_gpus(devices: Sequence[GpuReading], visible: str | None) -> tuple[GpuReading, ...]:
    """Choose and renumber as CUDA does for `CUDA_VISIBLE_DEVICES`: it ends at the first unknown."""
    if visible is None:
        return tuple(devices)
    chosen: list[GpuReading] = []
    for word in filter(None, (word.strip() for word in visible.split(","))):
        found = [d for d in devices if word == str(d.index) or d.uuid.startswith(word)]
        if not found or found[0].uuid in {d.uuid for d in chosen}:
            break
        chosen.append(found[0])
    return tuple(replace(d, index=index) for index, d in enumerate(chosen))


def resolve_device(wanted: str, gpus: Sequence[GpuReading]) -> str:
    """`auto`, `cpu`, `cuda` or `cuda:N` as torch spells it; `auto` takes the GPU with most free."""
    if wanted == CPU.name or (wanted == "auto" and not gpus):
        return CPU.name
    names = {f"{CUDA.name}:{gpu.index}": gpu.free_bytes for gpu in gpus}
    if wanted in {"auto", CUDA.name}:
        if not gpus:
            raise BadRequest(
                "The device 'cuda' was asked for, but no GPU can be used here: the driver library "
                "was not found, or torch was built without CUDA. Use --device cpu."
            )
        return max(names, key=names.__getitem__)
    if wanted not in names:
        raise BadRequest(
            f"The device {wanted!r} was asked for, but there are {len(gpus)} usable GPUs."
        )
    return wanted


def read_cpu_s(pid: int, proc: Path = PROC) -> float | None:
    """Processor time that a process has used, over all its threads; None where it cannot be read,
    also once it is gone."""
    fields = _stat(pid, proc)
    if fields is None:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def wants_to_run(pid: int, proc: Path = PROC) -> bool:
    """Whether a process has work to do, for which it may wait: for a processor that others use, or
    for a disk. One that sleeps, is stopped or is gone has none."""
    fields = _stat(pid, proc)
    return fields is not None and fields[0] in ("R", "D")


def _stat(pid: int, proc: Path) -> list[str] | None:
    """What `/proc/PID/stat` has after the name: the state first."""
    try:
        # The command's name comes first, in brackets, and may hold anything.
        return (proc / str(pid) / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    except OSError:
        return None


def _kib_fields(path: Path) -> dict[str, int]:
    """`Name:  123 kB` lines, in bytes."""
    fields: dict[str, int] = {}
    try:
        text = path.read_text()
    except OSError:
        return fields
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        if rest.endswith("kB"):
            fields[name] = int(rest.removesuffix("kB")) << 10
    return fields


def _integer(path: Path) -> int | None:
    """The number in a file; None for no file and for the word `max`."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _droppable(group: Path) -> int:
    """File pages of a control group; v1 has the sums over its children under `total_` names."""
    try:
        lines = (group / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    fields = dict(line.split() for line in lines)
    prefix = "total_" if "total_inactive_file" in fields else ""
    return sum(int(fields.get(f"{prefix}{name}_file", 0)) for name in ("inactive", "active"))


_V1_FILES = ("memory.limit_in_bytes", "memory.usage_in_bytes")
_V2_FILES = ("memory.max", "memory.current")


def memory_groups(proc: Path = PROC) -> Iterator[tuple[Path, tuple[str, str]]]:
    """Our memory control group and those above it, each with its limit and usage file names."""
    mounts = _cgroup_mounts(proc)
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:  # 4:memory:/path (v1) or 0::/path (v2)
        _, controllers, path = line.split(":", 2)
        version = 2 if controllers == "" else 1
        if version == 1 and "memory" not in controllers.split(","):
            continue
        if version not in mounts:
            continue
        mount, root = mounts[version]
        # In a container the mount may show only the part of the tree from `root` on.
        inside = path.removeprefix(root.rstrip("/")).strip("/")
        group = mount / inside if inside and ".." not in inside else mount
        while True:
            yield group, _V2_FILES if version == 2 else _V1_FILES
            if group == mount:
                break
            group = group.parent


def _cgroup_mounts(proc: Path) -> dict[int, tuple[Path, str]]:
    """Where the memory controller (1) and the unified tree (2) are mounted, and from which root."""
    mounts: dict[int, tuple[Path, str]] = {}
    try:
        lines = (proc / "self" / "mountinfo").read_text().splitlines()
    except OSError:
        return mounts
    for line in lines:
        before, _, after = line.partition(" - ")
        kind, _, options = after.partition(" ")
        root, mount_point = before.split()[3:5]
        if kind == "cgroup2":
            mounts[2] = (Path(mount_point), root)
        elif kind == "cgroup" and "memory" in options.split()[-1].split(","):
            mounts[1] = (Path(mount_point), root)
    return mounts


def _torch_has_cuda() -> bool:
    """Judged by the version's label, since torch itself must not be imported here."""
    try:
        return not metadata.version("torch").endswith("+cpu")
    except metadata.PackageNotFoundError:
        return False


class _NvmlMemory(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


def _nvml_devices(nvml: ctypes.CDLL) -> Iterator[GpuReading]:
    """Every GPU of the machine, in the order of the PCI bus."""
    if nvml.nvmlInit_v2() != 0:
        return
    try:
        count = ctypes.c_uint()
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return
        for index in range(count.value):
            handle, memory = ctypes.c_void_p(), _NvmlMemory()
            name, uuid = ctypes.create_string_buffer(96), ctypes.create_string_buffer(96)
            answers = (
                nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)),
                nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)),
                nvml.nvmlDeviceGetName(handle, name, 96),
                nvml.nvmlDeviceGetUUID(handle, uuid, 96),
            )
            if not any(answers):
                yield GpuReading(
                    index,
                    name.value.decode(),
                    uuid.value.decode(),
                    memory.total,
                    memory.free,
                    _nvml_processes(nvml, handle),
                )
    finally:
        nvml.nvmlShutdown()


class _NvmlProcess(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


_NVML_MAX_PROCESSES = 256
_NVML_NOT_AVAILABLE = (1 << 64) - 1


def _nvml_processes(nvml: ctypes.CDLL, handle: ctypes.c_void_p) -> dict[int, int]:
    """Bytes of every process that computes on a device."""
    count = ctypes.c_uint(_NVML_MAX_PROCESSES)
    found = (_NvmlProcess * _NVML_MAX_PROCESSES)()
    read = getattr(nvml, "nvmlDeviceGetComputeRunningProcesses_v3", None)
    if read is None or read(handle, ctypes.byref(count), found) != 0:
        return {}
    return {
        process.pid: process.used
        for process in found[: count.value]
        if process.used != _NVML_NOT_AVAILABLE
    }
