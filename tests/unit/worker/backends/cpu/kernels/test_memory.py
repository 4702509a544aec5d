"""Layers' memory: tensors take the places of those that are gone, and all of it ends with them."""

from __future__ import annotations

import gc
import random

import pytest
import torch

from penstock.worker.backends.cpu.kernels.memory import LayerMemory
from penstock.worker.backends.cpu.meter import MANY_ROWS

MIB = 1 << 20


def mapped(memory: LayerMemory) -> int:
    return sum(4 * len(mapping._numbers) for mapping in memory._mappings)


def test_a_tensor_has_the_place_of_one_that_is_gone() -> None:
    memory = LayerMemory()
    one = memory.rows(100, 64)
    place = one.data_ptr()
    other = memory.rows(100, 64)
    assert other.data_ptr() != place
    del one
    assert memory.rows(100, 64).data_ptr() == place


def test_a_view_holds_the_place() -> None:
    memory = LayerMemory()
    view = memory.rows(100, 64)[3:5].transpose(0, 1)
    view.fill_(7.0)
    memory.rows(100, 64).zero_()
    assert view.eq(7.0).all()


def test_what_is_expected_of_a_row_is_one_mapping_for_all_that_comes_and_goes() -> None:
    memory = LayerMemory()
    memory.expect(2 * 64 + 2 * 192)
    for _ in range(3):  # layers
        rows = memory.rows(100, 64)
        parts = [memory.rows(100, 64) for _ in range(5)]
        del parts
        inner = [memory.rows(100, 192) for _ in range(2)]
        answer = memory.rows(100, 64)
        del rows, inner, answer
    assert mapped(memory) == 100 * (2 * 64 + 2 * 192) * 4


def test_a_larger_tensor_is_not_held_beside_the_places_that_were_too_small() -> None:
    memory = LayerMemory()
    for count in (100, 200, 400):
        memory.rows(count, 64)
    assert mapped(memory) == 400 * 64 * 4


def test_few_rows_are_the_heaps() -> None:
    memory = LayerMemory()
    assert memory.rows(MANY_ROWS - 1, 64).shape == (MANY_ROWS - 1, 64)
    assert mapped(memory) == 0


def test_no_two_tensors_share_a_place_and_the_layout_is_the_same_again() -> None:
    def layout() -> list[int]:
        chance, memory = random.Random(3), LayerMemory()
        held: list[torch.Tensor] = []
        written = 0
        for _ in range(400):
            if held and chance.random() < 0.5:
                held.pop(chance.randrange(len(held)))
            else:
                tensor = memory.rows(chance.randrange(MANY_ROWS, 200), chance.choice([3, 64, 192]))
                written += 1
                tensor.fill_(written)
                held.append(tensor)
            assert all(tensor.eq(tensor.flatten()[0]).all() for tensor in held)
        assert len({float(tensor.flatten()[0]) for tensor in held}) == len(held)
        return [4 * len(mapping._numbers) for mapping in memory._mappings]

    assert layout() == layout()


def test_tensors_begin_with_a_line_of_the_cache() -> None:
    memory = LayerMemory()
    held = [memory.rows(MANY_ROWS, width) for width in (1, 3, 64)]
    assert all(tensor.data_ptr() % 64 == 0 for tensor in held)


def test_what_outlives_the_layers_stays_and_all_else_is_unmapped() -> None:
    memory = LayerMemory()
    model = torch.nn.Identity()
    memory.end_behind(model)
    kept = memory.rows(100, 64).fill_(5.0)
    model(torch.zeros(1, 3, 4))
    assert memory._mappings == []
    memory.rows(100, 64).zero_()
    assert kept.eq(5.0).all()


def test_a_cap_is_an_error_that_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("mmap.mmap", full)
    with pytest.raises(MemoryError, match="25600 bytes"):
        LayerMemory().rows(100, 64)


def test_nothing_is_left_when_all_are_gone() -> None:
    memory = LayerMemory()
    tensors = [memory.rows(256, 1024) for _ in range(4)]
    lent = [mapping._lent for mapping in memory._mappings]
    assert sum(len(each) for each in lent) == 4
    del tensors
    gc.collect()
    assert sum(len(each) for each in lent) == 0
