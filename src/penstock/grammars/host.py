"""The grammar host of one model: has its vocabulary and forks a matcher for each grammar.

Keeps the matchers within their bytes: those that nobody uses are ended first, the longest unused
before others; then, when those in use have grown, the latest opened one, whose requests wait until
there is room again. Small grammars have a quarter of the room to themselves, so they do not wait
behind large ones. Runs no grammar itself, starts no thread, and ends with the server's socket.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import sys
import time
from collections import deque
from typing import TYPE_CHECKING

from llguidance import LLParserLimits, LLTokenizer, TokenizerWrapper

from penstock.fork_server import set_process_name
from penstock.grammars.matcher import (
    CONNECT,
    IDLE,
    INVALID,
    READY,
    MatcherProcess,
    run_forked,
)
from penstock.grammars.messages import (
    ALIVE_S,
    PACKET_BYTES,
    Alive,
    Begin,
    Compile,
    Compiled,
    Evicted,
    FromHost,
    FromHostToWorker,
    Opened,
    Outcome,
    Refused,
    Up,
    Wanted,
    open_order,
    packed,
    to_host,
)
from penstock.grammars.processes import (
    Matcher,
    Vocabulary,
    cause_of_end,
    kill,
    private_bytes,
)
from penstock.wire import FrameReader, frame

if TYPE_CHECKING:
    from penstock.grammars.messages import Bounds

_TICK_S = 0.25  # between two readings of matchers in use
_IDLE_TICK_S = ALIVE_S
_MARGIN_BYTES = 512 << 10  # that a matcher may grow between two readings
_READY_TRIES = 3  # of a compile whose process is killed from outside


class Host:
    """Serves one server and one worker until the server is gone."""

    def __init__(self, control: socket.socket, worker: socket.socket) -> None:
        self._control = control
        self._worker = worker
        worker.setblocking(False)
        self._worker_gone = False  # the next one comes with a new host
        self._frames = FrameReader()
        self._orders: deque[Compile] = deque()  # that wait for room
        self._matchers: dict[bytes, Matcher] = {}
        self._ending: dict[int, Matcher] = {}  # killed and not reaped yet, by pid
        self._opening: dict[bytes, None] = {}  # the worker waits for these, in order
        self._kills: dict[bytes, int] = {}  # compiles that were killed from outside, in a row
        self._said_at = 0.0  # that it is alive
        self._wake_r, self._wake_w = os.pipe()
        for fd in (self._wake_r, self._wake_w):
            os.set_blocking(fd, False)

    def serve(self) -> None:
        """Read the vocabulary, then serve; returns when the server is gone."""
        begin = self._receive_begin()
        if begin is None:
            return
        self._bounds: Bounds = begin.bounds
        self._limits = LLParserLimits(verbose_errors=False, **begin.limits)  # type: ignore[arg-type]
        vocabulary = Vocabulary(begin.tokens, begin.special_ids)
        self._words = -(-len(vocabulary.tokens) // 32)
        self._tokenizer = LLTokenizer(TokenizerWrapper(vocabulary))
        del begin, vocabulary
        gc.collect()
        gc.disable()  # no collection may write to the pages that the forks share
        gc.freeze()
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_w)
        self._tell(Up(private_bytes(os.getpid())))
        while self._turn():
            pass

    def _receive_begin(self) -> Begin | None:
        while True:
            data = self._control.recv(1 << 20)
            if not data:
                return None
            if bodies := self._frames.feed(data):
                first, *others = map(to_host.decode, bodies)
                self._orders.extend(order for order in others if isinstance(order, Compile))
                assert isinstance(first, Begin)
                return first

    def _turn(self) -> bool:
        """Wait for something and deal with it; False when the server is gone."""
        sockets = {matcher.sock.fileno(): matcher for matcher in self._matchers.values()}
        watched = [self._control.fileno(), self._wake_r, *sockets]
        if not self._worker_gone:
            watched.append(self._worker.fileno())
        poll = select.poll()
        for fd in watched:
            poll.register(fd, select.POLLIN)
        active = any(m.opened_at or m.deadline for m in self._matchers.values())
        tick_s = _TICK_S if active else _IDLE_TICK_S
        ready = {fd for fd, _ in poll.poll(int(tick_s * 1000))}
        if self._control.fileno() in ready and not self._hear_server():
            return False
        if self._worker.fileno() in ready:
            self._hear_worker()
        for fd, matcher in sockets.items():
            if fd in ready:
                self._hear_matcher(matcher)
        if self._wake_r in ready:
            os.read(self._wake_r, 4096)
        self._reap()
        self._look_after()
        self._start_orders()
        self._say_alive()
        return True

    # --- what is heard -------------------------------------------------------------------------

    def _hear_server(self) -> bool:
        try:
            data = self._control.recv(1 << 20)
        except OSError:
            return False
        for body in self._frames.feed(data):
            order = to_host.decode(body)
            assert isinstance(order, Compile)
            known = self._matchers.get(order.key)
            if known is not None and known.deadline is None:
                known.used_at = time.monotonic()
                self._tell(Compiled(order.key, Outcome.READY))
                self._connect_waiting(known)
            elif known is None:
                self._orders.append(order)
        return bool(data)

    def _hear_worker(self) -> None:
        while True:
            try:
                data = self._worker.recv(PACKET_BYTES)
            except OSError:
                return
            if not data:
                self._worker_gone = True
                return
            key = open_order.decode(data).key
            matcher = self._matchers.get(key)
            if matcher is not None and matcher.deadline is None:
                self._connect(matcher)
                continue
            self._opening[key] = None
            if matcher is None:
                self._tell(Wanted(key))

    def _hear_matcher(self, matcher: Matcher) -> None:
        try:
            data = matcher.sock.recv(PACKET_BYTES, socket.MSG_DONTWAIT)
        except OSError:
            return
        key, now = matcher.order.key, time.monotonic()
        if data == READY:
            self._kills.pop(key, None)
            matcher.deadline, matcher.used_at = None, now
            matcher.order = Compile(key, "", matcher.order.quick)  # its text is not needed again
            matcher.bytes = private_bytes(matcher.pid) + _MARGIN_BYTES
            self._tell(Compiled(key, Outcome.READY))
            self._connect_waiting(matcher)
        elif data.startswith(IDLE):
            if int(data.removeprefix(IDLE)) == matcher.connected:  # and not opened again since
                matcher.opened_at, matcher.used_at = None, now
        elif data.startswith(INVALID):
            self._fail(matcher, Outcome.INVALID, data.removeprefix(INVALID).decode() + ".")

    def _connect_waiting(self, matcher: Matcher) -> None:
        if matcher.order.key in self._opening:
            del self._opening[matcher.order.key]
            self._connect(matcher)

    def _connect(self, matcher: Matcher) -> None:
        """Join the worker and a matcher."""
        ours, theirs = socket.socketpair()
        with ours, theirs:
            try:
                socket.send_fds(matcher.sock, [CONNECT], [ours.fileno()])
            except OSError:
                self._opening[matcher.order.key] = None  # it has just died
                return
            matcher.opened_at = matcher.used_at = time.monotonic()
            matcher.connected += 1
            self._tell_worker(Opened(matcher.order.key), theirs.fileno())

    # --- processes -----------------------------------------------------------------------------

    def _start_orders(self) -> None:
        for order in list(self._orders):
            bounds = self._bounds
            size = bounds.quick_bytes if order.quick else bounds.one_bytes
            total = bounds.total_bytes if order.quick else bounds.large_total_bytes
            if order.key in self._matchers:
                self._orders.remove(order)  # its answer is the other's
            elif self._make_room(size, total):
                self._orders.remove(order)
                self._fork(order, size)

    def _fork(self, order: Compile, size: int) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        bounds = self._bounds
        try:
            pid = os.fork()
        except OSError as error:
            ours.close()
            theirs.close()
            self._refuse(order, Outcome.EXCEEDED, f"no process could be had for it: {error}.")
            return
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for sock in (ours, self._control, self._worker):
                sock.close()
            for other in self._matchers.values():
                other.sock.close()
            set_process_name("penstock: match")
            process = MatcherProcess(theirs, self._tokenizer, self._words, bounds)
            run_forked(process, order.text, self._limits, quick=order.quick)
        theirs.close()
        now = time.monotonic()
        limit_s = bounds.quick_s if order.quick else bounds.timeout_s
        deadline = now + limit_s * bounds.wall_factor
        self._matchers[order.key] = Matcher(order, pid, ours, size, deadline, now)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if self._ending.pop(pid, None) is not None:
                continue
            for matcher in list(self._matchers.values()):
                if matcher.pid == pid:
                    self._hear_matcher(matcher)  # its last word
                    self._died(matcher, os.waitstatus_to_exitcode(status))

    def _died(self, matcher: Matcher, code: int) -> None:
        key = matcher.order.key
        if self._matchers.get(key) is not matcher:
            return
        del self._matchers[key]
        matcher.sock.close()
        if matcher.deadline is None:
            if key in self._opening:  # too late for this one
                self._tell(Wanted(key))
            return  # otherwise the worker sees the end of its socket and opens it again
        if code == -signal.SIGKILL and not matcher.expired:
            self._kills[key] = tries = self._kills.get(key, 0) + 1
            if tries < _READY_TRIES:
                self._orders.append(matcher.order)
                return
        self._refuse(matcher.order, Outcome.EXCEEDED, cause_of_end(matcher, code, self._bounds))

    def _fail(self, matcher: Matcher, outcome: Outcome, reason: str) -> None:
        """A matcher has said that it cannot be; its process ends by itself."""
        del self._matchers[matcher.order.key]
        matcher.sock.close()
        self._ending[matcher.pid] = matcher
        self._refuse(matcher.order, outcome, reason)

    def _refuse(self, order: Compile, outcome: Outcome, reason: str) -> None:
        self._kills.pop(order.key, None)
        self._tell(Compiled(order.key, outcome, reason))
        # The server orders what was too much for the quick lane once more, in the slow one.
        final = outcome is Outcome.INVALID or not order.quick
        if final and order.key in self._opening:
            del self._opening[order.key]
            self._tell_worker(Refused(order.key, reason))

    # --- room ----------------------------------------------------------------------------------

    def _held_bytes(self) -> int:
        living = (*self._matchers.values(), *self._ending.values())
        return sum(matcher.bytes for matcher in living)

    def _make_room(self, size: int, total: int) -> bool:
        """Whether `size` more fit into `total`; who is not used goes for it."""
        while (excess := self._held_bytes() + size - total) > 0:
            idle = [m for m in self._matchers.values() if m.opened_at is None and not m.deadline]
            ending = sum(matcher.bytes for matcher in self._ending.values())
            if not idle or ending >= excess:
                return False  # a reaped process brings us here again
            self._end(min(idle, key=lambda matcher: matcher.used_at))
        return True

    def _look_after(self) -> None:
        """End compiles past their deadline and matchers that nobody uses; keep within the room."""
        now = time.monotonic()
        for matcher in list(self._matchers.values()):
            if matcher.deadline is not None:
                if now > matcher.deadline:
                    matcher.expired = True
                    kill(matcher.pid)
            elif matcher.opened_at is None:
                if now - matcher.used_at > self._bounds.idle_s:
                    self._end(matcher)
            else:
                matcher.bytes = private_bytes(matcher.pid) + _MARGIN_BYTES
        if not self._make_room(0, self._bounds.total_bytes) and not self._ending:
            self._evict()

    def _evict(self) -> None:
        """The latest opened of the larger ones gives way."""
        used = [matcher for matcher in self._matchers.values() if matcher.opened_at is not None]
        if len(used) < 2:
            return  # one alone has its limit
        share = self._bounds.total_bytes // len(used)
        large = [matcher for matcher in used if matcher.bytes > share] or used
        victim = max(large, key=lambda matcher: matcher.opened_at or 0.0)
        self._tell_worker(Evicted(victim.order.key))
        self._end(victim)

    def _end(self, matcher: Matcher) -> None:
        del self._matchers[matcher.order.key]
        matcher.sock.close()
        self._ending[matcher.pid] = matcher
        kill(matcher.pid)

    # --- what is said --------------------------------------------------------------------------

    def _say_alive(self) -> None:
        now = time.monotonic()
        if now - self._said_at >= ALIVE_S / 2:
            self._said_at = now
            self._tell(Alive())

    def _tell(self, message: FromHost) -> None:
        with contextlib.suppress(OSError):  # its end is heard where it is read
            self._control.sendall(frame(message))

    def _tell_worker(self, message: FromHostToWorker, *fds: int) -> None:
        with contextlib.suppress(OSError):  # a worker that is gone; the next one opens anew
            socket.send_fds(self._worker, [packed(message)], fds)


def main(arguments: list[str]) -> None:
    """`python -m penstock.grammars.host CONTROL_FD WORKER_FD`, started by the server."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    set_process_name("penstock: gramm")
    control, worker = (socket.socket(fileno=int(fd)) for fd in arguments)
    for sock in (control, worker):
        sock.set_inheritable(False)
    try:
        Host(control, worker).serve()
    finally:
        os._exit(0)  # the matchers end with this process


if __name__ == "__main__":
    main(sys.argv[1:])
