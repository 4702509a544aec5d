"""What `penstock doctor` looks for on this machine: each finding with its remedy.

A problem keeps the server or a model from working; a warning makes it slower or smaller than it
could be. Nothing is changed, except for a file in the cache directory that is removed again.
"""

from __future__ import annotations

import errno
import os
import platform
import resource
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from penstock.memory.device_kinds import CUDA, kind_name
from penstock.memory.domains import RAM
from penstock.memory.limits import resolve_limits

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.config import Config
    from penstock.memory.readings.gauge import GpuReading, RamReading

OK, WARNING, PROBLEM = "ok", "warning", "problem"
_MIB, _GIB = 1 << 20, 1 << 30
_TORCH_S = 120.0
_DISK_BYTES = 64 * _MIB
_SLOW_BYTES_S = 100 * _MIB  # below this, computing KV anew is mostly quicker than reading it
_OTHER_FILES = 256
_MIN_MAPS = 65530
_DRIVER = Path("/proc/driver/nvidia/version")
_ASK_TORCH = (
    "import torch; print(torch.__version__, torch.version.cuda, torch.cuda.is_available(), "
    "torch.cuda.device_count())"
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    what: str
    level: str
    said: str
    remedy: str = ""

    def row(self) -> dict[str, str]:
        """For `--json`."""
        return {
            "what": self.what, "level": self.level, "said": self.said, "remedy": self.remedy,
        }  # fmt: skip


def findings(
    config: Config, ram: RamReading, gpus: Sequence[GpuReading], *, quick: bool
) -> Iterator[Finding]:
    """All of them, in the order in which they are looked for; `quick` leaves out what takes
    seconds."""
    yield _python()
    yield from _versions()
    if not quick:
        yield _torch(config, gpus)
        yield from _disk(config.cache.dir)
    yield _control_group(config, ram, gpus)
    yield from _limits(config)
    yield _port(config)
    yield from _others(gpus)


def _python() -> Finding:
    said = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    if sys.platform != "linux":
        return Finding(
            "python", WARNING, f"{said}: no memory caps around workers",
            "Run it on Linux where memory must be bounded from outside.",
        )  # fmt: skip
    return Finding("python", OK, said)


def _versions() -> Iterator[Finding]:
    """Whether what is installed is what penstock was made for."""
    try:
        from packaging.requirements import Requirement

        needed = [Requirement(text) for text in metadata.requires("penstock") or ()]
    except (ImportError, metadata.PackageNotFoundError):
        yield Finding("versions", WARNING, "not known: penstock is not installed as a package",
                      "Install it with `pip install .` or `make`.")  # fmt: skip
        return
    wrong = []
    for requirement in needed:
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            found = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            wrong.append(f"{requirement.name} is missing")
            continue
        if not requirement.specifier.contains(found, prereleases=True):
            wrong.append(f"{requirement.name} is {found}, needed is {requirement.specifier}")
    if wrong:
        yield Finding(
            "versions", PROBLEM, "; ".join(wrong), "Run `pip install --upgrade penstock`."
        )
    else:
        shown = " ".join(f"{name} {metadata.version(name)}" for name in ("torch", "transformers"))
        yield Finding("versions", OK, shown)


def _torch(config: Config, gpus: Sequence[GpuReading]) -> Finding:
    """Asked in a process of its own, since this one never imports torch."""
    command = [sys.executable, "-c", _ASK_TORCH]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=_TORCH_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding("torch", PROBLEM, f"torch cannot be asked: {error}", "Install torch again.")
    if ran.returncode:
        last = ran.stderr.strip().rpartition("\n")[2][:200]
        return Finding("torch", PROBLEM, f"torch cannot be imported: {last}",
                       "Install torch again.")  # fmt: skip
    version, cuda, available, count = ran.stdout.split()
    return judge_torch(config.models.device, len(gpus), (version, cuda, available, int(count)))


def judge_torch(
    device: str, gpus: int, told: tuple[str, str, str, int], *, driver: bool | None = None
) -> Finding:
    """Whether torch, the driver and the settings agree about the device."""
    version, cuda, available, count = told
    driver = _DRIVER.exists() if driver is None else driver
    level = PROBLEM if kind_name(device) == CUDA.name else WARNING
    said = f"torch {version} sees {count} GPU(s); the driver tells of {gpus}"
    if available == "True":
        return Finding("torch", OK, said)
    if driver and cuda == "None":
        return Finding(
            "torch", level,
            f"there is an NVIDIA driver, but torch {version} is built without CUDA",
            "Install a CUDA build of torch, or set models.device to cpu if the CPU is meant.",
        )  # fmt: skip
    if driver:
        return Finding(
            "torch", level,
            f"torch {version} is built for CUDA {cuda}, but cannot use the driver",
            "Update the driver, or install a torch that is built for an older CUDA; "
            "CUDA_VISIBLE_DEVICES may hide the cards.",
        )  # fmt: skip
    if level is PROBLEM:
        return Finding(
            "torch", PROBLEM, f"models.device is {device}, and there is no NVIDIA driver",
            "Install the driver, or set models.device to auto or cpu.",
        )  # fmt: skip
    return Finding("torch", OK, f"torch {version}, on the CPU")


def _control_group(config: Config, ram: RamReading, gpus: Sequence[GpuReading]) -> Finding:
    settings = config.memory
    limit = resolve_limits(settings.limit, settings.gpu_limit, ram, gpus)[RAM]
    group = ram.cgroup_limit_bytes
    said = f"memory.limit comes to {limit / _GIB:.1f} GiB"
    if group is None or group >= ram.physical_bytes:
        return Finding("control group", OK, f"{said}; no control group is tighter than the machine")
    said += f", the control group has {group / _GIB:.1f} GiB"
    if limit > group - _GIB // 4:
        return Finding(
            "control group", PROBLEM, said,
            "Leave at least 256 MiB between them: lower memory.limit, or raise MemoryMax (systemd) "
            "or the container's memory.",
        )  # fmt: skip
    return Finding("control group", OK, said)


def _limits(config: Config) -> Iterator[Finding]:
    wanted = config.server.max_connections + _OTHER_FILES
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < wanted:
        yield Finding(
            "open files", WARNING, f"at most {hard}; server.max_connections asks for {wanted}",
            "Raise LimitNOFILE (systemd) or `ulimit -n`, or lower server.max_connections.",
        )  # fmt: skip
    else:
        yield Finding("open files", OK, f"{'no limit' if hard < 0 else hard}")
    for name, which in (("RLIMIT_DATA", resource.RLIMIT_DATA), ("RLIMIT_AS", resource.RLIMIT_AS)):
        most = resource.getrlimit(which)[0]
        if most != resource.RLIM_INFINITY:
            yield Finding(
                name, WARNING, f"{most / _GIB:.1f} GiB for each process",
                "Take it away (`ulimit -d unlimited -v unlimited`); workers reserve more addresses "
                "than memory, and have limits of their own.",
            )  # fmt: skip
    maps = _number(Path("/proc/sys/vm/max_map_count"))
    if maps is not None and maps < _MIN_MAPS:
        yield Finding("memory maps", WARNING, f"vm.max_map_count is {maps}",
                      f"Set it to {_MIN_MAPS} (sysctl).")  # fmt: skip
    if _number(Path("/proc/sys/vm/overcommit_memory")) == 2:
        yield Finding(
            "overcommit", PROBLEM, "vm.overcommit_memory is 2: addresses without memory count",
            "Set it to 0 or 1 (sysctl); KV is an address range of which parts have memory.",
        )  # fmt: skip


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text("ascii"))
    except (OSError, ValueError):
        return None


def _disk(folder: Path) -> Iterator[Finding]:
    """How fast the cache's disk is, by a file that is written, dropped from RAM, and read."""
    place = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        free = os.statvfs(place)
        left = free.f_bavail * free.f_frsize
        if left < 4 * _DISK_BYTES:
            yield Finding("disk", PROBLEM, f"{left / _MIB:.0f} MiB are free at {place}",
                          "Free some, or move cache.dir.")  # fmt: skip
            return
        written, read = _disk_speed(place)
    except OSError as error:
        yield Finding("disk", PROBLEM, f"{place} cannot be written: {error.strerror or error}",
                      "Mend its rights, or move cache.dir.")  # fmt: skip
        return
    said = f"{place}: writes {written / _MIB:.0f} MiB/s, reads {read / _MIB:.0f} MiB/s"
    if min(written, read) < _SLOW_BYTES_S:
        remedy = "A faster disk for cache.dir; KV from this one is rarely worth its time."
        yield Finding("disk", WARNING, said, remedy)
    else:
        yield Finding("disk", OK, said)


def _disk_speed(folder: Path) -> tuple[float, float]:
    content = os.urandom(_MIB)
    with tempfile.TemporaryFile(dir=folder) as file:
        begun = time.perf_counter()
        for _ in range(_DISK_BYTES // _MIB):
            file.write(content)
        file.flush()
        os.fsync(file.fileno())
        written_s = time.perf_counter() - begun
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        begun = time.perf_counter()
        while file.read(_MIB):
            pass
        read_s = time.perf_counter() - begun
    return _DISK_BYTES / written_s, _DISK_BYTES / max(read_s, 1e-9)


def _port(config: Config) -> Finding:
    host, port = config.server.host, config.server.port
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return _taken(host, port)
        return Finding("port", PROBLEM, f"{host} port {port}: {error.strerror or error}",
                       "Choose others with --host and --port.")  # fmt: skip
    return Finding("port", OK, f"{host} port {port} is free")


def _taken(host: str, port: int) -> Finding:
    """By a penstock that runs already, or by another program."""
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    url = f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"
    try:
        ours = httpx.get(f"{url}/health", timeout=2).json() == {"status": "ok"}
    except (httpx.HTTPError, ValueError):
        ours = False
    if ours:
        return Finding("port", OK, f"a penstock serves at {url}")
    return Finding("port", PROBLEM, f"another program listens on {host} port {port}",
                   "Choose another with --port, or end that program.")  # fmt: skip


def _others(gpus: Sequence[GpuReading]) -> Iterator[Finding]:
    """Programs that hold memory of a card."""
    for gpu in gpus:
        held = [
            f"{_name(pid)} (pid {pid}) {size / _GIB:.1f} GiB" for pid, size in gpu.processes.items()
        ]
        name = str(gpu.domain)
        said = f"{gpu.name}, {gpu.free_bytes / _GIB:.1f} of {gpu.total_bytes / _GIB:.1f} GiB free"
        if held:
            yield Finding(name, WARNING, f"{said}; held by {', '.join(held)}",
                          "End them, or set memory.gpu_limit to what they leave.")  # fmt: skip
        else:
            yield Finding(name, OK, said)


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text("utf-8", "replace").strip()
    except OSError:
        return "a process of another user or container"
