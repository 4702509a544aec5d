"""Which device it is, nobody asks but the backends: what differs has a name in `Backend`."""

from __future__ import annotations

import re
from pathlib import Path

import penstock

SOURCE = Path(penstock.__file__).parent
QUESTION = re.compile(
    r"""device\.type|is_cuda|torch\.version\.cuda|torch\.cuda\.\w+\(|[!=]=\s*["'](cpu|cuda)"""
)
# What a device is called, and which domain and kind that name stands for, is told in `memory`;
# `doctor` compares what torch says with the driver.
ANSWERS = ("worker/backends/", "memory/", "testing/", "cli/doctor_checks.py")


def test_no_module_but_the_backends_asks_which_device_it_is() -> None:
    asking = [
        f"{name}:{number}: {line.strip()}"
        for file in sorted(SOURCE.rglob("*.py"))
        if not (name := file.relative_to(SOURCE).as_posix()).startswith(ANSWERS)
        for number, line in enumerate(file.read_text("utf-8").splitlines(), 1)
        if QUESTION.search(line)
    ]
    assert asking == []


def test_the_backends_themselves_are_found_by_it() -> None:
    found = [
        f for f in (SOURCE / "worker" / "backends").rglob("*.py") if QUESTION.search(f.read_text())
    ]
    assert len(found) > 3
