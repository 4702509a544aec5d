"""Models with recurrent layers: exact in every way of batching, with found states, and when steps
fail; refused where their state could not be continued."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

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
from penstock.wire import Sampling, Submit
from penstock.worker.backends.cpu.kernels.state_kernels import CpuStates
from penstock.worker.backends.runner import Runner
from penstock.worker.core.scheduler import Scheduler
from penstock.worker.models import verify
from penstock.worker.models.recurrent.kernels import ReferenceStates

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from penstock.worker.core.engine import GenerateEngine
    from penstock.worker.kv.layout.layer_states import LayerStates
    from penstock.worker.models.recurrent.kernels import Convolution
    from penstock.worker.models.recurrent.rows import StateRows

pytestmark = pytest.mark.usefixtures("one_thread")

CONTEXT = 256  # a short window is quickly profiled
PROMPTS = [tiny.prompt(length, seed) for seed, length in enumerate((1, 17, 50))]
NEW_TOKENS = 18
# Of each kind of scan one, and one that is a convolution only.
KINDS = ("qwen3_5_text", "kimi_linear", "mamba2", "lfm2")
# The others, of the same families, are for the long run.
TYPES = [
    architecture
    if architecture in (*KINDS, "falcon_h1", "nemotron_h")
    else pytest.param(architecture, marks=pytest.mark.proof)
    for architecture in tiny.HYBRID
]
MIXED = Mode(
    "chunks-arrivals-giving-way",
    step_tokens=24,
    step_sequences=6,
    arrive_every=3,
    give_way_every=7,
    max_context=CONTEXT,
)
ALONE = Mode("alone", alone=True, max_context=CONTEXT)


class TinyModels:
    """Folders and references of tiny models, made once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._references: dict[str, Reference] = {}

    def folder(self, architecture: str) -> Path:
        folder = self._root / architecture
        return folder if folder.exists() else tiny.save(architecture, folder)

    def reference(self, architecture: str) -> Reference:
        if architecture not in self._references:
            self._references[architecture] = Reference.load(self.folder(architecture))
        return self._references[architecture]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    return TinyModels(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("architecture", TYPES)
def test_tokens_equal_transformers(models: TinyModels, architecture: str) -> None:
    folder, reference = models.folder(architecture), models.reference(architecture)
    tally = compare_mode(reference, folder, MIXED, PROMPTS, NEW_TOKENS)
    assert tally.tokens == len(PROMPTS) * NEW_TOKENS
    assert tally.ties == 0
    assert tally.preemptions > 0


@pytest.mark.parametrize("architecture", KINDS[1:])
def test_plain_torch_gives_the_same_tokens(
    models: TinyModels, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("convolve", "delta_rule", "selective_scan"):
        monkeypatch.setattr(CpuStates, name, getattr(ReferenceStates, name))
    folder, reference = models.folder(architecture), models.reference(architecture)
    compare_mode(reference, folder, MIXED, PROMPTS, NEW_TOKENS)


@pytest.mark.parametrize("architecture", ["qwen3_5_text", "mamba2"])
def test_so_little_memory_that_sequences_give_way(models: TinyModels, architecture: str) -> None:
    engine = start_engine(models.folder(architecture), MIXED)
    size = engine.kv.states.slot_bytes
    assert engine.kv.cost.state_bytes == size > 0
    # Room for the longest of them and a little.
    longest = engine.kv.need_bytes(len(PROMPTS[-1]) + NEW_TOKENS)
    engine.kv.set_limit(engine.kv.limit_for(longest + size))
    engine.kv.trim()
    for _ in range(500):
        engine.lengths.observe(1)
    answers = run(engine, PROMPTS, NEW_TOKENS)
    tally = Tally()
    for prompt, tokens in zip(PROMPTS, answers, strict=True):
        tally.compare(models.reference(architecture), prompt, tokens)
    assert engine.kv.committed_bytes <= engine.kv.limit_bytes


def converse(engine: GenerateEngine, reference: Reference, turns: int, first: int) -> list[int]:
    """Turns that each begin with everything before them; the tokens reused in each."""
    text, reused = tiny.prompt(first, 5), []
    for turn in range(turns):
        engine.submit(Submit(turn, list(text), NEW_TOKENS, Sampling(temperature=0)))
        answer: list[int] = []
        reused.append(0)
        while engine.has_work():
            for output in engine.step():
                answer += output.tokens
                reused[-1] += output.reused or 0
            engine.check()
        Tally().compare(reference, text, answer)
        text = [*text, *answer, *tiny.prompt(11, turn)]
    return reused


@pytest.mark.parametrize("architecture", ["qwen3_5_text", "mamba2", "lfm2"])
def test_the_next_turn_goes_on_from_a_snapshot(models: TinyModels, architecture: str) -> None:
    with poisoned_blocks():
        engine = start_engine(models.folder(architecture), ALONE)
        reused = converse(engine, models.reference(architecture), turns=4, first=70)
    assert reused[0] == 0
    # All but the last begun block of the answer before, which was computed as it was generated.
    lengths = [70 + turn * (NEW_TOKENS + 11) for turn in range(4)]
    for turn in (1, 2, 3):
        assert reused[turn] >= lengths[turn] - 11 - 2 * 16


def test_where_prompts_are_computed_otherwise_answers_are_not_reused(models: TinyModels) -> None:
    """Nemotron-H limits the time steps of a prompt, not of what it generates."""
    engine = start_engine(models.folder("nemotron_h"), ALONE)
    assert engine.kv.states.prompts_differ
    reused = converse(engine, models.reference("nemotron_h"), turns=3, first=70)
    assert 0 < reused[1] <= 70 and 0 < reused[2] <= 70 + NEW_TOKENS + 11


@pytest.mark.parametrize("shared", [33, 64])
def test_whoever_begins_alike_waits_for_the_state_at_the_junction(
    models: TinyModels, shared: int
) -> None:
    folder, reference = models.folder("qwen3_5_text"), models.reference("qwen3_5_text")
    beginning = tiny.prompt(shared, 3)
    prompts = [[*beginning, *tiny.prompt(50, seed)] for seed in range(3)]
    with poisoned_blocks():
        engine = start_engine(
            folder, Mode("m", step_tokens=24, step_sequences=6, max_context=CONTEXT)
        )
        reused = dict.fromkeys(range(3), 0)
        for number, prompt in enumerate(prompts):
            engine.submit(Submit(number, prompt, 8, Sampling(temperature=0)))
        answers: dict[int, list[int]] = {number: [] for number in range(3)}
        while engine.has_work():
            for output in engine.step():
                answers[output.id] += output.tokens
                reused[output.id] += output.reused or 0
            engine.check()
    assert reused == {0: 0, 1: shared // 16 * 16, 2: shared // 16 * 16}
    for number, prompt in enumerate(prompts):
        Tally().compare(reference, prompt, answers[number])


def failing(monkeypatch: pytest.MonkeyPatch, layer: int, every: int) -> list[int]:
    """From now on every so manieth step runs out of memory behind some of its layers."""
    forward, convolve = Runner.forward, CpuStates.convolve
    steps: list[int] = []  # of several sequences; 1: it failed
    seen = [0]

    def step(runner: Runner, batch: Any) -> Any:
        # The smallest step would end its request.
        several = len(batch.states.decodes) + len(batch.states.chunks) > 1
        steps.extend([0] * several)
        seen[0] = 0 if several and len(steps) % every == 0 else -100
        return forward(runner, batch)

    def out_of_memory(*arguments: Any) -> Any:
        answer = convolve(*arguments)
        seen[0] += 1
        if seen[0] == layer:
            steps[-1] = 1
            raise MemoryError("no room for a test's step")
        return answer

    monkeypatch.setattr(Runner, "forward", step)
    monkeypatch.setattr(CpuStates, "convolve", out_of_memory)
    return steps


def answers_beside_failures(engine: GenerateEngine, prompts: list[list[int]]) -> list[list[int]]:
    """The gate forgets each failure, or it would let the sequences go one by one from then on."""
    gate = engine._memory.gate
    return run(engine, prompts, NEW_TOKENS, arrive_every=2, between_steps=gate.reset)


@pytest.mark.parametrize("layer", [1, 2])
def test_a_step_that_fails_behind_a_layer_changes_no_token(
    models: TinyModels, layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with poisoned_blocks():
        engine = start_engine(models.folder("qwen3_5_text"), MIXED)
        steps = failing(monkeypatch, layer, every=4)
        answers = answers_beside_failures(engine, PROMPTS)
    assert sum(steps) >= 3
    assert engine.status().oom_steps == sum(steps)
    for prompt, tokens in zip(PROMPTS, answers, strict=True):
        Tally().compare(models.reference("qwen3_5_text"), prompt, tokens)


def test_the_same_step_tried_again_would_be_wrong(
    models: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the test before proves: without going back, states have moved on."""
    engine = start_engine(models.folder("qwen3_5_text"), MIXED)
    failing(monkeypatch, 2, every=4)
    monkeypatch.setattr(Scheduler, "lose_states", lambda *_: None)
    answers = answers_beside_failures(engine, PROMPTS)
    with pytest.raises(Mismatch):
        for prompt, tokens in zip(PROMPTS, answers, strict=True):
            Tally().compare(models.reference("qwen3_5_text"), prompt, tokens)


@pytest.mark.parametrize("architecture", TYPES)
def test_plans_count_the_bytes_that_states_take(models: TinyModels, architecture: str) -> None:
    engine = start_engine(models.folder(architecture), ALONE)
    card = read_card(models.folder(architecture))
    planned = card.kv_cost(kv_format("auto", "float32"), 16, CONTEXT, ALONE.step_tokens)
    assert planned == engine.kv.cost
    assert engine.ready().cost.kv.state_bytes == planned.state_bytes


UNKNOWN_STATES = ("mamba", "jamba", "recurrent_gemma", "minimax", "zamba2")


@pytest.mark.parametrize("architecture", UNKNOWN_STATES)
def test_what_cannot_be_continued_is_refused(models: TinyModels, architecture: str) -> None:
    expected = "keep a recurrent state in a way|penstock cannot (page|continue)|cannot page their"
    with pytest.raises(ModelUnusable, match=expected):
        start_engine(models.folder(architecture), ALONE)


def forgetting(
    self: CpuStates, rows: Tensor, by: Convolution, states: LayerStates, of: StateRows
) -> Tensor:
    """Convolutions that leave nothing behind a chunk."""
    answer = ReferenceStates.convolve(self, rows, by, states, of)
    for span in of.chunks:
        states.columns[span.slot] = 0
    return answer


def test_a_model_whose_state_is_lost_between_chunks_is_refused(
    models: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuStates, "convolve", forgetting)
    with pytest.raises(ModelUnusable, match="its logits differ from the model's own"):
        start_engine(models.folder("qwen3_5_text"), ALONE)


def test_a_gpu_without_kernels_for_states_refuses_them(
    models: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.worker.backends.cpu.CpuBackend.serves_states", False)
    with pytest.raises(
        ModelUnusable, match="recurrent state, which penstock computes on CPUs only"
    ):
        start_engine(models.folder("lfm2"), ALONE)


def test_kept_layers_are_found_by_a_forward(models: TinyModels) -> None:
    reference = models.reference("falcon_h1")
    reference.model.set_attn_implementation("penstock")
    try:
        kept = verify.probe(reference.model, reference.model.config)
    finally:
        reference.model.set_attn_implementation("eager")
    assert set(kept.attention) == set(kept.states) == {0, 1, 2}, "every layer has both"
    assert kept.states[0].matrices == (8, 16, 16)
