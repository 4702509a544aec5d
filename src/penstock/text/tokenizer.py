"""A model's tokenizer: text to token ids and back, from the files of a model folder.

Owns what `tokenizer.json` and `tokenizer_config.json` say: vocabulary, special tokens, chat
templates. Encoding is work for a thread; `encode_in_thread` has threads of its own, few enough
to leave the cores to the model. It does not know requests, streams or stop strings.

Measured on two cores, 496,000 tokens from 1.5 MB of text: `encode` of the library holds Python's
lock for 1.15 s, `encode_batch_fast` of the same text for 13 ms in 0.7 s. Those 13 ms are the
making of the Python list. The library takes 100 to 210 bytes for each byte of text meanwhile, so a
long text is cut where that cannot change its tokens; see `seams` for which tokenizers allow it.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Self

import msgspec
from tokenizers import Encoding
from tokenizers import Tokenizer as RawTokenizer

from penstock.errors import BadRequest, ModelUnusable
from penstock.text.decoder import StreamDecoder
from penstock.text.seams import (
    PIECE_CHARS,
    Spec,
    can_be_cut,
    longest_piece,
    longest_token_bytes,
    pieces,
)

if TYPE_CHECKING:
    from pathlib import Path

# The library would otherwise run batches on a thread pool as wide as the machine, beside the
# model's own threads. Each call is one text here, so that pool could only get in the way.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def _give_way() -> None:
    """Encode a long text only on cores that a model's step leaves idle; a thread's own setting.

    Being nice is not enough: the kernel still counts such a thread when it spreads the others, and
    two threads of a step end up sharing one core.
    """
    if sys.platform == "linux":
        os.sched_setscheduler(threading.get_native_id(), os.SCHED_IDLE, os.sched_param(0))


# Long texts have threads of their own, so that short ones never wait behind them.
LONG_TEXT_CHARS = 64 * 1024
_THREADS = max(1, min(4, (os.cpu_count() or 1) // 4))
_SHORT_TEXTS = ThreadPoolExecutor(_THREADS, thread_name_prefix="tokenize")
_LONG_TEXTS = ThreadPoolExecutor(
    _THREADS, thread_name_prefix="tokenize-long", initializer=_give_way
)

_LARGEST_ID = 2**32 - 1  # what the library can be asked about at all


# Bytes that the library takes per byte of a text it works on: 213 measured at most.
_ENCODE_FACTOR = 214


class Tokenizer:
    """Text to token ids and back. Safe to use from several threads."""

    bos_token: str | None
    eos_token: str | None
    special_tokens: dict[str, str]  # by role: "bos_token", "pad_token", ...
    special_ids: frozenset[int]
    vocab_size: int  # one above the highest id known here; the model's own may be larger
    chat_templates: dict[str, str]  # by name; the usual one is "default"

    def __init__(
        self,
        tokenizer_json: bytes,
        *,
        special_tokens: dict[str, str] | None = None,
        chat_templates: dict[str, str] | None = None,
    ) -> None:
        spec = msgspec.json.decode(tokenizer_json, type=Spec)
        self._raw = RawTokenizer.from_str(tokenizer_json.decode())
        # Settings of the training run that some models ship; a prompt is never cut or filled.
        self._raw.no_truncation()
        self._raw.no_padding()
        self.decoder = StreamDecoder(spec.decoder)
        vocabulary = self._raw.get_vocab()
        self.vocab_size = 1 + max(vocabulary.values(), default=-1)
        self._cuttable = can_be_cut(spec)
        self._longest_token_bytes = longest_token_bytes(spec, vocabulary)
        added = self._raw.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._special_contents = {token.content for token in added.values() if token.special}
        self.special_tokens = special_tokens or {}
        self.bos_token = self.special_tokens.get("bos_token")
        self.eos_token = self.special_tokens.get("eos_token")
        self.chat_templates = chat_templates or {}

    @classmethod
    def from_folder(cls, path: Path) -> Self:
        """Reads a model folder; blocking. `ModelUnusable` names the file that cannot be used."""
        file = path / "tokenizer.json"
        config = _read_object(path / "tokenizer_config.json")
        legacy_specials = _read_object(path / "special_tokens_map.json")
        try:
            raw = file.read_bytes()
        except OSError as error:
            raise ModelUnusable(
                f"The tokenizer file {file} cannot be read: {error.strerror}."
            ) from error
        try:
            return cls(
                raw,
                special_tokens=_special_tokens(legacy_specials) | _special_tokens(config),
                chat_templates=_chat_templates(path, config),
            )
        except ModelUnusable:
            raise
        except Exception as error:  # the library raises nothing more specific
            raise ModelUnusable(f"The tokenizer file {file} cannot be used: {error}") from error

    @property
    def chat_template(self) -> str | None:
        """The template for plain chats, or None when the model has none."""
        if "default" in self.chat_templates:
            return self.chat_templates["default"]
        return next(iter(self.chat_templates.values()), None)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The ids of a text; blocking, but other threads go on. See `encode_in_thread`."""
        require_encodable(text)
        if not self._is_cut(text):
            return self._encoding(text, add_special_tokens).ids
        ids: list[int] = []
        for piece in pieces(text):
            ids += self._encoding(piece, False).ids
        return self._surrounded(ids) if add_special_tokens else ids

    async def encode_in_thread(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The ids of a text, without holding up the event loop or shorter texts."""
        loop = asyncio.get_running_loop()
        if len(text) <= LONG_TEXT_CHARS:
            return await loop.run_in_executor(
                _SHORT_TEXTS, lambda: self.encode(text, add_special_tokens=add_special_tokens)
            )
        await loop.run_in_executor(_SHORT_TEXTS, require_encodable, text)
        cut = self._is_cut(text)
        ids: list[int] = []
        for piece in pieces(text) if cut else (text,):
            encoding = await loop.run_in_executor(
                _LONG_TEXTS, self._encoding, piece, add_special_tokens and not cut
            )
            # A list is made under Python's lock: not by a thread that has to wait for a core.
            ids += await loop.run_in_executor(_SHORT_TEXTS, getattr, encoding, "ids")
        return self._surrounded(ids) if cut and add_special_tokens else ids

    def least_tokens(self, text: str) -> int:
        """A number of tokens that the text cannot fall below, without encoding it."""
        if self._longest_token_bytes is None:
            return 0
        return len(text) // self._longest_token_bytes  # a character has at least one byte

    def encoding_bytes(self, text: str) -> int:
        """What `encode` takes at most while it works, its answer aside."""
        chars = longest_piece(text) if self._cuttable else len(text)
        return chars * _ENCODE_FACTOR * (1 if text.isascii() else 2)

    def _is_cut(self, text: str) -> bool:
        return self._cuttable and len(text) > PIECE_CHARS

    def _encoding(self, text: str, add_special_tokens: bool) -> Encoding:
        return self._raw.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]

    def _surrounded(self, ids: list[int]) -> list[int]:
        """With the special tokens that the tokenizer puts before and after a text."""
        bare, full = self._encoding("a", False).ids, self._encoding("a", True).ids
        before = next(
            start for start in range(len(full)) if full[start : start + len(bare)] == bare
        )
        return [*full[:before], *ids, *full[before + len(bare) :]]

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ids. Ids the tokenizer does not know add nothing to it."""
        known = [token_id for token_id in ids if 0 <= token_id <= _LARGEST_ID]
        return self._raw.decode(known, skip_special_tokens=skip_special_tokens)

    def token(
        self,
        token_id: int,
        *,
        skip_special_tokens: bool = False,
        keep: frozenset[str] = frozenset(),
    ) -> str | None:
        """The vocabulary's own string for an id; None when unknown, or special and skipped.

        Those in `keep` are not skipped.
        """
        if not 0 <= token_id <= _LARGEST_ID:
            return None
        token = self._raw.id_to_token(token_id)
        if skip_special_tokens and token in self._special_contents and token not in keep:
            return None
        return token

    def token_id(self, token: str) -> int | None:
        """The id of a token of the vocabulary, special or not."""
        number: int | None = self._raw.token_to_id(token)
        return number

    def token_bytes(self, token_id: int) -> bytes:
        """What one token adds to a text, in UTF-8 bytes that may be part of a character."""
        token = self.token(token_id)
        return b"" if token is None else self.decoder.token_bytes(token)

    def token_text(self, token_id: int) -> str:
        """What one token adds to a text, with U+FFFD for what is only part of a character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")


def require_encodable(text: str, *, param: str | None = None) -> None:
    """Refuses text with half of a surrogate pair, which JSON can carry but UTF-8 cannot."""
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRequest(
            f"The text is not valid Unicode: character {error.start} is "
            f"U+{ord(text[error.start]):04X}, half of a surrogate pair without its other half.",
            param=param,
        ) from error


def _read_object(file: Path) -> dict[str, Any]:
    """A JSON object from a file that a model need not have."""
    try:
        raw = file.read_bytes()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ModelUnusable(f"The file {file} cannot be read: {error.strerror}.") from error
    try:
        return msgspec.json.decode(raw, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ModelUnusable(f"The file {file} is not a JSON object: {error}") from error


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Every `*_token` of a config, whether written as a string or as a token with options."""
    found = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            found[name] = content
    return found


def _chat_templates(path: Path, config: dict[str, Any]) -> dict[str, str]:
    """The templates by name. A file of its own wins over the same name in the config."""
    templates: dict[str, str] = {}
    listed = config.get("chat_template") or _read_object(path / "chat_template.json").get(
        "chat_template"
    )
    if isinstance(listed, str):
        templates["default"] = listed
    elif isinstance(listed, list):
        for entry in listed:
            try:
                templates[str(entry["name"])] = str(entry["template"])
            except (TypeError, KeyError) as error:
                raise ModelUnusable(
                    f"The chat templates in {path / 'tokenizer_config.json'} cannot be used: "
                    "each needs a name and a template."
                ) from error
    files = {"default": path / "chat_template.jinja"}
    files |= {
        file.stem: file for file in sorted((path / "additional_chat_templates").glob("*.jinja"))
    }
    for name, file in files.items():
        try:
            templates[name] = file.read_text(encoding="utf-8")
        except FileNotFoundError:
            continue
        except (OSError, UnicodeDecodeError) as error:
            raise ModelUnusable(f"The chat template {file} cannot be read: {error}") from error
    return templates
