"""Codes of 4 and 8 bits out of 32-bit words, and into the layout that is computed with.

That is [outputs, inputs], 4-bit codes two to a byte, the even input's in the low half.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

# AWQ: the outputs, of each eight, whose codes are in a word from its low end on.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_AT_ONCE = 1 << 20  # codes that are unpacked at a time


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """Codes [..., n], one to a byte, of int32 [..., words], lowest bits first."""
    return unpack_bytes(words.contiguous().view(torch.uint8), bits)


def unpack_bytes(packed: Tensor, bits: int) -> Tensor:
    """The same of bytes."""
    if bits == 8:
        return packed
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)


def pack_nibbles(codes: Tensor) -> Tensor:
    """Codes [..., n] below 16 as bytes [..., n / 2]."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def swap_nibbles(packed: Tensor) -> Tensor:
    """For files that have the even input's code in the high half."""
    return (packed << 4) | (packed >> 4)


def awq_codes(words: Tensor) -> Tensor:
    """[outputs, inputs / 2] of AWQ's [inputs, outputs / 8] words."""
    inputs, columns = words.shape
    packed = words.new_empty((8 * columns, inputs // 2), dtype=torch.uint8)
    some = max(1, _AT_ONCE // (8 * inputs))
    for begin in range(0, columns, some):
        codes = unpack_awq(words[:, begin : begin + some])
        packed[8 * begin : 8 * (begin + some)] = pack_nibbles(codes.t())
    return packed


def unpack_awq(words: Tensor) -> Tensor:
    """Codes [rows, outputs] of [rows, outputs / 8] words."""
    codes = unpack_words(words, 4).view(words.shape[0], -1, 8)
    place = torch.tensor(_AWQ_ORDER, device=words.device).argsort()
    return codes[:, :, place].flatten(1)


def order_of(group_of_input: Tensor, groups: int) -> Tensor:
    """Inputs sorted by their group; ValueError if groups are not of one size.

    A negative group says that there is no order but the plain one.
    """
    indices = group_of_input.long()
    inputs = len(indices)
    if bool((indices < 0).any()):
        return torch.arange(inputs, dtype=torch.int32, device=indices.device)
    if int(indices.max()) >= groups:
        raise ValueError(f"names group {int(indices.max())} of {groups}")
    sizes = torch.bincount(indices, minlength=groups)
    if bool((sizes != inputs // groups).any()):
        raise ValueError(
            f"has groups of {int(sizes.min())} to {int(sizes.max())} inputs instead of "
            f"{inputs // groups}"
        )
    return indices.argsort(stable=True).int()


def reorder_columns(codes: Tensor, order: Tensor, bits: int) -> Tensor:
    """Codes [outputs, ...] with their columns in another order."""
    places = order.long()
    if bool((places.diff() == 1).all()):
        return codes
    sorted_codes = torch.empty_like(codes)
    some = max(1, _AT_ONCE // len(order))
    for begin in range(0, len(codes), some):
        part = unpack_bytes(codes[begin : begin + some], bits)[:, places]
        sorted_codes[begin : begin + some] = part if bits == 8 else pack_nibbles(part)
    return sorted_codes
