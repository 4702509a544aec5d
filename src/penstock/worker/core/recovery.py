"""Recovery from a step that runs out of memory: smaller steps, and at last a failed request.

Out of memory in a step is an event, not an end: nothing has changed yet when it happens, but for
recurrent states, which go back to what was kept of them. So caches are emptied and a step of half
the tokens is planned instead; one with drafts is planned without them first. Only a request whose
smallest step fails alone is failed, with its own error; and after some attempts in vain the oldest
one is, so that a step always ends.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

from penstock.errors import Overloaded
from penstock.wire import Failure
from penstock.worker.core.gate import StepShape
from penstock.worker.core.scheduler import FLOOR_TOKENS

if TYPE_CHECKING:
    from types import TracebackType

    from penstock.memory.domains import Domain
    from penstock.worker.core.backend import Executor
    from penstock.worker.core.plan import Plan
    from penstock.worker.core.scheduler import Scheduler
    from penstock.worker.core.step_memory import StepMemory
    from penstock.worker.kv.cache import KvCache

log = logging.getLogger(__name__)

# Steps after which memory that could not be had for KV is asked for again.
_COMMIT_AGAIN_STEPS = 64
# Steps without drafts after one that had some ran out of memory.
_DRAFTS_AGAIN_STEPS = 64
# Attempts at one step, each smaller than the one before: more than there are halvings of it.
_ATTEMPTS = 24


class Failed(NamedTuple):
    """A request that is ended for want of memory."""

    request_id: int
    failure: Failure


class _NoSmallerStepError(Exception):
    """Not even the smallest step has the memory."""


class Attempt:
    """Around a step: one without memory ends here, and `Recovery.recover` is for the caller."""

    def __init__(self, recovery: Recovery) -> None:
        self.plan: Plan | None = None
        self.victim: Failed | None = None  # whom nothing can help
        self._recovery = recovery

    def admit(self, plan: Plan) -> Plan:
        """What may be launched; ends the attempt if nothing smaller would have the memory."""
        self.plan, self.victim = plan, self._recovery.impossible(plan)
        if self.victim is not None:
            raise _NoSmallerStepError
        return plan

    def __enter__(self) -> Attempt:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if isinstance(error, _NoSmallerStepError):
            return True
        if not isinstance(error, MemoryError | RuntimeError):
            return False
        if not self._recovery.executor.out_of_memory(error):
            return False
        shape = self.plan and self.plan.shape
        log.warning("out of memory in a step of %s: %s", shape, error)
        return True


class Recovery:
    """Makes the next attempt smaller, and says who has to go."""

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        kv: KvCache,
        memory: StepMemory,
        domain: Domain,
    ) -> None:
        self.executor = executor
        self._scheduler = scheduler
        self._kv = kv
        self._memory = memory
        self._domain = domain
        self.budget: int | None = None  # tokens of a step, while memory is found short
        self.oom_steps = 0  # that ran out of memory, since the start
        self._drafts_again_at = 0  # the step at which there may be drafts again
        self._in_vain = 0  # attempts since a step ran or somebody was failed
        self._kv_limit_bytes: int | None = None  # to be set again, since commits failed
        self._commit_again_at = 0  # the step at which it is
        self._steps = 0

    @property
    def drafts(self) -> bool:
        """Whether the next step may have drafts."""
        return self._steps >= self._drafts_again_at

    def attempt(self) -> Attempt:
        """Run a step in this."""
        return Attempt(self)

    def before_plan(self) -> None:
        """Ask again for memory that could not be had for KV some steps ago."""
        if self._kv_limit_bytes is not None and self._steps >= self._commit_again_at:
            self._kv.set_limit(self._kv_limit_bytes)
            self._kv_limit_bytes = None

    def limit_changed(self) -> None:
        """KV was given another limit; the one that was to be restored is obsolete."""
        self._kv_limit_bytes = None

    def step_ran(self, max_tokens: int) -> None:
        """Grow back after enough steps without an error."""
        self._steps += 1
        self._in_vain = 0
        if self.budget is not None:
            self.budget += max(1, self.budget // 4)
            if self.budget >= max_tokens:
                self.budget = None

    def impossible(self, plan: Plan) -> Failed | None:
        """The oldest request, when not even the smallest step of it alone has the memory."""
        if not plan.slices:
            oldest = self._scheduler.oldest()
            assert oldest is not None
            needed = self._kv.need_bytes(oldest.max_tokens)
            return self._fail(oldest.id, "its KV does not fit", needed, self._kv.capacity_bytes)
        if not _is_smallest(plan):
            return None
        shape, gate = plan.shape, self._memory.gate
        if gate.can_ever_run(shape):
            return None
        return self._fail(
            plan.slices[0].request_id,
            "its smallest step does not fit",
            gate.expected(shape),
            gate.granted_bytes,
        )

    def recover(self, attempt: Attempt) -> Failed | None:
        """Make the next attempt smaller, unless size was not what the last one failed for; who has
        to go, if that cannot help."""
        if attempt.victim is not None:
            return attempt.victim
        plan = attempt.plan
        if plan is not None:
            self._scheduler.lose_states({piece.request_id for piece in plan.slices})
        self.oom_steps += 1
        self._in_vain += 1
        if plan is None:
            self._memory.relieve()
            # No memory for more KV: live with what is there, and ask again later.
            self._kv_limit_bytes = self._kv_limit_bytes or self._kv.limit_bytes
            self._kv.set_limit(self._kv.committed_bytes)
            self._commit_again_at = self._steps + _COMMIT_AGAIN_STEPS
        elif plan.drafts:
            # The same without them may well find its memory.
            self._memory.relieve()
            self._drafts_again_at = self._steps + _DRAFTS_AGAIN_STEPS
        elif not self._memory.learn_from_oom():
            if _is_smallest(plan):
                gate, shape = self._memory.gate, plan.shape
                why = "its smallest step ran out of memory"
                return self._fail(
                    plan.slices[0].request_id, why, gate.predicted(shape), gate.room_bytes
                )
            self.budget = max(1, plan.tokens // 2)
        return self._fail_oldest() if self._in_vain == _ATTEMPTS else None

    def _fail_oldest(self) -> Failed:
        """Nothing smaller is left to try: somebody must go, or this would never end."""
        oldest, gate = self._scheduler.oldest(), self._memory.gate
        assert oldest is not None
        smallest = StepShape(tokens=1, sequences=1, context=len(oldest.tokens), logit_rows=1)
        why = f"{_ATTEMPTS} attempts at smaller and smaller steps found none"
        return self._fail(oldest.id, why, gate.predicted(smallest), max(0, gate.room_bytes))

    def _fail(self, request_id: int, why: str, needed: int, limit: int) -> Failed:
        log.error("request %d is failed: %s (%d of %d bytes)", request_id, why, needed, limit)
        self._in_vain = 0
        failure = Failure(
            Overloaded.code,
            f"The request was ended for want of memory: {why} ({needed} bytes needed, {limit} "
            "there). Others are not affected; a shorter prompt, fewer log-probabilities or a "
            "larger memory.limit would help.",
            {
                "reason": "memory",
                "domain": str(self._domain),
                "needed_bytes": needed,
                "limit_bytes": limit,
            },
        )
        return Failed(request_id, failure)


def _is_smallest(plan: Plan) -> bool:
    return len(plan.slices) == 1 and plan.tokens <= FLOOR_TOKENS
