"""GGUF headers: what they say, and that no file can make the reader take more than it should."""

from __future__ import annotations

import gc
import struct
import tracemalloc
from pathlib import Path  # noqa: TC003 - a fixture's type
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.catalog.gguf import header
from penstock.catalog.gguf.header import models_among, read_header, read_split
from penstock.errors import ModelUnusable


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def string(key: str, value: str) -> bytes:
    return text(key) + struct.pack("<I", 8) + text(value)


def integer(key: str, value: int) -> bytes:
    return text(key) + struct.pack("<II", 4, value)


def strings(key: str, values: list[str]) -> bytes:
    items = b"".join(text(value) for value in values)
    return text(key) + struct.pack("<IIQ", 9, 8, len(values)) + items


def shorts(key: str, count: int) -> bytes:
    values = struct.pack(f"<{count}h", *range(1000, 1000 + count))
    return text(key) + struct.pack("<IIQ", 9, 3, count) + values


def tensor(name: str, dims: tuple[int, ...], kind: int, offset: int) -> bytes:
    sizes = struct.pack(f"<{len(dims)}Q", *dims)
    return text(name) + struct.pack("<I", len(dims)) + sizes + struct.pack("<IQ", kind, offset)


def whole(keys: list[bytes], tensors: list[bytes], data_bytes: int, **claims: Any) -> bytes:
    head = b"GGUF" + struct.pack("<I", claims.get("version", 3))
    head += struct.pack("<Q", claims.get("tensor_count", len(tensors)))
    head += struct.pack("<Q", claims.get("key_count", len(keys)))
    head += b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + bytes(data_bytes)


KEYS = [string("general.architecture", "llama"), integer("llama.block_count", 3)]
MATRIX = tensor("blk.0.attn_q.weight", (64, 3), 2, 32)  # Q4_0: 6 blocks of 18 bytes
NORM = tensor("output_norm.weight", (8,), 0, 0)
GOOD = whole(KEYS, [NORM, MATRIX], 32 + 6 * 18)


def written(folder: Path, content: bytes, name: str = "model.gguf") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def test_a_header_is_read(tmp_path: Path) -> None:
    found = read_header(written(tmp_path, GOOD))
    assert found.metadata == {"general.architecture": "llama", "llama.block_count": 3}
    matrix, norm = found.tensors["blk.0.attn_q.weight"], found.tensors["output_norm.weight"]
    assert (matrix.block.name, matrix.shape, matrix.size_bytes) == ("Q4_0", (3, 64), 108)
    assert (norm.block.name, norm.shape, matrix.offset - norm.offset) == ("F32", (8,), 32)
    assert matrix.offset + matrix.size_bytes == len(GOOD)


def test_vocabularies_are_kept_only_if_asked_for(tmp_path: Path) -> None:
    words = [f"word {number}" for number in range(5000)]
    keys = [*KEYS, strings("tokenizer.ggml.tokens", words), strings("general.tags", ["a", "b"])]
    path = written(tmp_path, whole(keys, [NORM], 32))
    assert read_header(path).metadata["tokenizer.ggml.tokens"] is None
    assert read_header(path).metadata["general.tags"] == ["a", "b"]
    assert read_header(path, vocabulary=True).metadata["tokenizer.ggml.tokens"] == words


def test_a_file_that_was_changed_is_read_again(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD)
    assert read_header(path) is read_header(path)
    written(tmp_path, whole(KEYS[:1], [NORM, MATRIX], 32 + 6 * 18))
    assert "llama.block_count" not in read_header(path).metadata


def test_what_is_remembered_of_many_files_is_bounded(tmp_path: Path) -> None:
    texts = [string(f"key {number}", "\N{GRINNING FACE}" * 100_000) for number in range(10)]
    gc.collect()
    tracemalloc.start()
    for number in range(12):
        content = whole([*KEYS, *texts, shorts("a", 1024)], [NORM], 32)
        read_header(written(tmp_path, content, f"{number}.gguf"))
    del content
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert header._remembered.memory_bytes <= header._REMEMBERED_BYTES
    assert held <= header._REMEMBERED_BYTES + (1 << 20)


def test_no_header_takes_more_than_is_counted(tmp_path: Path) -> None:
    tensors = [tensor(f"{number}" * 3, (8, 8, 8, 8), 0, 16384 * number) for number in range(300)]
    keys = [*KEYS, *(shorts(f"key {number}", 100) for number in range(100))]
    path = written(tmp_path, whole(keys, tensors, 16384 * 300))
    read_header(path)
    tracemalloc.start()
    found = header._read(path, path.stat().st_size, vocabulary=False)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert held <= found.memory_bytes <= 3 * held


@pytest.mark.parametrize("kept", range(0, len(GOOD), 7))
def test_a_cut_file_is_refused(tmp_path: Path, kept: int) -> None:
    path = written(tmp_path, GOOD[:kept])
    with pytest.raises(ModelUnusable, match=r"not a usable GGUF file: its \d+ bytes (end|do not)"):
        read_header(path)


HUGE = (1 << 64) - 1
BAD = {
    "begins otherwise": (b"GGML" + GOOD[4:], "do not begin as one"),
    "big-endian": (b"GGUF" + struct.pack(">I", 3) + GOOD[8:], "version is 50331648"),
    "tensors": (whole(KEYS, [NORM], 32, tensor_count=HUGE), f"claims {HUGE} tensors; 65536 are"),
    "keys": (whole(KEYS, [NORM], 32, key_count=HUGE), f"claims {HUGE} keys; 4096 are the most"),
    "a string": (
        whole([text("a") + struct.pack("<IQ", 8, HUGE)], [], 32),
        r"bytes end within its header, which reaches to 1844674407370955",
    ),
    "an array of strings": (
        whole([text("a") + struct.pack("<IIQ", 9, 8, 1 << 40)], [], 32),
        "a claims 1099511627776 strings, more than the file can hold",
    ),
    "an array of numbers": (
        whole([text("a") + struct.pack("<IIQ", 9, 10, HUGE // 8)], [], 32),
        "bytes end within its header",
    ),
    "arrays in arrays": (
        whole([text("a") + struct.pack("<IIQ", 9, 9, 3)], [], 32),
        "a is an array of the unknown type 9",
    ),
    "a name": (whole([struct.pack("<Q", 1 << 20)], [], 1 << 21), "name in it is 1048576 bytes"),
    "bytes": (whole([string("a", "b").replace(b"b", b"\xff")], [], 32), "is not UTF-8"),
    "twice": (whole([*KEYS, KEYS[0]], [NORM], 32), "it has general.architecture twice"),
    "two tensors": (whole(KEYS, [NORM, NORM], 32), "it has output_norm.weight twice"),
    "dimensions": (whole(KEYS, [tensor("a", (1,) * 5, 0, 0)], 32), "a has 5 dimensions"),
    "no elements": (whole(KEYS, [tensor("a", (0, 4), 0, 0)], 32), "not a whole number of blocks"),
    "a part of a block": (whole(KEYS, [tensor("a", (48, 2), 2, 0)], 99), "blocks of 32 weights"),
    "overflow": (whole(KEYS, [tensor("a", (1 << 63,) * 4, 0, 0)], 32), "end before a, which"),
    "an offset": (whole(KEYS, [tensor("a", (8,), 0, 1 << 62)], 32), "end before a, which reaches"),
    "no boundary": (whole(KEYS, [tensor("a", (8,), 0, 4)], 64), "not begin at a multiple of 32"),
    "a type": (whole(KEYS, [tensor("a", (256,), 16, 0)], 66), "of type IQ2_XXS, which is not"),
    "overlapping": (
        whole(KEYS, [tensor("a", (32,), 0, 0), tensor("b", (32,), 0, 96)], 256),
        "b begins within a",
    ),
    "the same bytes": (
        whole(KEYS, [tensor("a", (32,), 0, 0), tensor("b", (32,), 0, 0)], 128),
        "b begins within a",
    ),
    "many short arrays": (
        whole([shorts(f"key {number}", 1024) for number in range(1000)], [NORM], 32),
        "its arrays have 17408 values up to key 16; 16384 are the most",
    ),
    "long texts": (
        whole([string(f"key {number}", "x" * (1 << 20)) for number in range(5)], [NORM], 32),
        "its strings are longer than 4194304 bytes in all",
    ),
    "alignment": (
        whole([*KEYS, integer("general.alignment", 3)], [NORM], 32),
        "general.alignment is 3, not a power of two",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_hostile_headers_are_refused_in_a_sentence(tmp_path: Path, name: str) -> None:
    content, sentence = BAD[name]
    with pytest.raises(ModelUnusable, match=sentence):
        read_header(written(tmp_path, content))


def test_a_header_that_is_too_large_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(header, "_MAX_HEADER_BYTES", 1 << 20)
    path = written(tmp_path, whole([string("a", "x" * (2 << 20))], [], 32))
    with pytest.raises(ModelUnusable, match="header is larger than 1048576 bytes"):
        read_header(path)


@given(at=st.integers(0, len(GOOD) - 1), value=st.binary(min_size=1, max_size=9))
def test_any_damage_is_refused_or_read(
    tmp_path_factory: pytest.TempPathFactory, at: int, value: bytes
) -> None:
    damaged = GOOD[:at] + value + GOOD[at + len(value) :]
    path = written(tmp_path_factory.mktemp("damaged"), damaged)
    try:
        read_header(path)
    except ModelUnusable as error:
        assert str(path) in error.message


def test_split_files_are_one_model(tmp_path: Path) -> None:
    count = text("split.count") + struct.pack("<IH", 2, 2)
    first = written(tmp_path, whole([*KEYS, count], [NORM], 32), "m-00001-of-00002.gguf")
    with pytest.raises(ModelUnusable, match=r"one of 2 files of a model, of which 1 are missing"):
        read_split(first)
    second = written(tmp_path, whole([], [tensor("a", (8,), 0, 0)], 32), "m-00002-of-00002.gguf")
    headers = read_split(first)
    assert [list(found.tensors) for found in headers.values()] == [["output_norm.weight"], ["a"]]
    written(tmp_path, whole([], [NORM], 32), second.name)
    with pytest.raises(ModelUnusable, match="a tensor is in two of its 2 files"):
        read_split(first)
    wrong = first.rename(tmp_path / "other.gguf")
    with pytest.raises(ModelUnusable, match="is the first of 2 files, but 1 are here"):
        read_split(wrong)


def test_models_among_files() -> None:
    names = ["b-Q8_0.gguf", "a-00002-of-00002.gguf", "a-00001-of-00002.gguf", "mmproj-x.gguf", "x"]
    assert models_among(names) == {
        "a-00001-of-00002.gguf": ["a-00001-of-00002.gguf", "a-00002-of-00002.gguf"],
        "b-Q8_0.gguf": ["b-Q8_0.gguf"],
    }
