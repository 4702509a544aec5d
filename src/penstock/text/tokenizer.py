"""A model's tokenizer: text to token ids and back, from the files of a model folder.

Owns what `tokenizer.json` and `tokenizer_config.json` say: vocabulary, special tokens, chat
templates. A short text is encoded in a thread of its own, a long one on the library's pool, which
runs only on cores that a model's step leaves idle. It does not know requests, streams or stop
strings.

Measured on two cores, 297,000 tokens from 1.6 MB of text: `encode_batch_fast` takes 0.98 s for the
whole text and 0.22 s for pieces of it on the pool, without Python's lock either way; making the
Python lists takes 10 ms under it. The library takes 100 to 210 bytes for each byte of text that it
works on, so pieces also bound that; `safe_splits` says which tokenizers allow a split.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from array import array
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import msgspec
from tokenizers import Encoding
from tokenizers import Tokenizer as RawTokenizer
from tokenizers.models import BPE

from penstock.errors import BadRequest, ModelUnusable
from penstock.text.decoder import StreamDecoder
from penstock.text.safe_splits import (
    PIECE_CHARS,
    Spec,
    can_be_split,
    longest_piece,
    longest_token_bytes,
    pieces,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

# Threads of the library's pool, which takes batches of two texts or more. Not one for every core:
# even an idle-only thread delays the waking of a step's thread on its core.
_WIDTH = max(1, min(4, (os.cpu_count() or 1) // 2))
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
os.environ.setdefault("RAYON_NUM_THREADS", str(_WIDTH))

# Between two pieces of a long text while a step wants all cores. The kernel gives even an idle-only
# thread its tick of 4 ms now and then; a step of 40 ms should meet one or two, not ten in a row.
_REST_S = 0.010
# A batch takes the pool some milliseconds. If it takes so long, other programs have the cores, and
# an idle-only thread may not get one for minutes: for a while texts are encoded without the pool.
_STARVED_S = 0.25
_WITHOUT_POOL_S = 5.0

# Threads that encode a short text themselves, 40 ms at most, and threads that wait for the pool,
# which may take long to find an idle core: short texts never wait for it.
LONG_TEXT_CHARS = 64 * 1024
# Of a longer text so much is encoded at a time: its ids, not packed yet, may take 40 times that.
_SLICE_CHARS = 256 * 1024
_SHORT_TEXTS = ThreadPoolExecutor(
    max(2, min(4, (os.cpu_count() or 1) // 4)), thread_name_prefix="tokenize"
)
_LONG_TEXTS = ThreadPoolExecutor(4, thread_name_prefix="tokenize-long")

_LARGEST_ID = 2**32 - 1  # what the library can be asked about at all

# Bytes that the library takes per byte of a text it works on: 213 measured at most.
_ENCODE_FACTOR = 214

# Each thread of the library keeps the tokens of the first words that it meets, 8 KiB for a long
# one, as long as the tokenizer lives: 82 MiB a thread by itself. So many words make it as quick.
_WORDS_KEPT = 256


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
        if (resize := getattr(self._raw.model, "_resize_cache", None)) is not None:
            resize(_WORDS_KEPT)  # BPE and Unigram
        self.decoder = StreamDecoder(spec.decoder)
        vocabulary = self._raw.get_vocab()
        self.vocab_size = 1 + max(vocabulary.values(), default=-1)
        self._cuttable = can_be_split(spec)
        self._longest_token_bytes = longest_token_bytes(spec, vocabulary)
        self._pool_from = 0.0  # when the pool is worth trying, on the monotonic clock
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
        if len(text) <= PIECE_CHARS:
            return self._encodings([text], add_special_tokens)[0].ids
        cut = self._cuttable
        parts = pieces(text) if cut else iter([text])
        specials = add_special_tokens and not cut
        ids: list[int] = []
        if len(text) > LONG_TEXT_CHARS:
            ids = self._encode_on_pool(parts, specials)
        else:
            for part in parts:
                ids += self._encodings([part], specials)[0].ids
        return self._surrounded(ids) if cut and add_special_tokens else ids

    def _encode_on_pool(self, parts: Iterator[str], add_special_tokens: bool) -> list[int]:
        """Some parts at a time, so that several long texts advance together."""
        ids: list[int] = []
        began = time.monotonic()
        while batch := list(islice(parts, _WIDTH if began >= self._pool_from else 1)):
            # The pool takes nothing less than two.
            filling = [""] * (began >= self._pool_from)
            encodings = self._encodings([*batch, *filling], add_special_tokens)
            for encoding in encodings[: len(batch)]:
                ids += encoding.ids
            ended = time.monotonic()
            if filling and ended - began > _STARVED_S:
                self._pool_from = ended + _WITHOUT_POOL_S
            if _crowded():
                time.sleep(_REST_S)
            began = time.monotonic()
        return ids

    async def encode_in_thread(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The ids of a text, without holding up the event loop or shorter texts."""
        threads = _SHORT_TEXTS if len(text) <= LONG_TEXT_CHARS else _LONG_TEXTS
        return await asyncio.get_running_loop().run_in_executor(
            threads, lambda: self.encode(text, add_special_tokens=add_special_tokens)
        )

    async def encode_in_slices(
        self, text: str, *, add_special_tokens: bool
    ) -> AsyncIterator[list[int]]:
        """The same, some ids at a time, so that their memory can be booked as they come."""
        if len(text) <= _SLICE_CHARS or not self._cuttable:
            yield await self.encode_in_thread(text, add_special_tokens=add_special_tokens)
            return
        slices = pieces(text, _SLICE_CHARS)

        def encode_next() -> list[int] | None:
            part = next(slices, None)
            return None if part is None else self.encode(part, add_special_tokens=False)

        loop = asyncio.get_running_loop()
        await loop.run_in_executor(_LONG_TEXTS, require_encodable, text)
        before, after = self._around() if add_special_tokens else ([], [])
        yield before
        while (ids := await loop.run_in_executor(_LONG_TEXTS, encode_next)) is not None:
            yield ids
        yield after

    async def encode_all_in_thread(
        self, texts: list[str], *, add_special_tokens: bool
    ) -> list[array[int]]:
        """The ids of each of some texts, packed; together they are no longer than a short one."""

        def encode() -> list[array[int]]:
            return [
                array("i", self.encode(text, add_special_tokens=add_special_tokens))
                for text in texts
            ]

        return await asyncio.get_running_loop().run_in_executor(_SHORT_TEXTS, encode)

    def encode_pair(self, first: str, second: str) -> tuple[list[int], list[int]]:
        """The ids of two short texts as the tokenizer joins them, and of which segment each is."""
        encoding = self._raw.encode(first, second)
        return list(encoding.ids), list(encoding.type_ids)

    def min_tokens_of(self, text: str) -> int:
        """A number of tokens that the text cannot fall below, without encoding it."""
        if self._longest_token_bytes is None:
            return 0
        return len(text) // self._longest_token_bytes  # a character has at least one byte

    def encoding_bytes(self, text: str) -> int:
        """What `encode` takes at most while it works, its answer aside."""
        chars = min(_WIDTH * longest_piece(text), len(text)) if self._cuttable else len(text)
        return chars * _ENCODE_FACTOR * (1 if text.isascii() else 2)

    def _encodings(self, texts: list[str], add_special_tokens: bool) -> list[Encoding]:
        _make_pool()  # here, since whoever calls first makes one, of threads like its own
        return self._raw.encode_batch_fast(texts, add_special_tokens=add_special_tokens)

    def _surrounded(self, ids: list[int]) -> list[int]:
        before, after = self._around()
        return [*before, *ids, *after]

    def _around(self) -> tuple[list[int], list[int]]:
        """The special tokens that the tokenizer puts before and after a text."""
        bare, full = (self._encodings(["a"], added)[0].ids for added in (False, True))
        before = next(
            start for start in range(len(full)) if full[start : start + len(bare)] == bare
        )
        return full[:before], full[before + len(bare) :]

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

    def has_special_text(self, text: str) -> bool:
        """Whether the text has the letters of a special token, which are read as that token."""
        return any(content in text for content in self._special_contents)

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


def _crowded() -> bool:
    """Whether more threads want a core than there are cores."""
    try:
        figures = Path("/proc/loadavg").read_text()  # 0.20 0.18 0.12 running/all last
    except OSError:
        return False
    return int(figures.split()[3].partition("/")[0]) > (os.cpu_count() or 1)


@cache
def _make_pool() -> None:
    """The library's pool, on threads that run only on cores which a model's step leaves idle.

    They inherit that from the thread whose call makes the pool. They never take Python's lock,
    so nobody waits for one of them that has no core; threads that do take it must not be idle
    ones. Being nice is not enough: the kernel still counts such a thread when it spreads the
    others, and two threads of a step end up sharing one core.
    """

    def make() -> None:
        if sys.platform == "linux":
            os.sched_setscheduler(threading.get_native_id(), os.SCHED_IDLE, os.sched_param(0))
        RawTokenizer(BPE()).encode_batch_fast(["a", "b"])

    thread = threading.Thread(target=make, name="tokenize-pool")
    thread.start()
    thread.join()


def require_encodable(text: str) -> None:
    """Refuses text with half of a surrogate pair, which JSON can carry but UTF-8 cannot."""
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRequest(
            f"The text is not valid Unicode: character {error.start} is "
            f"U+{ord(text[error.start]):04X}, half of a surrogate pair without its other half."
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
