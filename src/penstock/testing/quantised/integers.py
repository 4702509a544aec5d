"""Integer weights: compressed-tensors, GPTQ, AWQ."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray
    from torch import Tensor

    Codes = NDArray[np.int64]

_WORD = 32
_AWQ_OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)  # whose codes are in a word, from its low end on


def pack_ct_int8(weight: Tensor, *, group: int, asymmetric: bool = False) -> dict[str, Tensor]:
    """One code a byte, signed; `group` 0: a scale for each output."""
    group = group or weight.shape[1]
    codes, zeros, scales = _rounded(weight.numpy(), 8, _by_group(weight, group), asymmetric)
    stored = {
        "weight": torch.from_numpy((codes - 128).astype(np.int8)),
        "weight_scale": torch.from_numpy(scales).bfloat16(),
    }
    if asymmetric:
        stored["weight_zero_point"] = torch.from_numpy((zeros - 128).astype(np.int8))
    return stored


def ct_int8_numbers(stored: Mapping[str, Tensor]) -> Tensor:
    """(code - zero) x scale."""
    codes, scales = stored["weight"].numpy().astype(np.float32), stored["weight_scale"]
    wide = np.ones((1, codes.shape[1] // scales.shape[1]), np.float32)
    zeros = stored.get("weight_zero_point", torch.zeros(scales.shape)).float().numpy()
    return torch.from_numpy((codes - np.kron(zeros, wide)) * np.kron(scales.float().numpy(), wide))


def pack_ct(
    weight: Tensor, *, bits: int, group: int, asymmetric: bool = False, ordered: bool = False
) -> dict[str, Tensor]:
    """Codes in words along the inputs, zeros in words along the outputs."""
    group = group or weight.shape[1]
    of_input = _by_group(weight, group, ordered)
    codes, zeros, scales = _rounded(weight.numpy(), bits, of_input, asymmetric)
    stored = {
        "weight_packed": _to_words(codes, bits),
        "weight_scale": torch.from_numpy(scales).bfloat16(),
        "weight_shape": torch.tensor(weight.shape),
    }
    if asymmetric:
        stored["weight_zero_point"] = _to_words(zeros.T, bits).t().contiguous()
    if ordered:
        stored["weight_g_idx"] = torch.from_numpy(of_input).int()
    return stored


def ct_numbers(stored: Mapping[str, Tensor]) -> Tensor:
    """(code - zero) x scale, where the zero is the middle unless it is stored."""
    outputs, inputs = stored["weight_shape"].tolist()
    packed = stored["weight_packed"].numpy()
    bits = packed.shape[1] * _WORD // inputs
    n, k = np.ogrid[:outputs, :inputs]
    codes = _code(packed[n, k * bits // _WORD], k, bits)
    scales = stored["weight_scale"].float().numpy()
    g = k // (inputs // scales.shape[1])
    if "weight_g_idx" in stored:
        g = stored["weight_g_idx"].numpy()[k]
    zeros: Codes | int = 1 << (bits - 1)
    if "weight_zero_point" in stored:
        zeros = _code(stored["weight_zero_point"].numpy()[n * bits // _WORD, g], n, bits)
    return torch.from_numpy((codes - zeros).astype(np.float32) * scales[n, g])


def pack_gptq(
    weight: Tensor,
    *,
    bits: int,
    group: int,
    added: int = 1,
    ordered: bool = False,
    symmetric: bool = False,
) -> dict[str, Tensor]:
    """Codes in words along the inputs, which come first; zeros less `added`."""
    of_input = _by_group(weight, group, ordered)
    codes, zeros, scales = _rounded(weight.numpy(), bits, of_input, asymmetric=not symmetric)
    if not symmetric:
        zeros = np.clip(zeros, added, (1 << bits) - 1 + added)
        zeros[0, 0] = (1 << bits) - 1 + added  # with v1 one more than a code can be
    return {
        "qweight": _to_words(codes, bits).t().contiguous(),
        "qzeros": _to_words(zeros.T - added, bits),
        "scales": torch.from_numpy(scales.T.copy()).half(),
        "g_idx": torch.from_numpy(of_input).int(),
    }


def gptq_numbers(stored: Mapping[str, Tensor], *, added: int) -> Tensor:
    """(code - zero) x scale of the input's group."""
    words, outputs = stored["qweight"].shape
    bits = stored["qzeros"].shape[1] * _WORD // outputs
    n, k = np.ogrid[:outputs, : words * _WORD // bits]
    g = stored["g_idx"].numpy()[k]
    codes = _code(stored["qweight"].numpy()[k * bits // _WORD, n], k, bits)
    zeros = _code(stored["qzeros"].numpy()[g, n * bits // _WORD], n, bits) + added
    scales = stored["scales"].float().numpy()
    return torch.from_numpy((codes - zeros).astype(np.float32) * scales[g, n])


def pack_awq(weight: Tensor, *, group: int) -> dict[str, Tensor]:
    """Inputs first; codes and zeros in words along the outputs."""
    of_input = _by_group(weight, group)
    codes, zeros, scales = _rounded(weight.numpy(), 4, of_input, asymmetric=True)

    def mixed(numbers: Codes) -> Tensor:
        eights = numbers.reshape(len(numbers), -1, 8)[:, :, _AWQ_OUTPUTS]
        return _to_words(eights.reshape(len(numbers), -1), 4)

    return {
        "qweight": mixed(codes.T.copy()),
        "qzeros": mixed(zeros.T.copy()),
        "scales": torch.from_numpy(scales.T.copy()).half(),
    }


def awq_numbers(stored: Mapping[str, Tensor]) -> Tensor:
    """(code - zero) x scale."""
    inputs, words = stored["qweight"].shape
    n, k = np.ogrid[: words * 8, :inputs]
    place = np.array([_AWQ_OUTPUTS.index(output) for output in range(8)])[n % 8]
    g = k // (inputs // len(stored["scales"]))
    codes = _code(stored["qweight"].numpy()[k, n // 8], place, 4)
    zeros = _code(stored["qzeros"].numpy()[g, n // 8], place, 4)
    scales = stored["scales"].float().numpy()
    return torch.from_numpy((codes - zeros).astype(np.float32) * scales[g, n])


def _by_group(weight: Tensor, group: int, ordered: bool = False) -> Codes:
    """The group of each input; `ordered`: not one after the other."""
    of_input = np.arange(weight.shape[1]) // group
    return np.random.default_rng(len(of_input)).permutation(of_input) if ordered else of_input


def _rounded(
    weight: NDArray[np.float32], bits: int, of_input: Codes, asymmetric: bool
) -> tuple[Codes, Codes, NDArray[np.float32]]:
    """Codes [outputs, inputs] from 0 on; zeros and scales [outputs, groups]."""
    groups, top = int(of_input.max()) + 1, (1 << bits) - 1
    members = [weight[:, of_input == group] for group in range(groups)]
    low = np.stack([np.minimum(part.min(axis=1), 0) for part in members], axis=1)
    high = np.stack([np.maximum(part.max(axis=1), 0) for part in members], axis=1)
    scales = (high - low) / top
    if not asymmetric:
        scales = 2 * np.maximum(high, -low) / top
    # As they are stored, in fewer bits.
    scales = torch.from_numpy(np.maximum(scales, 1e-4)).bfloat16().half().float().numpy()
    middle = np.full(scales.shape, 1 << (bits - 1))
    zeros = np.clip(np.rint(-low / scales), 0, top) if asymmetric else middle
    codes = np.rint(weight / scales[:, of_input]) + zeros[:, of_input]
    return np.clip(codes, 0, top).astype(np.int64), zeros.astype(np.int64), scales


def _to_words(codes: Codes, bits: int) -> Tensor:
    """[..., n] as [..., words], lowest bits first; n is filled up to whole words."""
    per_word = _WORD // bits
    missing = -codes.shape[-1] % per_word
    codes = np.pad(codes, [(0, 0), (0, missing)])
    words = np.zeros((codes.shape[0], codes.shape[1] // per_word), np.int64)
    for place in range(per_word):
        words |= codes[:, place::per_word] << (bits * place)
    return torch.from_numpy(words.astype(np.uint32).view(np.int32))


def _code(words: NDArray[np.int32], index: Codes, bits: int) -> Codes:
    """The codes at `index`, of the words that they are in."""
    shifts = bits * (index % (_WORD // bits))
    codes: Codes = (words.astype(np.int64) >> shifts) & ((1 << bits) - 1)
    return codes
