"""A matcher's process as its host sees it: its memory, and the cause of its end."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.grammars.matcher import EXIT_OUT_OF_MEMORY

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

    from penstock.grammars.messages import Bounds, Compile


class Vocabulary:
    """What llguidance wants to know of a tokenizer. It never has to tokenise: nothing is forced."""

    def __init__(self, tokens: list[bytes], special_ids: Sequence[int]) -> None:
        # The library wants one token that ends every text. Which tokens do so here each request
        # says for itself, so it gets one of its own, behind those of the model.
        self.tokens = [*tokens, b"<end>"]
        self.eos_token_id = len(tokens)
        self.bos_token_id = None
        self.special_token_ids = [*special_ids, len(tokens)]

    def __call__(self, text: bytes) -> list[int]:
        return []


@dataclass(slots=True, eq=False)
class Matcher:
    """A matcher's process, as the host knows it."""

    order: Compile
    pid: int
    sock: socket.socket
    bytes: int  # what it is counted for: its limit while it compiles, then what was read
    deadline: float | None  # of its compile; None once it is ready
    used_at: float
    opened_at: float | None = None  # None: nobody uses it
    connected: int = 0  # how often
    expired: bool = False  # ended for its deadline


def cause_of_end(matcher: Matcher, code: int, bounds: Bounds) -> str:
    """Why a compile did not come to its end, for its client."""
    quick = matcher.order.quick
    timeout_s = bounds.quick_s if quick else bounds.timeout_s
    size = bounds.quick_bytes if quick else bounds.one_bytes
    if code == -signal.SIGPROF:
        return (
            f"to compile it takes more than {timeout_s:g} s of processor time "
            "(server.grammar_timeout_s)."
        )
    if matcher.expired:
        return (
            f"it was not compiled within {timeout_s * bounds.wall_factor:g} s, {timeout_s:g} s "
            "of which may be processor time (server.grammar_timeout_s)."
        )
    if code in (-signal.SIGABRT, EXIT_OUT_OF_MEMORY):
        return (
            f"to compile it takes more than {size >> 20} MiB of memory (memory.grammars has "
            f"{bounds.total_bytes >> 20} MiB for all grammars of a model)."
        )
    if code in (-signal.SIGSEGV, -signal.SIGBUS):
        return "its definitions refer to each other, or nest, too deeply for the stack."
    return f"the process that compiled it ended with code {code}."


def private_bytes(pid: int) -> int:
    """What a process has for itself; 0 once it is gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_Dirty"))


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
