"""GGUF files as they are: tokens are those of transformers with the numbers of their blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from penstock.catalog import read_card
from penstock.testing import gguf_files, tiny
from penstock.testing.exactness import (
    MODES,
    Mismatch,
    Mode,
    Reference,
    Tally,
    compare_mode,
    run,
    start_engine,
)
from penstock.worker.backends.cpu import CpuBackend
from penstock.worker.models import gguf_weights

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = [tiny.prompt(length, seed) for seed, length in enumerate((1, 17, 40, 90))]
NEW_TOKENS = 24
# Legacy types fit any width; those of 256 weights need one of that.
SMALL = {"ffn_down": "Q5_1", "attn_v": "Q8_0", "token_embd": "Q8_0", "ffn_gate_inp": "F32"}
SMALL |= {"exps": "Q4_1", "output": "Q5_0", r"blk\.1\..*attn": "F16", "attn": "Q4_0", "ffn": "Q4_1"}
LARGE = {"ffn_down": "Q6_K", "attn_v": "Q3_K", "token_embd": "Q6_K", "attn_k": "IQ4_XS"}
LARGE |= {"output": "Q5_K", r"blk\.1\..*ffn": "Q2_K", "attn": "Q5_K", "ffn": "Q4_K"}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "llama": ("llama", {"hidden_size": 128}, SMALL),
    "llama-k": ("llama", {"hidden_size": 256, "intermediate_size": 512}, LARGE),
    "llama-tied": ("llama", {"hidden_size": 128, "tie_word_embeddings": True}, SMALL),
    "qwen2": ("qwen2", {"use_sliding_window": False, "layer_types": None}, SMALL),
    "qwen3": ("qwen3", {}, SMALL),
    "qwen3moe": ("qwen3_moe", {}, SMALL),
    "gemma2": ("gemma2", {"tie_word_embeddings": True, "layer_types": None}, SMALL),
    "gemma3": (
        "gemma3_text",
        {"tie_word_embeddings": True, "num_hidden_layers": 7, "layer_types": None},
        SMALL,
    ),
    "phi3": ("phi3", {}, SMALL),
}


@pytest.fixture(autouse=True)
def small_extents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuBackend, "extent_bytes", 1 << 14)


class GgufModels:
    """Folders with GGUF files and their references, made once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._made: dict[str, tuple[Path, Reference]] = {}

    def get(self, name: str) -> tuple[Path, Reference]:
        if name not in self._made:
            architecture, changes, kinds = MODELS[name]
            plain = tiny.save(architecture, self._root / f"{name}-plain", **changes)
            folder, numbers = gguf_files.save(plain, self._root / name, kinds)
            self._made[name] = folder, Reference.load(numbers)
        return self._made[name]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> GgufModels:
    return GgufModels(tmp_path_factory.mktemp("gguf"))


@pytest.mark.parametrize("name", MODELS)
def test_tokens_equal_transformers(models: GgufModels, name: str) -> None:
    folder, reference = models.get(name)
    tally = compare_mode(reference, folder, Mode("at once"), PROMPTS, NEW_TOKENS)
    assert tally.tokens == len(PROMPTS) * NEW_TOKENS
    assert tally.ties == 0


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_tokens_equal_in_every_mode(models: GgufModels, mode: Mode) -> None:
    folder, reference = models.get("llama-k")
    assert compare_mode(reference, folder, mode, PROMPTS, NEW_TOKENS).ties == 0


@pytest.mark.parametrize("name", MODELS)
def test_the_catalog_knows_the_bytes_in_memory(models: GgufModels, name: str) -> None:
    folder, reference = models.get(name)
    card = read_card(folder)
    engine = start_engine(folder, Mode("alone"))
    kept = reference.model.state_dict()
    tables = sum(t.nbytes for key, t in reference.model.named_buffers() if key not in kept)
    loaded = engine.ready().weight_bytes
    assert loaded - tables == card.bytes_in_memory("float32")
    assert card.parameters == sum(p.numel() for p in reference.model.parameters())
    assert "q8_0" in card.formats or "q6_k" in card.formats
    # Codes stay where the file is mapped, but for rows in another order.
    copied = engine.ready().copied_bytes
    assert copied < loaded - card.weight_bytes // 2


def test_rows_in_the_files_order_are_seen(
    models: GgufModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order of q and k is undone: without, tokens are others."""
    folder, reference = models.get("llama")

    def as_it_is(rows: Tensor, _head_dim: int) -> Tensor:
        return rows

    monkeypatch.setattr(gguf_weights, "_in_halves", as_it_is)
    engine = start_engine(folder, Mode("at once"))
    with pytest.raises(Mismatch):
        for prompt, tokens in zip(PROMPTS, run(engine, PROMPTS, NEW_TOKENS), strict=True):
            Tally().compare(reference, prompt, tokens)
