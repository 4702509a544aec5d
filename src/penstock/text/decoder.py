"""Token strings back to text, one token at a time, exactly as a one-shot decode would.

A `tokenizer.json` names its decoder: one step or a sequence of steps, each a function from a list
of strings to a list of strings, joined at the end. This module runs the same steps over a stream.

    "▁Hi" "<0xC3>" "<0xA9>" ──▶ Replace ▁ ──▶ ByteFallback ──▶ Fuse ──▶ Strip ──▶ "Hi" "é"
                                each token    a run of bytes    from here on there is one token,
                                alone         becomes text      of which stages see the chunks

Steps that look at one token alone are run by the tokenizers library itself. Those that look across
tokens are written here, each with a bounded memory, except two: a run of byte-fallback tokens is
held until it ends (the library turns the whole run into U+FFFD when any byte of it is wrong), and
a step not known here is held until the end of the text, which is right but does not stream.

It knows nothing of token ids, special tokens or stop strings.
"""

from __future__ import annotations

import codecs
import json
import re
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from tokenizers import Tokenizer as RawTokenizer

if TYPE_CHECKING:
    from collections.abc import Callable

    from tokenizers.decoders import Decoder as RawDecoder

    Spec = dict[str, Any]

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Stage(Protocol):
    """One step of a decoder, working on a stream of tokens (or, once fused, of chunks)."""

    def push(self, token: str) -> list[str]:
        """What is certain after one more token."""

    def finish(self, *, cut: bool = False) -> list[str]:
        """What was held back; `cut`: without a character that is not whole."""

    def lone(self, token: str) -> str | bytes:
        """What the step makes of this token in mid-text; bytes end the chain."""


class _Local:
    """A step of the library that treats each token alone, except that the first may differ."""

    def __init__(self, decoder: RawDecoder) -> None:
        self._decoder = decoder
        self._first = True

    def push(self, token: str) -> list[str]:
        if self._first:
            self._first = False
            return [self._decoder.decode([token])]
        return [self.lone(token)]

    def finish(self, *, cut: bool = False) -> list[str]:
        return []

    def lone(self, token: str) -> str:
        # The empty first token leaves nothing in the text but makes ours the second.
        return self._decoder.decode(["", token])


class _Spaced:
    """No decoder at all: the library joins the tokens with spaces."""

    def __init__(self) -> None:
        self._first = True

    def push(self, token: str) -> list[str]:
        if self._first:
            self._first = False
            return [token]
        return [" " + token]

    def finish(self, *, cut: bool = False) -> list[str]:
        return []

    def lone(self, token: str) -> str:
        return token


def _byte_of_character() -> dict[str, int]:
    """The byte-level alphabet: printable Latin-1 is itself, other bytes follow from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    table = {chr(byte): byte for byte in printable}
    table.update((chr(0x100 + index), byte) for index, byte in enumerate(others))
    return table


_BYTE_LEVEL = _byte_of_character()


class _ByteLevel:
    """Each character is a byte, and the bytes of all tokens together are UTF-8."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: str) -> list[str]:
        return [self._utf8.decode(self.lone(token))]

    def finish(self, *, cut: bool = False) -> list[str]:
        return [] if cut else [self._utf8.decode(b"", final=True)]

    def lone(self, token: str) -> bytes:
        try:
            return bytes([_BYTE_LEVEL[character] for character in token])
        except KeyError:  # an added token with a character outside the alphabet stands for itself
            return token.encode()


# "+F" is no slip: the library reads the two characters as a number that may have a sign.
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>")


class _ByteFallback:
    """Runs of `<0xNN>` tokens are UTF-8; a run with one wrong byte is U+FFFD throughout."""

    def __init__(self) -> None:
        self._restart()

    def _restart(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("strict")
        self._length = 0  # bytes in the present run
        self._text: list[str] | None = []  # its characters; None once a byte was wrong

    def push(self, token: str) -> list[str]:
        value = self.lone(token)
        if isinstance(value, str):
            return [*self.finish(), value]
        self._length += 1
        if self._text is None:
            return [REPLACEMENT]
        try:
            self._text.append(self._utf8.decode(value))
        except UnicodeDecodeError:
            self._text = None
            return [REPLACEMENT] * self._length
        return []

    def finish(self, *, cut: bool = False) -> list[str]:
        length, text = self._length, self._text
        if not length:
            return []
        complete = cut or not self._utf8.getstate()[0]
        self._restart()
        if text is None:
            return []
        return ["".join(text)] if complete else [REPLACEMENT] * length

    def lone(self, token: str) -> str | bytes:
        match = _BYTE_TOKEN.fullmatch(token)
        return bytes([int(match[1], 16)]) if match else token


class _WordEnd:
    """A suffix marks the end of a word: a space, except on the last token of the text."""

    def __init__(self, decoder: RawDecoder) -> None:
        self._decoder = decoder
        self._last: str | None = None

    def push(self, token: str) -> list[str]:
        before, self._last = self._last, token
        return [] if before is None else [self.lone(before)]

    def finish(self, *, cut: bool = False) -> list[str]:
        return [] if self._last is None else [self._decoder.decode([self._last])]

    def lone(self, token: str) -> str:
        return self._decoder.decode([token, ""])


class _Collapse:
    """CTC: a repeated token counts once, and what is empty after clean-up is no token."""

    def __init__(self, decoder: RawDecoder) -> None:
        self._decoder = decoder
        self._before: str | None = None

    def push(self, token: str) -> list[str]:
        repeated, self._before = token == self._before, token
        text = "" if repeated else self.lone(token)
        return [text] if text else []

    def finish(self, *, cut: bool = False) -> list[str]:
        return []

    def lone(self, token: str) -> str:
        return self._decoder.decode([token])


class _StripEnds:
    """Takes up to `start` and `stop` copies of a character off the ends of the fused text."""

    def __init__(self, content: str, start: int, stop: int) -> None:
        self._content = content
        self._start = start
        self._stop = stop
        self._held = 0  # copies at the end of the text so far, which may be its very end

    def push(self, token: str) -> list[str]:
        while self._start and token:
            if not token.startswith(self._content):
                self._start = 0
                break
            token = token[1:]
            self._start -= 1
        if not self._stop or not token:
            return [token]
        text = self._content * self._held + token
        body = text.rstrip(self._content)
        self._held = min(len(text) - len(body), self._stop)
        return [text[: len(text) - self._held]]

    def finish(self, *, cut: bool = False) -> list[str]:
        return []

    def lone(self, token: str) -> str:
        return token


class _Whole:
    """Steps that cannot be streamed: everything is held to the end of the text."""

    def __init__(self, decoder: RawDecoder, *, fused: bool) -> None:
        self._decoder = decoder
        self._fused = fused
        self._tokens: list[str] = []

    def push(self, token: str) -> list[str]:
        self._tokens.append(token)
        return []

    def finish(self, *, cut: bool = False) -> list[str]:
        tokens = ["".join(self._tokens)] if self._fused else self._tokens
        text = self._decoder.decode(tokens)
        return [text.rstrip(REPLACEMENT) if cut else text]

    def lone(self, token: str) -> str:
        return self._decoder.decode([token])


class StreamDecoder:
    """What a tokenizer's decoder is; `start()` begins a text."""

    def __init__(self, spec: Spec | None) -> None:
        self._makers = [_Spaced] if spec is None else _stages(spec)
        self._samples = [make() for make in self._makers]

    def start(self) -> Decoding:
        return Decoding([make() for make in self._makers])

    def token_bytes(self, token: str) -> bytes:
        """What one token adds in mid-text, which need not be whole characters."""
        for stage in self._samples:
            value = stage.lone(token)
            if isinstance(value, bytes):
                return value
            token = value
        return token.encode()


class Decoding:
    """One text on its way out of a `StreamDecoder`."""

    def __init__(self, stages: list[Stage]) -> None:
        self._stages = stages

    def push(self, token: str) -> str:
        """The text that is certain after one more token, "" when there is none yet."""
        return "".join(self._run([token], 0))

    def finish(self, *, cut: bool = False) -> str:
        """The text that was held back; nothing may be pushed after it. `cut`: the tokens end in the
        middle, perhaps of a character, which is then left out."""
        text = []
        for index, stage in enumerate(self._stages):
            text += self._run(stage.finish(cut=cut), index + 1)
        return "".join(text)

    def _run(self, tokens: list[str], start: int) -> list[str]:
        for stage in self._stages[start:]:
            tokens = [made for token in tokens for made in stage.push(token)]
        return tokens


_LOCAL = frozenset({"Replace", "Metaspace", "WordPiece", "Strip"})
_ACROSS: dict[str, Callable[[RawDecoder], Stage]] = {"BPEDecoder": _WordEnd, "CTC": _Collapse}


def _stages(spec: Spec) -> list[Callable[[], Stage]]:
    makers: list[Callable[[], Stage]] = []
    steps = _flat(spec)
    fused = False
    for index, step in enumerate(steps):
        kind = step["type"]
        if kind == "Fuse" or (kind == "ByteLevel" and not fused):
            if kind == "ByteLevel":
                makers.append(_ByteLevel)
            fused = True
        elif kind == "ByteFallback" and not fused:
            makers.append(_ByteFallback)
        elif kind == "Strip" and fused:
            makers.append(partial(_StripEnds, step["content"], step["start"], step["stop"]))
        elif kind in _LOCAL and (not fused or _is_one_character(step)):
            makers.append(partial(_Local, _raw(step)))
        elif kind in _ACROSS and not fused:
            makers.append(partial(_ACROSS[kind], _raw(step)))
        else:
            rest = _raw({"type": "Sequence", "decoders": steps[index:]})
            makers.append(partial(_Whole, rest, fused=fused))
            break
    return makers


def _flat(spec: Spec) -> list[Spec]:
    if spec["type"] != "Sequence":
        return [spec]
    return [step for part in spec["decoders"] for step in _flat(part)]


def _is_one_character(step: Spec) -> bool:
    """Whether this replaces single characters, so that it may be done chunk by chunk."""
    return step["type"] == "Replace" and len(step["pattern"].get("String", "")) == 1


def _raw(spec: Spec) -> RawDecoder:
    """The library's own decoder for a step, by way of an otherwise empty tokenizer."""
    model = {"type": "BPE", "vocab": {}, "merges": []}
    decoder: RawDecoder = RawTokenizer.from_str(
        json.dumps({"model": model, "decoder": spec})
    ).decoder
    return decoder
