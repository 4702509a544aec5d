"""The generating engine: plan, forward, sample, absorb. One call of `step` is one forward."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from penstock.wire import Failure, Finish, Output, Ready, Sampling, Status, Submit
from penstock.worker.engine.batch import build_batch
from penstock.worker.engine.sampler import logprobs_of, sample
from penstock.worker.kv.blocks import BlockPool
from penstock.worker.scheduling.policy import StepPacer
from penstock.worker.scheduling.scheduler import Plan, Scheduler, Slice, StepLimits
from penstock.worker.scheduling.sequence import Sequence

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.wire import LoadSpec, TokenLogprobs
    from penstock.worker.engine.runner import Runner

_PROBE_ID = -1


class GenerateEngine:
    """Continuous batching over one model."""

    def __init__(self, runner: Runner, spec: LoadSpec, ready: Ready) -> None:
        arena = runner.arena
        self._runner = runner
        self._ready = ready
        self._block_tokens = arena.layout.block_tokens
        self._pool = BlockPool(arena.blocks, arena.extent_blocks, arena)
        self._scheduler = Scheduler(
            self._pool,
            StepLimits(
                tokens=spec.step_tokens,
                sequences=spec.step_sequences,
                block_tokens=self._block_tokens,
                logit_rows=2 * spec.step_sequences,
            ),
            StepPacer(spec.step_target_s),
        )
        self._refused: list[Output] = []
        self._steps = 0
        self._step_tokens = 0
        self._step_s = 0.0
        self._host_s = 0.0

    def ready(self) -> Ready:
        """What the server should know of this model."""
        return self._ready

    def submit(self, request: Submit) -> None:
        """Take a request; one that can never run is answered with the next step."""
        room = min(self._ready.context, self._scheduler.most_tokens())
        if not request.prompt or len(request.prompt) + 1 > room:
            # The front door refuses these; here only a broken or outdated server can send one.
            message = f"a prompt of {len(request.prompt)} tokens does not fit the {room} served"
            failure = Failure("context_length_exceeded", message)
            self._refused.append(Output(request.id, finish=Finish.ERROR, failure=failure))
            return
        request.max_tokens = max(1, min(request.max_tokens, room - len(request.prompt)))
        self._scheduler.add(request)

    def cancel(self, request_id: int) -> None:
        """Forget a request; its blocks are free at once."""
        self._scheduler.cancel(request_id)

    def drop_all(self) -> list[int]:
        """Forget every request; their ids."""
        return self._scheduler.drop_all()

    def grant(self, kv_bytes: int, step_bytes: int) -> int:
        """Hold no more than this from now on; the bytes that went back to the system."""
        return self.shed(0)

    def shed(self, size: int) -> int:
        """Give back what is not in use; the bytes that went back to the system."""
        before = self.kv_committed_bytes()
        self._pool.return_empty_extents()
        return before - self.kv_committed_bytes()

    def kv_committed_bytes(self) -> int:
        """Memory behind the KV arena."""
        return self._runner.arena.committed_bytes

    def has_work(self) -> bool:
        """Something is running, waiting or to be refused."""
        return bool(self._refused) or self._scheduler.has_work()

    def step(self) -> list[Output]:
        """Run one forward over everything planned."""
        outputs, self._refused = self._refused, []
        if not self._scheduler.has_work():
            return outputs
        started = time.perf_counter()
        plan = self._scheduler.plan()
        batch = build_batch(plan, self._block_tokens, self._runner.device)
        forward_started = time.perf_counter()
        logits = self._runner.forward(batch)
        forward_ended = time.perf_counter()
        outputs += self._absorb(plan, logits, started)
        self._steps += 1
        self._step_tokens = plan.tokens
        self._step_s = time.perf_counter() - started
        self._host_s = self._step_s - (forward_ended - forward_started)
        return outputs

    def status(self) -> Status:
        """Figures after the latest step."""
        return Status(
            running=self._scheduler.running,
            waiting=self._scheduler.waiting,
            blocks_total=self._pool.capacity,
            blocks_free=self._pool.free,
            block_tokens=self._block_tokens,
            step_tokens=self._step_tokens,
            step_s=self._step_s,
            host_s=self._host_s,
            preemptions=self._scheduler.preemptions,
            steps=self._steps,
        )

    def probe(self) -> None:
        """One real step of one token while idle; raises when the model cannot compute."""
        if self._scheduler.has_work():
            return  # the steps under way prove more
        self.submit(Submit(_PROBE_ID, prompt=[0], max_tokens=1, sampling=Sampling(temperature=0)))
        try:
            outputs = self.step()
        finally:
            self._scheduler.cancel(_PROBE_ID)
        self._refused += [output for output in outputs if output.id != _PROBE_ID]

    def score(self, tokens: list[int], chunk: int) -> Tensor:
        """Logits of every position, [tokens, vocabulary], computed in chunks while idle."""
        assert not self._scheduler.has_work(), "scoring shares the pool with nobody"
        request = Submit(_PROBE_ID, tokens, 1, Sampling(temperature=0), prompt_logprobs=0)
        sequence = Sequence(request, 0)
        sequence.blocks = self._pool.take(-(-len(tokens) // self._block_tokens))
        rows = []
        try:
            for start in range(0, len(tokens), chunk):
                piece = Slice(sequence, start, min(chunk, len(tokens) - start))
                # A lone row goes the way of a decode, so that both kernels are seen.
                plan = Plan(decodes=[piece]) if piece.count == 1 else Plan(chunks=[piece])
                batch = build_batch(plan, self._block_tokens, self._runner.device)
                rows.append(self._runner.forward(batch))
        finally:
            self._pool.give(sequence.blocks)
        return torch.cat(rows)

    def check(self) -> None:
        """Blocks and sequences agree."""
        self._scheduler.check()

    @torch.inference_mode()
    def _absorb(self, plan: Plan, logits: Tensor, started: float) -> list[Output]:
        outputs: dict[int, Output] = {}
        rows: list[int] = []
        samplers: list[Slice] = []
        row = 0
        for piece in plan.slices:
            first, row = row, row + piece.logit_rows  # before scoring, which changes the number
            if piece.sequence.wants_prompt_logits:
                scores = _prompt_logprobs(piece, logits[first:row])
                outputs[piece.sequence.id] = Output(piece.sequence.id, prompt_logprobs=scores)
            if piece.samples:
                rows.append(row - 1)
                samplers.append(piece)
        tokens: dict[int, int] = {}
        if samplers:
            wanted = logits if len(rows) == logits.shape[0] else logits[rows]
            sampled = sample(wanted, [piece.sequence for piece in samplers])
            for piece, token, scores_of in zip(
                samplers, sampled.tokens, sampled.logprobs, strict=True
            ):
                number = piece.sequence.id
                tokens[number] = token
                output = outputs.setdefault(number, Output(number))
                output.tokens = [token]
                output.logprobs = [scores_of] if scores_of else None
        finished = self._scheduler.absorb(plan, tokens, time.perf_counter() - started)
        for number, how in finished.items():
            outputs[number].finish = how
        return list(outputs.values())


def _prompt_logprobs(piece: Slice, logits: Tensor) -> list[TokenLogprobs | None]:
    """Row i predicts token i + 1; the first token has no row. None is sent twice."""
    sequence = piece.sequence
    request = sequence.request
    following = request.prompt[piece.start + 1 : piece.end + 1]
    scores: list[TokenLogprobs | None] = [None] if piece.start == 0 else []
    if following:
        rows = logits[: len(following)]
        scores += logprobs_of(rows, following, request.prompt_logprobs or 0)
    # A sequence that was preempted computes its rows again.
    fresh = scores[sequence.scored - (piece.start + 1 if piece.start else 0) :]
    sequence.scored += len(fresh)
    return fresh
