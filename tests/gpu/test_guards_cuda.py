"""The walls around a worker on a GPU: the allocator's limit, and what a step does behind it."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch

from penstock.testing import tiny
from penstock.testing.exactness import Mode, run, start_engine
from penstock.worker.backends.caps import is_out_of_memory
from penstock.worker.backends.cuda.caps import CudaCap

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from penstock.worker.core.backend import StepHandle
    from penstock.worker.core.plan import Plan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

MIB = 1 << 20
MANY_ROWS = 1000  # of 12288 values each: far more than an allocator has lying about
WIDE = {"intermediate_size": 12288, "max_position_embeddings": 4096}


@contextmanager
def capped(step_bytes: int) -> Iterator[None]:
    """Within it, this process may take so much more of the device than it holds."""
    torch.cuda.empty_cache()
    cap = CudaCap(torch.device("cuda:0"))
    cap.set_base()
    cap.move(0, step_bytes)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_beyond_the_cap_an_allocation_fails_with_an_error_that_is_known() -> None:
    with capped(128 * MIB):
        torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
        with pytest.raises(torch.OutOfMemoryError) as caught:
            torch.empty(512 * MIB, dtype=torch.uint8, device="cuda")
    assert is_out_of_memory(caught.value)


def test_a_step_that_runs_out_of_memory_is_retried_smaller_and_changes_no_token(
    tmp_path: Path,
) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    folder = tiny.save("llama", tmp_path, **WIDE)
    mode = Mode("tight", step_tokens=2048)
    prompts = [tiny.prompt(length, length) for length in (1500, 40, 130)]
    wanted = run(start_engine(folder, mode, device="cuda:0"), prompts, 24)
    engine = start_engine(folder, mode, device="cuda:0")
    executor: Any = engine.executor
    launch: Callable[..., StepHandle] = executor.launch
    done = False

    def tight(plan: Plan, after: StepHandle | None = None) -> StepHandle:
        nonlocal done
        if done or plan.tokens < MANY_ROWS:
            return launch(plan, after)
        done = True
        with capped(0):
            return launch(plan, after)

    executor.launch = tight
    assert run(engine, prompts, 24) == wanted
    assert engine.status().oom_steps == 1, "memory did not run out: the test tests nothing"
    assert engine.status().safety_factor > 1.0
