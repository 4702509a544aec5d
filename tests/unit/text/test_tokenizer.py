"""The tokenizer's files, its ids and bytes, and its threads."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from functools import cache
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from penstock.errors import BadRequest, ModelUnusable
from penstock.heap import trim_heap
from penstock.memory.readings.gauge import read_process
from penstock.testing.tokenizers import FAMILIES, SPECIALS, byte_level
from penstock.text.tokenizer import LONG_TEXT_CHARS, Tokenizer, require_encodable

if TYPE_CHECKING:
    from pathlib import Path

    from tokenizers import Encoding

family = cache(lambda name: FAMILIES[name]())
families = pytest.mark.parametrize("name", FAMILIES)


def raw_words() -> RawTokenizer:
    raw = RawTokenizer(models.WordLevel({"<s>": 0, "a": 1, "b": 2, "far": 9}, unk_token="a"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    raw.add_special_tokens(["<s>"])
    raw.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return raw


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tokenizer.json").write_text(raw_words().to_str())
    return tmp_path


def configure(folder: Path, **config: object) -> Path:
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_reads_a_folder(folder: Path) -> None:
    configure(folder, bos_token={"content": "<s>"}, eos_token="b", pad_token=None, model_max=5)
    tokenizer = Tokenizer.from_folder(folder)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "b")
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "b"}
    assert tokenizer.special_ids == {0}
    assert tokenizer.vocab_size == 10  # ids need not be dense
    assert tokenizer.chat_template is None
    assert tokenizer.encode("a b", add_special_tokens=True) == [0, 1, 2]
    assert tokenizer.encode("a b", add_special_tokens=False) == [1, 2]


def test_special_tokens_of_older_folders(folder: Path) -> None:
    (folder / "special_tokens_map.json").write_text('{"bos_token": "old", "eos_token": "b"}')
    tokenizer = Tokenizer.from_folder(configure(folder, bos_token="<s>"))
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "b")


def test_shipped_truncation_and_padding_are_not_used(tmp_path: Path) -> None:
    raw = raw_words()
    raw.enable_truncation(2)
    raw.enable_padding(length=8)
    (tmp_path / "tokenizer.json").write_text(raw.to_str())
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode("a b a b", add_special_tokens=False) == [1, 2, 1, 2]


@pytest.mark.parametrize("content", [None, b"{", b"[]", b"{}", b"\xff", b'{"decoder": 3}'])
def test_an_unusable_tokenizer_is_named(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ModelUnusable, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff"])
def test_an_unusable_config_is_named(folder: Path, content: bytes) -> None:
    (folder / "tokenizer_config.json").write_bytes(content)
    with pytest.raises(ModelUnusable, match=r"tokenizer_config\.json"):
        Tokenizer.from_folder(folder)


def test_template_as_text(folder: Path) -> None:
    assert Tokenizer.from_folder(configure(folder, chat_template="T")).chat_template == "T"


def test_templates_by_name(folder: Path) -> None:
    named = [{"name": "tool_use", "template": "U"}, {"name": "default", "template": "D"}]
    tokenizer = Tokenizer.from_folder(configure(folder, chat_template=named))
    assert tokenizer.chat_template == "D"
    assert tokenizer.chat_templates == {"tool_use": "U", "default": "D"}


def test_templates_in_files_win(folder: Path) -> None:
    configure(folder, chat_template="config")
    (folder / "chat_template.jinja").write_text("fïle", encoding="utf-8")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("U")
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.chat_templates == {"default": "fïle", "tool_use": "U"}


def test_template_of_a_processor(folder: Path) -> None:
    (folder / "chat_template.json").write_text('{"chat_template": "P"}')
    assert Tokenizer.from_folder(folder).chat_template == "P"


def test_templates_without_names_are_refused(folder: Path) -> None:
    with pytest.raises(ModelUnusable, match="name and a template"):
        Tokenizer.from_folder(configure(folder, chat_template=["T"]))


@given(text=st.text())
def test_encode_and_decode_are_inverse(text: str) -> None:
    tokenizer = family("byte_level")
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


@families
def test_ids_outside_the_vocabulary_add_nothing(name: str) -> None:
    tokenizer = family(name)
    for unknown in (-1, tokenizer.vocab_size, 2**32, 2**70):
        assert tokenizer.decode([unknown]) == ""
        assert tokenizer.token_bytes(unknown) == b""
        assert tokenizer.token_text(unknown) == ""


@pytest.mark.parametrize(
    ("name", "token", "expected"),
    [
        ("byte_level", "Ġw", b" w"),
        ("byte_level", "ð", b"\xf0"),
        ("byte_level", SPECIALS[0], SPECIALS[0].encode()),
        ("byte_level", "<tool>", b"<tool>"),
        ("byte_fallback", "<0xE2>", b"\xe2"),
        ("byte_fallback", "▁hello", b" hello"),
        ("byte_fallback", "é", "é".encode()),
        ("word_piece", "##ing", b"ing"),
        ("word_piece", "hello", b" hello"),
        ("metaspace", "▁world", b" world"),
        ("word_end", "ld</w>", b"ld "),
        ("undecoded", "hello", b"hello"),
    ],
)
def test_the_bytes_of_one_token(name: str, token: str, expected: bytes) -> None:
    tokenizer = family(name)
    by_token = {tokenizer.token(number): number for number in range(tokenizer.vocab_size)}
    assert tokenizer.token_bytes(by_token[token]) == expected
    assert tokenizer.token_text(by_token[token]) == expected.decode("utf-8", "replace")


def test_words_of_past_texts_do_not_stay() -> None:
    """6,000 long words would take 55 MiB for as long as the tokenizer lives."""
    tokenizer = byte_level()
    letters = str.maketrans("0123456789", "abcdefghij")

    def word(number: int) -> str:
        return str(number).translate(letters).ljust(250, "x")

    def grown(first: int) -> int:
        before = read_process(os.getpid())
        for number in range(first, first + 6000, 200):
            words = (word(n) for n in range(number, number + 200))
            tokenizer.encode(" ".join(words), add_special_tokens=False)
        trim_heap()
        after = read_process(os.getpid())
        assert before is not None
        assert after is not None
        return after.anonymous_bytes - before.anonymous_bytes

    assert grown(1 << 20) < 20 << 20


def test_lone_surrogates_are_refused_with_their_place() -> None:
    with pytest.raises(BadRequest, match=r"character 2 is U\+D83D"):
        require_encodable("ab\ud83dc")
    with pytest.raises(BadRequest, match="surrogate"):
        byte_level().encode("\udc00", add_special_tokens=False)
    require_encodable("a whole pair is one character: 🙂")


async def _short_beside_long() -> tuple[list[int], bool]:
    """A short text is encoded while a long one is stuck in its thread."""
    release = threading.Event()
    long_text = "a" * (LONG_TEXT_CHARS + 1)

    class Stuck(Tokenizer):
        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            if text == long_text:
                release.wait(30)
            return super().encode(text, add_special_tokens=add_special_tokens)

    tokenizer = Stuck(raw_words().to_str().encode())
    stuck = [
        asyncio.ensure_future(tokenizer.encode_in_thread(long_text, add_special_tokens=False))
        for _ in range(8)
    ]
    short = await asyncio.wait_for(tokenizer.encode_in_thread("b", add_special_tokens=False), 20)
    unfinished = not any(task.done() for task in stuck)
    release.set()
    await asyncio.gather(*stuck)
    return short, unfinished


def test_short_texts_do_not_wait_behind_long_ones() -> None:
    assert asyncio.run(_short_beside_long()) == ([2], True)


async def _in_slices(tokenizer: Tokenizer, text: str, added: bool) -> list[list[int]]:
    return [some async for some in tokenizer.encode_in_slices(text, add_special_tokens=added)]


@pytest.mark.parametrize("added", [True, False])
def test_slices_of_a_long_text_have_its_ids(monkeypatch: pytest.MonkeyPatch, added: bool) -> None:
    monkeypatch.setattr("penstock.text.tokenizer._SLICE_CHARS", 10_000)
    tokenizer = byte_level()
    text = "hello world " * 3000
    slices = asyncio.run(_in_slices(tokenizer, text, added))
    assert max(map(len, slices)) < len(text) / 4
    joined = [token for some in slices for token in some]
    assert joined == tokenizer.encode(text, add_special_tokens=added)


def test_a_pool_without_a_core_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other programs have all cores: a batch that takes long is the last one for a while."""
    monkeypatch.setattr("penstock.text.tokenizer._STARVED_S", 0.0)
    texts_at_once: list[int] = []
    tokenizer, plain = byte_level(), byte_level()

    def counting(texts: list[str], add_special_tokens: bool) -> list[Encoding]:
        texts_at_once.append(len(texts))
        return plain._encodings(texts, add_special_tokens)

    monkeypatch.setattr(tokenizer, "_encodings", counting)
    text = "the cat sat on 12 mats. " * (3 * LONG_TEXT_CHARS // 24)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert texts_at_once[0] >= 2 and set(texts_at_once[1:]) == {1}
    assert ids == plain._encodings([text], add_special_tokens=False)[0].ids
    texts_at_once.clear()
    monkeypatch.setattr("penstock.text.tokenizer._STARVED_S", 60.0)
    tokenizer.encode(text, add_special_tokens=False)
    assert set(texts_at_once) == {1}
    tokenizer._pool_from = 0.0  # the while is over
    tokenizer.encode(text, add_special_tokens=False)
    assert texts_at_once[-1] >= 2


def test_slices_of_a_text_that_cannot_be_split_are_one() -> None:
    assert asyncio.run(_in_slices(family("metaspace"), "hello", False)) == [[0]]
    with pytest.raises(BadRequest, match="character 300000 is"):
        asyncio.run(_in_slices(byte_level(), "a b " * 75_000 + "\udc00", False))


async def _in_thread(text: str) -> list[int]:
    return await byte_level().encode_in_thread(text, add_special_tokens=False)


def test_refusals_come_out_of_the_thread() -> None:
    with pytest.raises(BadRequest, match="surrogate"):
        asyncio.run(_in_thread("\ud800"))
