"""Vectors and scores equal transformers' own, whatever shares the step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

from penstock.errors import ModelUnusable
from penstock.testing import tiny_encoders
from penstock.testing.tiny_encoders import Reference
from penstock.wire import Encoding, EngineKind, LoadSpec, Sampling, Submit, token_ids
from penstock.worker.encoding import verify
from penstock.worker.encoding.loading import load

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray
    from torch import Tensor

    from penstock.worker.encoding.engine import EncodeEngine
    from penstock.worker.encoding.runner import EncodeRunner

pytestmark = pytest.mark.usefixtures("one_thread")

MEAN = {"1_Pooling": {"pooling_mode_mean_tokens": True}, "2_Normalize": {}}
LAST = {"1_Pooling": {"pooling_mode": "lasttoken"}, "2_Normalize": {}}
LENGTHS = (3, 1, 40, 7, 120, 7, 2, 33, 64, 7, 200)


def _load(folder: Path, **changes: Any) -> tuple[EncodeEngine, EncodeRunner]:
    spec = LoadSpec(
        **{
            "name": folder.name,
            "path": str(folder),
            "device": "cpu",
            "dtype": "float32",
            "memory_bytes": 256 << 20,
            "capped": False,
            "step_tokens": 256,
            "step_sequences": 8,
            "max_context": 256,
            "engine": EngineKind.ENCODE,
            **changes,
        }
    )
    return load(spec, lambda *_: None)


def _together(
    engine: EncodeEngine, texts: list[list[int]], encoding: Encoding | None = None
) -> list[NDArray[np.float32]]:
    for number, ids in enumerate(texts):
        engine.submit(
            Submit(number, token_ids(ids), 0, Sampling(), encoding=encoding or Encoding())
        )
    found: dict[int, NDArray[np.float32]] = {}
    while engine.has_work():
        for output in engine.step():
            assert output.failure is None, output.failure
            found[output.id] = np.frombuffer(output.vector, "<f4")
    return [found[number] for number in range(len(texts))]


def _alone(
    engine: EncodeEngine, texts: list[list[int]], encoding: Encoding | None = None
) -> list[NDArray[np.float32]]:
    return [_together(engine, [ids], encoding)[0] for ids in texts]


def _worst(found: list[NDArray[np.float32]], expected: list[Tensor]) -> float:
    return max(
        float(np.abs(own - other.numpy()).max()) for own, other in zip(found, expected, strict=True)
    )


# Of torch, for the code of DeBERTa.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("architecture", tiny_encoders.SERVED)
def test_vectors_are_those_of_each_text_alone(architecture: str, tmp_path: Path) -> None:
    causal = architecture in tiny_encoders.CAUSAL
    folder = tiny_encoders.save(architecture, tmp_path / "m", modules=LAST if causal else MEAN)
    engine, runner = _load(folder)
    assert runner.packs == (architecture not in tiny_encoders.BY_LENGTH)
    reference = Reference(folder)
    texts = [tiny_encoders.text(length, seed) for seed, length in enumerate(LENGTHS)]
    rows = [reference.rows(ids) for ids in texts]
    expected = [F.normalize(own[-1] if causal else own.mean(0), dim=0) for own in rows]
    together = _together(engine, texts)
    assert _worst(together, expected) < 1e-5
    # The neighbours of a text do not matter.
    alone = [torch.from_numpy(own.copy()) for own in _alone(engine, texts)]
    assert _worst(together, alone) < 1e-6
    engine.probe()


@pytest.mark.parametrize(
    ("architecture", "kind"), [("qwen3", AutoModelForCausalLM), ("bert", AutoModelForMaskedLM)]
)
def test_files_of_a_model_with_a_head_are_read_without_it(
    architecture: str, kind: Any, tmp_path: Path
) -> None:
    """As of Qwen3-Embedding, or of an encoder as it was pre-trained: without a pooler."""
    folder = tiny_encoders.save(architecture, tmp_path / "m", modules=MEAN, kind=kind)
    engine, runner = _load(folder)
    assert "head" not in str(runner.base) and runner.packs
    texts = [tiny_encoders.text(length, 1) for length in (3, 17, 40)]
    reference = Reference(folder)
    expected = [F.normalize(reference.rows(ids).mean(0), dim=0) for ids in texts]
    assert _worst(_together(engine, texts), expected) < 1e-5


@pytest.mark.parametrize(
    ("config", "pooled"),
    [
        ({"pooling_mode_cls_token": True}, lambda rows: rows[0]),
        ({"pooling_mode_max_tokens": True}, lambda rows: rows.max(0).values),
        (
            {"pooling_mode_mean_sqrt_len_tokens": True},
            lambda rows: rows.sum(0) / math.sqrt(len(rows)),
        ),
        (
            {"pooling_mode_weightedmean_tokens": True},
            lambda rows: (
                sum((i + 1) * row for i, row in enumerate(rows)) / sum(range(1, len(rows) + 1))
            ),
        ),
        ({"pooling_mode": ["cls", "mean"]}, lambda rows: torch.cat([rows[0], rows.mean(0)])),
        ({"pooling_mode": "mean", "include_prompt": False}, lambda rows: rows[2:].mean(0)),
    ],
)
def test_poolings(config: dict[str, Any], pooled: Any, tmp_path: Path) -> None:
    folder = tiny_encoders.save("bert", tmp_path / "m", modules={"1_Pooling": config})
    engine, _ = _load(folder)
    reference = Reference(folder)
    texts = [tiny_encoders.text(length, 1) for length in (3, 17, 40)]
    found = _together(engine, texts, Encoding(skipped=2))
    assert _worst(found, [pooled(reference.rows(ids)) for ids in texts]) < 1e-5


def test_projections_and_fewer_dimensions(tmp_path: Path) -> None:
    dense = {
        "in_features": 32,
        "out_features": 20,
        "bias": True,
        "activation_function": "torch.nn.modules.activation.Tanh",
    }
    modules: dict[str, dict[str, Any]] = {
        "1_Pooling": {"pooling_mode": "mean"},
        "2_Dense": dense,
        "3_Normalize": {},
    }
    folder = tiny_encoders.save("bert", tmp_path / "m", modules=modules)
    engine, _ = _load(folder)
    ids = tiny_encoders.text(30, 1)
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(20, 32, generator=generator)
    bias = torch.randn(20, generator=generator)
    full = torch.tanh(F.linear(Reference(folder).rows(ids).mean(0), weight, bias))
    whole = _together(engine, [ids])
    assert _worst(whole, [F.normalize(full, dim=0)]) < 1e-5
    cut = _together(engine, [ids], Encoding(dimensions=6))
    assert _worst(cut, [F.normalize(full[:6], dim=0)]) < 1e-5


@pytest.mark.parametrize(
    "architecture",
    ["bert", "xlm-roberta", "distilbert", "mpnet", "electra", "modernbert", "gte", "qwen3"],
)
def test_scores_are_those_of_each_pair_alone(architecture: str, tmp_path: Path) -> None:
    folder = tiny_encoders.save(architecture, tmp_path / "m", scores=True)
    engine, _ = _load(folder)
    reference = Reference(folder, scores=True)
    pairs = [tiny_encoders.text(length, 5) for length in (9, 60, 9, 150)]
    second = 4 if architecture in ("bert", "electra") else None
    segments = (
        None if second is None else [[int(i >= second) for i in range(len(p))] for p in pairs]
    )
    logits = [
        reference.logit(ids, None if segments is None else segments[number])
        for number, ids in enumerate(pairs)
    ]
    expected = [torch.tensor([logit]) for logit in logits]
    raw = _together(engine, pairs, Encoding(second=second, raw=True))
    assert _worst(raw, expected) < 1e-5
    assert _worst(_alone(engine, pairs, Encoding(second=second, raw=True)), expected) < 1e-5
    scores = _together(engine, pairs, Encoding(second=second))
    assert _worst(scores, [torch.sigmoid(logit) for logit in expected]) < 1e-5


def test_a_model_that_side_by_side_would_be_wrong_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one whose positions started elsewhere than we know."""
    folder = tiny_encoders.save("roberta", tmp_path / "m", modules=MEAN)
    monkeypatch.setattr("penstock.worker.encoding.loading.read_first_position", lambda *_: 0)
    with pytest.raises(ModelUnusable, match=r"differ from the model's own by \d"):
        _load(folder)


def test_a_head_that_would_be_wrong_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that asks the transformer for something else than its rows."""
    folder = tiny_encoders.save("bert", tmp_path / "m", scores=True)
    monkeypatch.setattr("penstock.worker.encoding.heads._Rows.pooler_output", None, raising=False)
    wrong = property(lambda self: self.last_hidden_state[:, 0], lambda *_: None)
    monkeypatch.setattr("penstock.worker.encoding.heads._Rows.pooler_output", wrong)
    monkeypatch.setattr(
        "penstock.worker.encoding.heads._Rows.__getitem__",
        lambda self, index: (self.last_hidden_state, self.pooler_output)[index],
    )
    with pytest.raises(ModelUnusable, match="scores from rows computed side by side differ"):
        _load(folder)


def test_without_a_word_on_pooling_the_settings_must_have_one(tmp_path: Path) -> None:
    folder = tiny_encoders.save("bert", tmp_path / "m")
    with pytest.raises(ModelUnusable, match=r"set models.m.pooling to one of cls, mean"):
        _load(folder)
    engine, _ = _load(folder, pooling="cls")
    ids = tiny_encoders.text(11, 1)
    expected = F.normalize(Reference(folder).rows(ids)[0], dim=0)
    assert _worst(_together(engine, [ids]), [expected]) < 1e-5


def test_the_longest_text_is_what_a_step_can_hold(tmp_path: Path) -> None:
    folder = tiny_encoders.save("bert", tmp_path / "m", modules=MEAN)
    engine, _ = _load(folder)
    assert engine.ready().context == 256
    needed = engine.ready().step_bytes
    # Beside 4 MiB for requests there is hardly anything for a step.
    with pytest.raises(Exception, match="does not fit its memory: a step with one text of 64"):
        _load(folder, memory_bytes=5 << 20)
    assert needed > 5 << 20


def test_the_check_looks_at_windows(tmp_path: Path) -> None:
    """The texts of the check are longer than the windows of common models."""
    folder = tiny_encoders.save("modernbert", tmp_path / "m", modules=MEAN)
    _, runner = _load(folder)
    lengths = [len(text) for text in verify._texts(runner.base, 512)]
    assert max(lengths) > 128 and len(set(lengths)) < len(lengths)
