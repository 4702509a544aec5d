"""Token ids that several requests have in common, such as the choices of `n`: stored once."""

from __future__ import annotations

from array import array
from hashlib import blake2b
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from penstock.wire import token_ids

if TYPE_CHECKING:
    from penstock.wire import TokenIds

_DIGEST_BYTES = 16


class SharedTokens:
    """Lists and sets of ids by what is in them, while anybody has them."""

    def __init__(self) -> None:
        self._lists: WeakValueDictionary[bytes, array[int]] = WeakValueDictionary()
        self._sets: WeakValueDictionary[bytes, frozenset[int]] = WeakValueDictionary()

    def list(self, ids: TokenIds) -> array[int]:
        """The same ids; the same object for whoever has the same."""
        packed = ids if isinstance(ids, array) else token_ids(ids)
        return self._lists.setdefault(_key(packed), packed)

    def set(self, ids: TokenIds) -> frozenset[int]:
        """Likewise, without order."""
        packed = ids if isinstance(ids, array) else token_ids(ids)
        key = _key(packed)
        known = self._sets.get(key)
        if known is None:
            known = self._sets[key] = frozenset(packed)
        return known


def _key(ids: array[int]) -> bytes:
    return blake2b(ids, digest_size=_DIGEST_BYTES).digest()
