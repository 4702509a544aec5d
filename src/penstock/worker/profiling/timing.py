"""How long steps of one sequence with more and more drafts take, measured once beside the profile.

What is learned later, while requests run, corrects it; without it nobody would know which numbers
of rows a device multiplies for little more than one.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.worker.profiling import store as profile_store
from penstock.worker.profiling.stress import StepShapeTrial, Stress

if TYPE_CHECKING:
    from penstock.worker.core.profile import Profile
    from penstock.worker.profiling.context import ProfileContext

_ROWS = (1, 4, 8, 16, 2)  # in the order of their worth
_CONTEXT = 64
_TIMES = 3  # each, of which the least counts
_LONG_S = 1.0  # after which no further number of rows is tried


def with_times(context: ProfileContext, found: Profile) -> Profile:
    """The same profile with rows and seconds, by rows, where there may be drafts."""
    if not context.drafts:
        return found
    stored = profile_store.load(context.spec.profile_dir, context.fingerprint)
    if stored is not None and stored.times:
        return replace(found, times=stored.times)
    return replace(found, times=tuple(sorted(_measured(context, found).items())))


def _measured(context: ProfileContext, found: Profile) -> dict[int, float]:
    stress = Stress(context.executor, context.memory, context.kv, context.meter, 2 * _CONTEXT)
    began, times = time.perf_counter(), {}
    often = 1 if found.provisional else _TIMES
    most = min(context.drafts + 1, found.limits.logit_rows - 1, found.limits.tokens)
    seen = max(1, min(_CONTEXT, context.window - most))
    try:
        for rows in _ROWS:
            if rows > most or time.perf_counter() - began > _LONG_S:
                continue
            trial = StepShapeTrial(1, seen, drafts=rows - 1)
            times[rows] = min(stress.seconds(trial, context.vocabulary) for _ in range(often))
    finally:
        stress.close()
    return times
