"""Layers of a step of single rows in one call: the answers of the modules that they replace."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numba
import pytest
import torch
from torch import Tensor, nn

from penstock.testing import tiny
from penstock.testing.gguf_files import random_rows
from penstock.worker.backends.cpu.kernels.cpu_kernels import CpuKernels
from penstock.worker.backends.cpu.kernels.one_call import layer_loops, layer_runs
from penstock.worker.backends.cpu.kernels.one_call.fused_layers import FusedLayer
from penstock.worker.backends.runner import Runner
from penstock.worker.kv.layout.layer_blocks import LayerBlocks
from penstock.worker.models import attention
from penstock.worker.models.batch import Batch, GroupBatch
from penstock.worker.models.build import sliding_windows
from penstock.worker.models.linear import PackedLinear
from penstock.worker.models.linear.gguf_blocks import GGUF_WEIGHTS

BLOCK, BLOCKS, WIDEST = 16, 128, 6
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "heads of 64, three to a key": (
        "llama",
        {"hidden_size": 192, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 64},
    ),
    "heads of 80": ("llama", {"head_dim": 80, "hidden_size": 160, "intermediate_size": 344}),
    "heads of 128": ("llama", {"head_dim": 128, "num_attention_heads": 2}),
    "sizes that are no multiple of anything": (
        "llama",
        {
            "hidden_size": 66,
            "head_dim": 22,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "intermediate_size": 35,
        },
    ),
    "biases, and windows in some layers": ("qwen2", {}),
    "norms of heads": ("qwen3", {}),
    "a window": ("mistral", {}),
}
# What the weights of a layer are, one after the other; None is float32.
MIXTURES: dict[str, tuple[str | None, ...]] = {
    "one type": ("Q4_1",) * 7,
    "small blocks": ("Q4_0", "Q8_0", None, "Q5_0", "Q4_1", "Q8_0", "Q4_0"),
    "large blocks": ("Q4_K", "Q4_K", "Q6_K", "Q5_K", "Q4_K", "Q5_K", "Q6_K"),
}
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Blocks:
    """KV of all layers: numbers where sequences have some, NaN elsewhere."""

    block_tokens = BLOCK
    device = torch.device("cpu")
    states = None  # of no recurrent layer

    def __init__(self, config: Any, contexts: list[int]) -> None:
        width = getattr(config, "head_dim", None) or (
            config.hidden_size // config.num_attention_heads
        )
        shape = BLOCKS, config.num_hidden_layers, 2, BLOCK, config.num_key_value_heads, width
        chance = torch.Generator().manual_seed(7)
        order = torch.randperm(BLOCKS, generator=chance).int()
        self.tables = order[: len(contexts) * WIDEST].view(-1, WIDEST).contiguous()
        self.arena = torch.full(shape, torch.nan)
        for table, context in zip(self.tables, contexts, strict=True):
            for position in range(context - 1):
                place = self.arena[table[position // BLOCK], :, :, position % BLOCK]
                place.copy_(torch.randn(place.shape, generator=chance))

    def blocks(self, layer: int) -> LayerBlocks:
        return LayerBlocks(self.arena[:, layer, 0], self.arena[:, layer, 1])

    def group_of(self, layer: int) -> int:
        return 0


def adopted(architecture: str, mixture: tuple[str | None, ...] = (), **changes: Any) -> Any:
    attention.register()
    model: Any = tiny.build(tiny.config(architecture, **changes)).requires_grad_(False)
    model.set_attn_implementation(attention.IMPLEMENTATION)
    kinds = {kind.format.block.name: kind for kind in GGUF_WEIGHTS}
    for layer in model.model.layers if mixture else ():
        for seed, (name, kind) in enumerate(zip(PROJECTIONS, mixture, strict=True)):
            parent = layer.self_attn if hasattr(layer.self_attn, name) else layer.mlp
            plain = getattr(parent, name)
            if kind is not None:
                rows = torch.from_numpy(
                    random_rows(kind, plain.out_features, plain.in_features, seed)
                )
                weight = kinds[kind].read({"weight": rows}, torch.empty(1 << 16))
                setattr(parent, name, PackedLinear(weight, plain.bias))
    kernels = CpuKernels()
    kernels.adopt(model)
    return SimpleNamespace(model=model, kernels=kernels, config=model.config)


def logits(
    of: Any, contexts: list[int], *, nan_row: int | None = None, firsts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Of one step of single rows, and all of KV behind it."""
    memory = Blocks(of.config, contexts)
    if nan_row is not None:
        memory.arena[memory.tables[nan_row, 0]] = torch.nan
    windows = sliding_windows(of.config)
    runner = Runner(of.model, memory, of.kernels, windows)  # type: ignore[arg-type] # what it needs
    positions = torch.tensor(contexts) - 1
    own = memory.tables.gather(1, (positions // BLOCK)[:, None])[:, 0].long()
    group = GroupBatch(
        write_blocks=own,
        write_slots=positions % BLOCK,
        decodes=len(contexts),
        decode_tables=memory.tables,
        decode_contexts=torch.tensor(contexts, dtype=torch.int32),
        chunks=(),
        decode_firsts=firsts,
    )
    ids = (torch.arange(len(contexts)) * 7 + 3) % tiny.VOCABULARY
    batch = Batch(ids[None], positions[None], torch.arange(len(contexts)), (group,))
    return runner.forward(batch), memory.arena


def compare(of: Any, contexts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    ours, our_kv = logits(of, contexts)
    with monkeypatch.context() as patch:
        patch.setattr(layer_runs, "MOST_ROWS", 0)
        theirs, their_kv = logits(of, contexts)
    assert ours.isfinite().all()
    error = (ours - theirs).abs().amax(dim=-1) / theirs.abs().amax(dim=-1)
    assert float(error.max()) < 1e-4
    torch.testing.assert_close(our_kv, their_kv, rtol=1e-3, atol=1e-4, equal_nan=True)


def runs_of(of: Any) -> set[int]:
    forwards = [layer.forward for layer in of.model.model.layers]
    assert all(isinstance(forward, FusedLayer) for forward in forwards)
    return {id(forward._run) for forward in forwards}


@pytest.mark.parametrize("contexts", [[1], [70], [17, 33], [1, 16, 90], [5] * 3 + [64] * 4])
@pytest.mark.parametrize("case", CASES)
def test_plain_weights(case: str, contexts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    architecture, changes = CASES[case]
    of = adopted(architecture, **changes)
    assert len(runs_of(of)) == 1
    compare(of, contexts, monkeypatch)


def test_a_window_is_found_wherever_the_model_has_it() -> None:
    for architecture, windows in (("mistral", [24] * 3), ("qwen2", [24, None, 24])):
        run = adopted(architecture).model.model.layers[0].forward._run
        assert [layer.window for layer in run.layers] == windows


@pytest.mark.parametrize("mixture", MIXTURES)
def test_packed_weights(mixture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    of = adopted("qwen3", MIXTURES[mixture], hidden_size=256, intermediate_size=512, head_dim=64)
    assert len(runs_of(of)) == 1
    for contexts in ([40], [3, 81], [90, 1, 16, 17, 33]):
        compare(of, contexts, monkeypatch)


def test_as_many_rows_as_there_is_room_for_and_one_more(monkeypatch: pytest.MonkeyPatch) -> None:
    of = adopted("llama", MIXTURES["one type"], hidden_size=128)
    run = of.model.model.layers[0].forward._run
    for count in (layer_runs.MOST_ROWS, layer_runs.MOST_ROWS + 1):
        contexts = [20 + row for row in range(count)]
        assert logits(of, contexts)[0].isfinite().all()
        assert (run.answered is not None) is (count == layer_runs.MOST_ROWS)
        compare(of, contexts, monkeypatch)


def test_rows_of_one_sequence_go_through_the_modules() -> None:
    """They see each other's KV, so they cannot be computed one beside the other."""
    of = adopted("llama")
    run = of.model.model.layers[0].forward._run
    for firsts in (None, torch.tensor([0, 1, 2], dtype=torch.int32)):
        logits(of, [20, 40], firsts=firsts)
        assert (run.answered is None) is (firsts is not None)


def test_a_row_of_nan_spoils_no_other() -> None:
    for mixture in ((), MIXTURES["small blocks"]):
        of = adopted("llama", mixture, hidden_size=128)
        contexts = [40, 41, 42, 43, 44]
        clean, _ = logits(of, contexts)
        spoilt, _ = logits(of, contexts, nan_row=2)
        assert spoilt[2].isnan().all()
        others = [0, 1, 3, 4]
        assert torch.equal(spoilt[others], clean[others])


def test_more_threads_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    of = adopted("llama", hidden_size=192)
    alone, _ = logits(of, [50, 60, 3])
    scratch = of.model.model.layers[0].forward._run.scratch
    several = layer_runs.Scratch(scratch._shape, 3, 3)
    run = of.model.model.layers[0].forward._run
    several.describe(run._record)
    monkeypatch.setattr(run, "scratch", several)
    monkeypatch.setattr(numba, "get_num_threads", lambda: 3)
    together, _ = logits(of, [50, 60, 3])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("architecture", ["granite", "gemma2", "phi3", "qwen3_moe", "ministral3"])
def test_layers_that_differ_stay_as_they_are(architecture: str) -> None:
    of = adopted(architecture)
    assert not any(isinstance(layer.forward, FusedLayer) for layer in of.model.model.layers)


def test_a_layer_that_differs_parts_the_others() -> None:
    of = adopted("smollm3", num_hidden_layers=5, no_rope_layers=[1, 1, 0, 1, 1])
    forwards = [layer.forward for layer in of.model.model.layers]
    assert not isinstance(forwards[2], FusedLayer)
    runs = [len(forwards[at]._run.layers) for at in (0, 1, 3, 4)]
    assert runs == [2, 2, 2, 2]


def test_layers_with_something_between_them_are_not_one_run() -> None:
    class Doubling(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.inner = layer

        def forward(self, hidden_states: Tensor, **how: Any) -> Any:
            return self.inner(hidden_states * 2, **how)

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(self.inner, name)

    attention.register()
    model: Any = tiny.build(tiny.config("llama")).requires_grad_(False)
    model.set_attn_implementation(attention.IMPLEMENTATION)
    model.model.layers[1] = Doubling(model.model.layers[1])
    CpuKernels().adopt(model)
    first, second, third = (getattr(layer, "inner", layer).forward for layer in model.model.layers)
    assert [len(each._run.layers) for each in (first, second, third)] == [1, 2, 2]


def test_the_record_of_a_call_is_of_addresses_that_live() -> None:
    of = adopted("llama")
    run = of.model.model.layers[0].forward._run
    norms = [layer.attention_norm.data_ptr() for layer in run.layers]
    assert run._table[:, layer_loops.NORM].tolist() == norms
    assert [layer.module.input_layernorm.weight.data_ptr() for layer in run.layers] == norms
