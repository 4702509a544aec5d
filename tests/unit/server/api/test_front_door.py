"""How many tokens an answer may have, which bound refuses a prompt, and the seeds of choices."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from penstock import wire
from penstock.catalog import read_card
from penstock.errors import ContextTooLong
from penstock.memory.cost import Measured, fit
from penstock.server.api.fields import GenerationFields, seed_of
from penstock.server.api.generation import Job, check_window, grant
from penstock.testing.fake_server import add_model
from penstock.testing.fake_worker import FakeModel
from penstock.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from pathlib import Path

WINDOW = 1000


@pytest.fixture
def job(tmp_path: Path) -> Job:
    folder = add_model(tmp_path, "fake", FakeModel(context=WINDOW))
    return Job(
        card=read_card(folder),
        tokenizer=Tokenizer.from_folder(folder),
        prompts=[[1] * 200],
        fields=GenerationFields(),
        prompt_field="prompt",
        max_tokens=None,
        sampling=wire.Sampling(),
        stop_token_ids=[],
    )


def loaded(context: int, kv_tokens: int, device: str = "cpu") -> wire.Ready:
    return wire.Ready(
        pid=1,
        device=device,
        dtype="float32",
        weight_bytes=1,
        kv_bytes_per_token=10,
        kv_tokens=kv_tokens,
        context=context,
        load_s=0,
        cost=fit([Measured(1, 1, 1, 1, 0)], 10, 16),
        process_bytes=1,
        step_bytes=1,
        kv_bytes=10 * kv_tokens,
        step_tokens=512,
    )


def test_the_last_token_of_the_room_is_granted(job: Job) -> None:
    assert grant(job, 200, loaded(WINDOW, 5000), "cut") == WINDOW - 200
    assert grant(job, WINDOW - 1, loaded(WINDOW, 5000), "refuse") == 1


@pytest.mark.parametrize(("device", "domain"), [("cpu", "ram"), ("cuda:1", "gpu:1")])
def test_memory_is_named_where_it_is_what_binds(job: Job, device: str, domain: str) -> None:
    with pytest.raises(ContextTooLong) as refused:
        grant(job, 200, loaded(context=160, kv_tokens=160, device=device), "cut")
    assert refused.value.numbers == {
        "reason": "memory",
        "domain": domain,
        "needed_tokens": 201,
        "limit_tokens": 160,
        "needed_bytes": 2010,
        "limit_bytes": 1600,
    }
    assert "memory.limit" in refused.value.message


def test_the_window_is_named_where_memory_would_do(job: Job) -> None:
    with pytest.raises(ContextTooLong) as refused:
        grant(job, 200, loaded(context=150, kv_tokens=5000), "cut")
    assert refused.value.numbers is not None
    assert refused.value.numbers["reason"] == "window"


def test_the_window_is_checked_before_anything_is_loaded(job: Job) -> None:
    check_window(job, None)
    check_window(job, 201)
    with pytest.raises(ContextTooLong):
        check_window(job, 200)


def test_seeds_of_choices_differ_and_repeat() -> None:
    seeds = [seed_of(7, choice) for choice in range(100)]
    assert seeds[0] == 7
    assert len(set(seeds)) == 100
    assert seeds == [seed_of(7, choice) for choice in range(100)]
    assert seed_of(8, 1) not in seeds
    assert all(0 <= seed < 2**63 for seed in seeds)
