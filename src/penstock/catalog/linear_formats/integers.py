"""Integer weights of 4 and 8 bits: compressed-tensors, GPTQ and AWQ."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from penstock.catalog.linear_formats.base import (
    SCALE_DTYPES,
    FormattedWeight,
    LinearFormat,
    check_dtype,
    check_shape,
    full_name,
    groups_of,
    scale_bytes,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.catalog.weights import Tensor

_SERVED_BITS = (4, 8)
_WORD_BITS = 32
_ORDER_BYTES = 4  # of each input: where it is in the order of groups
_INTEGERS = frozenset({"I32"})


class CtInt8(LinearFormat):
    """compressed-tensors `int-quantized`: int8 codes, one by one; zeros if asymmetric."""

    name = "ct-int8"

    def find(
        self, module: str, parts: Mapping[str, Tensor], said: Mapping[str, Any]
    ) -> FormattedWeight | None:
        weight, scales = parts.get("weight"), parts.get("weight_scale")
        if weight is None or scales is None or weight.dtype != "I8" or len(weight.shape) != 2:
            return None
        check_dtype(module, "weight_scale", scales, SCALE_DTYPES)
        shape = outputs, inputs = weight.shape[0], weight.shape[1]
        groups = groups_of(module, "weight_scale", scales, shape)
        tensors, size = {"weight", "weight_scale"}, outputs * inputs
        if (zeros := parts.get("weight_zero_point")) is not None:
            check_dtype(module, "weight_zero_point", zeros, frozenset({"I8"}))
            check_shape(module, "weight_zero_point", zeros, scales.shape)
            tensors.add("weight_zero_point")
            size += outputs * groups
        size += scale_bytes(scales, outputs, groups)
        return FormattedWeight(self, shape, frozenset(tensors), size)


class CtPacked(LinearFormat):
    """compressed-tensors `pack-quantized`: codes of 4 or 8 bits in words of 32 along the inputs.

    How many bits, only the configuration says.
    """

    name = "ct-pack"

    def find(
        self, module: str, parts: Mapping[str, Tensor], said: Mapping[str, Any]
    ) -> FormattedWeight | None:
        packed, scales = parts.get("weight_packed"), parts.get("weight_scale")
        if packed is None or scales is None or packed.dtype != "I32" or len(packed.shape) != 2:
            return None
        check_dtype(module, "weight_scale", scales, SCALE_DTYPES)
        outputs, words = packed.shape
        bits = _ct_bits(module, words, scales, said)
        inputs = words * _WORD_BITS // bits
        shape = (outputs, inputs)
        groups = groups_of(module, "weight_scale", scales, shape)
        tensors, size = {"weight_packed", "weight_scale"}, outputs * words * 4
        size += scale_bytes(scales, outputs, groups)
        if (said_shape := parts.get("weight_shape")) is not None:
            check_shape(module, "weight_shape", said_shape, (2,))
            tensors.add("weight_shape")
        if (zeros := parts.get("weight_zero_point")) is not None:
            # Packed along the outputs; some producers leave them as they are.
            rows = -(-outputs * bits // _WORD_BITS)
            if zeros.dtype == "I8":
                check_shape(module, "weight_zero_point", zeros, scales.shape)
            else:
                check_dtype(module, "weight_zero_point", zeros, _INTEGERS)
                check_shape(module, "weight_zero_point", zeros, (rows, groups))
            tensors.add("weight_zero_point")
            size += outputs * groups
        if (order := parts.get("weight_g_idx")) is not None:
            check_shape(module, "weight_g_idx", order, (inputs,))
            tensors.add("weight_g_idx")
            size += inputs * _ORDER_BYTES
        return FormattedWeight(self, shape, frozenset(tensors), size)


def _ct_bits(module: str, words: int, scales: Tensor, said: Mapping[str, Any]) -> int:
    schemes = _ct_schemes(said)
    if not schemes:
        raise ValueError(
            f"{module}.weight_packed has codes of a number of bits that quantization_config does "
            "not say (config_groups with weights.num_bits)"
        )
    groups = scales.shape[1] if len(scales.shape) == 2 else 1
    fitting = [
        (bits, targets)
        for bits, group, targets in schemes
        if groups == 1 or group is None or groups * group * bits == words * _WORD_BITS
    ]
    # Configurations of several schemes say which layers each is for, by patterns of their names.
    if len({bits for bits, _ in fitting}) > 1:
        fitting = [scheme for scheme in fitting if _is_target(module, scheme[1])]
    found = {bits for bits, _ in fitting}
    if len(found) != 1 or not found <= set(_SERVED_BITS):
        raise ValueError(
            f"{module}.weight_packed ({words} words for each output, {groups} scales) has codes "
            f"of {' or '.join(map(str, sorted(found))) or 'an unknown number of'} bits by "
            "quantization_config; 4 and 8 are served"
        )
    return found.pop()


def _ct_schemes(said: Mapping[str, Any]) -> list[tuple[int, int | None, list[Any]]]:
    """Bits, inputs in a group (None: not said) and targets of each."""
    schemes = []
    groups = said.get("config_groups")
    for scheme in groups.values() if isinstance(groups, dict) else ():
        weights = scheme.get("weights") if isinstance(scheme, dict) else None
        if not isinstance(weights, dict) or not isinstance(bits := weights.get("num_bits"), int):
            continue
        group, targets = weights.get("group_size"), scheme.get("targets")
        known = group if isinstance(group, int) and group > 0 else None
        schemes.append((bits, known, targets if isinstance(targets, list) else []))
    return schemes


def _is_target(module: str, targets: list[Any]) -> bool:
    for target in targets:
        pattern = str(target)
        try:
            if pattern.startswith("re:") and re.match(pattern[3:], module):
                return True
        except re.error:
            continue
        if pattern == module or module.endswith(f".{pattern}"):
            return True
    return False


class Gptq(LinearFormat):
    """GPTQ: codes in words along the inputs, zeros in words along the outputs, one less than they
    mean. With `g_idx` each input says its group."""

    name = "gptq"
    _V2 = False

    def find(
        self, module: str, parts: Mapping[str, Tensor], said: Mapping[str, Any]
    ) -> FormattedWeight | None:
        codes, scales, zeros = (parts.get(leaf) for leaf in ("qweight", "scales", "qzeros"))
        if codes is None or scales is None or zeros is None or _is_gptq_v2(said) != self._V2:
            return None
        if codes.dtype != "I32" or any(len(part.shape) != 2 for part in (codes, scales, zeros)):
            return None
        words, outputs = codes.shape
        if scales.shape[1] != outputs or not outputs:
            return None
        check_dtype(module, "scales", scales, SCALE_DTYPES)
        check_dtype(module, "qzeros", zeros, _INTEGERS)
        bits = zeros.shape[1] * _WORD_BITS // outputs
        if bits not in _SERVED_BITS:
            raise ValueError(
                f"{module}.qweight has codes of {bits} bits by the shape {list(zeros.shape)} of "
                "qzeros; 4 and 8 are served"
            )
        inputs, groups = words * _WORD_BITS // bits, scales.shape[0]
        check_shape(module, "qzeros", zeros, (groups, outputs * bits // _WORD_BITS))
        _check_groups(module, inputs, groups)
        tensors, size = {"qweight", "scales", "qzeros"}, words * outputs * 4
        # A stored zero of all ones means one more than a code can be.
        size += scale_bytes(scales, outputs, groups) + outputs * groups * bits // 4
        if (order := parts.get("g_idx")) is not None:
            check_shape(module, "g_idx", order, (inputs,))
            tensors.add("g_idx")
            size += inputs * _ORDER_BYTES
        return FormattedWeight(self, (outputs, inputs), frozenset(tensors), size)


class GptqV2(Gptq):
    """The same with zeros as they are."""

    name = "gptq-v2"
    _V2 = True


def _is_gptq_v2(said: Mapping[str, Any]) -> bool:
    # "gptq_p" is another layout for other numbers of bits only.
    return not {"gptq_v2", "gptq_p"}.isdisjoint(
        str(said.get(key)) for key in ("checkpoint_format", "format")
    )


class Awq(LinearFormat):
    """AWQ `gemm`: codes and zeros in words along the outputs, in an order of their own."""

    name = "awq"
    _IN_A_WORD = 8

    def find(
        self, module: str, parts: Mapping[str, Tensor], said: Mapping[str, Any]
    ) -> FormattedWeight | None:
        codes, scales, zeros = (parts.get(leaf) for leaf in ("qweight", "scales", "qzeros"))
        if codes is None or scales is None or zeros is None:
            return None
        if codes.dtype != "I32" or any(len(part.shape) != 2 for part in (codes, scales)):
            return None
        inputs, words = codes.shape
        groups, outputs = scales.shape
        if words * self._IN_A_WORD != outputs:
            return None
        check_dtype(module, "scales", scales, SCALE_DTYPES)
        check_dtype(module, "qzeros", zeros, _INTEGERS)
        check_shape(module, "qzeros", zeros, (groups, words))
        _check_groups(module, inputs, groups)
        size = inputs * words * 4 + scale_bytes(scales, outputs, groups) + outputs * groups
        tensors = frozenset({"qweight", "scales", "qzeros"})
        return FormattedWeight(self, (outputs, inputs), tensors, size)


def _check_groups(module: str, inputs: int, groups: int) -> None:
    if not groups or inputs % groups or (inputs // groups) % 2:
        raise ValueError(
            f"{full_name(module, 'scales')} has {groups} groups, which do not divide the {inputs} "
            "inputs into equal parts"
        )
