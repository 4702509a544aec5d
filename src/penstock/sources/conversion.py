"""Runs `penstock.worker.convert` in a process of its own: that code imports torch, we do not."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from penstock.config.private import FILE
from penstock.errors import PenstockError, PullFailed
from penstock.sources.staging import folder_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from penstock.sources.staging import Progress, Staging

_LOOK_S = 0.25
_READ_BYTES = 1 << 16
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",  # everything it needs is on disk
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
}


def convert(
    what: str,
    source: Path,
    staging: Staging,
    progress: Progress,
    *,
    failed: type[PenstockError] = PullFailed,
    began: Callable[[int], None] = lambda pid: None,
) -> None:
    """Convert `source` into the folder being built; `what` is one of those of `worker.convert`.

    `began` is told the process. A `progress` that raises ends it.
    """
    log = staging.download.parent / "convert.log"
    command = [sys.executable, "-m", "penstock.worker.convert", what, str(source)]
    failure: str | None = None
    with (
        log.open("wb") as stderr,
        subprocess.Popen(
            [*command, str(staging.model)],
            stdin=subprocess.PIPE,  # closes with this process, which ends the child
            stdout=subprocess.PIPE,
            stderr=stderr,
            env={**os.environ, **_ENVIRONMENT},
            pass_fds=(staging.lock_fd,),
        ) as child,
    ):
        assert child.stdout is not None
        try:
            began(child.pid)
            failure = _follow(child.stdout, staging.model, progress)
            child.wait()
        except BaseException:
            child.kill()
            raise
    if child.returncode != 0:
        raise failed(failure or f"Converting {source} failed: {_last_line(log)}")
    for path in staging.model.iterdir():
        path.chmod(FILE)  # also those that a library made by its own rules


@dataclass(slots=True)
class _Phase:
    """What the child does, as it last said, and how far it is."""

    name: str
    done: int
    total: int
    folder: Path
    before: int | None = None  # bytes in the folder: of a phase that does not tell what it writes

    @classmethod
    def said(cls, message: dict[str, Any], folder: Path) -> _Phase:
        phase = cls(message["phase"], message["done"], message["total"], folder)
        if phase.name == "write" and phase.done == 0:
            phase.before = folder_bytes(folder)
        return phase

    def tell(self, progress: Progress) -> None:
        if self.before is not None:
            self.done = min(max(0, folder_bytes(self.folder) - self.before), self.total)
        progress(self.name, self.done, self.total)


def _follow(stdout: IO[bytes], target: Path, progress: Progress) -> str | None:
    """Pass progress on until the child's end, also while it says nothing; its sentence if it
    failed."""
    phase = _Phase("start", 0, 0, target)
    for line in _lines(stdout):
        if line is not None:
            message: dict[str, Any] = json.loads(line)
            if "error" in message:
                return str(message["error"])
            phase = _Phase.said(message, target)
        phase.tell(progress)
    return None


def _lines(stdout: IO[bytes]) -> Iterator[bytes | None]:
    """Lines as they come; None where a while passes without one."""
    rest = b""
    while True:
        if not select.select([stdout], [], [], _LOOK_S)[0]:
            yield None
            continue
        if not (content := os.read(stdout.fileno(), _READ_BYTES)):
            return
        *lines, rest = (rest + content).split(b"\n")
        yield from lines


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text("utf-8", "replace").splitlines()]
    return next((line for line in reversed(lines) if line), "it ended without a word.")
