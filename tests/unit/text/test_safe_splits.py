"""Cutting a long text changes no token, and the least number of tokens is never too many."""

from __future__ import annotations

import itertools
import random
from typing import Any

import msgspec
import pytest

from penstock.testing import tokenizers
from penstock.text import safe_splits
from penstock.text.safe_splits import Spec

VOCABULARY = ["a", "abc"]
ALPHABET = [
    "a",
    "the cat",
    " sat on",
    "\n",
    "  ",
    "1234",
    "don't",
    "ß",
    "猫",
    ".",
    " <|x|>",
    "zz z",
    " B2",
    " 7 7",
]


def byte_level(**changes: Any) -> Spec:
    spec = {
        "model": {"type": "BPE"},
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
        "added_tokens": [{"content": "<|end|>"}],
        **changes,
    }
    return msgspec.convert(spec, Spec)


def test_pieces_are_the_text_and_meet_at_safe_splits() -> None:
    chance = random.Random(1)
    text = "".join(chance.choice(ALPHABET) for _ in range(40_000))
    cut = list(safe_splits.pieces(text))
    assert len(cut) > 2
    assert "".join(cut) == text
    for first, then in itertools.pairwise(cut):
        assert first[-1].isalnum()
        assert then[0] == " "
        assert then[1].isalnum()
    assert safe_splits.longest_piece(text) == max(map(len, cut)) < 2 * safe_splits.PIECE_CHARS
    assert list(safe_splits.pieces("x" * 100_000)) == ["x" * 100_000]


@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": {"type": "NFC"}},
        {"model": {"type": "WordPiece"}},
        {"pre_tokenizer": None},
        {"pre_tokenizer": {"type": "Metaspace"}},
        {"added_tokens": [{"content": "<|end|>", "rstrip": True}]},
        {
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [{"type": "Split", "behavior": "Removed"}, {"type": "ByteLevel"}],
            }
        },
    ],
)
def test_what_may_lose_bytes_has_no_bound_and_no_splits(changes: dict[str, Any]) -> None:
    assert safe_splits.longest_token_bytes(byte_level(), VOCABULARY) == 7
    assert safe_splits.can_be_split(byte_level())
    assert safe_splits.longest_token_bytes(byte_level(**changes), VOCABULARY) is None
    assert not safe_splits.can_be_split(byte_level(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"added_tokens": [{"content": "of the"}]},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True}},
        {"pre_tokenizer": {"type": "ByteLevel", "use_regex": False}},
    ],
)
def test_what_could_join_tokens_over_a_seam_is_not_cut(changes: dict[str, Any]) -> None:
    assert not safe_splits.can_be_split(byte_level(**changes))


def test_tokens_of_pieces_are_tokens_of_the_text() -> None:
    tokenizer = tokenizers.byte_level()
    chance = random.Random(2)
    text = "".join(chance.choice(ALPHABET) for _ in range(400_000))
    assert len(text) > 2 * safe_splits.PIECE_CHARS
    for special in (False, True):
        whole = tokenizer._encodings([text], special)[0].ids
        assert tokenizer.encode(text, add_special_tokens=special) == whole
    assert 0 < tokenizer.min_tokens_of(text) <= len(whole)
    assert tokenizer.encoding_bytes(text) < len(text) * 214
