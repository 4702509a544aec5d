"""Which backend a device's name gives, and what the CPU's gives."""

from __future__ import annotations

import pytest

from penstock.catalog.kv_formats import kv_format
from penstock.memory.device_kinds import kind_of
from penstock.memory.domains import RAM, Domain
from penstock.worker.backends import open_backend
from penstock.worker.backends.caps import NoCap
from penstock.worker.kv.arena import LayerGeometry
from penstock.worker.kv.groups import LayerGroup
from penstock.worker.kv.memory import KvMemory

LAYERS = {0: LayerGeometry(8, 64, 64)}
GROUP = LayerGroup((0,), None, 4096, 16)


def test_each_device_has_its_backend() -> None:
    for name in ("cpu", "cuda:0"):
        assert open_backend(name).kind == kind_of(name)
    assert open_backend("cpu").domain == RAM
    assert open_backend("cuda:1").domain == Domain.gpu(1)
    assert open_backend("cuda").domain == Domain.gpu(0)
    with pytest.raises(ValueError, match="use cpu or cuda:N"):
        open_backend("meta")


def test_kv_is_in_no_reading_of_the_meter() -> None:
    backend = open_backend("cpu")
    memory = KvMemory((GROUP,), LAYERS, kv_format("auto", "float32"), backend, [1024])
    (arena,) = memory.arenas
    meter = backend.meter(memory)
    meter.drop_caches()
    before = meter.held()
    try:
        arena.commit(0)
        assert arena.committed_bytes == backend.extent_bytes
        assert abs(meter.held() - before) < 8 << 20
    finally:
        arena.close()


def test_a_process_without_a_limit_has_no_cap() -> None:
    backend = open_backend("cpu")
    memory = KvMemory((GROUP,), LAYERS, kv_format("auto", "float32"), backend, [16])
    try:
        assert isinstance(backend.cap(memory, 0, enforced=False), NoCap)
    finally:
        memory.arenas[0].close()
