"""Models with their first layers only."""

from __future__ import annotations

import pytest
import torch

from penstock.testing import tiny
from penstock.worker.models.shallow import enough, first_layers


@pytest.mark.parametrize(
    ("kinds", "count"),
    [
        ("a" * 30, 10),
        ("aaaa", 4),
        ("a", 1),
        ("sssssfsssssf" * 4, 12),
        ("d" + "a" * 29, 10),
        ("abcdef" * 2, 12),
    ],
)
def test_every_kind_is_among_them_twice_where_it_comes_twice(kinds: str, count: int) -> None:
    assert enough(kinds) == count


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "qwen3_moe", "gpt_oss", "phi3"])
def test_the_model_computes_with_fewer_layers_and_then_with_all(architecture: str) -> None:
    kinds = [["sliding_attention", "full_attention"][number % 2] for number in range(14)]
    more = {"layer_types": kinds} if architecture in {"gemma3_text", "gpt_oss"} else {}
    model = tiny.build(tiny.config(architecture, num_hidden_layers=14, **more)).eval()
    windows: list[int | None] = [None] * 14
    ran: list[int] = []
    layers = model.get_submodule("model.layers")
    for number, layer in enumerate(layers.children()):
        layer.register_forward_hook(lambda *_, number=number: ran.append(number))
    ids = torch.arange(5)[None]
    with torch.inference_mode():
        with first_layers(model, windows):
            model(input_ids=ids, use_cache=False)
        few = list(ran)
        model(input_ids=ids, use_cache=False)
    assert few == list(range(len(few))) and 10 <= len(few) < 14
    assert ran[len(few) :] == list(range(14))
    assert model.get_submodule("model.layers") is layers


def test_all_layers_are_back_when_a_step_fails() -> None:
    model = tiny.build(tiny.config("llama", num_hidden_layers=14))
    with pytest.raises(MemoryError), first_layers(model, [None] * 14):
        raise MemoryError
    assert len(model.model.layers) == 14
