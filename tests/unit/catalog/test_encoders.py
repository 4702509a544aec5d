from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from penstock.catalog import read_card
from penstock.catalog.encoders import Stage
from penstock.catalog.kv_formats import kv_format
from penstock.catalog.scan import file_marks
from penstock.errors import ModelUnusable
from penstock.testing.model_folders import LLAMA, write_model, write_safetensors

if TYPE_CHECKING:
    from pathlib import Path

WIDTH = LLAMA["hidden_size"]
BERT = {**LLAMA, "architectures": ["BertModel"], "model_type": "bert"}
OLD = "sentence_transformers.models."
NEW = "sentence_transformers.sentence_transformer.modules.pooling."


def _folder(
    path: Path,
    *modules: tuple[str, str],
    config: dict[str, Any] = BERT,
    files: dict[str, Any] | None = None,
) -> Path:
    folder = write_model(path / "m", config)
    listed = [
        {"idx": number, "name": str(number), "path": place, "type": kind}
        for number, (kind, place) in enumerate(modules)
    ]
    for name, content in {"modules.json": listed, **(files or {})}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content), "utf-8")
    return folder


TRANSFORMER, POOLING = (f"{OLD}Transformer", ""), (f"{OLD}Pooling", "1_Pooling")
MEAN = {"1_Pooling/config.json": {"pooling_mode_mean_tokens": True}}


def test_a_folder_says_how_rows_become_a_vector(tmp_path: Path) -> None:
    folder = _folder(
        tmp_path,
        TRANSFORMER,
        (f"{NEW}Pooling", "1_Pooling"),
        (f"{OLD}Dense", "2_Dense"),
        (f"{OLD}Normalize", "3_Normalize"),
        files={
            "1_Pooling/config.json": {"pooling_mode": ["cls", "mean"], "include_prompt": False},
            "2_Dense/config.json": {
                "in_features": 2 * WIDTH,
                "out_features": 5,
                "activation_function": "torch.nn.modules.linear.Identity",
            },
            "config_sentence_transformers.json": {
                "prompts": {"query": "query: "},
                "default_prompt_name": "query",
                "truncate_dim": 3,
            },
            "sentence_bert_config.json": {"max_seq_length": 64},
        },
    )
    write_safetensors(
        folder / "2_Dense" / "model.safetensors", {"linear.weight": ("F32", (5, 2 * WIDTH))}
    )
    card = read_card(folder)
    encoder = card.encoder
    assert card.kind == "embed" and encoder is not None
    assert encoder.pooling == ("cls", "mean")
    assert not encoder.pools_prompt
    assert encoder.stages == (
        Stage("dense", "2_Dense", 2 * WIDTH, 5, "identity"),
        Stage("normalize"),
    )
    assert (encoder.dimensions, encoder.default_dimensions, encoder.usual_tokens) == (5, 3, 64)
    assert (encoder.prompts, encoder.default_prompt) == ({"query": "query: "}, "query")
    assert card.facts() == {
        "dimensions": 3,
        "pooling": ["cls", "mean"],
        "normalized": True,
        "prompts": ["query"],
    }
    # The projection is among the model's weights, and no token keeps anything.
    assert card.parameters == 16 * WIDTH + WIDTH + 10 * WIDTH
    assert card.kv_cost(kv_format("auto", "float32"), 16, 128, 64).sequence(128) == 0


@pytest.mark.parametrize(
    ("said", "pooling"),
    [
        ({"pooling_mode_cls_token": True}, ("cls",)),
        ({"pooling_mode_lasttoken": True}, ("last",)),
        ({"pooling_mode": "lasttoken"}, ("last",)),
        ({"pooling_mode_max_tokens": True, "pooling_mode_mean_tokens": True}, ("max", "mean")),
    ],
)
def test_poolings(tmp_path: Path, said: dict[str, Any], pooling: tuple[str, ...]) -> None:
    encoder = read_card(
        _folder(tmp_path, TRANSFORMER, POOLING, files={"1_Pooling/config.json": said})
    ).encoder
    assert encoder is not None
    assert (encoder.pooling, encoder.dimensions) == (pooling, len(pooling) * WIDTH)


@pytest.mark.parametrize(
    ("modules", "files", "sentence"),
    [
        ((), {}, "does not begin with a Transformer"),
        ((TRANSFORMER,), {}, "nothing where the Pooling"),
        ((TRANSFORMER, (f"{OLD}LSTM", "1_LSTM")), {}, "LSTM where the Pooling"),
        ((TRANSFORMER, POOLING), {"1_Pooling/config.json": {}}, "no mode that is known"),
        (
            (TRANSFORMER, POOLING),
            {"1_Pooling/config.json": {"pooling_mode": "attention"}},
            "the mode 'attention'",
        ),
        ((TRANSFORMER, POOLING, (f"{OLD}LogitScore", "2_X")), MEAN, "a module 'LogitScore'"),
        ((TRANSFORMER, POOLING, (f"{OLD}Dense", "../x")), MEAN, "names the folder"),
        (
            (TRANSFORMER, POOLING, (f"{OLD}Dense", "2_Dense")),
            {**MEAN, "2_Dense/pytorch_model.bin": {}},
            "pickled weights are never read",
        ),
    ],
)
def test_what_is_not_known_is_refused_with_its_name(
    tmp_path: Path,
    modules: tuple[tuple[str, str], ...],
    files: dict[str, Any],
    sentence: str,
) -> None:
    with pytest.raises(ModelUnusable, match=sentence):
        read_card(_folder(tmp_path, *modules, files=files))


def test_a_decoder_with_modules_embeds_and_nothing_guesses_the_pooling(tmp_path: Path) -> None:
    card = read_card(_folder(tmp_path, TRANSFORMER, POOLING, config=LLAMA, files=MEAN))
    assert card.kind == "embed"
    bare = read_card(write_model(tmp_path / "bare", BERT))
    assert bare.kind == "embed" and bare.encoder is not None
    assert bare.encoder.pooling == ()


@pytest.mark.parametrize(
    ("said", "activation"),
    [
        ({}, "sigmoid"),
        (
            {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
            "identity",
        ),
        (
            {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}},
            "sigmoid",
        ),
    ],
)
def test_what_a_score_goes_through(tmp_path: Path, said: dict[str, Any], activation: str) -> None:
    config = {
        **BERT,
        "architectures": ["BertForSequenceClassification"],
        "id2label": {"0": "x"},
        **said,
    }
    # New cross-encoders have modules, too.
    card = read_card(_folder(tmp_path, TRANSFORMER, config=config))
    assert card.kind == "rerank" and card.encoder is not None
    assert (card.encoder.activation, card.encoder.dimensions) == (activation, 1)


def test_a_changed_module_is_a_changed_model(tmp_path: Path) -> None:
    folder = _folder(tmp_path, TRANSFORMER, POOLING, files=MEAN)
    before = file_marks(folder)
    (folder / "1_Pooling/config.json").write_text('{"pooling_mode": "cls"}')
    assert file_marks(folder) != before
