from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import models, pre_tokenizers, processors

from penstock.text.surroundings import Surroundings, pair_surroundings, surroundings
from penstock.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tokenizers.processors import PostProcessor

_TOKENS = ["[UNK]", "[CLS]", "[SEP]", "<s>", "</s>", *"abcdefg"]
_NUMBERS = {token: number for number, token in enumerate(_TOKENS)}


def _special(*tokens: str) -> list[tuple[str, int]]:
    return [(token, _NUMBERS[token]) for token in tokens]


FORMS: dict[str, tuple[PostProcessor | None, int | None]] = {
    "bert": (
        processors.BertProcessing(("[SEP]", _NUMBERS["[SEP]"]), ("[CLS]", _NUMBERS["[CLS]"])),
        1,
    ),
    "bert template": (
        processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=_special("[CLS]", "[SEP]"),
        ),
        1,
    ),
    "roberta": (
        processors.RobertaProcessing(("</s>", _NUMBERS["</s>"]), ("<s>", _NUMBERS["<s>"])),
        None,
    ),
    "end only": (
        processors.TemplateProcessing(
            single="$A </s>", pair="$A $B </s>", special_tokens=_special("</s>")
        ),
        None,
    ),
    "none": (None, None),
}


def _tokenizer(form: str) -> tuple[Tokenizer, RawTokenizer]:
    raw = RawTokenizer(models.WordLevel(_NUMBERS, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if (processor := FORMS[form][0]) is not None:
        raw.post_processor = processor
    return Tokenizer(raw.to_str().encode()), raw


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("first", "second"), [("a b c", "d e"), ("c", "a a a a"), ("a", "a")])
def test_texts_are_joined_as_the_tokenizer_joins_them(form: str, first: str, second: str) -> None:
    tokenizer, raw = _tokenizer(form)
    alone = surroundings(tokenizer)
    ids = array("i", tokenizer.encode(first, add_special_tokens=False))
    assert alone.around(ids).tolist() == raw.encode(first).ids
    pair = pair_surroundings(tokenizer)
    other = array("i", tokenizer.encode(second, add_special_tokens=False))
    joined, begins = pair.joined(ids, other)
    expected = raw.encode(first, second)
    assert joined.tolist() == expected.ids
    assert pair.added == raw.num_special_tokens_to_add(is_pair=True)
    if FORMS[form][1] is not None:
        assert begins == expected.type_ids.index(1)
    elif form != "none":  # which the library numbers by text, and no model has segments for
        assert begins is None


def test_a_text_is_cut_and_its_special_tokens_stay() -> None:
    around = Surroundings((1,), (2,))
    assert around.around(array("i", [7, 8, 9]), 4).tolist() == [1, 7, 8, 2]
    assert around.around(array("i", [7]), 4).tolist() == [1, 7, 2]
