"""Small tokenizers of every decoder family, made in code.

`FAMILIES` is for tests that must hold for any tokenizer; `byte_level` is the one to use where any
tokenizer will do, since it can encode every text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders as raw_decoders

from penstock.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable

    from tokenizers.decoders import Decoder

SPECIALS = ["<|start|>", "<|end|>"]
PLAIN_ADDED = ["ünï", "<tool>", "Ġ"]  # inside and outside the byte-level alphabet
_MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("Ã", "©"), ("ð", "Ł")]
_WORDS = ["hello", "world", "##ing", "##s", "don", "'", "t", "n't", ".", ",", "!", "é", "🙂", "##é"]
_PIECES = ["▁", "▁hello", "▁world", "ing", "s", ".", "é", "🙂", "▁▁", "h", "<0xZZ>", "a▁b"]


def byte_level(*, chat_templates: dict[str, str] | None = None) -> Tokenizer:
    """As GPT-2, Llama 3 and Qwen: characters stand for bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, *("".join(merge) for merge in _MERGES)]
    raw = RawTokenizer(models.BPE(vocab=_numbered(tokens), merges=_MERGES))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return _finished(raw, raw_decoders.ByteLevel(), chat_templates)


def byte_fallback() -> Tokenizer:
    """As Llama 2 and Mistral: pieces with ▁ for space, rare characters as <0xNN> tokens."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *_PIECES]
    raw = RawTokenizer(
        models.BPE(vocab=_numbered(pieces), merges=[], unk_token="<unk>", byte_fallback=True)
    )
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [
        raw_decoders.Replace("▁", " "),
        raw_decoders.ByteFallback(),
        raw_decoders.Fuse(),
        raw_decoders.Strip(" ", 1, 0),
    ]
    return _finished(raw, raw_decoders.Sequence(steps))


def byte_fallback_unstripped() -> Tokenizer:
    """As Gemma: no leading space is taken off; here the ▁ are replaced after fusing."""
    steps = [raw_decoders.ByteFallback(), raw_decoders.Fuse(), raw_decoders.Replace("▁", " ")]
    pieces = [*(f"<0x{byte:02X}>" for byte in range(256)), *_PIECES]
    return _finished(_word_level(pieces), raw_decoders.Sequence(steps))


def word_piece() -> Tokenizer:
    """As BERT: ## continues a word, and spaces before punctuation are cleaned up."""
    return _finished(_word_level(_WORDS), raw_decoders.WordPiece())


def metaspace() -> Tokenizer:
    """As T5: ▁ is a space, except at the very start."""
    return _finished(_word_level(_PIECES), raw_decoders.Metaspace())


def word_end() -> Tokenizer:
    """As the first GPT: </w> ends a word, and the last one needs no space."""
    pieces = ["hello</w>", "wor", "ld</w>", "</w>", "é</w>"]
    return _finished(_word_level(pieces), raw_decoders.BPEDecoder())


def ctc() -> Tokenizer:
    """Repeats collapse and padding vanishes."""
    return _finished(_word_level(["<pad>", "|", "h", "i", "hi"]), raw_decoders.CTC())


def undecoded() -> Tokenizer:
    """No decoder: tokens with spaces between."""
    return _finished(_word_level(_WORDS), None)


def unstreamable() -> Tokenizer:
    """A regular expression over the whole text: nothing is certain before its end."""
    steps = [raw_decoders.Fuse(), raw_decoders.Replace(Regex("l+"), "L")]
    return _finished(_word_level(_WORDS), raw_decoders.Sequence(steps))


FAMILIES: dict[str, Callable[[], Tokenizer]] = {
    make.__name__: make
    for make in (
        byte_level,
        byte_fallback,
        byte_fallback_unstripped,
        word_piece,
        metaspace,
        word_end,
        ctc,
        undecoded,
        unstreamable,
    )
}


def _word_level(tokens: list[str]) -> RawTokenizer:
    raw = RawTokenizer(models.WordLevel(_numbered(["<unk>", *tokens]), unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return raw


def _numbered(tokens: list[str]) -> dict[str, int]:
    return {token: number for number, token in enumerate(tokens)}


def _finished(
    raw: RawTokenizer, decoder: Decoder | None, chat_templates: dict[str, str] | None = None
) -> Tokenizer:
    if decoder is not None:
        raw.decoder = decoder
    raw.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    raw.add_tokens(PLAIN_ADDED)
    return Tokenizer(
        raw.to_str().encode(),
        special_tokens={"bos_token": SPECIALS[0], "eos_token": SPECIALS[1]},
        chat_templates=chat_templates,
    )
