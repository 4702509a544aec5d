"""The generating engine: plan, launch, settle. One call of `step` is one forward that succeeded.

Where the device works on its own, a step is planned and launched while the one before it runs, and
its tokens are taken when the next is on its way: they come one call later, and are the same.

Out of memory in a step is an event, not an end: nothing has changed yet when it happens, so caches
are emptied and a step of half the tokens is planned instead. Only a request whose smallest step
fails alone is failed, with its own error.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import torch

from penstock.errors import BadRequest, ContextTooLong, Overloaded
from penstock.wire import Failure, Finish, Output, Ready, Sampling, Status, Submit
from penstock.worker.caps import exhausted
from penstock.worker.engine.memory import StepMemory
from penstock.worker.scheduling.gate import StepShape
from penstock.worker.scheduling.plan import Plan, Slice
from penstock.worker.scheduling.policy import StepPacer
from penstock.worker.scheduling.scheduler import FLOOR_TOKENS, Scheduler
from penstock.worker.scheduling.sequence import Sequence

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from penstock.worker.engine.cuda_executor import CudaExecutor
    from penstock.worker.engine.executor import Executor, Launched
    from penstock.worker.kv.shelf import Shelf
    from penstock.worker.profile import Bench, Profile
    from penstock.worker.scheduling.lengths import OutputLengths

log = logging.getLogger(__name__)

_PROBE_ID = -1
# While blocks are being read and there is nothing to compute; and while some wait to be written.
_READ_WAIT_S = 0.05
_TIDY_S = 0.01
# Steps after which memory that could not be had for KV is asked for again.
_COMMIT_AGAIN_STEPS = 64
# Attempts at one step, each smaller than the one before: more than there are halvings of it.
_ATTEMPTS = 24


class GenerateEngine:
    """Continuous batching over one model, which has been profiled."""

    def __init__(
        self, bench: Bench, profile: Profile, ready: Ready, shelf: Shelf | None = None
    ) -> None:
        self.bench = bench
        self.shelf = shelf
        self.profile = profile
        self._executor: Executor | CudaExecutor = bench.executor
        self._arena = bench.arena
        self._pool = bench.pool
        self._ready = ready
        self._window = bench.window
        self._domain = "ram" if bench.arena.in_ram else f"gpu:{bench.arena.device.index or 0}"
        self._block_tokens = profile.limits.block_tokens
        self._memory = StepMemory(profile, bench.arena, bench.meter, bench.cap)
        self._pacer = StepPacer(bench.spec.step_target_s)
        self._scheduler = Scheduler(
            bench.pool, profile.limits, self._pacer, self._memory.gate, shelf
        )
        self._granted_blocks = profile.kv_blocks
        self._commit_again_at: int | None = None  # the step at which the pool gets them back
        self._pool.set_limit(profile.kv_blocks)
        self._refused: list[Output] = []
        self._flying: tuple[Launched, float] | None = None  # and when it was begun
        self._landed_at = 0.0
        self._budget: int | None = None  # tokens of a step, while memory is found short
        self._exhausted = 0
        self._steps = 0
        self._step_tokens = 0
        self._prompt_tokens = 0
        self._reused_tokens = 0
        self._step_s = 0.0
        self._host_s = 0.0
        self._device_s = 0.0

    @property
    def lengths(self) -> OutputLengths:
        """What has been learned of the lengths of answers."""
        return self._scheduler.lengths

    @property
    def model(self) -> PreTrainedModel:
        """The model itself, for those who measure."""
        return self._executor.model

    def ready(self) -> Ready:
        """What the server should know of this model."""
        return self._ready

    def submit(self, request: Submit) -> None:
        """Take a request; one that can never run is answered with the next step."""
        room = min(self._window, self._scheduler.most_tokens())
        if (failure := self._why_never(request.prompt, room)) is not None:
            self._refused.append(_failed(request.id, failure))
            return
        known = range(self.bench.vocabulary)
        request.stop_token_ids = [token for token in request.stop_token_ids if token in known]
        request.max_tokens = max(1, min(request.max_tokens, room - len(request.prompt)))
        self._executor.admit(request)
        self._scheduler.add(request)

    def _why_never(self, prompt: list[int], room: int) -> Failure | None:
        if not prompt or len(prompt) + 1 > room:
            # The front door refuses these; here only a broken or outdated server can send one.
            message = f"a prompt of {len(prompt)} tokens does not fit the {room} served"
            return Failure(ContextTooLong.code, message)
        # Tokenizers have tokens that the model has no row for, as of images; one of them would
        # fail the step of everybody.
        known = range(self.bench.vocabulary)
        if strange := [token for token in (min(prompt), max(prompt)) if token not in known]:
            message = (
                f"the prompt has token {strange[0]}, which the model does not know: its "
                f"vocabulary has {len(known)} tokens"
            )
            return Failure(BadRequest.code, message)
        return None

    def cancel(self, request_id: int) -> None:
        """Forget a request; its blocks are free at once."""
        self._scheduler.cancel(request_id)
        self._executor.forget(request_id)

    def drop_all(self) -> list[int]:
        """Forget every request; their ids."""
        ids = self._scheduler.drop_all()
        for request_id in ids:
            self._executor.forget(request_id)
        return ids

    def has_work(self) -> bool:
        """Something is running, waiting or to be refused."""
        return bool(self._refused) or self._scheduler.has_work()

    def grant(self, kv_bytes: int, step_bytes: int, tier_bytes: int = 0) -> int:
        """Hold no more than this from now on; the bytes that went back to the system.

        What has been taken in can always be finished: below what the largest request here may
        come to the arena does not go, and `kv_limit_bytes` says where it stopped.
        """
        if self.shelf is not None:
            self.shelf.grant(tier_bytes)
        return self._hold(kv_bytes, step_bytes)

    def _hold(self, kv_bytes: int, step_bytes: int) -> int:
        before = self._arena.committed_bytes
        least = max(2, self._scheduler.least_blocks() + 1)
        # Memory comes in whole extents: what is held for one block of it serves the others too.
        kv_bytes = max(kv_bytes, self._arena.bytes_for(least))
        self._granted_blocks = self._arena.blocks_within(kv_bytes)
        self._commit_again_at = None
        self._pool.set_limit(self._granted_blocks)
        self._scheduler.shrink()
        if self._arena.committed_bytes > self.kv_limit_bytes():
            self._return_extents()
        self._memory.grant(max(self.kv_limit_bytes(), self._arena.committed_bytes), step_bytes)
        return before - self._arena.committed_bytes

    def shed(self, size: int) -> int:
        """Have that much less of KV from now on if it is not in use; the bytes that went back."""
        before = self._arena.committed_bytes
        freed = self._memory.relieve()
        self._return_extents()
        self._hold(max(0, self.kv_limit_bytes() - size), self._memory.gate.granted_bytes)
        if self.shelf is not None:
            self.shelf.trim()
        return freed + before - self._arena.committed_bytes

    def kv_limit_bytes(self) -> int:
        """What the arena may hold at most."""
        return self._arena.bytes_for(self._granted_blocks)

    def tier_limit_bytes(self) -> int:
        """What KV kept in RAM, beside the device, may hold at most."""
        return 0 if self.shelf is None else self.shelf.tier_bytes

    def notices(self) -> list[str]:
        """What people should know that has not been told yet."""
        return [] if self.shelf is None else self.shelf.notices()

    def step(self) -> list[Output]:
        """Run one forward over everything planned, or over less where memory is short."""
        outputs, self._refused = self._refused, []
        in_vain = 0
        while self._scheduler.has_work():
            ended = len(outputs)
            if self._attempt(outputs):
                break
            in_vain = in_vain + 1 if len(outputs) == ended else 0
            if in_vain == _ATTEMPTS:
                self._give_up(outputs)
                in_vain = 0
        return outputs

    def tidy(self) -> float | None:
        """What is left to do while there is no work; when to come again, None for no need."""
        # Not before somebody has had a first answer. What reading has left is no step's.
        if self._steps and self.bench.executor.prepare():
            self._memory.relieve()
        if self.shelf is not None and self.shelf.offer(self._scheduler.cache.find):
            return _TIDY_S
        return None

    def close(self) -> None:
        """Save what can be saved in the time that a shutdown has."""
        if self.shelf is not None:
            self.shelf.close(self._scheduler.cache.find)

    def status(self) -> Status:
        """Figures after the latest step."""
        return Status(
            running=self._scheduler.running,
            waiting=self._scheduler.waiting,
            blocks_total=self._pool.capacity,
            blocks_free=self._scheduler.cache.free,
            block_tokens=self._block_tokens,
            step_tokens=self._step_tokens,
            step_s=self._step_s,
            host_s=self._host_s,
            preemptions=self._scheduler.preemptions,
            steps=self._steps,
            blocks_kept=self._scheduler.cache.kept,
            evictions=self._scheduler.cache.evicted,
            prompt_tokens=self._prompt_tokens,
            reused_tokens=self._reused_tokens,
            private_bytes=self._memory.private_bytes(),
            kv_committed_bytes=self._arena.committed_bytes,
            predicted_bytes=self._memory.predicted_bytes,
            measured_bytes=self._memory.measured_bytes,
            exhausted=self._exhausted,
            surprises=self._memory.surprises,
            widening=self._memory.gate.widening,
            expected_output_tokens=self.lengths.mean,
            device_s=self._device_s,
            tier={} if self.shelf is None else self.shelf.stats(),
        )

    def probe(self) -> None:
        """One real step of one token while idle; raises when the model cannot compute."""
        if self._scheduler.has_work():
            return  # the steps under way prove more
        self.submit(Submit(_PROBE_ID, prompt=[0], max_tokens=1, sampling=Sampling(temperature=0)))
        try:
            outputs = self.step() + self._land(None)
        finally:
            self._scheduler.cancel(_PROBE_ID)
        self._refused += [output for output in outputs if output.id != _PROBE_ID]
        answers = [output for output in outputs if output.id == _PROBE_ID]
        failures = [output.failure.message for output in answers if output.failure is not None]
        if failures or not any(output.tokens for output in answers):
            raise RuntimeError(f"a probe got no token: {'; '.join(failures) or 'none came'}")

    def open(self) -> None:
        """All is measured: begin with what goes on beside steps."""
        if self.shelf is not None:
            if not self._arena.in_ram:  # on a CPU this would take seconds
                self._calibrate()
            self.shelf.start()
        self._memory.relieve()  # what the load has left in the heap is no step's

    def _calibrate(self) -> None:
        """Learn how fast prompts are computed: whether others should be read depends on it."""
        count = min(self.profile.limits.tokens, self._window - 1, self._scheduler.most_tokens() - 1)
        prompt = [(7919 * place) % self.bench.vocabulary for place in range(count)]
        self.submit(Submit(_PROBE_ID, prompt, 1, Sampling(temperature=0)))
        while self._scheduler.has_work():
            self.step()
        self._scheduler.cache.clear()
        self._prompt_tokens = 0

    def score(self, tokens: list[int], chunk: int) -> Tensor:
        """Logits of every position, [tokens, vocabulary], computed in chunks while idle."""
        assert not self._scheduler.has_work(), "scoring shares the pool with nobody"
        request = Submit(_PROBE_ID, tokens, 1, Sampling(temperature=0), prompt_logprobs=0)
        sequence = Sequence(request, 0)
        cache = self._scheduler.cache
        sequence.blocks = cache.take(-(-len(tokens) // self._block_tokens))
        rows = []
        try:
            for start in range(0, len(tokens), chunk):
                piece = Slice(sequence, start, min(chunk, len(tokens) - start))
                # A lone row goes the way of a decode, so that both kernels are seen.
                plan = Plan(decodes=[piece]) if piece.count == 1 else Plan(chunks=[piece])
                rows.append(self._executor.logits(plan))
        finally:
            cache.give(sequence.blocks)
        return torch.cat(rows)

    def check(self) -> None:
        """Blocks and sequences agree."""
        self._scheduler.check()

    def _attempt(self, outputs: list[Output]) -> bool:
        """Plan a step and run it; False when memory was short and something was made smaller."""
        started = time.perf_counter()
        plan: Plan | None = None
        try:
            plan = self._plan()
            if self._flying is not None and not plan.slices:
                outputs += self._land(None)  # whatever there is to do waits for its tokens
                return True
            if not plan.slices and self.shelf is not None and self._scheduler.reads():
                self.shelf.deliver(self._scheduler)  # for those who have just asked
                self.shelf.wait(_READ_WAIT_S)
                return True
            if self._refuse_the_impossible(plan, outputs):
                return False
            self._memory.begin(plan)
            if self.shelf is not None:
                self.shelf.fence(plan.written(self._block_tokens))
            launched = self._executor.launch(plan, self._flying and self._flying[0])
        except (MemoryError, RuntimeError) as error:
            if not exhausted(error):
                raise
            log.warning("out of memory in a step of %s: %s", plan and plan.shape, error)
        else:
            self._memory.end(plan)
            self._scheduler.advance(plan)
            outputs += self._land((launched, started))
            if launched.wants_host:
                outputs += self._land(None)
            return True
        # The error is gone by now, and with it the frames that held the step's tensors.
        self._recover(plan, outputs)
        return False

    def _plan(self) -> Plan:
        if self._commit_again_at is not None and self._steps >= self._commit_again_at:
            self._commit_again_at = None
            self._pool.set_limit(self._granted_blocks)
        self._memory.read_room()
        if self.shelf is not None:
            self.shelf.deliver(self._scheduler)
            self.shelf.offer(self._scheduler.cache.find)
        self._pacer.crowded = self._executor.crowded
        plan = self._scheduler.plan(self._budget)
        if self._memory.gate.pinched and self._memory.relieve():
            self._memory.read_room()
            plan = self._scheduler.plan(self._budget)
        return plan

    def _refuse_the_impossible(self, plan: Plan, outputs: list[Output]) -> bool:
        """Fail the oldest request when not even the smallest step of it alone has the memory."""
        if not plan.slices:
            oldest = self._scheduler.oldest()
            assert oldest is not None
            needed, limit = self._kv_bytes(oldest.most_tokens), self._kv_bytes_now()
            self._fail(oldest, "its KV does not fit", needed, limit, outputs)
            return True
        shape, gate = plan.shape, self._memory.gate
        if not _is_smallest(plan) or gate.can_ever_run(shape):
            return False
        needed, limit = gate.expected(shape), gate.granted_bytes
        self._fail(
            plan.slices[0].sequence, "its smallest step does not fit", needed, limit, outputs
        )
        return True

    def _recover(self, plan: Plan | None, outputs: list[Output]) -> None:
        """Make the next attempt smaller, unless size was not what the last one failed for."""
        self._exhausted += 1
        if plan is None:
            self._memory.relieve()
            # No memory for more KV: live with what is there, and ask again later.
            self._pool.set_limit(self._pool.committed * self._arena.extent_blocks)
            self._commit_again_at = self._steps + _COMMIT_AGAIN_STEPS
            return
        if self._memory.learn_from_exhaustion():
            return
        if _is_smallest(plan):
            needed, limit = self._memory.gate.predicted(plan.shape), self._memory.gate.room_bytes
            sequence = plan.slices[0].sequence
            self._fail(sequence, "its smallest step ran out of memory", needed, limit, outputs)
        else:
            self._budget = max(1, plan.tokens // 2)

    def _give_up(self, outputs: list[Output]) -> None:
        """Nothing smaller is left to try: somebody must go, or this would never end."""
        oldest, gate = self._scheduler.oldest(), self._memory.gate
        assert oldest is not None
        least = StepShape(tokens=1, sequences=1, context=len(oldest.tokens), logit_rows=1)
        why = f"{_ATTEMPTS} attempts at smaller and smaller steps found none"
        self._fail(oldest, why, gate.predicted(least), max(0, gate.room_bytes), outputs)

    def _fail(
        self, sequence: Sequence, why: str, needed: int, limit: int, outputs: list[Output]
    ) -> None:
        log.error("request %d is failed: %s (%d of %d bytes)", sequence.id, why, needed, limit)
        failure = Failure(
            Overloaded.code,
            f"The request was ended for want of memory: {why} ({needed} bytes needed, {limit} "
            "there). Others are not affected; a shorter prompt, fewer log-probabilities or a "
            "larger memory.limit would help.",
            {
                "reason": "memory",
                "domain": self._domain,
                "needed_bytes": needed,
                "limit_bytes": limit,
            },
        )
        self.cancel(sequence.id)
        outputs.append(_failed(sequence.id, failure))

    def _land(self, launched: tuple[Launched, float] | None) -> list[Output]:
        """Take the result of the step in flight; `launched` is in flight from now on."""
        landed, self._flying = self._flying, launched
        if landed is None:
            return []
        step, begun = landed
        result, plan = step.result(), step.plan
        gone = {piece.sequence.id for piece in plan.slices if piece.sequence.ended}
        for piece in plan.slices:
            scored = result.scored.get(piece.sequence.id)
            if scored is not None:
                piece.sequence.scored = scored
        now = time.perf_counter()
        self._step_s = now - max(self._landed_at, begun) - result.waited_s
        self._landed_at = now
        finished = self._scheduler.settle(plan, result.tokens, self._step_s)
        self._count_reused(plan, result.outputs)
        if self.shelf is not None and plan.chunks and not plan.decodes:
            self.shelf.computed(plan.chunk_tokens, self._step_s)
        for number, how in finished.items():
            result.outputs[number].finish = how
            self._executor.forget(number)
        for number, why in result.failed.items():
            self.cancel(number)
            result.outputs[number] = _failed(number, _unfollowed(why))
        if self._budget is not None:  # grow back, so that one bad moment is not for ever
            self._budget += max(1, self._budget // 4)
            if self._budget >= self.profile.limits.tokens:
                self._budget = None
        self._steps += 1
        self._step_tokens = plan.tokens
        self._host_s = max(0.0, self._step_s - result.forward_s)
        self._device_s += result.forward_s
        return [output for output in result.outputs.values() if output.id not in gone]

    def _count_reused(self, plan: Plan, outputs: dict[int, Output]) -> None:
        for piece in plan.slices:
            sequence = piece.sequence
            if piece.end == sequence.prompt_tokens and sequence.id in outputs:  # its first token
                outputs[sequence.id].reused = sequence.reused
                self._prompt_tokens += sequence.prompt_tokens
                self._reused_tokens += sequence.reused

    def _return_extents(self) -> None:
        """Move what is in use together and give the rest of the arena's memory back."""
        if self.shelf is not None:
            self.shelf.settle()
        moves = self._pool.compact()
        self._arena.copy(moves)
        self._scheduler.rename(moves)
        self._pool.return_empty_extents()

    def _kv_bytes(self, tokens: int) -> int:
        return self.profile.cost.sequence(tokens)

    def _kv_bytes_now(self) -> int:
        return self._arena.bytes_for(self._pool.capacity)


def _unfollowed(why: str) -> Failure:
    return Failure(
        BadRequest.code, f"The form that was asked of the answer became too costly to keep: {why}"
    )


def _is_smallest(plan: Plan) -> bool:
    return len(plan.slices) == 1 and plan.tokens <= FLOOR_TOKENS


def _failed(number: int, failure: Failure) -> Output:
    return Output(number, finish=Finish.ERROR, failure=failure)
