"""A `tokenizer.json` from the vocabulary inside a GGUF file.

GGUF stores tokens, merges and token types, but of the pre-tokenizer only a name
(`tokenizer.ggml.pre`). Splitting text in the wrong places gives other token ids than the model was
trained on and no error, so each name known here has its exact rule, and any other is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from penstock.errors import ModelUnusable, shortened

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class TokenType(IntEnum):
    """GGUF's classes of tokens."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class _Rule:
    """How one family cuts text before byte-pair merging."""

    split: str | None = None  # a regular expression; None: GPT-2's own, built into ByteLevel
    single_digits: bool = False  # each digit alone, before anything else
    composed: bool = False  # Unicode NFC first
    whole_words: bool = False  # a piece that is a token is taken before any merge is tried
    begins: bool = False  # a begin token in front, unless the file says otherwise


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_LOWER = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+"
_CASED_UPPER = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_PATH_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"

_GPT2 = _Rule()
_DIGITS_GPT2 = _Rule(single_digits=True)
_LLAMA3 = _Rule(
    split=rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}{{1,3}}|{_SYMBOLS}{_TAIL}",
    whole_words=True,
    begins=True,
)
_QWEN2 = _Rule(split=rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}|{_SYMBOLS}{_TAIL}", composed=True)
_TEKKEN = _Rule(
    split=rf"{_CASED_LOWER}|{_CASED_UPPER}|\p{{N}}|{_PATH_SYMBOLS}{_TAIL}",
    whole_words=True,
    begins=True,
)
_GPT4O = _Rule(
    split=rf"{_CASED_LOWER}{_CONTRACTIONS}?|{_CASED_UPPER}{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}|{_PATH_SYMBOLS}{_TAIL}"
)

RULES: dict[str, _Rule] = {
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "olmo": _GPT2,
    "smollm": _DIGITS_GPT2,
    "starcoder": _DIGITS_GPT2,
    "refact": _DIGITS_GPT2,
    "command-r": _DIGITS_GPT2,
    "llama-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
    "gpt-4o": _GPT4O,
}


def tokenizer_for(metadata: Mapping[str, Any], folder: Path) -> Tokenizer:
    """The tokenizer of a GGUF file in `folder`: by its metadata or, where these do not say enough,
    the `tokenizer.json` that lies beside, if its tokens are the file's."""
    try:
        return build_tokenizer(metadata)
    except ModelUnusable as error:
        beside = folder / "tokenizer.json"
        if not beside.exists():
            raise ModelUnusable(
                f"{error.message} With its tokenizer.json beside the GGUF file it can be used."
            ) from error
    try:
        tokenizer = Tokenizer.from_file(str(beside))
    except Exception as error:  # the library raises nothing narrower
        raise ModelUnusable(f"{beside} is not a tokenizer: {error}.") from error
    tokens = _list(metadata, "tokens")
    for token, index in tokenizer.get_vocab().items():
        if index >= len(tokens) or tokens[index] != token:
            raise ModelUnusable(
                f"{beside} is of another model: its token {index} is {shortened(token)!r}, and the "
                f"GGUF file's is {shortened(str((*tokens, None)[min(index, len(tokens))]))!r}."
            )
    return tokenizer


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that the GGUF file's metadata describe."""
    model = metadata.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise ModelUnusable(
            f"The GGUF file has a {model!r} vocabulary; only byte-level BPE ('gpt2') is converted. "
            "Use the model's safetensors version, which has its own tokenizer."
        )
    pre = metadata.get("tokenizer.ggml.pre")
    if pre not in RULES:
        raise ModelUnusable(
            f"The GGUF file names the pre-tokenizer {pre!r}, which is not one of "
            f"{', '.join(sorted(RULES))}. Use the model's safetensors version instead."
        )
    rule = RULES[pre]
    tokens, types = _list(metadata, "tokens"), _list(metadata, "token_type")
    if len(tokens) != len(types):
        raise ModelUnusable(f"The GGUF file has {len(tokens)} tokens but {len(types)} token types.")
    merges = [tuple(merge.split(" ", 1)) for merge in _list(metadata, "merges")]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=merges,
            fuse_unk=False,
            byte_fallback=False,
            ignore_merges=rule.whole_words,
        )
    )
    if rule.composed:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(rule)
    tokenizer.decoder = decoders.ByteLevel()
    _add_tokens(tokenizer, tokens, types)
    begin_id = metadata.get("tokenizer.ggml.bos_token_id")
    if metadata.get("tokenizer.ggml.add_bos_token", rule.begins) and begin_id is not None:
        begin = tokens[begin_id]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", pair=f"{begin} $A {begin} $B", special_tokens=[(begin, begin_id)]
        )
    return tokenizer


def _list(metadata: Mapping[str, Any], name: str) -> list[Any]:
    value = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(value, list) or not value:
        raise ModelUnusable(f"The GGUF file has no tokenizer.ggml.{name}.")
    return value


def _pre_tokenizer(rule: _Rule) -> pre_tokenizers.PreTokenizer:
    steps: list[pre_tokenizers.PreTokenizer] = []
    if rule.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if rule.split is not None:
        steps.append(pre_tokenizers.Split(Regex(rule.split), behavior="isolated", invert=False))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule.split is None))
    return pre_tokenizers.Sequence(steps)


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Control tokens are special (left out of decoded text); user-defined ones are plain text."""
    special = (TokenType.CONTROL, TokenType.UNKNOWN)
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind in special
        ]
    )
    tokenizer.add_tokens(
        [
            AddedToken(token, special=False, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind == TokenType.USER_DEFINED
        ]
    )


def tokenizer_config(metadata: Mapping[str, Any], window: int) -> dict[str, Any]:
    """The `tokenizer_config.json` that goes with it: special tokens and the chat template."""
    tokens = _list(metadata, "tokens")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": window,
        "clean_up_tokenization_spaces": False,
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad")):
        token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if token_id is not None and token_id < len(tokens):
            config[f"{key}_token"] = tokens[token_id]
    if template := metadata.get("tokenizer.chat_template"):
        config["chat_template"] = template
    return config


def end_token_ids(metadata: Mapping[str, Any]) -> list[int]:
    """Every id that ends an answer: end of sequence, of turn, of message."""
    names = ("eos", "eot", "eom")
    found = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in names)
    return list(dict.fromkeys(int(token_id) for token_id in found if token_id is not None))
