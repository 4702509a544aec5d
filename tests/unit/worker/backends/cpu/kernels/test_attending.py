"""Attention of one row over blocks: against float64, for any sizes, and nothing read that is not
its own."""

from __future__ import annotations

import ctypes
import mmap
from typing import TYPE_CHECKING

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.worker.backends.cpu.kernels.one_call.attending import attend

if TYPE_CHECKING:
    from numpy.typing import NDArray

_PAGE = mmap.PAGESIZE
_libc = ctypes.CDLL(None, use_errno=True)


class Guarded:
    """Numbers that end where a page begins that may not be read."""

    def __init__(self, numbers: NDArray[np.float32]) -> None:
        size = -(-numbers.nbytes // _PAGE) * _PAGE
        self._pages = mmap.mmap(-1, size + _PAGE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._pages))
        assert _libc.mprotect(ctypes.c_void_p(address + size), _PAGE, 0) == 0
        first = size - numbers.nbytes
        self.numbers = np.frombuffer(self._pages, np.float32, numbers.size, first)
        self.numbers[:] = numbers.ravel()
        self.address = address + first


def reference(
    query: NDArray[np.float32], keys: NDArray[np.float32], values: NDArray[np.float32], scale: float
) -> NDArray[np.float64]:
    """Softmax in float64."""
    scores = keys.astype(np.float64) @ query.astype(np.float64) * scale
    weights = np.exp(scores - scores.max())
    found: NDArray[np.float64] = weights @ values.astype(np.float64) / weights.sum()
    return found


@given(
    width=st.integers(1, 40).map(lambda half: 2 * half) | st.sampled_from([64, 128, 130]),
    tokens=st.sampled_from([1, 3, 16, 48]),
    context=st.integers(1, 200),
    window=st.integers(0, 90),
    kv_heads=st.integers(1, 3),
    spread=st.sampled_from([0.1, 3.0, 30.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_it_is_softmax_over_what_is_seen(
    width: int, tokens: int, context: int, window: int, kv_heads: int, spread: float, seed: int
) -> None:
    chance = np.random.default_rng(seed)
    start = max(0, context - window) if window else 0
    blocks = -(-context // tokens)
    table = chance.permutation(blocks).astype(np.int32)
    shape = blocks, tokens, kv_heads, width
    head = int(chance.integers(kv_heads))
    keys = (chance.standard_normal(shape) * spread).astype(np.float32)
    values = chance.standard_normal(shape).astype(np.float32)
    query = chance.standard_normal(width).astype(np.float32)
    # What is behind the context is not read: in the table it is the last block, and its rest NaN.
    unseen = context - (blocks - 1) * tokens
    keys[table[-1], unseen:], values[table[-1], unseen:] = np.nan, np.nan
    own = Guarded(keys), Guarded(values)
    room = -(-max(width, 64) // 16) * 16
    scratch = np.empty((2, room), np.float32)
    answer = np.empty(width, np.float32)
    scale = np.float32(width**-0.5)
    attend(
        query, (start, context, scale), *(part.address + head * width * 4 for part in own),
        table, (width, tokens * kv_heads * width, kv_heads * width, tokens), tuple(scratch), answer,
    )  # fmt: skip
    seen_keys, seen_values = (
        part[table].reshape(-1, kv_heads, width)[start:context, head] for part in (keys, values)
    )
    expected = reference(query, seen_keys, seen_values, float(scale))
    np.testing.assert_allclose(answer, expected, rtol=0, atol=2e-5 * max(1.0, spread))


def test_what_is_no_number_is_told() -> None:
    """A score that is none makes the answer none, wherever it is."""
    tokens, width = 16, 32
    for place in (0, 15, 16, 37):
        keys = np.ones((4, tokens, width), np.float32)
        keys[place // tokens, place % tokens] = np.nan
        own = Guarded(keys)
        answer = np.zeros(width, np.float32)
        scratch = tuple(np.empty((2, 64), np.float32))
        attend(
            np.ones(width, np.float32), (0, 38, np.float32(1.0)), own.address, own.address,
            np.arange(4, dtype=np.int32), (width, tokens * width, width, tokens), scratch, answer,
        )  # fmt: skip
        assert np.isnan(answer).all()
