"""What is in a block file: written and read whole, with its checksums."""

from __future__ import annotations

import errno
import zlib
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.tiers.format import (
    PAGE,
    BadBlock,
    Group,
    Header,
    Payload,
    block_name,
    decode,
    header_size,
    require,
    require_checksums,
    stated_header_size,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.tiers.files import Files

# Written and checked in pieces that stay in a core's own cache between the two.
CHUNK = 512 << 10


def write_file(
    files: Files,
    descriptor: int,
    blank: Header,
    payloads: Sequence[Payload],
    proceed: Callable[[], bool],
) -> bool:
    """Fill a block file straight from the owner's memory; False if told to stop half-way.

    `blank` is the header but for the payloads, whose checksums are known last.
    """
    offset = header_size(len(blank.key), len(payloads))
    groups = []
    for payload in payloads:
        crc = 0
        for start in range(0, payload.data.nbytes, CHUNK):
            if not proceed():
                return False
            chunk = payload.data[start : start + CHUNK]
            crc = zlib.crc32(chunk, crc)
            _write_whole(files, descriptor, chunk, offset + start)
        offset += payload.data.nbytes
        groups.append(Group(payload.kind, payload.data.nbytes, crc))
    _write_whole(files, descriptor, replace(blank, groups=tuple(groups)).encode(), 0)
    return True


def read_file(
    files: Files, descriptor: int, model: bytes, key: bytes, into: Sequence[Payload]
) -> None:
    """Fill the owner's memory from a block file; BadBlock if it is not exactly that block."""
    header = bytearray(header_size(len(key), len(into)))
    size = len(header) + sum(payload.data.nbytes for payload in into)
    actual = files.status_of(descriptor).st_size
    if actual != size:
        raise BadBlock(f"it has {actual} bytes, not {size}")
    _read_whole(files, descriptor, memoryview(header), 0)
    stated = decode(bytes(header))
    require(stated, model, key, into)
    offset = len(header)
    crcs = []
    for payload in into:
        crcs.append(_read_checked(files, descriptor, payload.data, offset))
        offset += payload.data.nbytes
    require_checksums(stated.groups, crcs)


def read_header(files: Files, descriptor: int) -> Header:
    """The header of a block file of any model; BadBlock if there is none."""
    start = bytearray(PAGE)
    _read_whole(files, descriptor, memoryview(start), 0)
    data = bytearray(stated_header_size(bytes(start)))
    _read_whole(files, descriptor, memoryview(data), 0)
    return decode(bytes(data))


def check_file(files: Files, descriptor: int, name: str) -> None:
    """Read a block file of any model; BadBlock if it is not what its name and header promise."""
    header = read_header(files, descriptor)
    if block_name(header.model, header.key) != name:
        raise BadBlock("it belongs to another key")
    actual = files.status_of(descriptor).st_size
    if actual != header.file_size:
        raise BadBlock(f"it has {actual} bytes, not {header.file_size}")
    buffer, offset, crcs = memoryview(bytearray(CHUNK)), header.size, []
    for group in header.groups:
        crc = 0
        for position in range(0, group.size, CHUNK):
            chunk = buffer[: min(CHUNK, group.size - position)]
            crc = _read_checked(files, descriptor, chunk, offset + position, crc)
        offset += group.size
        crcs.append(crc)
    require_checksums(header.groups, crcs)


def _read_checked(
    files: Files, descriptor: int, buffer: memoryview, offset: int, crc: int = 0
) -> int:
    for start in range(0, buffer.nbytes, CHUNK):
        chunk = buffer[start : start + CHUNK]
        _read_whole(files, descriptor, chunk, offset + start)
        crc = zlib.crc32(chunk, crc)
    return crc


def _read_whole(files: Files, descriptor: int, buffer: memoryview, offset: int) -> None:
    while buffer.nbytes:
        count = files.read(descriptor, [buffer], offset)
        if count == 0:
            raise BadBlock("it ends too early")
        buffer, offset = buffer[count:], offset + count


def _write_whole(files: Files, descriptor: int, data: memoryview | bytes, offset: int) -> None:
    rest = memoryview(data)
    while rest.nbytes:
        count = files.write(descriptor, rest, offset)
        if count == 0:
            raise OSError(errno.EIO, "the disk takes no more bytes")
        rest, offset = rest[count:], offset + count
