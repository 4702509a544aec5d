"""Fill-in-the-middle prompts by the marks of a vocabulary."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as RawTokenizer
from tokenizers.models import BPE

from penstock.errors import BadRequest
from penstock.text.infill import infill_form, infill_marks
from penstock.text.tokenizer import Tokenizer


def with_tokens(*tokens: str) -> Tokenizer:
    raw = RawTokenizer(BPE())
    raw.add_special_tokens([AddedToken(token, special=True) for token in tokens])
    return Tokenizer(raw.to_str().encode())


def test_the_marks_are_those_of_the_vocabulary() -> None:
    qwen = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|endoftext|>")
    marks, ends = infill_form(with_tokens(*qwen), "suffix")
    prompt = marks.prompt("a", "b")
    assert prompt == "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>"
    assert sorted(ends) == [0, 1, 2, 3]


def test_some_want_the_right_side_first() -> None:
    marks, _ = infill_form(with_tokens("[PREFIX]", "[SUFFIX]"), "suffix")
    prompt = marks.prompt("a", "b")
    assert prompt == "[SUFFIX]b[PREFIX]a"


def test_half_of_the_marks_are_none() -> None:
    tokenizer = with_tokens("<|fim_prefix|>", "<|fim_suffix|>")
    assert infill_marks(tokenizer) is None
    with pytest.raises(BadRequest, match="no tokens for filling in the middle"):
        infill_form(tokenizer, "suffix")
