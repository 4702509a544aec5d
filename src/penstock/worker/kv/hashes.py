"""Keys of KV blocks: a hash over everything that a block's content is a function of.

A key is a hash over the key of the block before it and the block's own tokens, so it stands for
everything from the first token on. What else makes KV differ is part of it: a salt at the root, and
extras by block index, such as the digest of an attachment. Blocks of several layer groups have the
same key; where they share one name space, as on disk, `group_key` tells them apart.
"""

from __future__ import annotations

import hashlib
from array import array
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Sequence as Seq

    from penstock.wire import Media

KEY_BYTES = 16


def root_key(salt: bytes = b"") -> bytes:
    """Where hashes begin: with another salt they have no key in common."""
    return hashlib.blake2b(salt, digest_size=KEY_BYTES).digest()


def group_key(key: bytes, group: int) -> bytes:
    """The key of a group's block where keys of all groups are in one name space."""
    return key + bytes([group]) if group else key


def media_extras(media: Seq[Media], block_tokens: int) -> dict[int, bytes]:
    """What images add to the keys of the blocks that have tokens of them: placeholders are the same
    for all images. Which rows of it a block has is told by where the first of them is."""
    extras: dict[int, bytes] = {}
    for image in media:
        assert len(image.digest) >= KEY_BYTES, "an image without a digest has no key"
        done = 0
        for first, count in zip(image.runs[::2], image.runs[1::2], strict=True):
            for block in range(first // block_tokens, -(-(first + count) // block_tokens)):
                row = done + max(0, block * block_tokens - first)
                extras[block] = extras.get(block, b"") + image.digest + row.to_bytes(4, "little")
            done += count
    return extras


class BlockHashes:
    """The keys of one sequence's blocks, computed as far as anybody has asked for them."""

    def __init__(
        self,
        root: bytes,
        tokens: Seq[int],
        block_tokens: int,
        extras: Mapping[int, bytes] | None = None,
    ) -> None:
        self._root = root
        self._tokens = tokens  # grows; what is in it does not change
        self.block_tokens = block_tokens
        self._extras = extras or {}
        self._keys: list[bytes] = []

    def key(self, index: int) -> bytes:
        """The key of a block; its tokens are all known."""
        while len(self._keys) <= index:
            start = len(self._keys) * self.block_tokens
            tokens = array("i", self._tokens[start : start + self.block_tokens])
            assert len(tokens) == self.block_tokens, "a block that is not full has no key"
            parent = self._keys[-1] if self._keys else self._root
            content = parent + tokens.tobytes() + self._extras.get(len(self._keys), b"")
            digest = hashlib.blake2b(content, digest_size=KEY_BYTES)
            self._keys.append(digest.digest())
        return self._keys[index]
