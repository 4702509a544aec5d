"""The encode engine as the worker's loop drives it: take texts, pack a step, answer. No torch.

There is no KV: a text is in a step whole, or waits. A step that runs out of memory is repeated with
half of its texts; only one that fails alone is failed, with its own error.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from penstock.errors import BadRequest, ContextTooLong, InternalError, Overloaded
from penstock.wire import Encoding, Failure, Finish, Freed, Output, Ready, Sampling, Status, Submit
from penstock.worker.core.figures import Figures
from penstock.worker.core.pacer import StepPacer
from penstock.worker.encoding.packing import PackedStep, Text, pack
from penstock.worker.process_memory import PrivateBytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.wire import Grant
    from penstock.worker.core.profile import Profile, ServedModel
    from penstock.worker.core.step_memory import StepMemory

log = logging.getLogger(__name__)

_PROBE_ID = -1


@dataclass(frozen=True, slots=True)
class StepVectors:
    """What a step gave: float32 of each text, in order; None where it is not a number."""

    vectors: list[bytes | None]
    forward_s: float = 0.0
    waited_s: float = 0.0  # for others that compute on the same cores


class Encoder(Protocol):
    """Runs packed steps on a model."""

    @property
    def crowded(self) -> bool:
        """Others want the same processors: a long step is in their way."""

    def encode(self, step: PackedStep) -> StepVectors:
        """One forward."""

    def out_of_memory(self, error: BaseException) -> bool:
        """Whether this is what running out of memory looks like here."""


class EncodeEngine:
    """Vectors and scores from one model, which has been profiled."""

    def __init__(
        self,
        encoder: Encoder,
        memory: StepMemory,
        profile: Profile,
        served: ServedModel,
        ready: Ready,
    ) -> None:
        self.profile = profile
        self._encoder = encoder
        self._memory = memory
        self._served = served
        self._ready = ready
        self._waiting: dict[int, Text] = {}
        self._arrivals = 0
        self._sequences = profile.limits.sequences  # of a step; fewer after one without memory
        self._oom_steps = 0
        self._pacer = StepPacer(served.step_target_s)
        self._figures = Figures()
        self._private = PrivateBytes()
        self.wants_reload = False  # its profile is whole from the start

    def ready(self) -> Ready:
        """What the server should know of this model."""
        return self._ready

    def submit(self, request: Submit) -> None:
        """Take a text."""
        if request.encoding is None:
            raise BadRequest("This model makes vectors or scores; it generates no text.")
        tokens, longest = request.prompt, self._ready.context
        if not 0 < len(tokens) <= longest:
            # The front door refuses these; here only a broken or outdated server can send one.
            raise ContextTooLong(
                f"a text of {len(tokens)} tokens does not fit the {longest} served"
            )
        known = range(self._served.vocabulary)
        if strange := [token for token in (min(tokens), max(tokens)) if token not in known]:
            raise BadRequest(
                f"the text has token {strange[0]}, which the model does not know: its vocabulary "
                f"has {len(known)} tokens"
            )
        self._arrivals += 1
        place = request.priority, self._arrivals
        self._waiting[request.id] = Text(request.id, tokens, request.encoding, place)

    def cancel(self, request_id: int) -> None:
        """Forget a text."""
        self._waiting.pop(request_id, None)

    def has_work(self) -> bool:
        """Whether anything waits."""
        return bool(self._waiting)

    def step(self) -> list[Output]:
        """One forward over the texts that fit, or over fewer where memory is short."""
        outputs: list[Output] = []
        while self._waiting:
            began_at = time.perf_counter()
            step = self._pack()
            if not step.texts:
                outputs.append(self._fail_first("its step does not fit"))
                continue
            self._memory.begin(step)
            try:
                result = self._encoder.encode(step)
            except (MemoryError, RuntimeError) as error:
                if not self._encoder.out_of_memory(error):
                    raise
                log.warning("out of memory in a step of %s: %s", step.shape, error)
                outputs += self._recover(step)
                continue
            self._memory.end()
            return outputs + self._answers(step, result, began_at)
        return outputs

    def tidy(self, called: Callable[[], bool]) -> float | None:
        """Nothing is left to do."""
        return None

    def close(self) -> None:
        """Nothing is kept."""

    def grant(self, grant: Grant) -> Freed:
        """Steps may hold so much from now on; there is nothing else."""
        self._memory.grant(0, grant.step_bytes)
        return Freed(0)

    def shed(self, size: int) -> Freed:
        """What allocators keep goes back."""
        return Freed(self._memory.relieve())

    def notices(self) -> list[str]:
        """There are none."""
        return []

    def status(self) -> Status:
        """Figures after the latest step."""
        memory, figures = self._memory, self._figures
        running = min(len(self._waiting), self.profile.limits.sequences)
        return Status(
            running=running,
            waiting=len(self._waiting) - running,
            step_tokens=figures.step_tokens,
            step_s=figures.step_s,
            host_s=figures.host_s,
            preemptions=0,
            steps=figures.steps,
            prompt_tokens=figures.prompt_tokens,
            private_bytes=self._private.read(),
            predicted_bytes=memory.predicted_bytes,
            measured_bytes=memory.measured_bytes,
            oom_steps=self._oom_steps,
            underpredicted_steps=memory.underpredicted_steps,
            safety_factor=memory.gate.safety_factor,
            device_s=figures.device_s,
        )

    def probe(self) -> None:
        """One real step of one token while idle; raises when the model cannot compute."""
        if self._waiting:
            return  # the steps under way prove more
        self.submit(Submit(_PROBE_ID, [0], 1, Sampling(), encoding=Encoding()))
        try:
            outputs = self.step()
        finally:
            self.cancel(_PROBE_ID)
        if not any(output.vector for output in outputs):
            why = [output.failure.message for output in outputs if output.failure is not None]
            raise RuntimeError(f"a probe got no vector: {'; '.join(why) or 'none came'}")

    def _pack(self) -> PackedStep:
        memory, limits = self._memory, self.profile.limits
        self._pacer.crowded = self._encoder.crowded
        tokens = min(self._pacer.chunk_limit(0) or limits.tokens, limits.tokens)
        memory.read_room()
        step = pack(self._waiting.values(), tokens, self._sequences, memory.gate)
        if memory.gate.rejected and memory.relieve():
            memory.read_room()
            step = pack(self._waiting.values(), tokens, self._sequences, memory.gate)
        if step.texts:
            return step
        # Nothing smaller is left to try than the first text alone.
        alone = PackedStep((self._first(),))
        return alone if memory.gate.can_ever_run(alone.shape) else step

    def _first(self) -> Text:
        return min(self._waiting.values(), key=lambda text: text.place)

    def _answers(self, step: PackedStep, result: StepVectors, began_at: float) -> list[Output]:
        step_s = time.perf_counter() - began_at - result.waited_s
        self._figures.step_ran(step.tokens, step_s, result.forward_s)
        self._figures.prompt_tokens += step.tokens
        self._pacer.observe(0, step.tokens, step_s)
        self._sequences = min(2 * self._sequences, self.profile.limits.sequences)
        for text in step.texts:
            del self._waiting[text.request_id]
        return [
            _not_a_number(text.request_id)
            if vector is None
            else Output(text.request_id, finish=Finish.STOP, vector=vector)
            for text, vector in zip(step.texts, result.vectors, strict=True)
        ]

    def _recover(self, step: PackedStep) -> list[Output]:
        """Make the next attempt smaller; who has to go, if that cannot help."""
        self._oom_steps += 1
        if self._memory.learn_from_oom():
            return []
        if len(step.texts) > 1:
            self._sequences = max(1, len(step.texts) // 2)
            return []
        return [self._fail_first("its step ran out of memory")]

    def _fail_first(self, why: str) -> Output:
        text, gate = self._first(), self._memory.gate
        del self._waiting[text.request_id]
        needed, limit = gate.predicted(PackedStep((text,)).shape), max(0, gate.room_bytes)
        log.error("text %d is failed: %s (%d of %d bytes)", text.request_id, why, needed, limit)
        failure = Failure(
            Overloaded.code,
            f"The text of {len(text)} tokens was not computed for want of memory: {why} ({needed} "
            f"bytes needed, {limit} there). Others are not affected; a shorter text or a larger "
            "memory.limit would help.",
            {
                "reason": "memory",
                "domain": str(self._served.domain),
                "needed_bytes": needed,
                "limit_bytes": limit,
            },
        )
        return Output(text.request_id, finish=Finish.ERROR, failure=failure)


def _not_a_number(request_id: int) -> Output:
    message = (
        "The model's result for this text is not a number (NaN or infinite); a wider type helps "
        "where the model was not made for a narrow one (models.dtype = float32)."
    )
    failure = Failure(InternalError.code, message)
    return Output(request_id, finish=Finish.ERROR, failure=failure)
