"""What those are told who wait for a model that was refused."""

from __future__ import annotations

import pytest

from penstock.errors import ModelTooLarge, ModelUnusable, Overloaded, PenstockError
from penstock.memory.domains import RAM
from penstock.memory.ledger import Ledger, OutOfBudget, Purpose
from penstock.server.residency.model import Model, State


def out_of_budget() -> PenstockError:
    with pytest.raises(OutOfBudget) as caught:
        Ledger({RAM: 100}).reserve("model:m", {(RAM, Purpose.KV): 101})
    return caught.value


@pytest.mark.parametrize(
    "error",
    [
        out_of_budget(),
        Overloaded("later"),
        ModelTooLarge("never", numbers={"domain": "ram"}),
        ModelUnusable("its files are broken", param="model"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_refusal_is_repeated_with_the_time_left(error: PenstockError) -> None:
    model = Model("m")
    model.enter(State.LOADING)
    model.on_refused(error)
    told = model.refusal()
    assert told is not error
    assert told.retry_after_s is not None
    assert 0 < told.retry_after_s <= 1
    for name in ("status", "code", "anthropic", "message", "param", "numbers"):
        assert getattr(told, name) == getattr(error, name)
