"""The process of one grammar: compiles it, then answers with masks until nobody needs it.

Forked from the host, whose vocabulary it shares. Its limits are the kernel's: processor time by a
timer whose signal ends the process, memory by RLIMIT_DATA, recursion by the stack. So whatever a
grammar makes the library do, it ends here.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.grammars.messages import Ask, Drop, Mask, to_matcher
from penstock.wire import FrameReader, frame

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    from penstock.grammars.messages import Bounds

READY = b"ready"
IDLE = b"idle "  # and how many workers have come so far
INVALID = b"invalid "  # and why
CONNECT = b"connect"  # with a socket to the worker
EXIT_OUT_OF_MEMORY = 3

_PR_SET_PDEATHSIG = 1
_REASON_CHARACTERS = 600
_DEAD_END = "NoExtensionBias"  # how the library says that no token is allowed
# A mask beyond this makes its process give way to others from then on: priorities only go down.
_SLOW_MASK_S = 0.02
_SLOW_NICE = 10


def limit_process(bounds: Bounds, *, quick: bool) -> None:
    """Let this process end, rather than anything else, when a compile takes too much."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limit_memory(bounds.quick_bytes if quick else bounds.one_bytes)
    if not quick:
        os.nice(_SLOW_NICE)
    signal.setitimer(signal.ITIMER_PROF, bounds.quick_s if quick else bounds.timeout_s)


def limit_memory(size: int) -> None:
    """Allocations beyond `size` more than now fail, and Rust ends the process then."""
    status = Path("/proc/self/status")
    if not status.exists():
        return
    data = next(line for line in status.read_text().splitlines() if line.startswith("VmData"))
    limit = int(data.split()[1]) * 1024 + size
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


class MatcherProcess:
    """Compiles one grammar and follows it for any number of requests."""

    def __init__(
        self, host: socket.socket, tokenizer: LLTokenizer, words: int, bounds: Bounds
    ) -> None:
        self._host = host
        self._tokenizer = tokenizer
        self._bounds = bounds
        self._bits = bytearray(4 * words)
        self._address = ctypes.addressof((ctypes.c_char * len(self._bits)).from_buffer(self._bits))
        self._gives_way = False

    def run(self, text: str, limits: LLParserLimits, *, quick: bool) -> None:
        """From the compile to the end of the process."""
        from llguidance import LLMatcher

        limit_process(self._bounds, quick=quick)
        self._gives_way = not quick
        fresh = LLMatcher(self._tokenizer, text, log_level=0, limits=limits)
        if error := fresh.get_error():
            reason = error.strip().rstrip(".")[:_REASON_CHARACTERS]
            self._host.send(INVALID + reason.encode())
            return
        signal.setitimer(signal.ITIMER_PROF, 0)
        limit_memory(self._bounds.one_bytes)
        self._host.send(READY)
        workers = 0
        while (connection := self._connected()) is not None:
            workers += 1
            with connection:
                self._follow(fresh, connection)
            self._host.send(IDLE + str(workers).encode())

    def _connected(self) -> socket.socket | None:
        """The next worker; None when the host is gone."""
        data, fds, _, _ = socket.recv_fds(self._host, 64, 1)
        return socket.socket(fileno=fds[0]) if data and fds else None

    def _follow(self, fresh: LLMatcher, worker: socket.socket) -> None:
        """Answer one worker until it has no request of this grammar, or another comes."""
        matchers: dict[int, LLMatcher] = {}
        frames = FrameReader()
        while True:
            readable, _, _ = select.select([self._host, worker], [], [])
            if worker not in readable:
                return  # another worker, or the host's end
            try:
                data = worker.recv(1 << 18)
            except OSError:
                return
            if not data:
                return
            for body in frames.feed(data):
                message = to_matcher.decode(body)
                if isinstance(message, Drop):
                    matchers.pop(message.id, None)
                    continue
                if len(message.tokens) == message.at:
                    matchers[message.id] = fresh.deep_copy()
                answer = self._answer(matchers[message.id], message)
                try:
                    worker.sendall(frame(answer))
                except OSError:
                    return

    def _answer(self, matcher: LLMatcher, ask: Ask) -> Mask:
        began = time.thread_time()
        signal.setitimer(signal.ITIMER_PROF, self._bounds.timeout_s)
        if ask.tokens:
            matcher.consume_tokens(ask.tokens)
        matcher.unsafe_compute_mask_ptr(self._address, len(self._bits))
        accepting, error = matcher.is_accepting(), matcher.get_error()
        signal.setitimer(signal.ITIMER_PROF, 0)
        spent = time.thread_time() - began
        if spent > _SLOW_MASK_S and not self._gives_way:
            self._gives_way = True
            os.nice(_SLOW_NICE)
        return Mask(ask.id, ask.at, accepting, _reason(error), spent, bytes(self._bits))


def _reason(error: str) -> str:
    """Why a grammar cannot be followed, without the library's own state behind it."""
    first = error.strip().partition("\n")[0].rstrip(".")
    if first == _DEAD_END:
        return "no text that begins like this answer has that form"
    return first[:_REASON_CHARACTERS]


def run_forked(process: MatcherProcess, text: str, limits: LLParserLimits, *, quick: bool) -> None:
    """What a fork of the host does; never returns."""
    code = 0
    try:
        process.run(text, limits, quick=quick)
    except (BrokenPipeError, ConnectionResetError):
        code = 0  # the host is gone
    except MemoryError:
        code = EXIT_OUT_OF_MEMORY
    except BaseException as error:  # noqa: BLE001 - a panic of the library is no Exception
        sys.stderr.write(f"a matcher failed: {type(error).__name__}: {error}"[:500] + "\n")
        code = 1
    finally:
        os._exit(code)
