"""4-bit codes that stand for the numbers of a table: MXFP4, NVFP4, NF4 and FP4 of bitsandbytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.catalog.linear_formats.base import (
    EXPONENTS,
    FLOAT32_BYTES,
    FormattedWeight,
    LinearFormat,
    check_dtype,
    check_shape,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.catalog.weights import Tensor

_FLOAT32 = frozenset({"F32"})


class Mxfp4(LinearFormat):
    """e2m1 with a power of two for each 32 inputs: stacked experts (gpt-oss), single weights
    (compressed-tensors), and such in int8 bytes (DeepSeek-V4)."""

    name = "mxfp4"
    GROUP = 32
    _NAMES = (
        ("_blocks", "_scales", "U8"),
        ("weight_packed", "weight_scale", "U8"),
        ("weight", "scale", "I8"),
    )

    def find(
        self, module: str, parts: Mapping[str, Tensor], said: Mapping[str, Any]
    ) -> FormattedWeight | None:
        for codes_leaf, scales_leaf, dtype in self._NAMES:
            codes, scales = parts.get(codes_leaf), parts.get(scales_leaf)
            if codes is None or scales is None or codes.dtype != dtype:
                continue
            if scales.dtype not in EXPONENTS:
                continue
            *outer, inputs = _unpacked(codes.shape)
            wanted = (*outer, inputs // self.GROUP)
            if inputs % self.GROUP or len(wanted) < 2:
                continue
            check_shape(module, scales_leaf, scales, wanted)
            size = codes.elements + scales.elements
            tensors = frozenset({codes_leaf, scales_leaf})
            return FormattedWeight(self, (*outer, inputs), tensors, size)
        return None


def _unpacked(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of numbers, two to a byte; gpt-oss has the groups of 32 as a dimension of their own."""
    if len(shape) == 4 and shape[3] == Mxfp4.GROUP // 2:
        return (*shape[:2], shape[2] * Mxfp4.GROUP)
    return (*shape[:1], shape[1] * 2) if len(shape) == 2 else (0,)


class Nvfp4(LinearFormat):
    """compressed-tensors' NVFP4: e2m1, a float8 scale for each 16 inputs, and one number for the
    whole weight that these are divided by."""

    name = "nvfp4"
    GROUP = 16
    _CODES, _WHOLE = "weight_packed", "weight_global_scale"

    def find(
        self, module: str, parts: Mapping[str, Tensor], said: Mapping[str, Any]
    ) -> FormattedWeight | None:
        codes, scales = parts.get(self._CODES), parts.get("weight_scale")
        if codes is None or scales is None or codes.dtype != "U8" or len(codes.shape) != 2:
            return None
        if scales.dtype != "F8_E4M3" or (whole := parts.get(self._WHOLE)) is None:
            return None
        outputs, inputs = codes.shape[0], codes.shape[1] * 2
        check_shape(module, "weight_scale", scales, (outputs, inputs // self.GROUP))
        if inputs % self.GROUP:
            raise ValueError(f"{module}.{self._CODES} has {inputs} inputs, not whole groups of 16")
        check_dtype(module, self._WHOLE, whole, _FLOAT32)
        if whole.elements != 1:
            check_shape(module, self._WHOLE, whole, (1,))
        # The number for the whole weight is repeated for each output.
        size = codes.elements + scales.elements + outputs * FLOAT32_BYTES
        tensors = frozenset({self._CODES, "weight_scale", self._WHOLE})
        return FormattedWeight(self, (outputs, inputs), tensors, size)


class Nvfp4ModelOpt(Nvfp4):
    """ModelOpt's: the number for the whole weight multiplies."""

    name = "nvfp4-modelopt"
    _CODES, _WHOLE = "weight", "weight_scale_2"


class BitsAndBytes4(LinearFormat):
    """bitsandbytes' NF4 and FP4: a table of 16 numbers, and a largest one for each block of the
    weight's numbers in a row, itself in 8 bits if double-quantised.

    The shape is in a tensor of JSON, so headers say how many numbers there are and no more.
    """

    name = "bnb-4bit"
    _STATES = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")

    def find(
        self, module: str, parts: Mapping[str, Tensor], said: Mapping[str, Any]
    ) -> FormattedWeight | None:
        weight, absmax = parts.get("weight"), parts.get("weight.absmax")
        table = parts.get("weight.quant_map")
        state = next((leaf for leaf in self._STATES if leaf in parts), None)
        if weight is None or absmax is None or table is None or state is None:
            return None
        if weight.dtype != "U8":
            return None
        check_dtype(module, "weight.quant_map", table, _FLOAT32)
        check_shape(module, "weight.quant_map", table, (16,))
        tensors = {"weight", "weight.absmax", "weight.quant_map", state}
        size = weight.elements + absmax.size_bytes + table.size_bytes
        if absmax.dtype == "U8":
            for leaf in ("weight.nested_absmax", "weight.nested_quant_map"):
                if leaf not in parts:
                    raise ValueError(f"{module}.{leaf} is missing")
                check_dtype(module, leaf, parts[leaf], _FLOAT32)
                tensors.add(leaf)
                size += parts[leaf].size_bytes
            nested = parts["weight.nested_quant_map"]
            check_shape(module, "weight.nested_quant_map", nested, (256,))
        else:
            check_dtype(module, "weight.absmax", absmax, _FLOAT32)
        return FormattedWeight(self, (2 * weight.elements,), frozenset(tensors), size)
