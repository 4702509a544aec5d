"""A GGUF file's header: metadata and where its tensors are. Files may be hostile.

Nothing is believed that the file's own size does not allow: every count is bounded, and a header
larger than `_MAX_HEADER_BYTES` is refused before more of it is read. What is kept of a header is
bounded too: a value of one byte in a file is an object in memory. No weight is read.
"""

from __future__ import annotations

import math
import re
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.catalog.gguf.blocks import OTHERS, SERVED, BlockType
from penstock.errors import ModelUnusable, shortened

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Metadata = dict[str, Any]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_HEADER_BYTES = 128 << 20  # a vocabulary of 262,144 tokens with its merges takes 12 MiB
_READ_BYTES = 1 << 20
_MAX_KEYS = 1 << 12
_MAX_TENSORS = 1 << 16
_MAX_NAME_BYTES = 1 << 10
_MAX_DIMENSIONS = 4
_ALIGNMENTS = frozenset(1 << power for power in range(3, 21))
_SHORT_ARRAY = 1024  # longer ones are vocabularies, which only a tokenizer needs
# Over all arrays that are kept: of a configuration, and with tokens, merges, scores and types.
_MAX_VALUES, _MAX_VOCABULARY_VALUES = 1 << 14, 1 << 21
_MAX_TEXT_BYTES = 4 << 20  # of all strings beside vocabularies; chat templates take 100 KiB
_SPLIT = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_REMEMBERED_BYTES = 16 << 20  # of headers; that of a usual model takes 200 KiB
# In memory: one tensor beside its name (measured: 480), one key, one value of an array.
_TENSOR_BYTES, _KEY_BYTES, _VALUE_BYTES = 500, 200, 70

# By GGUF's numbers of types of values; 8 is a string, 9 an array.
_SCALARS = {
    number: struct.Struct(f"<{letter}")
    for number, letter in {
        0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
    }.items()
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One entry of the table of tensors."""

    block: BlockType
    shape: tuple[int, ...]  # slowest first, as everywhere but in the file
    offset: int  # from the beginning of the file
    size_bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What one file says about itself."""

    metadata: Metadata
    tensors: dict[str, GgufTensor]
    memory_bytes: int  # that it takes at most


class _Remembered:
    """Headers by file, the latest used, as many as fit: walking over a vocabulary takes a good part
    of a second, and cards are read often."""

    def __init__(self) -> None:
        self._headers: dict[tuple[object, ...], GgufHeader] = {}  # the longest unused first

    def get(self, key: tuple[object, ...], read: Callable[[], GgufHeader]) -> GgufHeader:
        header = self._headers.pop(key, None) or read()
        if header.memory_bytes <= _REMEMBERED_BYTES:
            self._headers[key] = header
        for oldest in list(self._headers):
            if self.memory_bytes <= _REMEMBERED_BYTES:
                break
            self._headers.pop(oldest, None)
        return header

    @property
    def memory_bytes(self) -> int:
        return sum(header.memory_bytes for header in list(self._headers.values()))


_remembered = _Remembered()


def read_header(path: Path, *, vocabulary: bool = False) -> GgufHeader:
    """The header of one file; ModelUnusable says what is wrong with it. Long arrays are left out of
    the metadata unless `vocabulary` is asked for."""
    try:
        status = path.stat()
        if vocabulary:
            return _read(path, status.st_size, vocabulary=True)
        key = (path, status.st_size, status.st_mtime_ns, status.st_ino)
        return _remembered.get(key, lambda: _read(path, status.st_size, vocabulary=False))
    except OSError as error:
        raise ModelUnusable(f"{path} cannot be read: {error.strerror}.") from error


def _read(path: Path, size_bytes: int, *, vocabulary: bool) -> GgufHeader:
    with path.open("rb") as file:
        cursor = _Cursor(file, size_bytes)
        try:
            return _Parser(cursor, vocabulary).header()
        except _Broken as broken:
            raise ModelUnusable(f"{path} is not a usable GGUF file: {broken}.") from broken


class _Broken(Exception):  # noqa: N818 - what the file is
    """Says how."""


class _Cursor:
    """A place in a file of which only as much is read as has been asked for."""

    def __init__(self, file: Any, size_bytes: int) -> None:
        self._file = file
        self._data = b""
        self.size_bytes = size_bytes
        self.at = 0

    def skip(self, count: int) -> int:
        """Where the next `count` bytes begin in `data`; they are there."""
        begin, self.at = self.at, self.at + count
        if self.at > len(self._data):
            self._fetch()
        return begin

    def between(self, begin: int) -> bytes:
        """From there to here."""
        return self._data[begin : self.at]

    def take(self, count: int) -> bytes:
        """The next bytes."""
        return self.between(self.skip(count))

    def unpack(self, form: struct.Struct) -> Any:
        """The next number."""
        begin = self.skip(form.size)
        return form.unpack_from(self._data, begin)[0]

    def numbers(self, form: struct.Struct, count: int) -> list[Any]:
        """So many of them."""
        return [value for (value,) in form.iter_unpack(self.take(form.size * count))]

    def _fetch(self) -> None:
        if self.at > self.size_bytes:
            raise _Broken(
                f"its {self.size_bytes} bytes end within its header, which reaches to {self.at} at "
                "least; fetch it again"
            )
        if self.at > _MAX_HEADER_BYTES:
            raise _Broken(f"its header is larger than {_MAX_HEADER_BYTES} bytes")
        wanted = max(self.at - len(self._data), _READ_BYTES, len(self._data))
        self._data += self._file.read(wanted)
        if self.at > len(self._data):
            raise _Broken(f"it was cut at {len(self._data)} bytes while it was read")


class _Parser:
    """One header from its first byte to its last."""

    def __init__(self, cursor: _Cursor, vocabulary: bool) -> None:
        self._cursor = cursor
        self._vocabulary = vocabulary
        self._values = 0  # of arrays that are kept
        self._text_bytes = 0

    def header(self) -> GgufHeader:
        """All of it."""
        cursor = self._cursor
        if cursor.size_bytes < 24 or cursor.take(4) != _MAGIC:
            raise _Broken(f"its {cursor.size_bytes} bytes do not begin as one")
        version = cursor.unpack(_U32)
        if version not in _VERSIONS:
            raise _Broken(f"its version is {version} instead of 2 or 3")
        tensors = self._count(_MAX_TENSORS, "tensors")
        keys = self._count(_MAX_KEYS, "keys")
        metadata: Metadata = {}
        for _ in range(keys):
            name = self._name()
            if name in metadata:
                raise _Broken(f"it has {name} twice")
            metadata[name] = self._value(cursor.unpack(_U32), name)
        entries = [self._entry() for _ in range(tensors)]
        placed = self._placed(entries, metadata)
        return GgufHeader(metadata, placed, self._memory_bytes(keys, tensors))

    def _memory_bytes(self, keys: int, tensors: int) -> int:
        counted = tensors * _TENSOR_BYTES + keys * _KEY_BYTES + self._values * _VALUE_BYTES
        return counted + 4 * self._text_bytes  # a character may take four bytes

    def _count(self, most: int, what: str) -> int:
        count: int = self._cursor.unpack(_U64)
        if count > most:
            raise _Broken(f"it claims {count} {what}; {most} are the most")
        return count

    def _name(self) -> str:
        length = self._cursor.unpack(_U64)
        if not 0 < length <= _MAX_NAME_BYTES:
            raise _Broken(f"a name in it is {length} bytes long; {_MAX_NAME_BYTES} are the most")
        return self._text(length)

    def _text(self, length: int) -> str:
        begin = self._cursor.skip(length)
        self._text_bytes += length
        if self._text_bytes > _MAX_TEXT_BYTES and not self._vocabulary:
            raise _Broken(f"its strings are longer than {_MAX_TEXT_BYTES} bytes in all")
        try:
            return self._cursor.between(begin).decode("utf-8")
        except UnicodeDecodeError as error:
            raise _Broken(f"a string in it is not UTF-8: {error.reason}") from error

    def _value(self, kind: int, name: str) -> Any:
        if (form := _SCALARS.get(kind)) is not None:
            return self._cursor.unpack(form)
        if kind == _STRING:
            return self._text(self._cursor.unpack(_U64))
        if kind != _ARRAY:
            raise _Broken(f"{shortened(name)} is of the unknown type {kind}")
        return self._array(name)

    def _array(self, name: str) -> list[Any] | None:
        """None: a long one that nobody asked for."""
        kind, count = self._cursor.unpack(_U32), self._cursor.unpack(_U64)
        kept = self._vocabulary or count <= _SHORT_ARRAY
        if kept:
            self._count_values(count, name)
        if (form := _SCALARS.get(kind)) is not None:
            if kept:
                return self._cursor.numbers(form, count)
            self._cursor.skip(form.size * count)
            return None
        if kind != _STRING:
            raise _Broken(f"{shortened(name)} is an array of the unknown type {kind}")
        # Each string takes eight bytes at least: a file cannot claim more than it can hold.
        if count * _U64.size > self._cursor.size_bytes:
            raise _Broken(f"{shortened(name)} claims {count} strings, more than the file can hold")
        if kept:
            return [self._text(self._cursor.unpack(_U64)) for _ in range(count)]
        for _ in range(count):
            self._cursor.skip(self._cursor.unpack(_U64))
        return None

    def _count_values(self, count: int, name: str) -> None:
        self._values += count
        most = _MAX_VOCABULARY_VALUES if self._vocabulary else _MAX_VALUES
        if self._values > most:
            raise _Broken(
                f"its arrays have {self._values} values up to {shortened(name)}; {most} are the "
                "most"
            )

    def _entry(self) -> tuple[str, BlockType, tuple[int, ...], int]:
        name, count = self._name(), self._cursor.unpack(_U32)
        if not 0 < count <= _MAX_DIMENSIONS:
            raise _Broken(f"{shortened(name)} has {count} dimensions")
        shape = tuple(reversed(self._cursor.numbers(_U64, count)))
        kind, offset = self._cursor.unpack(_U32), self._cursor.unpack(_U64)
        if kind not in SERVED:
            raise _Broken(
                f"{shortened(name)} is of type {OTHERS.get(kind, kind)}, which is not served; those"
                f" served are {', '.join(block.name for block in SERVED.values())}"
            )
        block = SERVED[kind]
        if not all(shape) or shape[-1] % block.elements:
            raise _Broken(
                f"{shortened(name)} {list(shape)} is not a whole number of blocks of "
                f"{block.elements} weights ({block.name})"
            )
        return name, block, shape, offset

    def _placed(
        self, entries: list[tuple[str, BlockType, tuple[int, ...], int]], metadata: Metadata
    ) -> dict[str, GgufTensor]:
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment not in _ALIGNMENTS:
            raise _Broken(f"general.alignment is {alignment!r}, not a power of two from 8 on")
        start = -(-self._cursor.at // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, block, shape, offset in entries:
            size_bytes = math.prod(shape) // block.elements * block.size_bytes
            end = start + offset + size_bytes
            if end > self._cursor.size_bytes:
                raise _Broken(
                    f"its {self._cursor.size_bytes} bytes end before {shortened(name)}, which "
                    f"reaches to {end}; fetch it again"
                )
            if offset % alignment:
                raise _Broken(f"{shortened(name)} does not begin at a multiple of {alignment}")
            if name in tensors:
                raise _Broken(f"it has {shortened(name)} twice")
            tensors[name] = GgufTensor(block, shape, start + offset, size_bytes)
        _refuse_overlaps(tensors)
        return tensors


def _refuse_overlaps(tensors: dict[str, GgufTensor]) -> None:
    """Tensors that shared bytes would take more memory than the file has."""
    end, before = 0, ""
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].offset):
        if tensor.offset < end:
            raise _Broken(f"{shortened(name)} begins within {shortened(before)}")
        end, before = tensor.offset + tensor.size_bytes, name


def split_files(path: Path) -> list[Path]:
    """The files of the model that `path` is a file of, in order; all of them are there."""
    found = _SPLIT.fullmatch(path.name)
    if found is None:
        return [path]
    count = int(found["count"])
    files = [
        path.with_name(f"{found['stem']}-{number:05}-of-{found['count']}.gguf")
        for number in range(1, count + 1)
    ]
    missing = [file.name for file in files if not file.exists()]
    if missing or not files:
        raise ModelUnusable(
            f"{path} is one of {count} files of a model, of which {len(missing)} are missing "
            f"({(missing or ['all'])[0]} is the first)."
        )
    return files


def read_split(path: Path, *, vocabulary: bool = False) -> dict[Path, GgufHeader]:
    """The headers of all files of a model, in order. The first has the metadata."""
    files = split_files(path)
    headers = {files[0]: read_header(files[0], vocabulary=vocabulary)}
    headers.update((file, read_header(file)) for file in files[1:])
    said = headers[files[0]].metadata.get("split.count", 1)
    if said != len(files) and (said not in (0, 1) or len(files) > 1):
        raise ModelUnusable(f"{files[0]} is the first of {said} files, but {len(files)} are here.")
    names = [name for header in headers.values() for name in header.tensors]
    if len(set(names)) != len(names):
        raise ModelUnusable(f"{path}: a tensor is in two of its {len(files)} files.")
    wanted = headers[files[0]].metadata.get("split.tensors.count", len(names))
    if wanted != len(names):
        raise ModelUnusable(f"{path} should have {wanted} tensors, but has {len(names)}.")
    return headers


def models_among(names: list[str]) -> dict[str, list[str]]:
    """GGUF models among the names of files: the files of each by the name of its first, without
    such as only belong to another (projectors of images, importance matrices)."""
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        base = name.rpartition("/")[2]
        if not base.endswith(".gguf") or base.startswith(("mmproj", "imatrix")):
            continue
        found = _SPLIT.fullmatch(name)
        first = f"{found['stem']}-00001-of-{found['count']}.gguf" if found else name
        models.setdefault(first, []).append(name)
    return models
