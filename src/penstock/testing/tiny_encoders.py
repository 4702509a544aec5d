"""Tiny random encoders of many architectures, saved as sentence-transformers folders or as
cross-encoders, and what transformers itself makes of a text with them.

As in `tiny`, weights are wide and windows short, so that what an architecture does peculiarly shows
in its vectors.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import models, normalizers, pre_tokenizers, processors
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

VOCABULARY = 211
CONTEXT = 512
WINDOW = 24
_PAD = 1
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT + 2,
    "type_vocab_size": 2,
    "initializer_range": 0.3,
    "pad_token_id": _PAD,
    "bos_token_id": None,
    "eos_token_id": None,
    "cls_token_id": None,
    "sep_token_id": None,
}
_DECODER = {"num_key_value_heads": 2, "head_dim": 8}
_PECULIAR: dict[str, dict[str, Any]] = {
    "bert": {},
    "roberta": {},
    "xlm-roberta": {},
    "camembert": {},
    "distilbert": {"dim": 32, "hidden_dim": 48, "n_layers": 3, "n_heads": 4},
    "mpnet": {},
    "electra": {"embedding_size": 24},
    "albert": {"embedding_size": 24},
    "modernbert": {"local_attention": WINDOW, "global_attn_every_n_layers": 2},
    "nomic_bert": {},
    "gte": {},
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    "gemma3_text": {
        **_DECODER,
        "query_pre_attn_scalar": 8,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "use_bidirectional_attention": True,
    },
    "qwen3": _DECODER,
    "mistral": {**_DECODER, "sliding_window": WINDOW},
}
SERVED = tuple(_PECULIAR)
CAUSAL = ("qwen3", "mistral")
# Their attention is their own code: texts are computed by length.
BY_LENGTH = ("mpnet", "deberta-v2")
_KIND = "sentence_transformers.models."


def save(
    architecture: str,
    folder: Path,
    *,
    modules: Mapping[str, Mapping[str, Any]] | None = None,
    scores: bool = False,
    kind: Any = AutoModel,
    said: Mapping[str, Any] | None = None,
) -> Path:
    """Write the folder: with `modules` by name as sentence-transformers names them (`1_Pooling`),
    or as a cross-encoder; `kind` is what the model was trained as, and `said` its
    config_sentence_transformers.json."""
    fields = {**_COMMON, **_PECULIAR[architecture]}
    if scores:
        fields["num_labels"] = 1
    config = AutoConfig.for_model(architecture, **fields)
    torch.manual_seed(0)
    kind = AutoModelForSequenceClassification if scores else kind
    model = kind.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    model.save_pretrained(folder)
    if modules is not None:
        _write_modules(folder, modules)
    if said is not None:
        (folder / "config_sentence_transformers.json").write_text(json.dumps(said))
    write_tokenizer(folder)
    return folder


def _write_modules(folder: Path, modules: Mapping[str, Mapping[str, Any]]) -> None:
    listed = [{"idx": 0, "name": "0", "path": "", "type": f"{_KIND}Transformer"}]
    for number, (name, config) in enumerate(modules.items(), 1):
        kind = name.partition("_")[2]
        listed.append({"idx": number, "name": str(number), "path": name, "type": _KIND + kind})
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
        if kind == "Dense":
            generator = torch.Generator().manual_seed(number)
            shape = config["out_features"], config["in_features"]
            tensors = {"linear.weight": torch.randn(shape, generator=generator)}
            if config.get("bias", True):
                tensors["linear.bias"] = torch.randn(shape[0], generator=generator)
            save_file(tensors, folder / name / "model.safetensors")
    (folder / "modules.json").write_text(json.dumps(listed))


def write_tokenizer(folder: Path) -> None:
    """One token a character of a word, as BERT has it: a text between `[CLS]` and `[SEP]`, and of a
    pair the second one in a segment of its own."""
    tokens = ["[UNK]", "[PAD]", "[CLS]", "[SEP]"]
    letters = "abcdefghijklmnopqrstuvwxyz0123456789.,:;?!"
    tokens += [*letters, *(f"##{letter}" for letter in letters)]
    numbers = {token: number for number, token in enumerate(tokens)}
    raw = RawTokenizer(models.WordPiece(numbers, unk_token="[UNK]"))
    raw.normalizer = normalizers.Lowercase()
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    raw.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", numbers["[CLS]"]), ("[SEP]", numbers["[SEP]"])],
    )
    raw.save(str(folder / "tokenizer.json"))
    config = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


class Reference:
    """transformers' own results, one text at a time, without padding."""

    def __init__(self, folder: Path, *, scores: bool = False) -> None:
        kind = AutoModelForSequenceClassification if scores else AutoModel
        options = {"dtype": torch.float32, "attn_implementation": "eager"}
        self.model = kind.from_pretrained(folder, **options).eval()

    @torch.inference_mode()
    def rows(self, ids: Sequence[int]) -> Tensor:
        """The last layer's rows, [length, hidden]."""
        rows: Tensor = self.model(input_ids=torch.tensor([list(ids)])).last_hidden_state[0]
        return rows

    @torch.inference_mode()
    def logit(self, ids: Sequence[int], segments: Sequence[int] | None = None) -> float:
        """What a cross-encoder says of a pair, before any activation."""
        more = {} if segments is None else {"token_type_ids": torch.tensor([list(segments)])}
        logits: Tensor = self.model(input_ids=torch.tensor([list(ids)]), **more).logits
        return float(logits[0, 0])


def text(length: int, seed: int) -> list[int]:
    """Token ids without padding, the same for the same arguments."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    ids: list[int] = torch.randint(2, VOCABULARY, (length,), generator=generator).tolist()
    return ids
