"""How a worker's reader ends the process when nothing more can be read."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import msgspec
import pytest

from penstock.wire import Cancel, frame
from penstock.worker.loop import EXIT_ENGINE_BROKEN, EXIT_SERVER_GONE

if TYPE_CHECKING:
    from collections.abc import Iterator

# Its main thread is deep in a step, and hears nothing.
WORKER = """
import socket, sys, time
from penstock.wire import WorkerChannel
from penstock.worker.loop import _Inbox
_Inbox(WorkerChannel(socket.socket(fileno=int(sys.argv[1]))))
time.sleep(15)
sys.exit(99)
"""


@contextlib.contextmanager
def reading() -> Iterator[tuple[socket.socket, subprocess.Popen[bytes]]]:
    ours, theirs = socket.socketpair()
    number = theirs.fileno()
    worker = subprocess.Popen([sys.executable, "-c", WORKER, str(number)], pass_fds=[number])
    theirs.close()
    with ours:
        yield ours, worker
    worker.wait(20)


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


@pytest.mark.parametrize(
    "garbage",
    [
        pytest.param(b"\xff" * 64, id="a length that no message has"),
        pytest.param(framed(msgspec.msgpack.encode({"type": "Unheard"})), id="an unknown kind"),
        pytest.param(framed(b"\xc1"), id="no msgpack"),
    ],
)
def test_what_cannot_be_read_ends_the_worker(garbage: bytes) -> None:
    with reading() as (server, worker):
        server.sendall(frame(Cancel(1)) + garbage)
        assert worker.wait(20) == EXIT_ENGINE_BROKEN


def test_the_end_of_the_server_ends_the_worker() -> None:
    with reading() as (server, worker):
        server.sendall(frame(Cancel(1)))
        server.close()
        assert worker.wait(20) == EXIT_SERVER_GONE
