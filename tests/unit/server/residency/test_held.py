"""What is held by purpose: a model's own figures in its domain, and what lies in RAM beside it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from penstock.memory.domains import RAM, Domain
from penstock.memory.ledger import Purpose
from penstock.server.residency.held import held_by_purpose
from penstock.wire import Status

GPU = Domain.gpu(0)


def model(domain: Domain, status: Status | None) -> Any:
    client = SimpleNamespace(ready=SimpleNamespace(weight_bytes=100), status=status)
    return SimpleNamespace(grant=SimpleNamespace(domain=domain), client=client)


def status(**tier: float) -> Status:
    return Status(
        running=0, waiting=0, step_tokens=0, step_s=0, host_s=0, preemptions=0, steps=0,
        kv_committed_bytes=30, measured_bytes=5, tier=tier,
    )  # fmt: skip


def test_models_of_one_domain_are_summed() -> None:
    held = held_by_purpose([model(RAM, status(queued_bytes=2.0)), model(RAM, None)], 7)
    assert held == {
        (RAM, Purpose.REQUESTS): 7,
        (RAM, Purpose.WEIGHTS): 200,
        (RAM, Purpose.KV): 30,
        (RAM, Purpose.STEP): 5,
        (RAM, Purpose.QUEUE): 2,
    }


def test_a_model_on_a_gpu_holds_ram_beside_it() -> None:
    held = held_by_purpose([model(GPU, status(ram_held_bytes=11.0, queued_bytes=2.0))], 0)
    assert held[GPU, Purpose.KV] == 30
    assert (held[RAM, Purpose.TIER], held[RAM, Purpose.QUEUE]) == (11, 2)
    assert (GPU, Purpose.TIER) not in held
