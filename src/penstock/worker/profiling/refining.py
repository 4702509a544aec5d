"""The whole profile of a model that serves with a first one, measured while nobody asks for it.

One step at a time, within the grant, and given up as soon as a message arrives: whoever sends one
waits for a layer. What comes of it is stored, and is in force when the model is loaded again.
"""

from __future__ import annotations

import logging
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch.nn.modules.module import register_module_forward_pre_hook

from penstock.memory.cost import Measured, fit
from penstock.worker.backends.caps import is_out_of_memory
from penstock.worker.priority import behind_others
from penstock.worker.profiling import store as profile_store
from penstock.worker.profiling.sizing import (
    MIN_STEP_TOKENS,
    bounds,
    leaves_enough,
    open_stress,
)
from penstock.worker.profiling.store import StoredProfile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.worker.core.profile import Profile
    from penstock.worker.models.verify import Kept
    from penstock.worker.profiling.context import ProfileContext
    from penstock.worker.profiling.stress import StepShapeTrial

log = logging.getLogger(__name__)

QUIET_S = 5.0  # without a step, before the first is measured


class Refinement:
    """What a worker does while it is idle, until it is done."""

    def __init__(self, context: ProfileContext, found: Profile, kept: Kept) -> None:
        self._context = context
        self._found = found
        self._kept = kept
        self._steps = -1  # that the engine had run when it was last looked at
        self._quiet_since = 0.0
        self._done = False
        self.stored = False
        self._begin(context.limits.tokens)

    def run(self, steps: int, granted: tuple[int, int], called: Callable[[], bool]) -> float | None:
        """A piece of it, within bytes for KV and for steps, unless somebody has `called`; when to
        come again, None: it is done. `steps` is how many the engine has run."""
        if self._done:
            return None
        now = time.monotonic()
        if steps != self._steps or self._context.executor.crowded:
            self._steps, self._quiet_since = steps, now
        if (left := self._quiet_since + QUIET_S - now) > 0:
            return left
        if self._measure(granted, called):
            self._next += 1
        if not self._done and self._next == len(self._trials):
            self._finish(granted[0])
        return None if self._done else 0.0

    def _begin(self, tokens: int) -> None:
        context = self._context
        limits = context.limits
        self._limits = limits if tokens == limits.tokens else limits.within(tokens, context.drafts)
        of = bounds(context, self._limits)
        # The first of its size also takes what libraries keep from then on. Each several times:
        # where a tensor comes to lie in a heap is chance.
        trials = [trial for trial in of.trials() for _ in range(context.repeats)]
        self._trials: list[StepShapeTrial] = [of.everything(), *trials]
        self._points: list[Measured] = []
        self._next = 0

    def _measure(self, granted: tuple[int, int], called: Callable[[], bool]) -> bool:
        """One step; whether it came to its end."""
        context = self._context
        held = context.memory.committed_bytes
        context.cap.move(held, max(sum(granted) - held, granted[1]))
        try:
            stress = open_stress(context, self._limits)
            try:
                with context.shallow(), behind_others(everyone=True), _given_up(called):
                    point = stress.run(self._trials[self._next], context.vocabulary)
            finally:
                stress.close()
        except _Called:
            return False
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            self._halve()
            return False
        finally:
            context.meter.drop_caches()
            context.cap.move(*granted)
        if self._next:
            self._points.append(point)
        return True

    def _halve(self) -> None:
        """There is no room for so large a step now."""
        tokens = self._limits.tokens // 2
        if tokens < max(MIN_STEP_TOKENS, 2 * self._found.limits.tokens):
            log.info("there is no room to measure larger steps; those of the first profile stay")
            self._done = True
            return
        self._begin(tokens)

    def _finish(self, kv_bytes: int) -> None:
        context, limits = self._context, self._limits
        kv = context.kv
        cost = fit(
            self._points[:],
            context.memory.cost(limits.tokens),
            floor=context.meter.floor_bytes,
            row_bytes=context.row_bytes,
        )
        own_cost = kv.cost
        enough = leaves_enough(context, limits, cost)
        kv.cost = own_cost
        kv.set_limit(kv_bytes)  # it was tried with others
        if not enough:
            self._halve()
            return
        stored = StoredProfile(
            format=profile_store.FORMAT,
            fingerprint=context.fingerprint,
            memory_bytes=context.spec.memory_bytes,
            step_tokens=limits.tokens,
            step_sequences=limits.sequences,
            cost=cost,
            layers=tuple(self._kept.attention.items()),
            states=tuple(self._kept.states.items()),
            prompts_differ=self._kept.prompts_differ,
            times=self._found.times,
            image_pixels=context.images.pixels,
            stage_bytes=context.images.stage_bytes,
            stage_s=context.images.stage_s,
        )
        profile_store.save(context.spec.profile_dir, stored)
        log.info("the whole profile is measured; it holds when the model is loaded again")
        self._done = self.stored = True


class _Called(Exception):  # noqa: N818 - not an error
    """A message has arrived."""


@contextmanager
def _given_up(called: Callable[[], bool]) -> Iterator[None]:
    """Forwards within it end at the next module once somebody has called."""

    def look(*_: Any) -> None:
        if called():
            raise _Called

    handle = register_module_forward_pre_hook(look)
    try:
        yield
    finally:
        handle.remove()
