"""What a block file is: its name, its header, its payloads and how they are checked.

    IDENTITY-KEY.kv              16 hex digits of the model's identity, the key in hex
    IDENTITY-KEY.TOKEN.part      the same being written; whoever writes it holds its lock

    | header, one page or more                                            | payloads, in order |
    | magic · version · header bytes · model · its name for people · key  |                    |
    | (kind, bytes, crc)… · crc of all that · zeros up to the page        |                    |

Numbers are little-endian. The payloads of a block belong to groups of layers: "attention" for keys
and values, "recurrent" for a state, whatever comes next under a name of its own. Nothing here
knows what is in them. The key says what a file must contain, so a file is right or it is removed.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import struct
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from typing_extensions import Buffer

VERSION = 1
PAGE = 4096

_MAGIC = b"penstkKV"
_LABEL_BYTES = 64
# Magic, version, header bytes, model, label, key bytes, groups.
_START = struct.Struct(f"<8sII32s{_LABEL_BYTES}sHH")
_GROUP = struct.Struct("<16sQI")  # kind, bytes, crc
_END = struct.Struct("<I")  # crc of the header so far
IDENTITY_BYTES = 8  # of a model's digest, in the names of its files
_KEY_BYTES = 64  # the longest key: 128 hex digits, well below the longest name of a file
_BLOCK_NAME = re.compile(
    rf"([0-9a-f]{{{2 * IDENTITY_BYTES}}})-((?:[0-9a-f]{{2}}){{1,{_KEY_BYTES}}})"
)
_BLOCK_SUFFIX = ".kv"
_PART_SUFFIX = ".part"


class BadBlock(Exception):  # noqa: N818 - named for what is the case
    """A file that is not what its name promises; the message says in what."""


@dataclass(frozen=True, slots=True, init=False)
class Payload:
    """The bytes of one group of layers in the owner's memory, to write from or to read into."""

    kind: str
    data: memoryview

    def __init__(self, kind: str, data: Buffer) -> None:
        if not 0 < len(kind.encode()) <= 16:
            raise ValueError(f"a payload's kind has 1 to 16 bytes, not {kind!r}")
        view = memoryview(data)
        # A view without elements cannot be cast, whatever its shape.
        flat = view.cast("B") if view.nbytes else memoryview(b"")
        object.__setattr__(self, "kind", kind)
        object.__setattr__(self, "data", flat)


@dataclass(frozen=True, slots=True)
class Group:
    """A payload as the header describes it."""

    kind: str
    size: int
    crc: int


@dataclass(frozen=True, slots=True)
class Header:
    """All that a block file says of itself."""

    model: bytes
    key: bytes
    groups: tuple[Group, ...] = ()
    label: str = ""  # what people call the model; not checked, and cut if it is long

    @property
    def size(self) -> int:
        return header_size(len(self.key), len(self.groups))

    @property
    def file_size(self) -> int:
        return self.size + sum(group.size for group in self.groups)

    def encode(self) -> bytes:
        label = self.label.encode()[:_LABEL_BYTES]
        counts = len(self.key), len(self.groups)
        parts = [
            _START.pack(_MAGIC, VERSION, self.size, self.model, label, *counts),
            self.key,
            *(_GROUP.pack(group.kind.encode(), group.size, group.crc) for group in self.groups),
        ]
        content = b"".join(parts)
        return (content + _END.pack(zlib.crc32(content))).ljust(self.size, b"\0")


def header_size(key_bytes: int, groups: int) -> int:
    """Whole pages: payloads begin on one, as a reader past the page cache would need."""
    return space(_START.size + key_bytes + groups * _GROUP.size + _END.size)


def space(size: int) -> int:
    """What a file of `size` bytes takes on a disk."""
    return -(-size // PAGE) * PAGE


def stated_header_size(start: bytes) -> int:
    """How long the header is that begins so; to be checked by `decode`."""
    magic, version, size = _START.unpack_from(start)[:3]
    if magic != _MAGIC:
        raise BadBlock("it does not begin as a block file does")
    if version != VERSION:
        raise BadBlock(f"it has format {version}, not {VERSION}")
    if not 0 < size <= 1 << 20:
        raise BadBlock(f"its header claims {size} bytes")
    return int(size)


def decode(data: bytes) -> Header:
    """The header that these bytes are."""
    if len(data) < _START.size:
        raise BadBlock("it is shorter than a header")
    size = stated_header_size(data)
    _, _, _, model, label, key_bytes, count = _START.unpack_from(data)
    content = _START.size + key_bytes + count * _GROUP.size
    if size != len(data) or size != header_size(key_bytes, count):
        raise BadBlock(f"its header claims {size} bytes")
    if _END.unpack_from(data, content)[0] != zlib.crc32(data[:content]):
        raise BadBlock("the checksum of its header is wrong")
    groups = []
    for number in range(count):
        kind, length, crc = _GROUP.unpack_from(data, _START.size + key_bytes + number * _GROUP.size)
        groups.append(Group(_text(kind), length, crc))
    key = data[_START.size : _START.size + key_bytes]
    return Header(model, key, tuple(groups), _text(label))


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode(errors="ignore")


def require(header: Header, model: bytes, key: bytes, into: Sequence[Payload]) -> None:
    """Raise unless this is that block of that model, in that shape."""
    if header.model != model:
        raise BadBlock("it belongs to another model")
    if header.key != key:
        raise BadBlock("it belongs to another key")
    stated = [(group.kind, group.size) for group in header.groups]
    wanted = [(payload.kind, payload.data.nbytes) for payload in into]
    if stated != wanted:
        raise BadBlock(f"it holds {stated}, not {wanted}")


def require_checksums(groups: Iterable[Group], crcs: Iterable[int]) -> None:
    """Raise unless every payload has the checksum that the header states."""
    for group, crc in zip(groups, crcs, strict=True):
        if group.crc != crc:
            raise BadBlock(f"the checksum of its {group.kind} payload is wrong")


# --- names -------------------------------------------------------------------------------------


def model_digest(fingerprint: str) -> bytes:
    """What files carry of a model's fingerprint."""
    return hashlib.sha256(fingerprint.encode()).digest()


def block_tag(model: bytes, key: bytes) -> bytes:
    """What a block's name is made of, in less than half its length."""
    if not 0 < len(key) <= _KEY_BYTES:
        raise ValueError(f"a key has 1 to {_KEY_BYTES} bytes, not {len(key)}")
    return model[:IDENTITY_BYTES] + key


def name_of(tag: bytes) -> str:
    """A name of hex digits only: no key can point out of the directory."""
    return f"{tag[:IDENTITY_BYTES].hex()}-{tag[IDENTITY_BYTES:].hex()}{_BLOCK_SUFFIX}"


def tag_of(name: str) -> bytes:
    """What the name of a block file is made of."""
    return bytes.fromhex(name.removesuffix(_BLOCK_SUFFIX).replace("-", ""))


def block_name(model: bytes, key: bytes) -> str:
    """The name of a block's file."""
    return name_of(block_tag(model, key))


def part_name(name: str) -> str:
    """A name to write the block `name` under, used by nobody else."""
    return f"{name.removesuffix(_BLOCK_SUFFIX)}.{secrets.token_hex(8)}{_PART_SUFFIX}"


def parse_block_name(name: str) -> tuple[str, bytes] | None:
    """(identity, key) of a block file, None for anything else."""
    match = _BLOCK_NAME.fullmatch(name.removesuffix(_BLOCK_SUFFIX))
    if match is None or not name.endswith(_BLOCK_SUFFIX):
        return None
    return match[1], bytes.fromhex(match[2])


def is_part(name: str) -> bool:
    """Whether it is ours and being written, or was."""
    stem, _, _ = name.removesuffix(_PART_SUFFIX).rpartition(".")
    return name.endswith(_PART_SUFFIX) and _BLOCK_NAME.fullmatch(stem) is not None
