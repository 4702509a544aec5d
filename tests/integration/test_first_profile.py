"""A model that serves with a first profile: its tokens, and the rest of its profile while it is
idle."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from penstock.testing import tiny
from penstock.testing.exactness import Mode, run, start_engine
from penstock.worker.profiling import refining, short

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.worker.core.plan import StepLimits
    from penstock.worker.profiling.context import ProfileContext

pytestmark = pytest.mark.usefixtures("one_thread")

MODE = Mode("first", step_tokens=128, step_sequences=4, max_context=512)
PROMPTS = [tiny.prompt(length, seed=length) for length in (3, 150, 40)]


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of which the whole profile takes long, on a machine without a pause."""

    def limits_of(context: ProfileContext, step_s: float) -> StepLimits:
        return context.limits.within(64, context.drafts)

    monkeypatch.setattr(short, "limits_of", limits_of)
    monkeypatch.setattr(refining, "QUIET_S", 0.0)


class Caller:
    """Somebody who sends a message after so many looks."""

    def __init__(self, patience: int) -> None:
        self.patience = patience

    def called(self) -> bool:
        self.patience -= 1
        return self.patience < 0


@pytest.mark.usefixtures("slow")
def test_it_answers_as_with_a_whole_profile_whatever_is_measured_between(tmp_path: Path) -> None:
    folder = tiny.save("llama", tmp_path / "model")
    expected = run(start_engine(folder, MODE), PROMPTS, 12)
    engine = start_engine(folder, MODE, cache=tmp_path / "cache")
    assert engine.profile.provisional
    assert engine.profile.limits.tokens == 64
    assert run(engine, PROMPTS, 12) == expected
    free = engine.kv.free_bytes
    for patience in (1, 5, 12, 30):  # given up in a layer, in another, behind all of them
        engine.tidy(Caller(patience).called)
        assert engine.kv.free_bytes == free
        assert run(engine, PROMPTS, 12) == expected
    while engine.tidy(Caller(1 << 30).called) is not None:
        pass
    assert run(engine, PROMPTS, 12) == expected
    engine.check()
    engine.close()
    again = start_engine(folder, MODE, cache=tmp_path / "cache")
    assert not again.profile.provisional
    assert again.profile.limits.tokens == 128
    assert again.tidy(Caller(0).called) is None
    assert run(again, PROMPTS, 12) == expected
    again.close()
