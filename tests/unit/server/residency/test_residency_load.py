"""A load that fails between its booking and its process gives every byte back."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.catalog import Card
from penstock.catalog.kv_formats import KvLayers
from penstock.catalog.weights import Weights
from penstock.config import ModelsSettings
from penstock.errors import InternalError
from penstock.memory.domains import RAM
from penstock.memory.ledger import Ledger
from penstock.memory.limits import MIB
from penstock.server.residency import residency as residency_module
from penstock.server.residency.load_estimate import LoadEstimate, Storage
from penstock.server.residency.memory_grant import MemoryGrant
from penstock.server.residency.residency import Residency

CARD = Card(
    name="m",
    path=Path("/models/m"),
    kind="generate",
    architecture="LlamaForCausalLM",
    model_type="llama",
    weights=Weights(MIB, 4 * MIB, "float32", 0),
    context=2048,
    layers=("full_attention",),
    kv_layers=(KvLayers(None, 1024, 16),),
    hidden_size=64,
    vocab_size=512,
    eos_token_ids=(),
    sampling_defaults={},
    source="test",
)


class NoWorkers:
    """In place of the supervisor: it has a template, and no process is ever born."""

    @property
    def launcher(self) -> Any:
        return self

    async def started(self) -> int:
        return 1

    async def start(self, spec: object) -> Any:
        raise OSError("no more processes")


def fail(*_: object, **__: object) -> Any:
    raise RuntimeError("injected")


@pytest.mark.parametrize(
    ("place", "name"),
    [
        (MemoryGrant, "__init__"),
        (residency_module, "largest_kv"),
        (LoadEstimate, "spec"),
        (NoWorkers, "start"),
    ],
)
def test_every_byte_comes_back(monkeypatch: pytest.MonkeyPatch, place: Any, name: str) -> None:
    asyncio.run(load_in_vain(monkeypatch, place, name))


async def load_in_vain(monkeypatch: pytest.MonkeyPatch, place: Any, name: str) -> None:
    ledger = Ledger({RAM: 4000 * MIB})
    catalog = SimpleNamespace(find=lambda _: CARD)
    residency = Residency(
        cast("Any", catalog),
        cast("Any", NoWorkers()),
        ledger,
        ModelsSettings(device="cpu"),
        storage=Storage(Path("/profiles")),
        patience_s=5.0,
    )
    monkeypatch.setattr(residency_module, "read_gpus", lambda: ())
    monkeypatch.setattr(residency_module, "read_process", lambda _: None)
    before = ledger.snapshot()[RAM].owners
    monkeypatch.setattr(place, name, fail)
    with pytest.raises(InternalError, match="injected"):
        async with asyncio.timeout(10), residency.lease("m"):
            pass
    assert ledger.snapshot()[RAM].owners == before
    ledger.check()
