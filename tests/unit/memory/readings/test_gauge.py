from __future__ import annotations

import gc
import mmap
import os
from typing import TYPE_CHECKING

import pytest

from penstock.errors import BadRequest
from penstock.memory.readings.gauge import (
    GpuReading,
    GroupReading,
    ProcessGauge,
    RamReading,
    read_gpus,
    read_process,
    read_ram,
    resolve_device,
    visible_gpus,
    wants_to_run,
)

if TYPE_CHECKING:
    from pathlib import Path

GPUS = (GpuReading(0, "a", "GPU-aa", 10, 3), GpuReading(1, "b", "GPU-bb", 10, 9))


def _fresh_pages(size: int) -> mmap.mmap:
    """Touched memory that is certainly new: `malloc` may reuse pages that were freed before."""
    pages = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.write(b"\1" * size)
    return pages


def make_proc(tmp_path: Path, cgroup: str, mount_kind: str, mount: Path, root: str = "/") -> Path:
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 1000 kB\nMemAvailable:  600 kB\nHugePages_Total: 0\n")
    (proc / "self" / "cgroup").write_text(f"9:cpu:/x\n{cgroup}\n")
    options = "rw,memory" if mount_kind == "cgroup" else "rw"
    (proc / "self" / "mountinfo").write_text(
        "20 1 8:1 / / rw,relatime - ext4 /dev/vda rw\n"
        f"30 20 0:5 {root} {mount} rw shared:1 - {mount_kind} none {options}\n"
    )
    return proc


def put(group: Path, limit: tuple[str, str], used: tuple[str, str]) -> None:
    group.mkdir(parents=True, exist_ok=True)
    for name, value in (limit, used):
        (group / name).write_text(f"{value}\n")


def test_v2_takes_the_tightest_limit_and_what_is_used_there(tmp_path: Path) -> None:
    mount = tmp_path / "unified"
    proc = make_proc(tmp_path, "0::/outer/inner", "cgroup2", mount)
    put(mount / "outer" / "inner", ("memory.max", "max"), ("memory.current", "70"))
    put(mount / "outer", ("memory.max", "500"), ("memory.current", "90"))
    (mount / "outer" / "memory.stat").write_text("anon 60\ninactive_file 20\nactive_file 5\n")
    groups = (GroupReading(500, 65),)
    assert read_ram(proc) == RamReading(1000 << 10, 600 << 10, groups)
    assert read_ram(proc).capacity_bytes == 500


def test_v1_without_a_limit_shows_a_huge_number(tmp_path: Path) -> None:
    mount = tmp_path / "memory"
    proc = make_proc(tmp_path, "4:memory:/group", "cgroup", mount)
    files = ("memory.limit_in_bytes", "memory.usage_in_bytes")
    put(mount / "group", (files[0], str((1 << 63) - 4096)), (files[1], "70"))
    reading = read_ram(proc)
    assert reading.cgroup_limit_bytes is None
    assert reading.capacity_bytes == 1000 << 10
    put(mount / "group", (files[0], "4096"), (files[1], "70"))
    stat = "inactive_file 1\ntotal_inactive_file 30\ntotal_active_file 10\n"
    (mount / "group" / "memory.stat").write_text(stat)
    assert read_ram(proc).capacity_bytes == 4096
    assert read_ram(proc).groups == (GroupReading(4096, 30),)


def test_a_container_sees_its_group_as_the_root_of_the_mount(tmp_path: Path) -> None:
    mount = tmp_path / "memory"
    proc = make_proc(tmp_path, "4:memory:/docker/id/sub", "cgroup", mount, root="/docker/id")
    files = ("memory.limit_in_bytes", "memory.usage_in_bytes")
    put(mount / "sub", (files[0], "300"), (files[1], "1"))
    put(mount, (files[0], "200"), (files[1], "2"))
    reading = read_ram(proc)
    assert reading.cgroup_limit_bytes == 200


def test_no_sources_are_no_error(tmp_path: Path) -> None:
    reading = read_ram(tmp_path)
    assert reading.physical_bytes > 0
    assert reading.cgroup_limit_bytes is None
    assert read_process(os.getpid(), tmp_path) is None


def test_our_own_process_has_private_memory() -> None:
    before = read_process(os.getpid())
    ballast = _fresh_pages(32 << 20)
    after = read_process(os.getpid())
    assert before is not None
    assert after is not None
    assert after.private_bytes - before.private_bytes > 30 << 20
    ballast.close()
    assert after.private_bytes <= after.resident_bytes


def test_between_walks_the_counters_tell_how_a_process_has_grown(tmp_path: Path) -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += 0.010  # a walk takes ten milliseconds
        return now[0]

    def put_figures(private_kib: int, counted_kib: int) -> None:
        names = ("Rss", "Anonymous", "Private_Dirty", "Private_Clean", "Pss_Anon")
        (folder / "smaps_rollup").write_text("".join(f"{n}: {private_kib} kB\n" for n in names))
        (folder / "status").write_text(f"RssAnon: {counted_kib} kB\nRssShmem: 4 kB\n")

    folder = tmp_path / "7"
    folder.mkdir()
    gauge = ProcessGauge(7, tmp_path, clock)
    put_figures(private_kib=100, counted_kib=300)
    assert (reading := gauge.read()) is not None
    assert reading.anonymous_bytes == 100 << 10
    put_figures(private_kib=90, counted_kib=340)  # 10 of them are shared by now
    assert (reading := gauge.read()) is not None
    assert reading.anonymous_bytes == reading.unbacked_bytes == 140 << 10
    now[0] += 0.99
    assert (reading := gauge.read()) is not None
    assert reading.anonymous_bytes == 90 << 10
    (folder / "status").unlink()
    assert gauge.read() is None


def test_a_gauge_follows_our_own_process() -> None:
    gauge = ProcessGauge(os.getpid())
    gc.collect()  # what earlier tests have left would be freed in between
    before = gauge.read()
    ballast = _fresh_pages(32 << 20)
    after = gauge.read()
    assert before is not None
    assert after is not None
    assert after.anonymous_bytes - before.anonymous_bytes > 30 << 20
    ballast.close()


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, "ab"),
        ("1", "b"),
        ("1,0", "ba"),
        ("GPU-bb", "b"),
        ("", ""),
        ("0,7,1", "a"),
        ("-1", ""),
    ],
)
def test_gpus_are_numbered_as_cuda_numbers_them(visible: str | None, names: str) -> None:
    seen = visible_gpus(GPUS, visible)
    assert "".join(gpu.name for gpu in seen) == names
    assert [gpu.index for gpu in seen] == list(range(len(names)))


def test_reading_gpus_never_fails() -> None:
    assert all(gpu.total_bytes > 0 for gpu in read_gpus())


def test_a_device_is_resolved() -> None:
    assert resolve_device("auto", ()) == "cpu"
    assert resolve_device("cpu", GPUS) == "cpu"
    assert resolve_device("auto", GPUS) == "cuda:1"
    assert resolve_device("cuda", GPUS) == "cuda:1"
    assert resolve_device("cuda:0", GPUS) == "cuda:0"
    for wanted, gpus in (("cuda", ()), ("cuda:2", GPUS), ("cuda:0", ())):
        with pytest.raises(BadRequest, match="cuda"):
            resolve_device(wanted, gpus)


@pytest.mark.parametrize(
    ("state", "wants"), [("R", True), ("D", True), ("S", False), ("T", False), ("Z", False)]
)
def test_who_waits_for_a_processor_or_a_disk_wants_to_run(
    tmp_path: Path, state: str, wants: bool
) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "stat").write_text(f"7 (a) name) {state} 1 7 7 0 -1 4194304 0 0\n")
    assert wants_to_run(7, tmp_path) is wants
    assert not wants_to_run(8, tmp_path)
