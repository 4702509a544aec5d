"""How keys and values lie in memory, and so how many bytes a token takes.

They are kept in the numbers that are computed with, or as codes of 8 bits with a scale for each
vector: the key, or the value, of one token in one KV head. Plans and arenas ask here, so that both
count the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.catalog.weights import ITEM_BYTES


@dataclass(frozen=True, slots=True)
class KvFormat:
    """The numbers of a vector, and what is kept beside them."""

    name: str  # of the numbers, as torch has it
    item_bytes: int
    scale_bytes: int = 0  # of each vector; 0: it has no scale

    @property
    def scaled(self) -> bool:
        """Whether the numbers are codes."""
        return self.scale_bytes > 0

    def size_bytes(self, values: int, vectors: int) -> int:
        """Bytes of so many numbers in so many vectors."""
        return values * self.item_bytes + vectors * self.scale_bytes

    def token_bytes(self, size_bytes: int, block_tokens: int) -> int:
        """What a token takes that has `size_bytes` in a group of layers, in blocks of so many.

        Memory comes in pieces that are whole blocks and whole pages. Of codes with scales blocks
        have few factors of two, and a piece of a large model would be a gigabyte: they are a little
        larger than what is in them.
        """
        if not self.scaled:
            return size_bytes
        return _evener(size_bytes * block_tokens, block_tokens) // block_tokens


def _evener(size: int, unit: int) -> int:
    """At most a 64th more, in whole `unit`, with the most factors of two that there are."""
    step = 1 << size.bit_length()
    while step > 1:
        found = -(-size // step) * step
        if found <= size + size // 64 and found % unit == 0:
            return found
        step //= 2
    return size


# A scale is a bfloat16: it has the range of float32, so that no vector is too large or too small
# for it, and since codes are made with the rounded scale, its few digits cost nothing.
INT8 = KvFormat("int8", item_bytes=1, scale_bytes=2)
MADE = {INT8.name: INT8}


def kv_format(wanted: str, dtype: str) -> KvFormat:
    """The format that the setting `wanted` names; "auto": the numbers that are computed with."""
    return MADE.get(wanted) or KvFormat(dtype, ITEM_BYTES[dtype])


@dataclass(frozen=True, slots=True)
class KvLayers:
    """What layers that look back equally far keep of a token."""

    window: int | None  # tokens that a row sees, itself included; None: all
    values: int  # numbers of all keys and values
    vectors: int  # keys and values, of each KV head one

    def size_bytes(self, form: KvFormat) -> int:
        """Bytes of a token."""
        return form.size_bytes(self.values, self.vectors)
