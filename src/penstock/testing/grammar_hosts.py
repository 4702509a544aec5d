"""A grammar host without a server: for tests of masks, for engines in a test and for benchmarks."""

from __future__ import annotations

import os
import socket
import threading
from hashlib import sha256
from typing import TYPE_CHECKING

from penstock.errors import BadRequest
from penstock.grammars.messages import (
    Begin,
    Bounds,
    Compile,
    Compiled,
    Outcome,
    Up,
    Wanted,
    from_host,
)
from penstock.server.processes.child_process import launch_module
from penstock.server.processes.grammar_host import ENVIRONMENT, MODULE, begin_frame
from penstock.text.grammars.grammar import LIMITS, Format, grammar_of
from penstock.text.tokenizer import Tokenizer
from penstock.wire import FrameReader, frame

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType
    from typing import Self

    from llguidance import LLParserLimits

    from penstock.text.grammars.json_form import Style

MIB = 1 << 20
BOUNDS = Bounds(total_bytes=128 * MIB, one_bytes=64 * MIB, quick_bytes=12 * MIB, timeout_s=2.0)
_WAIT_S = 60.0


class LocalHost:
    """A host process, ordered about from any thread; what its worker misses it compiles again."""

    def __init__(self, begin: bytes) -> None:
        self._control, theirs = socket.socketpair()
        host_end, self.worker_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, host_end:
            fds = [theirs.fileno(), host_end.fileno()]
            self._process = launch_module(MODULE, fds, (), 2, ENVIRONMENT)
        self.pid = self._process.pid
        self.texts: dict[bytes, str] = {}
        self.wanted: list[bytes] = []  # what the worker missed
        self._answers: dict[bytes, Compiled] = {}
        self._heard = threading.Condition()
        self._up = 0
        self._control.sendall(begin)
        threading.Thread(target=self._read, daemon=True).start()
        with self._heard:
            assert self._heard.wait_for(lambda: self._up, _WAIT_S), "the host does not start"

    @classmethod
    def of_tokens(
        cls, tokens: list[bytes], special_ids: list[int], bounds: Bounds = BOUNDS
    ) -> Self:
        """For a vocabulary."""
        return cls(frame(Begin(tokens, special_ids, LIMITS, bounds)))

    @classmethod
    def of_model(cls, folder: Path, vocabulary: int, bounds: Bounds = BOUNDS) -> Self:
        """For a model's tokenizer."""
        return cls(begin_frame(Tokenizer.from_folder(folder), vocabulary, bounds))

    def compile(self, text: str, *, quick: bool = False) -> Compiled:
        """Have a grammar compiled; what became of it."""
        key = sha256(text.encode()).digest()
        self.texts[key] = text
        with self._heard:
            self._answers.pop(key, None)
            self._control.sendall(frame(Compile(key, text, quick)))
            assert self._heard.wait_for(lambda: key in self._answers, _WAIT_S), "no answer"
            return self._answers[key]

    def key(self, text: str) -> bytes:
        """The key of a grammar that can be compiled."""
        answer = self.compile(text)
        assert answer.outcome is Outcome.READY, answer.reason
        return answer.key

    def matchers(self) -> list[int]:
        """The process ids of the matchers."""
        with open(f"/proc/{self.pid}/task/{self.pid}/children") as children:  # noqa: PTH123
            return [int(pid) for pid in children.read().split()]

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        self._control.close()
        self.worker_end.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _read(self) -> None:
        frames = FrameReader()
        while True:
            try:
                data = self._control.recv(1 << 16)
            except OSError:
                return
            if not data:
                return
            for message in map(from_host.decode, frames.feed(data)):
                with self._heard:
                    self._hear(message)
                    self._heard.notify_all()

    def _hear(self, message: Up | Compiled | Wanted) -> None:
        if isinstance(message, Up):
            self._up = message.private_bytes
        elif isinstance(message, Compiled):
            self._answers[message.key] = message
        elif isinstance(message, Wanted):
            self.wanted.append(message.key)
            text = self.texts[message.key]
            self._control.sendall(frame(Compile(message.key, text, False)))


def checked_grammar(wanted: Format, style: Style = "compact") -> str:
    """The grammar of an answer that is nothing but this form; refused if it is none."""
    check(text := grammar_of(wanted, style), wanted.param)
    return text


def check(text: str, param: str) -> None:
    """Refuse a grammar that cannot be enforced."""
    if problem := problem_of(text):
        raise BadRequest(f"`{param}` cannot be enforced: {problem}", param=param)


def limits() -> LLParserLimits:
    """What a grammar may cost, as the library is told."""
    from llguidance import LLParserLimits

    return LLParserLimits(verbose_errors=False, **LIMITS)  # type: ignore[arg-type]


def problem_of(text: str) -> str | None:
    """Why a grammar cannot be enforced; None if it can. In this process, whatever it takes."""
    from llguidance import LLMatcher

    failed, messages = LLMatcher.validate_grammar_with_warnings(text, limits=limits())
    return messages[0] if failed else None


def signal_matchers(host: LocalHost, sign: int) -> None:
    """Send a signal to every matcher."""
    for pid in host.matchers():
        os.kill(pid, sign)
