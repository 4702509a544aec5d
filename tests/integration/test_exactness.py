"""Greedy tokens through the real engine equal those of plain transformers; or it is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.catalog import read_card
from penstock.catalog.kv_formats import kv_format
from penstock.errors import ModelUnusable
from penstock.testing import tiny
from penstock.testing.exactness import (
    Mismatch,
    Mode,
    Reference,
    Tally,
    compare_mode,
    poisoned_blocks,
    run,
    start_engine,
)
from penstock.wire import Finish, Sampling, Submit, TokenLogprobs
from penstock.worker.backends import executor
from penstock.worker.backends.cpu import CpuBackend
from penstock.worker.backends.cpu.kernels.cpu_kernels import CpuKernels
from penstock.worker.models import attention
from penstock.worker.models.batch import Batch, build_batch
from penstock.worker.models.kernels import reference
from penstock.worker.models.kernels.interface import Masking

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.worker.core.engine import GenerateEngine
    from penstock.worker.core.plan import Plan
    from penstock.worker.kv.layout.layer_blocks import LayerBlocks
    from penstock.worker.models.batch import GroupBatch

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = [tiny.prompt(length, seed) for seed, length in enumerate((1, 17, 40, 90))]
NEW_TOKENS = 24
# 8 blocks: the longest request fits alone, the others outgrow what is left for them. With windows
# KV hardly grows, so that they are made to give way as well.
CROWDED = Mode("crowded", step_tokens=64, step_sequences=6, pool_tokens=128, give_way_every=7)
SHORT_MODES = (
    Mode("alone", alone=True),
    Mode("chunks-of-7-arrivals", step_tokens=7, step_sequences=3, arrive_every=3),
    CROWDED,
)


@pytest.fixture(autouse=True)
def small_extents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Extents of a few blocks, so that a tiny arena has many."""
    monkeypatch.setattr(CpuBackend, "extent_bytes", 1 << 14)


class TinyModels:
    """Folders and references of tiny models, made once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._references: dict[tuple[str, str], Reference] = {}

    def folder(self, architecture: str) -> Path:
        folder = self._root / architecture
        return folder if folder.exists() else tiny.save(architecture, folder)

    def reference(self, architecture: str, kv_dtype: str = "auto") -> Reference:
        key = architecture, kv_dtype
        if key not in self._references:
            self._references[key] = Reference.load(self.folder(architecture), kv_dtype)
        return self._references[key]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    return TinyModels(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("architecture", tiny.SERVED)
@pytest.mark.parametrize("mode", SHORT_MODES, ids=str)
def test_tokens_equal_transformers(models: TinyModels, architecture: str, mode: Mode) -> None:
    folder, reference = models.folder(architecture), models.reference(architecture)
    tally = compare_mode(reference, folder, mode, PROMPTS, NEW_TOKENS)
    assert tally.tokens == len(PROMPTS) * NEW_TOKENS
    assert tally.ties == 0  # none with these seeds; one that appears says that logits moved
    assert (tally.preemptions > 0) == (mode is CROWDED)


# Whatever is peculiar about attention: windows, soft-caps, sinks, values narrower than keys.
OVER_ROUNDED_KV = (
    "llama",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3_text",
    "mistral",
    "gpt_oss",
    "deepseek_v3",
)


@pytest.mark.parametrize("architecture", OVER_ROUNDED_KV)
@pytest.mark.parametrize("mode", SHORT_MODES, ids=str)
def test_tokens_over_kv_in_8_bits_equal_transformers_over_rounded_kv(
    models: TinyModels, architecture: str, mode: Mode
) -> None:
    folder, reference = models.folder(architecture), models.reference(architecture, "int8")
    mode = replace(mode, kv_dtype="int8")
    tally = compare_mode(reference, folder, mode, PROMPTS, NEW_TOKENS)
    assert tally.tokens == len(PROMPTS) * NEW_TOKENS
    assert tally.ties <= 2
    assert (tally.preemptions > 0) == mode.name.startswith("crowded")


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "deepseek_v3"])
def test_plans_count_the_bytes_that_kv_takes(
    models: TinyModels, architecture: str, kv_dtype: str
) -> None:
    mode = Mode("alone", kv_dtype=kv_dtype)
    engine = start_engine(models.folder(architecture), mode)
    card, form = read_card(models.folder(architecture)), kv_format(kv_dtype, "float32")
    planned = card.kv_cost(form, 16, tiny.CONTEXT, mode.step_tokens)
    assert planned.groups == engine.kv.cost.groups


# The comparison must bite: each of these makes one small thing wrong.


def compare_running(
    models: TinyModels, architecture: str, engine: GenerateEngine, kv_dtype: str = "auto"
) -> None:
    answers = run(engine, PROMPTS, NEW_TOKENS)
    for prompt, tokens in zip(PROMPTS, answers, strict=True):
        Tally().compare(models.reference(architecture, kv_dtype), prompt, tokens)


@pytest.mark.parametrize(("kept", "compared"), [("int8", "auto"), ("auto", "int8")])
def test_what_rounding_changes_is_seen(models: TinyModels, kept: str, compared: str) -> None:
    engine = start_engine(models.folder("llama"), Mode("at once", kv_dtype=kept))
    with pytest.raises(Mismatch):
        compare_running(models, "llama", engine, compared)


def test_a_chunk_that_sees_itself_before_it_is_rounded_is_seen(
    models: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start_engine(models.folder("llama"), Mode("at once", kv_dtype="int8"))
    attend = CpuKernels.attend

    def careless(
        kernels: CpuKernels,
        rows: torch.Tensor,
        new: tuple[torch.Tensor, torch.Tensor],
        blocks: LayerBlocks,
        batch: GroupBatch,
        masking: Masking,
    ) -> torch.Tensor:
        out = attend(kernels, rows, new, blocks, batch, masking)
        for span in batch.chunks:
            own = slice(span.row, span.row + span.count)
            if span.count == span.context:
                out[own] = reference.attend(rows[own], new[0][own], new[1][own], masking)
        return out

    monkeypatch.setattr(CpuKernels, "attend", careless)
    with pytest.raises(Mismatch):
        compare_running(models, "llama", engine, "int8")


@pytest.mark.parametrize("rows", ["a decode", "a chunk"])
def test_one_wrong_entry_in_a_block_table_is_seen(
    models: TinyModels, monkeypatch: pytest.MonkeyPatch, rows: str
) -> None:
    engine = start_engine(models.folder("llama"), Mode("chunks", step_tokens=32, step_sequences=6))
    wrong = 0

    def misdirected(plan: Plan, block_tokens: int, device: torch.device) -> Batch:
        nonlocal wrong
        pieces = plan.decodes if rows == "a decode" else plan.chunks
        victims = [p for p in pieces if p.start >= block_tokens]
        if wrong or not victims:
            return build_batch(plan, block_tokens, device)
        wrong += 1
        (blocks,) = victims[0].tables
        right, blocks[0] = int(blocks[0]), blocks[1]  # a block of its own, not the right one
        try:
            return build_batch(plan, block_tokens, device)
        finally:
            blocks[0] = right

    monkeypatch.setattr(executor, "build_batch", misdirected)
    with pytest.raises(Mismatch):
        compare_running(models, "llama", engine)
    assert wrong == 1


def test_reading_one_slot_too_many_is_seen(
    models: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    def greedy_reader(plan: Plan, block_tokens: int, device: torch.device) -> Batch:
        batch = build_batch(plan, block_tokens, device)
        contexts = batch.groups[0].decode_contexts
        inside = contexts % block_tokens != 0
        contexts[inside] += 1
        return batch

    with poisoned_blocks():
        engine = start_engine(models.folder("llama"), Mode("at once"))
        monkeypatch.setattr(executor, "build_batch", greedy_reader)
        with pytest.raises((Mismatch, ArithmeticError)):  # a kernel may notice by itself
            compare_running(models, "llama", engine)


FORGOTTEN = [
    ("mistral", "window"),
    ("gemma3_text", "window"),
    ("qwen2_moe", "window"),
    ("phimoe", "window"),
    ("gemma2", "softcap"),
    ("gpt_oss", "sinks"),
]


def forget(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    def forgetful(*fields: Any) -> Masking:
        names = ("scale", "window", "softcap", "sinks")
        return Masking(**{n: f for n, f in zip(names, fields, strict=True) if n != what})

    monkeypatch.setattr(attention, "Masking", forgetful)


@pytest.mark.parametrize(("architecture", "what"), FORGOTTEN)
def test_a_forgotten_rule_of_attention_is_seen(
    models: TinyModels, monkeypatch: pytest.MonkeyPatch, architecture: str, what: str
) -> None:
    engine = start_engine(models.folder(architecture), Mode("at once"))
    forget(monkeypatch, what)
    with pytest.raises(Mismatch):
        compare_running(models, architecture, engine)


@pytest.mark.parametrize(("architecture", "what"), FORGOTTEN)
def test_a_forgotten_rule_of_attention_is_refused_at_load(
    models: TinyModels, monkeypatch: pytest.MonkeyPatch, architecture: str, what: str
) -> None:
    forget(monkeypatch, what)
    with pytest.raises(ModelUnusable, match="computes attention in a way penstock does not know"):
        start_engine(models.folder(architecture), Mode("at once"))


# Everything else a request can ask for goes through the same rows.


def collect(engine: GenerateEngine, requests: list[Submit]) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = {request.id: [] for request in requests}
    for request in requests:
        engine.submit(request)
    while engine.has_work():
        for output in engine.step():
            tokens[output.id] += output.tokens
        engine.check()
    return tokens


def test_a_seeded_answer_is_the_same_alone_and_in_a_crowd(models: TinyModels) -> None:
    folder = models.folder("qwen3")

    def requests() -> list[Submit]:
        return [
            Submit(i, list(p), NEW_TOKENS, Sampling(temperature=0.8, top_p=0.9, seed=i))
            for i, p in enumerate(PROMPTS)
        ]

    quiet = start_engine(folder, Mode("alone"))
    alone = {r.id: collect(quiet, [r])[r.id] for r in requests()}
    crowded = start_engine(folder, CROWDED)
    assert collect(crowded, requests()) == alone
    assert crowded.status().preemptions > 0


def test_prompt_logprobs_come_once_and_are_the_models_own(models: TinyModels) -> None:
    """In chunks, beside other requests, and computed twice where their owner gave way."""
    reference = models.reference("llama")
    engine = start_engine(models.folder("llama"), CROWDED)
    for number, prompt in enumerate(PROMPTS):
        engine.submit(
            Submit(number, list(prompt), NEW_TOKENS, Sampling(temperature=0), prompt_logprobs=2)
        )
    scores: list[list[TokenLogprobs | None]] = [[] for _ in PROMPTS]
    tokens: list[list[int]] = [[] for _ in PROMPTS]
    preempted = [0 for _ in PROMPTS]
    while engine.has_work():
        for output in engine.step():
            preempted[output.id] = max(preempted[output.id], output.preempted)
            scores[output.id] += output.prompt_logprobs or []
            tokens[output.id] += output.tokens
        engine.check()
    assert sum(preempted) == engine.status().preemptions > 0  # each is told of its own
    for number, prompt in enumerate(PROMPTS):
        Tally().compare(reference, prompt, tokens[number])
        first, *rest = scores[number]
        assert first is None
        with torch.inference_mode():
            theirs = torch.log_softmax(reference.model(torch.tensor([prompt])).logits[0], -1)
        ours = [score for score in rest if score is not None]
        assert [score.chosen.token for score in ours] == prompt[1:]
        expected = [float(theirs[place, token]) for place, token in enumerate(prompt[1:])]
        assert [score.chosen.logprob for score in ours] == pytest.approx(expected, abs=1e-3)
        assert all(len(score.top) == 2 for score in ours)


def test_a_cancelled_request_leaves_the_others_as_they_are(models: TinyModels) -> None:
    with poisoned_blocks():
        engine = start_engine(
            models.folder("llama"), Mode("chunks", step_tokens=16, step_sequences=6)
        )
        for number, prompt in enumerate(PROMPTS):
            engine.submit(Submit(number, list(prompt), NEW_TOKENS, Sampling(temperature=0)))
        tokens: list[list[int]] = [[] for _ in PROMPTS]
        steps = 0
        while engine.has_work():
            for output in engine.step():
                tokens[output.id] += output.tokens
            steps += 1
            if steps in (4, 8):  # one in the middle of its prompt, one of its answer
                engine.cancel({4: 3, 8: 1}[steps])
                engine.check()
    for number in (0, 2):
        Tally().compare(models.reference("llama"), PROMPTS[number], tokens[number])
    assert len(tokens[3]) == 0
    assert 0 < len(tokens[1]) < NEW_TOKENS


def test_a_probe_runs_a_real_step_and_leaves_nothing_behind(models: TinyModels) -> None:
    engine = start_engine(models.folder("llama"), Mode("alone"))
    engine.submit(Submit(5, [1] * (tiny.CONTEXT + 1), 1, Sampling(temperature=0)))
    engine.probe()
    assert engine.status().steps == 1
    (refused,) = engine.step()
    assert refused.id == 5
    assert refused.failure is not None
    assert refused.failure.code == "context_length_exceeded"
    assert not engine.has_work()


def test_a_probe_whose_step_cannot_run_fails(
    models: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start_engine(models.folder("llama"), Mode("alone"))

    def no_memory(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as broken:
        broken.setattr(engine.executor, "launch", no_memory)
        with pytest.raises(RuntimeError, match=r"got no token.*smallest step ran out of memory"):
            engine.probe()
    engine.check()
    engine.probe()
    assert not engine.has_work()


@pytest.mark.parametrize("strange", [tiny.VOCABULARY, (1 << 31) - 1, -1])
def test_a_token_beyond_the_vocabulary_fails_its_own_request_alone(
    models: TinyModels, strange: int
) -> None:
    engine = start_engine(models.folder("llama"), Mode("at once"))
    greedy, prompt = Sampling(temperature=0), PROMPTS[1]
    engine.submit(Submit(0, list(prompt), NEW_TOKENS, greedy))
    engine.submit(Submit(1, [*prompt, strange, 3], NEW_TOKENS, greedy))
    # The same of tokens at which an answer ends; while none may be chosen, they are looked up.
    engine.submit(Submit(2, list(prompt), NEW_TOKENS, greedy, [strange], min_tokens=NEW_TOKENS))
    outputs = []
    while engine.has_work():
        outputs += engine.step()
        engine.check()
    (refused,) = [output for output in outputs if output.failure is not None]
    assert (refused.id, refused.finish) == (1, Finish.ERROR)
    assert refused.failure is not None and refused.failure.code == "invalid_request_error"
    assert f"token {strange}, which the model does not know" in refused.failure.message
    for number in (0, 2):
        tokens = [token for output in outputs if output.id == number for token in output.tokens]
        Tally().compare(models.reference("llama"), prompt, tokens)
        assert len(tokens) == NEW_TOKENS


# What cannot be computed exactly is refused, with a sentence.


@pytest.mark.parametrize(
    ("architecture", "sentence"),
    [
        ("falcon", "models of type falcon have attention code of their own"),
        ("bloom", "3 of 3 layers compute attention in a way that penstock cannot page"),
        ("mamba", "3 of 3 layers keep a recurrent state in a way that penstock does not know"),
        ("llama4_text", "has layers of kind chunked_attention; penstock serves"),
        ("bert", "computes attention in a way penstock does not know"),
    ],
)
def test_an_architecture_that_cannot_be_paged_is_refused(
    tmp_path: Path, architecture: str, sentence: str
) -> None:
    with pytest.raises(ModelUnusable, match=sentence):
        start_engine(tiny.save(architecture, tmp_path), Mode("alone"))


def edit_weights(folder: Path, name: str, value: torch.Tensor | None) -> None:
    file = folder / "model.safetensors"
    weights = load_file(file)
    del weights[name]
    if value is not None:
        weights[name] = value
    save_file(weights, file, metadata={"format": "pt"})


def edit_config(folder: Path, **fields: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def test_a_missing_weight_is_refused(tmp_path: Path) -> None:
    folder = tiny.save("llama", tmp_path)
    edit_weights(folder, "model.layers.1.mlp.up_proj.weight", None)
    with pytest.raises(ModelUnusable, match=r"1 weights are missing.*layers\.1\.mlp\.up_proj"):
        start_engine(folder, Mode("alone"))


def test_a_weight_of_the_wrong_shape_is_refused(tmp_path: Path) -> None:
    folder = tiny.save("llama", tmp_path)
    edit_weights(folder, "model.layers.1.mlp.up_proj.weight", torch.zeros(95, 64))
    with pytest.raises(ModelUnusable, match=r"another shape.*up_proj\.weight: \[95, 64\]"):
        start_engine(folder, Mode("alone"))


def test_weights_that_are_quantised_by_name_only_are_refused(tmp_path: Path) -> None:
    folder = tiny.save("llama", tmp_path)
    edit_config(folder, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(ModelUnusable, match=r"quantization_config \(gptq\) says that the model"):
        start_engine(folder, Mode("alone"))


def test_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    folder = tiny.save("llama", tmp_path)
    edit_config(folder, model_type="nobody_knows")
    with pytest.raises(ModelUnusable, match=r"config\.json cannot be used.*nobody_knows"):
        start_engine(folder, Mode("alone"))


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    folder = tiny.save("llama", tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelUnusable, match=r"has no weights: model\.safetensors is missing"):
        start_engine(folder, Mode("alone"))
