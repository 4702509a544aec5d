"""What `penstock doctor` finds: each check, well and ill, with the remedy where it is ill."""

from __future__ import annotations

import errno
import os
import resource
import socket
from contextlib import closing
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib import metadata
from threading import Thread
from typing import TYPE_CHECKING, Any

import pytest

from penstock import config
from penstock.cli import doctor, doctor_checks
from penstock.cli.doctor_checks import Finding, judge_torch
from penstock.memory.readings.gauge import GpuReading, GroupReading, RamReading

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

GIB = 1 << 30
CPU_BUILD = ("2.11.0+cpu", "None", "False", 0)
CUDA_BUILD = ("2.11.0+cu130", "13.0", "False", 0)
WORKING = ("2.11.0+cu130", "13.0", "True", 1)


@pytest.mark.parametrize(
    ("device", "driver", "told", "level", "words"),
    [
        ("auto", False, CPU_BUILD, "ok", "on the CPU"),
        ("auto", True, WORKING, "ok", "sees 1"),
        ("cuda", False, CPU_BUILD, "problem", "no NVIDIA driver"),
        ("auto", True, CPU_BUILD, "warning", "without CUDA"),
        ("cuda:1", True, CPU_BUILD, "problem", "without CUDA"),
        ("auto", True, CUDA_BUILD, "warning", "cannot use the driver"),
    ],
)
def test_torch_and_the_device(
    device: str, driver: bool, told: tuple[str, str, str, int], level: str, words: str
) -> None:
    finding = judge_torch(device, told[3], told, driver=driver)
    assert (finding.level, words in finding.said) == (level, True), finding
    assert bool(finding.remedy) == (level != "ok")


@pytest.fixture
def settings(tmp_path: Path) -> config.Config:
    home = {"PENSTOCK_HOME": str(tmp_path)}
    return config.load(environment=home, flags={"memory.limit": str(8 * GIB)})


def is_found(found: Finding, level: str, *words: str) -> None:
    """Every finding that is not well has its remedy."""
    assert found.level == level, found
    assert all(word in found.said for word in words), found
    assert bool(found.remedy) == (level != "ok"), found


@pytest.mark.parametrize(
    ("group", "level", "words"),
    [
        (None, "ok", "no control group is tighter"),
        (64 * GIB, "ok", "no control group is tighter"),  # wider than the machine
        (9 * GIB, "ok", "the control group has 9.0 GiB"),
        (8 * GIB, "problem", "the control group has 8.0 GiB"),
        (8 * GIB + (200 << 20), "problem", "memory.limit comes to 8.0 GiB"),
    ],
)
def test_the_control_group_leaves_something_beside_the_limit(
    settings: config.Config, group: int | None, level: str, words: str
) -> None:
    groups = () if group is None else (GroupReading(group, 0),)
    ram = RamReading(32 * GIB, 30 * GIB, groups)
    is_found(doctor_checks._control_group(settings, ram, ()), level, words)


def limits(
    monkeypatch: pytest.MonkeyPatch, settings: config.Config, **given: int
) -> dict[str, Finding]:
    """What is found under these limits of the process and of the kernel."""
    unlimited = resource.RLIM_INFINITY
    of_process = {
        resource.RLIMIT_NOFILE: given.get("files", 1 << 20),
        resource.RLIMIT_DATA: given.get("data", unlimited),
        resource.RLIMIT_AS: given.get("addresses", unlimited),
    }
    of_kernel = {
        "max_map_count": given.get("maps", 65530),
        "overcommit_memory": given.get("overcommit", 0),
    }
    monkeypatch.setattr(resource, "getrlimit", lambda which: (of_process[which],) * 2)
    monkeypatch.setattr(doctor_checks, "_number", lambda path: of_kernel[path.name])
    return {one.what: one for one in doctor_checks._limits(settings)}


def test_limits_that_are_well_are_one_line(
    monkeypatch: pytest.MonkeyPatch, settings: config.Config
) -> None:
    found = limits(monkeypatch, settings)
    assert list(found) == ["open files"]
    is_found(found["open files"], "ok", str(1 << 20))
    endless = limits(monkeypatch, settings, files=resource.RLIM_INFINITY)
    is_found(endless["open files"], "ok", "no limit")


@pytest.mark.parametrize(
    ("given", "value", "what", "level", "words"),
    [
        ("files", 1024, "open files", "warning", "at most 1024; server.max_connections asks for"),
        ("data", 2 * GIB, "RLIMIT_DATA", "warning", "2.0 GiB"),
        ("addresses", 4 * GIB, "RLIMIT_AS", "warning", "4.0 GiB"),
        ("maps", 1000, "memory maps", "warning", "vm.max_map_count is 1000"),
        ("overcommit", 2, "overcommit", "problem", "vm.overcommit_memory is 2"),
    ],
)
def test_limits_that_are_too_tight(
    monkeypatch: pytest.MonkeyPatch,
    settings: config.Config,
    given: str,
    value: int,
    what: str,
    level: str,
    words: str,
) -> None:
    is_found(limits(monkeypatch, settings, **{given: value})[what], level, words)


def test_a_disk_is_written_read_and_left_clean(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(doctor_checks, "_DISK_BYTES", 1 << 20)
    [found] = doctor_checks._disk(tmp_path / "not" / "there" / "yet")
    assert f"{tmp_path}: writes" in found.said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("speeds", "level"), [((9e8, 9e8), "ok"), ((9e8, 1e7), "warning"), ((1e7, 9e8), "warning")]
)
def test_a_slow_disk(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, speeds: tuple[float, float], level: str
) -> None:
    monkeypatch.setattr(doctor_checks, "_disk_speed", lambda _: speeds)
    [found] = doctor_checks._disk(tmp_path)
    is_found(found, level, "MiB/s")


def test_a_disk_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(_: Path) -> tuple[float, float]:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(doctor_checks, "_disk_speed", refuse)
    [found] = doctor_checks._disk(tmp_path)
    is_found(found, "problem", "cannot be written: Read-only file system")
    monkeypatch.setattr(doctor_checks, "_DISK_BYTES", 1 << 60)
    [found] = doctor_checks._disk(tmp_path)
    is_found(found, "problem", f"are free at {tmp_path}")


class _Ours(BaseHTTPRequestHandler):
    answer = b'{"status":"ok"}'

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.answer)

    def log_message(self, *_: object) -> None:
        pass


class _Another(_Ours):
    answer = b"<html>hello</html>"


@pytest.fixture
def listening(request: pytest.FixtureRequest) -> Iterator[int]:
    """The port of a server with this handler."""
    server = HTTPServer(("127.0.0.1", 0), request.param)
    thread = Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


def at(settings: config.Config, port: int, host: str = "127.0.0.1") -> config.Config:
    return replace(settings, server=replace(settings.server, host=host, port=port))


@pytest.mark.parametrize(
    ("listening", "level", "words"),
    [(_Ours, "ok", "a penstock serves at"), (_Another, "problem", "another program listens")],
    indirect=["listening"],
)
def test_a_port_that_is_taken(
    settings: config.Config, listening: int, level: str, words: str
) -> None:
    is_found(doctor_checks._port(at(settings, listening)), level, words, str(listening))


def test_ports_that_are_free_or_cannot_be_had(settings: config.Config) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        free = server.getsockname()[1]
    is_found(doctor_checks._port(at(settings, free)), "ok", "is free")
    # An address that is no machine's own (RFC 5737).
    is_found(doctor_checks._port(at(settings, free, "192.0.2.1")), "problem", "192.0.2.1 port")


def versions(monkeypatch: pytest.MonkeyPatch, needed: list[str], there: dict[str, str]) -> Finding:
    def version(name: str) -> str:
        if name not in there:
            raise metadata.PackageNotFoundError(name)
        return there[name]

    monkeypatch.setattr(metadata, "requires", lambda _: needed)
    monkeypatch.setattr(metadata, "version", version)
    [found] = doctor_checks._versions()
    return found


NEEDED = ["torch>=2.11", "transformers>=5.17,<6", "pytest; extra == 'dev'"]


@pytest.mark.parametrize(
    ("there", "level", "words"),
    [
        ({"torch": "2.13.0+cpu", "transformers": "5.17.0"}, "ok", "torch 2.13.0+cpu"),
        ({"torch": "2.9", "transformers": "5.17.0"}, "problem", "torch is 2.9, needed is >=2.11"),
        ({"torch": "2.11", "transformers": "6.0"}, "problem", "transformers is 6.0"),
        ({"torch": "2.11"}, "problem", "transformers is missing"),
    ],
)
def test_versions(
    monkeypatch: pytest.MonkeyPatch, there: dict[str, str], level: str, words: str
) -> None:
    is_found(versions(monkeypatch, NEEDED, there), level, words)


def test_versions_of_what_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def requires(name: str) -> Any:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", requires)
    [found] = doctor_checks._versions()
    is_found(found, "warning", "not installed as a package")


def card(**processes: int) -> GpuReading:
    held = {int(pid.removeprefix("pid")): size for pid, size in processes.items()}
    return GpuReading(0, "H200", "uuid", 141 * GIB, 100 * GIB, held)


def test_programs_on_a_card() -> None:
    [alone] = doctor_checks._others([card()])
    is_found(alone, "ok", "H200, 100.0 of 141.0 GiB free")
    here, gone = os.getpid(), 4_194_304  # above the kernel's largest process id
    [shared] = doctor_checks._others([card(**{f"pid{here}": 3 * GIB, f"pid{gone}": GIB})])
    is_found(shared, "warning", f"(pid {here}) 3.0 GiB", "a process of another user or container")


def test_all_checks_in_order(
    monkeypatch: pytest.MonkeyPatch, settings: config.Config, tmp_path: Path
) -> None:
    """`--quick` leaves out what takes seconds."""
    monkeypatch.setattr(doctor_checks, "_torch", lambda *_: Finding("torch", "ok", ""))
    monkeypatch.setattr(doctor_checks, "_disk_speed", lambda _: (9e8, 9e8))
    ram = RamReading(32 * GIB, 30 * GIB)

    def names(*, quick: bool) -> list[str]:
        found = doctor_checks.findings(at(settings, 0), ram, [card()], quick=quick)
        return list(dict.fromkeys(one.what for one in found))

    everything = names(quick=False)
    assert everything[:4] == ["python", "versions", "torch", "disk"]
    assert {"control group", "open files", "port", "gpu:0"} <= set(everything)
    assert [name for name in everything if name not in names(quick=True)] == ["torch", "disk"]


@pytest.mark.parametrize(
    ("value", "shown"), [(str(3 * GIB), "3.0 GiB"), ("60%", "60%"), ("auto", "auto")]
)
def test_a_limit_is_shown_as_people_read_it(value: str, shown: str) -> None:
    assert doctor._shown("memory.limit", value) == shown
