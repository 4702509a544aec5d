"""Where one request stands, for those who watch, and the way to end it.

It reads what the generation counts anyway; nothing here is done for a token.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from penstock.errors import Cancelled

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.memory.clients.requests import RequestMemory
    from penstock.memory.cost import CostModel


class Stage(Enum):
    """What a request does until it is with the worker."""

    CHECKED = "checked"
    MODEL = "model"  # in the line, until the model is loaded
    MEMORY = "memory"  # in the line, until there is KV for it
    SLOT = "turn"  # in the line, until it has a place with the worker


class Tokens(Protocol):
    """What is counted of a request anyway."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    granted_tokens: int


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request asks for, and whose it is."""

    id: str
    model: str
    key: str  # a label
    priority: int
    prompts: int
    answers: int
    memory: RequestMemory
    started: float  # on the monotonic clock
    trace: str = ""  # the client's `traceparent`


class Progress:
    """One request on its way."""

    def __init__(self, asked: Asked, tokens: Tokens) -> None:
        self.id = asked.id
        self.queued: object = None  # itself in its model's line
        self.submitted: float | None = None  # on the monotonic clock
        self.first_token: float | None = None
        self.last_token: float | None = None
        self.preemptions: dict[int, int] = {}  # by answer
        self._stage = Stage.CHECKED
        self._cost: CostModel | None = None
        self.asked = asked
        self._tokens = tokens
        self._task: asyncio.Task[object] | None = None
        self._cancelled = False

    def enter(self, queued: object) -> None:
        """It stands in the line, at the beginning or once more."""
        self.queued, self.submitted, self._stage = queued, None, Stage.MODEL

    def has_model(self, cost: CostModel) -> None:
        """The model is there."""
        self._cost, self._stage = cost, Stage.MEMORY

    def has_memory(self) -> None:
        """There is KV for it."""
        self._stage = Stage.SLOT

    def begin(self) -> None:
        """The first of its answers is with the worker."""
        self.submitted = self.submitted or time.monotonic()

    def since_start_ms(self, at: float | None) -> float | None:
        """From its head to a moment."""
        return None if at is None else round(1000 * (at - self.asked.started), 1)

    @contextmanager
    def cancellable(self) -> Iterator[None]:
        """Raise `Cancelled` when the operator ends what is done in the block."""
        self._task = task = asyncio.current_task()
        try:
            yield
        except asyncio.CancelledError:
            if task is None or not self._cancelled or task.uncancel() > 0:
                raise
            raise Cancelled("An operator of this server has cancelled the request.") from None
        finally:
            self._task = None

    def cancel(self) -> None:
        """End it."""
        if self._task is not None and not self._cancelled:
            self._cancelled = True
            self._task.cancel()

    def row(self) -> dict[str, object]:
        """What `/admin/api/requests` shows, without its place in line."""
        asked, tokens, now = self.asked, self._tokens, time.monotonic()
        running = self.submitted is not None
        waits = None if running or self._stage is Stage.CHECKED else self._stage.value
        return {
            "id": self.id,
            "model": asked.model,
            "key": asked.key,
            "state": "running" if running else "queued" if waits else "checked",
            "waits_for": waits,
            "place": None,
            "expected_start_s": None,
            "priority": asked.priority,
            "answers": asked.answers,
            "prompt_tokens": tokens.prompt_tokens,
            "cached_tokens": tokens.cached_tokens,
            "completion_tokens": tokens.completion_tokens,
            "max_tokens": tokens.granted_tokens or None,
            "tokens_per_s": _rate(tokens.completion_tokens, self.first_token, self.last_token),
            "kv_bytes": self._kv_bytes() if running else 0,
            "bytes": asked.memory.size,
            "preemptions": sum(self.preemptions.values()),
            "age_s": round(now - asked.started, 1),
            "waited_s": round((self.submitted or now) - asked.started, 1),
            "first_token_s": self._until(self.first_token),
        }

    def states(self, ended: float) -> list[tuple[str, float, float]]:
        """(name, begin, end) of the states it has been in, on the monotonic clock."""
        begun, first = self.submitted, self.first_token
        found = [("queued", self.asked.started, ended if begun is None else begun)]
        if begun is not None:
            found.append(("prefill", begun, ended if first is None else first))
        if first is not None:
            found.append(("decode", first, self.last_token or first))
        return found

    def attributes(self) -> dict[str, str | int]:
        """What is said of it in a trace, in the words of OpenTelemetry where it has some."""
        return {
            "gen_ai.request.model": self.asked.model,
            "gen_ai.usage.input_tokens": self._tokens.prompt_tokens,
            "gen_ai.usage.output_tokens": self._tokens.completion_tokens,
            "penstock.request.id": self.id,
            "penstock.key": self.asked.key,
            "penstock.cached_tokens": self._tokens.cached_tokens,
            "penstock.preemptions": sum(self.preemptions.values()),
        }

    def _until(self, at: float | None) -> float | None:
        return None if at is None else round(at - self.asked.started, 3)

    def _kv_bytes(self) -> int:
        """Of its answers as they are on average; those to one prompt may share what is counted."""
        if self._cost is None:
            return 0
        asked, tokens = self.asked, self._tokens
        prompt = tokens.prompt_tokens // asked.prompts
        return asked.answers * self._cost.sequence(
            prompt + tokens.completion_tokens // asked.answers
        )


def _rate(tokens: int, first: float | None, last: float | None) -> float | None:
    """Tokens a second after the first."""
    if first is None or last is None or last <= first:
        return None
    return round((tokens - 1) / (last - first), 1)
