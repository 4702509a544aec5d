"""The loop of a worker: an engine of any kind is driven, and what cannot be read ends it."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from penstock.wire import (
    Alive,
    Cancel,
    Finish,
    FrameReader,
    Freed,
    Grant,
    Loading,
    Output,
    Probe,
    Ready,
    Sampling,
    Shed,
    Shutdown,
    Step,
    Submit,
    frame,
    from_worker,
)
from penstock.worker.loop import EXIT_ENGINE_BROKEN, EXIT_OK, EXIT_SERVER_GONE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.wire import FromWorker, ToWorker

# Its main thread is deep in a step, and hears nothing.
WORKER = """
import socket, sys, time
from penstock.wire import WorkerChannel
from penstock.worker.loop import _Inbox
_Inbox(WorkerChannel(socket.socket(fileno=int(sys.argv[1]))))
time.sleep(15)
sys.exit(99)
"""


# Serves the engine of this folder, which keeps no KV.
COUNTING = """
import socket, sys
from penstock.wire import LoadSpec
from penstock.worker.loop import run
sys.path.append(sys.argv[2])
spec = LoadSpec("counting", "/nowhere", "cpu", "auto", 0)
sys.exit(run(socket.socket(fileno=int(sys.argv[1])), spec, "counting_engine"))
"""


@contextlib.contextmanager
def reading(code: str = WORKER) -> Iterator[tuple[socket.socket, subprocess.Popen[bytes]]]:
    ours, theirs = socket.socketpair()
    number = theirs.fileno()
    worker = subprocess.Popen(
        [sys.executable, "-c", code, str(number), str(Path(__file__).parent)], pass_fds=[number]
    )
    theirs.close()
    with ours:
        yield ours, worker
    worker.wait(20)


class Conversation:
    """The server's side of a worker's socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._frames = FrameReader()
        self._heard: list[FromWorker] = []
        sock.settimeout(20)

    def say(self, *messages: ToWorker) -> None:
        self._sock.sendall(b"".join(map(frame, messages)))

    def hear(self) -> FromWorker:
        while not self._heard:
            self._heard += map(from_worker.decode, self._frames.feed(self._sock.recv(1 << 16)))
        return self._heard.pop(0)


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


def test_an_engine_without_kv_is_driven_by_the_same_loop() -> None:
    with reading(COUNTING) as (server, worker):
        talk = Conversation(server)
        assert isinstance(talk.hear(), Loading)
        ready = talk.hear()
        assert isinstance(ready, Ready)
        assert (ready.pid, ready.kv_bytes, ready.cost.kv.token_bytes) == (worker.pid, 0, 0)
        how = Sampling(temperature=0)
        talk.say(Submit(1, [7, 7, 7], 1, how), Submit(2, [], 1, how))
        answers: dict[int, Output] = {}
        while len(answers) < 2:
            step = talk.hear()
            assert isinstance(step, Step)
            answers |= {output.id: output for output in step.outputs}
        assert (answers[1].tokens, answers[1].finish) == ([3], Finish.STOP)
        assert answers[2].failure is not None and "nothing to count" in answers[2].failure.message
        talk.say(Grant(0, 1 << 19))
        assert talk.hear() == Freed(1 << 19)
        assert isinstance(talk.hear(), Step)  # the figures, since no step follows
        talk.say(Shed(1 << 20), Probe(5))
        heard = [talk.hear() for _ in range(3)]
        assert Freed(0) in heard and Alive(5) in heard
        talk.say(Shutdown())
        assert worker.wait(20) == EXIT_OK
