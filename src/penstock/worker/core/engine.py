"""The generating engine: schedule, launch, advance. A call of `step` is a forward that succeeded.

Where the device works on its own, a step is planned and launched while the one before it runs, and
its tokens are taken when the next is on its way: they come one call later, and are the same.

Holds no tensor and asks no device anything: `Executor` runs plans, `KvCache` has the KV, and what
happens when memory runs out is `recovery.py`'s.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from penstock.errors import BadRequest, ContextTooLong
from penstock.wire import (
    Failure,
    Freed,
    Output,
    Ready,
    Sampling,
    Status,
    Submit,
    token_ids,
)
from penstock.worker.core.failures import failed, unfollowed
from penstock.worker.core.figures import Figures
from penstock.worker.core.pacer import StepPacer
from penstock.worker.core.recovery import Recovery
from penstock.worker.core.scheduler import Scheduler
from penstock.worker.core.shared_tokens import SharedTokens
from penstock.worker.process_memory import PrivateBytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.wire import Grant, TokenIds
    from penstock.worker.core.backend import Executor, StepHandle, StepResult
    from penstock.worker.core.lengths import OutputLengths
    from penstock.worker.core.plan import Plan
    from penstock.worker.core.profile import Profile, ServedModel
    from penstock.worker.core.recovery import Failed
    from penstock.worker.core.step_memory import StepMemory
    from penstock.worker.kv.cache import KvCache

_PROBE_ID = -1
# Without a step to run: while blocks are read or masks computed; while blocks wait to be written.
_READ_WAIT_S = 0.05
_TIDY_S = 0.01


class GenerateEngine:
    """Continuous batching over one model, which has been profiled."""

    def __init__(
        self,
        executor: Executor,
        kv: KvCache,
        memory: StepMemory,
        profile: Profile,
        served: ServedModel,
        ready: Ready,
    ) -> None:
        self.executor = executor
        self.kv = kv
        self.profile = profile
        self._memory = memory
        self._served = served
        self._ready = ready
        self._pacer = StepPacer(served.step_target_s)
        self._scheduler = Scheduler(kv, profile.limits, self._pacer, memory.gate, served.drafting)
        self._recovery = Recovery(executor, self._scheduler, kv, memory, served.domain)
        self._refused: list[Output] = []
        self._shared = SharedTokens()
        self._unready: dict[int, Submit] = {}  # whose grammars are not compiled yet
        self._in_flight: tuple[StepHandle, float] | None = None  # and when it was begun
        self._began_at = self._taken_at = 0.0
        self._figures = Figures()
        self._private = PrivateBytes()
        self.wants_reload = False
        kv.set_limit(profile.kv_bytes)

    @property
    def lengths(self) -> OutputLengths:
        """What has been learned of the lengths of answers."""
        return self._scheduler.lengths

    def ready(self) -> Ready:
        """What the server should know of this model."""
        return self._ready

    def submit(self, request: Submit) -> None:
        """Take a request; one that can never run is answered with the next step."""
        if request.encoding is not None:
            raise BadRequest("This model generates text; it makes no vectors and no scores.")
        known = range(self._served.vocabulary)
        stops = token_ids(token for token in request.stop_token_ids if token in known)
        request.stop_token_ids = self._shared.list(stops)
        request.prompt = self._shared.list(request.prompt)
        if (failure := self._why_never(request.prompt)) is not None:
            self._refused.append(failed(request.id, failure))
            return
        self.executor.admit(request)
        if self.executor.ready(request.id):
            self._enter(request)
        else:
            self._unready[request.id] = request

    def cancel(self, request_id: int) -> None:
        """Forget a request; its blocks are free at once."""
        self._unready.pop(request_id, None)
        self._scheduler.cancel(request_id)
        self.executor.forget(request_id)

    def has_work(self) -> bool:
        """Something is running, waiting, to be refused or in flight. A step whose requests have all
        been cancelled still has to be taken: time until the next would be counted as its length."""
        if self._refused or self._unready or self._in_flight is not None:
            return True
        return self._scheduler.has_work()

    def step(self) -> list[Output]:
        """Run one forward over everything planned, or over less where memory is short."""
        outputs = self._begin()
        while self._scheduler.has_work():
            launched = None
            with self._recovery.attempt() as attempt:
                plan = self._schedule()
                if not plan.slices and self._must_wait():
                    return outputs + self._wait()
                launched = self._launch(attempt.admit(plan))
            if launched is not None:
                return outputs + self._advance(launched)
            outputs += self._end(self._recovery.recover(attempt))
        return outputs + self._take_in_flight()

    def tidy(self, called: Callable[[], bool]) -> float | None:
        """Some of what is left to do while there is no work; when to come again, or None."""
        if self.kv.tidy():
            return _TIDY_S
        if (work := self._served.idle_work) is None:
            return None
        granted = max(self.kv.limit_bytes, self.kv.committed_bytes), self._memory.gate.granted_bytes
        left_s = work.run(self._figures.steps, granted, called)
        self.wants_reload = work.stored
        return left_s

    def close(self) -> None:
        """Save what can be saved in the time that a shutdown has."""
        self.kv.close()

    def open(self) -> None:
        """All is measured: begin with what goes on beside steps."""
        if self._served.calibrates:
            self._calibrate()
        self.kv.start()
        self._memory.relieve()  # what the load has left in the heap is no step's

    def check(self) -> None:
        """Blocks and sequences agree."""
        self._scheduler.check()

    # --- how much it may hold ---

    def grant(self, grant: Grant) -> Freed:
        """Hold no more than this from now on; the bytes that went back to the system.

        What has been taken in can always be finished: below what the largest request here may
        come to the KV does not go, and the answer says where it stopped.
        """
        self.kv.grant_tier(grant.tier_bytes)
        return self._freed(self._hold(grant.kv_bytes, grant.step_bytes))

    def _hold(self, kv_bytes: int, step_bytes: int) -> int:
        before = self.kv.committed_bytes
        # Memory comes in whole extents: what is held for one block of it serves the others too.
        self.kv.set_limit(max(kv_bytes, self.kv.limit_for(self._scheduler.min_bytes())))
        self._recovery.limit_changed()
        self._scheduler.shrink()
        self.kv.trim()
        self._memory.grant(max(self.kv.limit_bytes, self.kv.committed_bytes), step_bytes)
        return before - self.kv.committed_bytes

    def shed(self, size: int) -> Freed:
        """Have that much less of KV from now on if it is not in use; the bytes that went back."""
        before = self.kv.committed_bytes
        freed = self._memory.relieve()
        self.kv.compact()
        self._hold(max(0, self.kv.limit_bytes - size), self._memory.gate.granted_bytes)
        return self._freed(freed + before - self.kv.committed_bytes)

    def _freed(self, size: int) -> Freed:
        return Freed(size, self.kv.limit_bytes, self.kv.tier_bytes)

    # --- what is told ---

    def notices(self) -> list[str]:
        """What people should know that has not been told yet."""
        return self.kv.notices()

    def status(self) -> Status:
        """Figures after the latest step."""
        kv, memory, figures = self.kv, self._memory, self._figures
        return Status(
            running=self._scheduler.running,
            waiting=self._scheduler.waiting,
            kv_capacity_bytes=kv.capacity_bytes,
            kv_free_bytes=max(0, kv.capacity_bytes - kv.held_bytes),
            kv_evictable_bytes=kv.evictable_bytes,
            step_tokens=figures.step_tokens,
            step_s=figures.step_s,
            host_s=figures.host_s,
            preemptions=self._scheduler.preemptions,
            steps=figures.steps,
            evictions=kv.evictions,
            prompt_tokens=figures.prompt_tokens,
            reused_tokens=figures.reused_tokens,
            private_bytes=self._private.read(),
            kv_committed_bytes=kv.committed_bytes,
            predicted_bytes=memory.predicted_bytes,
            measured_bytes=memory.measured_bytes,
            oom_steps=self._recovery.oom_steps,
            underpredicted_steps=memory.underpredicted_steps,
            safety_factor=memory.gate.safety_factor,
            device_s=figures.device_s,
            tier=kv.tier_stats(),
            drafts=self._scheduler.drafting.figures(),
            wants_reload=self.wants_reload,
        )

    def probe(self) -> None:
        """One real step of one token while idle; raises when the model cannot compute."""
        if self._scheduler.has_work():
            return  # the steps under way prove more
        self.submit(Submit(_PROBE_ID, prompt=[0], max_tokens=1, sampling=Sampling(temperature=0)))
        try:
            outputs = self.step() + self._take_in_flight()
        finally:
            self._scheduler.cancel(_PROBE_ID)
        self._refused += [output for output in outputs if output.id != _PROBE_ID]
        answers = [output for output in outputs if output.id == _PROBE_ID]
        failures = [output.failure.message for output in answers if output.failure is not None]
        if failures or not any(output.tokens for output in answers):
            raise RuntimeError(f"a probe got no token: {'; '.join(failures) or 'none came'}")

    # --- a step ---

    def _begin(self) -> list[Output]:
        """Let those enter whose grammars are there by now; what is refused."""
        self._enter_ready()
        if self._unready and not self._refused and not self._scheduler.has_work():
            self.executor.poll(_READ_WAIT_S)
            self._enter_ready()
        refused, self._refused = self._refused, []
        return refused

    def _schedule(self) -> Plan:
        self._began_at = time.perf_counter()
        self._recovery.before_plan()
        self._memory.read_room()
        self.kv.poll()
        self._pacer.crowded = self.executor.crowded
        budget, held = self._recovery.budget, self.executor.held
        self._scheduler.drafting.paused = not self._recovery.drafts
        plan = self._scheduler.plan(budget, held)
        if self._memory.gate.rejected and self._memory.relieve():
            self._memory.read_room()
            plan = self._scheduler.plan(budget, held)
        return plan

    def _must_wait(self) -> bool:
        """Nothing can be computed before something else has come."""
        return bool(self._in_flight or self._scheduler.fetches() or self.executor.waits)

    def _wait(self) -> list[Output]:
        """Take the tokens in flight, or wait a little for blocks or masks."""
        if self._in_flight is None and self._scheduler.fetches():
            self.kv.wait(_READ_WAIT_S)
        elif self._in_flight is None:
            self.executor.poll(_READ_WAIT_S)
        return self._take_in_flight()

    def _launch(self, plan: Plan) -> StepHandle:
        self._memory.begin(plan)
        self.kv.fence(plan)
        return self.executor.launch(plan, self._in_flight and self._in_flight[0])

    def _advance(self, launched: StepHandle) -> list[Output]:
        """Count on what a step will have computed, and take the result of the one before it."""
        self._memory.end()
        self._scheduler.advance(launched.plan, launched.late)
        outputs = self._take_in_flight()
        self._in_flight = launched, self._began_at
        if launched.wants_host or not self._scheduler.has_work():
            outputs += self._take_in_flight()
        return outputs

    def _end(self, victim: Failed | None) -> list[Output]:
        """End a request for which there is no memory, if there is one."""
        if victim is None:
            return []
        self.cancel(victim.request_id)
        return [failed(*victim)]

    def _take_in_flight(self) -> list[Output]:
        """The result of the step in flight, if there is one."""
        if self._in_flight is None:
            return []
        (handle, began_at), self._in_flight = self._in_flight, None
        result, plan = handle.result(), handle.plan
        asking = {
            piece.request_id for piece in plan.slices if self._scheduler.find(piece.request_id)
        }
        for number, scored in result.scored.items():
            if (sequence := self._scheduler.find(number)) is not None:
                sequence.scored = scored
        now = time.perf_counter()
        step_s = now - max(self._taken_at, began_at) - result.waited_s
        self._taken_at = now
        self._count_reused(plan, result)
        finished = self._scheduler.absorb(plan, result.tokens, step_s)
        if plan.chunks and not plan.decodes:
            self.kv.computed(plan.chunk_tokens, step_s)
        for number, ended in finished.items():
            result.end(number, ended)
            self.executor.forget(number)
        for number, why in result.failed.items():
            self.cancel(number)
            result.outputs[number] = failed(number, unfollowed(why))
        self._recovery.step_ran(self.profile.limits.tokens)
        self._figures.step_ran(plan.tokens, step_s, result.forward_s)
        return [output for output in result.outputs.values() if output.id in asking]

    def _count_reused(self, plan: Plan, result: StepResult) -> None:
        for piece in plan.slices:
            sequence, output = self._scheduler.find(piece.request_id), None
            if sequence is not None and sequence.preempted and piece.request_id in result.outputs:
                result.outputs[piece.request_id].preempted = sequence.preempted
            if piece.drafts and (guessed := result.outputs.get(piece.request_id)) is not None:
                guessed.drafts, guessed.accepted = len(piece.drafts), len(guessed.tokens) - 1
            if sequence is not None and piece.end == sequence.prompt_tokens:
                output = result.outputs.get(piece.request_id)
            if sequence is not None and output is not None and output.tokens:  # its first
                output.reused = sequence.reused
                self._figures.prompt_tokens += sequence.prompt_tokens
                self._figures.reused_tokens += sequence.reused

    # --- who comes in ---

    def _enter(self, request: Submit) -> None:
        """Let it take part in steps, or say why not."""
        failure = self._why_never(request.prompt) or self.executor.failure(request.id)
        if failure is not None:
            self.executor.forget(request.id)
            self._refused.append(failed(request.id, failure))
            return
        request.max_tokens = max(1, min(request.max_tokens, self._room - len(request.prompt)))
        self._scheduler.add(request)

    def _enter_ready(self) -> None:
        """Let those enter whose grammars are there by now."""
        self.executor.poll()
        for number, request in list(self._unready.items()):
            if self.executor.ready(number):
                del self._unready[number]
                self._enter(request)

    @property
    def _room(self) -> int:
        """The longest sequence that can be served now."""
        return min(self._served.window, self.kv.max_tokens())

    def _why_never(self, prompt: TokenIds) -> Failure | None:
        room = self._room
        if not prompt or len(prompt) + 1 > room:
            # The front door refuses these; here only a broken or outdated server can send one.
            message = f"a prompt of {len(prompt)} tokens does not fit the {room} served"
            return Failure(ContextTooLong.code, message)
        # Tokenizers have tokens that the model has no row for, as of images; one of them would
        # fail the step of everybody.
        known = range(self._served.vocabulary)
        if strange := [token for token in (min(prompt), max(prompt)) if token not in known]:
            message = (
                f"the prompt has token {strange[0]}, which the model does not know: its "
                f"vocabulary has {len(known)} tokens"
            )
            return Failure(BadRequest.code, message)
        return None

    def _calibrate(self) -> None:
        """Learn how fast prompts are computed: whether others should be read depends on it."""
        count = min(self.profile.limits.tokens, self._served.window - 1, self.kv.max_tokens() - 1)
        prompt = [(7919 * place) % self._served.vocabulary for place in range(count)]
        self.submit(Submit(_PROBE_ID, prompt, 1, Sampling(temperature=0)))
        while self._scheduler.has_work():
            self.step()
        self.kv.clear()
        self._figures.prompt_tokens = 0
