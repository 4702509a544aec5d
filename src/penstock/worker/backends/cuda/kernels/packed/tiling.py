"""Packed weights brought into the layout of `tiled`, by class; None: there is no kernel for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from penstock.worker.backends.cuda.kernels.packed import triton_codes as codes
from penstock.worker.backends.cuda.kernels.packed import triton_scales as scales
from penstock.worker.backends.cuda.kernels.packed.tiled import (
    Coding,
    Planes,
    TiledWeight,
    Workspace,
)
from penstock.worker.models.linear.block_fp8 import BlockFp8Weight
from penstock.worker.models.linear.gguf_blocks import GgufWeight
from penstock.worker.models.linear.grouped import (
    E2m1Weight,
    Fp8Weight,
    GroupedWeight,
    Int4Weight,
    Int8Weight,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.worker.models.linear import PackedWeight

_AT_ONCE = 1 << 24  # codes that are unpacked at a time
_BLOCK = 128
_SCALES = {
    torch.float32: scales.FLOAT32.value,
    torch.bfloat16: scales.BFLOAT16.value,
    torch.float16: scales.FLOAT16.value,
    torch.float8_e8m0fnu: scales.EXPONENT.value,
    torch.float8_e4m3fn: scales.FLOAT8.value,
}


def tiled(weight: PackedWeight, workspace: Workspace) -> TiledWeight | None:
    """The same weight in another layout; float32 rows are left to torch."""
    if weight.dtype not in (torch.bfloat16, torch.float16):
        return None
    found = _MAKERS.get(type(weight))
    made = None if found is None else found(weight)
    return None if made is None else TiledWeight(*made, weight.scratch, workspace)


def span_of(inputs: int, group: int, parts: int) -> int:
    """The largest span that inputs are whole multiples of and whose parts have one scale each."""
    for span in (128, 64):
        fits = group % span == 0 or (2 * group == span) or (4 * group == span and parts == 4)
        if fits and inputs % span == 0:
            return span
    return 0


def _nibbles(packed: Tensor) -> Tensor:
    """Codes [outputs, inputs] of bytes that have the even input's in the low half."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)


def _words(packed: Tensor, span: int, unpacked: Callable[[Tensor], Tensor]) -> Tensor:
    """Words [outputs, words] of codes in any packing, some outputs at a time."""
    first = unpacked(packed[:1])
    inputs, parts = first.shape[1], 4 if unpacked is not _as_bytes else 2
    out = torch.empty(len(packed), inputs // parts, dtype=torch.int16, device=packed.device)
    some = max(1, _AT_ONCE // inputs)
    shifts = torch.arange(parts, device=packed.device, dtype=torch.int32) * (16 // parts)
    for begin in range(0, len(packed), some):
        of_spans = torch.unflatten(
            unpacked(packed[begin : begin + some]), 1, (-1, parts, span // parts)
        )
        words = (of_spans.int() << shifts[:, None]).sum(dim=2, dtype=torch.int32)
        out[begin : begin + some] = words.to(torch.int16).flatten(1)
    return out


def _as_bytes(packed: Tensor) -> Tensor:
    return packed.view(torch.uint8)


def _plane(numbers: Tensor) -> Tensor:
    """[words, outputs] of the bits of [outputs, groups]."""
    bits = numbers.contiguous().view(torch.uint8)
    lacking = -bits.shape[1] % 4
    padded = torch.nn.functional.pad(bits, (0, lacking)) if lacking else bits
    return _transposed(padded.view(torch.int32))


def _transposed(words: Tensor) -> Tensor:
    """In memory of its own: of a single word, `contiguous` would leave odd strides."""
    return torch.empty(words.shape[::-1], dtype=words.dtype, device=words.device).copy_(words.t())


def _order(weight: GroupedWeight) -> Tensor | None:
    return weight.get_buffer("order") if weight.reordered else None


def _grouped(weight: GroupedWeight, kind: int) -> tuple[Coding, Planes] | None:
    inputs = weight.shape[1]
    groups = weight.scales.shape[1]
    zeros = weight._buffers.get("zeros")
    parts = 4 if kind <= codes.E2M1.value else 2
    # One scale for each output is applied to its sum.
    group = 0 if groups == 1 and zeros is None else inputs // groups
    span = span_of(inputs, group, parts)
    if not span:
        return None
    packed = _words(weight.codes, span, _nibbles if parts == 4 else _as_bytes)
    order = _order(weight)
    if group == 0:
        coding = Coding(kind, scales.FLOAT32.value, 0, span, whole=True)
        return coding, Planes(packed, more=_plane(weight.scales.float()), order=order)
    zero_bits = 0 if zeros is None else 8 * zeros.element_size()
    coding = Coding(kind, _SCALES[weight.scales.dtype], group, span, zeros=zero_bits)
    plane = None if zeros is None else _plane(zeros)
    return coding, Planes(packed, _plane(weight.scales), plane, order=order)


def _int4(weight: PackedWeight) -> tuple[Coding, Planes] | None:
    assert isinstance(weight, Int4Weight)
    return _grouped(weight, codes.INT4.value)


def _int8(weight: PackedWeight) -> tuple[Coding, Planes] | None:
    assert isinstance(weight, Int8Weight)
    return _grouped(weight, codes.INT8.value)


def _fp8(weight: PackedWeight) -> tuple[Coding, Planes] | None:
    assert isinstance(weight, Fp8Weight)
    return _grouped(weight, codes.E4M3.value)


def _e2m1(weight: PackedWeight) -> tuple[Coding, Planes] | None:
    assert isinstance(weight, E2m1Weight)
    return _grouped(weight, codes.E2M1.value)


def _block_fp8(weight: PackedWeight) -> tuple[Coding, Planes] | None:
    span = span_of(weight.shape[1], _BLOCK, 2)
    if not span or weight.shape[1] % _BLOCK:
        return None
    coding = Coding(codes.E4M3.value, scales.FLOAT32.value, _BLOCK, span, block=_BLOCK)
    return coding, Planes(_words(weight.codes, span, _as_bytes), _plane(weight.scales))


def _q4_k(weight: PackedWeight) -> tuple[Coding, Planes] | None:
    outputs = weight.shape[0]
    blocks = weight.codes.view(outputs, -1, 144)

    def unpacked(some: Tensor) -> Tensor:
        chunks = torch.unflatten(some.view(len(some), -1, 144)[:, :, 16:], 2, (4, 1, 32))
        return torch.cat((chunks & 15, chunks >> 4), dim=3).flatten(1)

    steps = _plane(blocks[:, :, :4].flatten(1))
    fields, more = six_bit_planes(blocks[:, :, 4:16])
    coding = Coding(codes.INT4.value, scales.FLOAT16.value, 32, 128, zeros=6)
    return coding, Planes(_words(weight.codes, 128, unpacked), steps, fields, more)


def six_bit_planes(packed: Tensor) -> tuple[Tensor, Tensor]:
    """The planes of `triton_scales.six_bit_scales` of twelve bytes [outputs, blocks, 12]."""
    first, second, third = (part.int() for part in torch.split(packed, 4, dim=2))
    s = torch.stack((first & 63, (third & 15) | ((first >> 6) << 4)), dim=2)
    m = torch.stack((second & 63, (third >> 4) | ((second >> 6) << 4)), dim=2)
    fields = s[..., 0] | (s[..., 1] << 6) | (s[..., 2] << 12) | (s[..., 3] << 18)
    fields = fields | (m[..., 0] << 24) | ((m[..., 1] >> 4) << 30)
    halves = m[..., 2] | (m[..., 3] << 6) | ((m[..., 1] & 15) << 12)
    more = halves[..., 0] | (halves[..., 1] << 16)
    return _transposed(fields.flatten(1)), _transposed(more)


_MAKERS: dict[type[PackedWeight], Callable[[PackedWeight], tuple[Coding, Planes] | None]] = {
    Int4Weight: _int4,
    Int8Weight: _int8,
    Fp8Weight: _fp8,
    E2m1Weight: _e2m1,
    BlockFp8Weight: _block_fp8,
    **{kind: _q4_k for kind in GgufWeight.__subclasses__() if kind.format.block.name == "Q4_K"},
}
