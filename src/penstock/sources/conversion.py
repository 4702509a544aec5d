"""Runs `penstock.worker.convert` in a process of its own: that code imports torch, we do not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from penstock.errors import PullFailed
from penstock.sources.staging import watched

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.sources.staging import Progress, Staging

_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",  # everything it needs is on disk
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
}


def convert(what: str, source: Path, staging: Staging, progress: Progress) -> None:
    """Convert `source` ("gguf" or "tokenizer") into the folder being built."""
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
            failure = _follow(child.stdout, staging.model, progress)
            child.wait()
        except BaseException:
            child.kill()
            raise
    if child.returncode != 0:
        raise PullFailed(failure or f"Converting {source} failed: {_last_line(log)}")
    for path in staging.model.iterdir():
        path.chmod(0o644)


def _follow(lines: Any, target: Path, progress: Progress) -> str | None:
    """Pass progress on until the child's end; its sentence if it failed."""
    with ExitStack() as stack:
        for line in lines:
            message: dict[str, Any] = json.loads(line)
            if "error" in message:
                return str(message["error"])
            phase, done, total = message["phase"], message["done"], message["total"]
            stack.close()
            if phase == "write" and done == 0:
                stack.enter_context(watched(target, phase, total, progress))
            else:
                progress(phase, done, total)
    return None


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text("utf-8", "replace").splitlines()]
    return next((line for line in reversed(lines) if line), "it ended without a word.")
