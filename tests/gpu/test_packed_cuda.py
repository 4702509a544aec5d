"""Packed weights on a GPU: tokens of the numbers that the codes stand for."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch

from penstock.catalog import read_card
from penstock.testing import quantised, tiny
from penstock.testing.exactness import MODES, Mode, Reference, compare_mode, start_engine
from penstock.testing.rounding import mixed_rows
from penstock.wire import Sampling, Submit

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.worker.core.engine import GenerateEngine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

LENGTHS = (1, 16, 17, 40, 130)
NEW_TOKENS = 24
FORMS = ("fp8-block", "fp8-channel", "ct-int8", "ct-pack4", "awq", "gptq", "gptq-order", "mxfp4")
Q4_K = {"attn": "Q4_K", "ffn": "Q4_K", "token_embd": "Q8_0", "output": "F16"}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 192, "intermediate_size": 320},  # q, k and v are multiplied apart
    "qwen3": {"hidden_size": 256, "head_dim": 64, "intermediate_size": 384},  # and joined
    "qwen3_moe": {"hidden_size": 192, "moe_intermediate_size": 72},
}


@pytest.mark.parametrize("architecture", SHAPES)
def test_tokens_of_fp8_blocks_equal_transformers(tmp_path: Path, architecture: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    plain = tiny.save(architecture, tmp_path / "plain", **SHAPES[architecture])
    folder, numbers = quantised.save(plain, tmp_path / "fp8", "fp8-block")
    reference = Reference.load(numbers)
    texts = [tiny.prompt(length, seed) for seed, length in enumerate(LENGTHS)]
    for mode in (MODES[0], MODES[1], MODES[3]):
        tally = compare_mode(reference, folder, mode, texts, NEW_TOKENS, device="cuda:0")
        assert tally.tokens == len(LENGTHS) * NEW_TOKENS


@pytest.mark.parametrize("architecture", SHAPES)
def test_int8_is_near_its_numbers_in_bfloat16(tmp_path: Path, architecture: str) -> None:
    plain = tiny.save(architecture, tmp_path / "plain", **SHAPES[architecture])
    exact = Reference.load(quantised.save_int8_reference(plain, tmp_path / "int8")).model
    engine = start_engine(plain, Mode("at once", dtype="int8"), device="cuda:0")
    tables = sum(t.nbytes for name, t in exact.named_buffers() if name not in exact.state_dict())
    loaded = engine.ready().weight_bytes - tables
    assert loaded == read_card(plain).bytes_in_memory("bfloat16", "int8")
    text = tiny.prompt(60, 0)
    with torch.inference_mode():
        expected = exact(torch.tensor([text])).logits[0]
    rows = mixed_rows(engine, [text], random.Random(0)).float().cpu()
    error = (rows - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert float(error.median()) < 0.05


@pytest.mark.parametrize("form", [*FORMS, "q4_k"])
def test_codes_on_a_gpu_are_near_their_numbers(tmp_path: Path, form: str) -> None:
    folder, numbers = _model(tmp_path, form)
    reference = Reference.load(numbers)
    engine = start_engine(folder, Mode("at once", dtype="bfloat16"), device="cuda:0")
    assert _tiled(engine) > 0
    text = tiny.prompt(60, 0)
    with torch.inference_mode():
        expected = reference.model(torch.tensor([text])).logits[0]
    rows = mixed_rows(engine, [text], random.Random(0)).float().cpu()
    error = (rows - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert float(error.median()) < 0.05
    for count in (1, 3):  # by graphs: a row alone, and several
        assert _decode_error(engine, reference, count) < 0.1


def _model(path: Path, form: str) -> tuple[Path, Path]:
    if form == "q4_k":
        gguf_files = pytest.importorskip("penstock.testing.gguf_files")
        plain = tiny.save("llama", path / "plain", hidden_size=256, intermediate_size=512)
        made: tuple[Path, Path] = gguf_files.save(plain, path / form, Q4_K)
        return made
    return quantised.save(tiny.save("qwen3", path / "plain", **SHAPES["qwen3"]), path / form, form)


def _tiled(engine: GenerateEngine) -> int:
    """How many of the layers' weights are multiplied by their codes."""
    from penstock.worker.backends.cuda.kernels.packed.tiled import TiledWeight

    executor: Any = engine.executor
    return sum(isinstance(module, TiledWeight) for module in executor.model.modules())


def _decode_error(engine: GenerateEngine, reference: Reference, count: int) -> float:
    """Of the log-probabilities of greedy answers to so many prompts at once, in the mean."""
    prompts = [tiny.prompt(20 + number, number) for number in range(count)]
    texts = [list(prompt) for prompt in prompts]
    found: list[list[float]] = [[] for _ in prompts]
    for number, prompt in enumerate(prompts):
        engine.submit(Submit(number, list(prompt), NEW_TOKENS, Sampling(temperature=0, logprobs=0)))
    while engine.has_work():
        for output in engine.step():
            assert output.failure is None, output.failure
            texts[output.id] += output.tokens
            found[output.id] += [scores.chosen.logprob for scores in output.logprobs or []]
    errors = []
    for prompt, text, scores in zip(prompts, texts, found, strict=True):
        with torch.inference_mode():
            logits = reference.model(torch.tensor([text])).logits[0, len(prompt) - 1 : -1]
        exact = logits.log_softmax(-1).gather(1, torch.tensor(text[len(prompt) :])[:, None])[:, 0]
        errors.append((torch.tensor(scores) - exact).abs().mean())
    return float(torch.stack(errors).mean())
