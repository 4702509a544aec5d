"""Stands in for an engine's loader: uses torch in a forked worker and reports through an error."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.errors import Overloaded
from penstock.fork_server import thread_count

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.wire import LoadSpec


def load_engine(spec: LoadSpec, progress: Callable[[str, int, int], None]) -> None:
    """Two threads (this one and the socket's), no bad-fork flag, and a parallel operation works."""
    threads = thread_count()
    import torch  # already imported by the template; the server must not

    torch.set_num_threads(2)
    total = int((torch.ones(1024, 1024) @ torch.ones(1024, 1024))[0, :4].sum())
    bad_fork = torch.cuda._is_in_bad_fork()
    raise Overloaded(f"bad_fork={bad_fork} threads_before={threads} sum={total}")
