"""A worker's life: load an engine, then turn messages into steps until told to stop.

The device thread (the main one) owns the engine. One helper thread reads the socket and only
posts messages, with one exception: it ends the process when there is nobody left to work for,
because the device thread may be deep in a load or a step. Knows no torch, no model and no KV: the
engine arrives through the module named in the order, and is what `core.engine_contract` says.
"""

from __future__ import annotations

import importlib
import logging
import os
import queue
import sys
import threading
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, cast

import msgspec

from penstock.errors import InternalError, ModelUnusable, PenstockError
from penstock.wire import (
    Alive,
    Cancel,
    Failure,
    Finish,
    Grant,
    LoadFailed,
    Loading,
    LoadSpec,
    Output,
    Probe,
    Shed,
    Shutdown,
    Step,
    Submit,
    ToWorker,
    WorkerChannel,
)
from penstock.worker.priority import behind_others

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator

    from penstock.worker.core.engine_contract import Engine, EngineModule

log = logging.getLogger(__name__)

EXIT_OK = 0
EXIT_LOAD_FAILED = 3
EXIT_ENGINE_BROKEN = 4  # the engine failed FAILURES_ALLOWED times in a row; a restart may help
EXIT_SERVER_GONE = 5

FAILURES_ALLOWED = 3
PROGRESS_EVERY_S = 0.1


def run(sock: socket.socket, spec: LoadSpec, engine_module: str) -> int:
    """Serve `spec` over `sock`; returns the exit code of the process."""
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    started = time.monotonic()
    channel = WorkerChannel(sock)
    inbox = _Inbox(channel)
    try:
        try:
            engine = _load(channel, spec, engine_module)
        except PenstockError as error:
            log.error("the load of %s failed: %s", spec.name, error.message)
            channel.send(LoadFailed(_failure(error)))
            return EXIT_LOAD_FAILED
        inbox.loaded.set()
        channel.send(
            msgspec.structs.replace(
                engine.ready(), pid=os.getpid(), load_s=time.monotonic() - started
            )
        )
        return _Worker(channel, inbox, engine).serve()
    except (BrokenPipeError, ConnectionResetError):
        return EXIT_SERVER_GONE


def _load(channel: WorkerChannel, spec: LoadSpec, engine_module: str) -> Engine:
    """The engine of `spec`; whatever goes wrong becomes a `PenstockError`."""
    progress = _Progress(channel)
    try:
        module = cast("EngineModule", importlib.import_module(engine_module))
        with behind_others() if spec.yields else nullcontext():
            return module.load_engine(spec, progress)
    except (PenstockError, BrokenPipeError, ConnectionResetError):
        raise
    except Exception as error:
        log.exception("the load of %s failed", spec.name)
        raise ModelUnusable(
            f"The model {spec.name!r} could not be loaded from {spec.path}: "
            f"{type(error).__name__}: {error}. The worker's log has the whole traceback."
        ) from error


class _Progress:
    """Sends `Loading` frames, not more often than anyone can read them."""

    def __init__(self, channel: WorkerChannel) -> None:
        self._channel = channel
        self._phase = ""
        self._sent_at = 0.0

    def __call__(self, phase: str, done: int, total: int) -> None:
        now = time.monotonic()
        if phase == self._phase and done < total and now - self._sent_at < PROGRESS_EVERY_S:
            return
        self._phase, self._sent_at = phase, now
        self._channel.send(Loading(phase, done, total))


class _Inbox:
    """The messages that have arrived, in order; filled by the reader thread."""

    def __init__(self, channel: WorkerChannel) -> None:
        self.loaded = threading.Event()
        self._channel = channel
        self._messages: queue.SimpleQueue[ToWorker] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="socket in", daemon=True).start()

    def _read(self) -> None:
        while True:
            try:
                messages = self._channel.receive()
            except OSError:
                messages = None
            except MemoryError:
                # A message is lost, and nobody would hear the next: dying is heard.
                log.critical("out of memory while reading a message; ending this process")
                os._exit(EXIT_ENGINE_BROKEN)
            except Exception:
                # Bytes of another version, or none that were ever a message: neither can what
                # follows be read, and without this thread the server's end would not be noticed.
                log.exception("a message could not be read; ending this process")
                os._exit(EXIT_ENGINE_BROKEN)
            if messages is None:
                os._exit(EXIT_SERVER_GONE)
            for message in messages:
                if isinstance(message, Shutdown) and not self.loaded.is_set():
                    os._exit(EXIT_OK)  # half a load is of no use to anyone
                self._messages.put(message)

    def waiting(self) -> bool:
        """Whether there is anything to take."""
        return not self._messages.empty()

    def take(self, wait_s: float | None) -> Iterator[ToWorker]:
        """Everything that has arrived, or arrives first within so long; None: whenever."""
        try:
            yield self._messages.get(block=wait_s != 0, timeout=wait_s)
            while True:
                yield self._messages.get_nowait()
        except queue.Empty:
            return


class _Worker:
    """The loop of a loaded engine."""

    def __init__(self, channel: WorkerChannel, inbox: _Inbox, engine: Engine) -> None:
        self._channel = channel
        self._inbox = inbox
        self._engine = engine
        self._in_flight: set[int] = set()
        self._failures = 0  # in a row
        self._told_to_reload = False

    def serve(self) -> int:
        """Step while there is work, sleep while there is none; returns the exit code."""
        while self._failures < FAILURES_ALLOWED:
            wait_s = 0.0 if self._engine.has_work() else self._engine.tidy(self._inbox.waiting)
            if self._engine.wants_reload and not self._told_to_reload:
                self._told_to_reload = True
                self._send([])
            figures_changed = False
            for message in self._inbox.take(wait_s):
                if isinstance(message, Shutdown):
                    self._engine.close()
                    return EXIT_OK
                figures_changed |= self._take(message)
            if self._engine.has_work():
                self._step()
            elif figures_changed:
                self._send([])  # no step follows to carry the figures
        log.error("the engine failed %d times in a row; ending this process", self._failures)
        return EXIT_ENGINE_BROKEN

    def _take(self, message: Submit | Cancel | Probe | Grant | Shed) -> bool:
        """Do what a message asks; whether the figures changed."""
        match message:
            case Submit():
                self._submit(message)
            case Cancel():
                self._in_flight.discard(message.id)
                self._engine.cancel(message.id)
            case Probe():
                self._probe(message)
            case Grant():
                self._channel.send(self._engine.grant(message))
            case Shed():
                self._channel.send(self._engine.shed(message.bytes))
        return isinstance(message, Cancel | Grant | Shed)

    def _send(self, outputs: list[Output]) -> None:
        self._in_flight.difference_update(o.id for o in outputs if o.finish is not None)
        self._channel.send(Step(outputs, self._engine.status(), self._engine.notices()))

    def _submit(self, request: Submit) -> None:
        self._in_flight.add(request.id)
        try:
            self._engine.submit(request)
        except PenstockError as error:
            self._send([_ended(request.id, _failure(error))])
        except Exception:
            log.exception("request %d could not be submitted", request.id)
            self._engine.cancel(request.id)
            self._send([_ended(request.id, _step_failure())])

    def _probe(self, message: Probe) -> None:
        try:
            self._engine.probe()
        except Exception:
            # No answer is the answer: the server's probe runs into its time-out.
            self._failures += 1
            log.exception("a probe failed")
        else:
            self._failures = 0
            self._channel.send(Alive(message.number))

    def _step(self) -> None:
        try:
            outputs = self._engine.step()
        except Exception:
            # Not the fault of one request, or the engine would have said which: all of them go,
            # the model stays.
            self._failures += 1
            log.exception("a step with %d requests failed", len(self._in_flight))
            failed = sorted(self._in_flight)
            for request_id in failed:
                self._engine.cancel(request_id)
            self._send([_ended(request_id, _step_failure()) for request_id in failed])
        else:
            self._failures = 0
            self._send(outputs)


def _ended(request_id: int, failure: Failure) -> Output:
    return Output(request_id, finish=Finish.ERROR, failure=failure)


def _failure(error: PenstockError) -> Failure:
    return Failure(error.code, error.message, error.numbers)


def _step_failure() -> Failure:
    return Failure(
        InternalError.code,
        "A step of the model failed and every request in it was ended; the worker's log has the "
        "traceback. The model is still loaded: the request may be sent again.",
    )
