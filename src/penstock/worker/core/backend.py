"""What the core asks of a device: the protocol, and what a step gives. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Collection

    from penstock.wire import Failure, Output, Submit
    from penstock.worker.core.plan import Plan
    from penstock.worker.core.sequence import Ended


@dataclass(slots=True)
class StepResult:
    """What a step gave, by request id."""

    outputs: dict[int, Output] = field(default_factory=dict)  # tokens and scores, without `finish`
    scored: dict[int, int] = field(default_factory=dict)  # prompt tokens scored once it is taken
    failed: dict[int, str] = field(default_factory=dict)  # requests whose grammar went wrong
    late: set[int] = field(default_factory=set)  # requests that sampled nothing, these among them
    forward_s: float = 0.0
    waited_s: float = 0.0  # for others that compute on the same cores

    def end(self, number: int, ended: Ended) -> None:
        """A request ends with the first of its tokens: the rest is nobody's."""
        output = self.outputs[number]
        output.finish = ended.how
        output.tokens = output.tokens[: ended.tokens]
        output.accepted = min(output.accepted, ended.tokens - 1)
        if output.logprobs is not None:
            output.logprobs = output.logprobs[: ended.tokens]

    @property
    def tokens(self) -> dict[int, list[int]]:
        """The new tokens of each request that got any."""
        return {number: output.tokens for number, output in self.outputs.items() if output.tokens}


class StepHandle(Protocol):
    """A step on its way."""

    plan: Plan
    wants_host: bool  # nothing may be launched before its result is taken

    @property
    def late(self) -> set[int]:
        """Requests for which it samples nothing, since their masks were not there."""

    def result(self) -> StepResult:
        """What it gave; waits for it."""


class Executor(Protocol):
    """Runs plans, and has by request id what steps need beside them."""

    @property
    def crowded(self) -> bool:
        """Others want the same processors: a long step is in their way."""

    @property
    def waits(self) -> bool:
        """Somebody waits for a grammar or an image."""

    @property
    def held(self) -> Collection[int]:
        """Requests that can take part in no step: what their next token depends on is not here."""

    def admit(self, request: Submit) -> None:
        """A request will be in plans, once it is `ready`."""

    def ready(self, request_id: int) -> bool:
        """Whether it may be in plans."""

    def failure(self, request_id: int) -> Failure | None:
        """Why it cannot be answered; None if it can."""

    def poll(self, wait_s: float = 0.0) -> None:
        """Encode the next image; take in what grammars have to say, or what comes first within so
        long."""

    def forget(self, request_id: int) -> None:
        """It will be in no plan any more."""

    def launch(self, plan: Plan, after: StepHandle | None) -> StepHandle:
        """Start a plan, whose UNKNOWN tokens are those that `after` samples."""

    def out_of_memory(self, error: BaseException) -> bool:
        """Whether this is what running out of memory looks like here."""
