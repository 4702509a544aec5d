"""float8 weights (e4m3), by what their scales are for: blocks, outputs, or groups of 32 inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.catalog.linear_formats.base import (
    EXPONENTS,
    FLOAT32_BYTES,
    SCALE_DTYPES,
    FormattedWeight,
    LinearFormat,
    full_name,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.catalog.weights import Tensor

# By their producers: Qwen and DeepSeek, compressed-tensors and ModelOpt, DeepSeek-V4, Mistral. All
# of them are multiplied with, whatever the name says.
FP8_SCALES = ("weight_scale_inv", "weight_scale", "scale", "qscale_weight")


class _Fp8(NamedTuple):
    shape: tuple[int, int]
    leaf: str  # of the scales
    scales: Tensor

    @classmethod
    def of(cls, parts: Mapping[str, Tensor]) -> _Fp8 | None:
        weight = parts.get("weight")
        if weight is None or weight.dtype != "F8_E4M3" or len(weight.shape) != 2:
            return None
        found = [leaf for leaf in FP8_SCALES if leaf in parts]
        if len(found) != 1 or parts[found[0]].dtype not in SCALE_DTYPES | EXPONENTS:
            return None
        return cls((weight.shape[0], weight.shape[1]), found[0], parts[found[0]])

    def weight(self, of: LinearFormat, resident_bytes: int) -> FormattedWeight:
        return FormattedWeight(of, self.shape, frozenset({"weight", self.leaf}), resident_bytes)


class ChannelFp8(LinearFormat):
    """A scale for each output; one for the whole weight is repeated, so that outputs of several
    weights can lie side by side."""

    name = "fp8-channel"

    def find(
        self, module: str, parts: Mapping[str, Tensor], said: Mapping[str, Any]
    ) -> FormattedWeight | None:
        if (fp8 := _Fp8.of(parts)) is None or fp8.scales.dtype not in SCALE_DTYPES:
            return None
        outputs, inputs = fp8.shape
        if fp8.scales.elements != 1 and fp8.scales.shape not in ((outputs,), (outputs, 1)):
            return None
        return fp8.weight(self, outputs * inputs + outputs * FLOAT32_BYTES)


class Mxfp8(LinearFormat):
    """A power of two for each 32 inputs of an output, kept as its exponent."""

    name = "mxfp8"
    GROUP = 32

    def find(
        self, module: str, parts: Mapping[str, Tensor], said: Mapping[str, Any]
    ) -> FormattedWeight | None:
        if (fp8 := _Fp8.of(parts)) is None or fp8.scales.dtype not in EXPONENTS:
            return None
        outputs, inputs = fp8.shape
        if inputs % self.GROUP or fp8.scales.shape != (outputs, inputs // self.GROUP):
            return None
        return fp8.weight(self, outputs * inputs + outputs * inputs // self.GROUP)


class BlockFp8(LinearFormat):
    """A scale for each block of 128 x 128 (Qwen, DeepSeek, GLM); exponents become float32."""

    name = "fp8-block"
    BLOCK = 128

    def find(
        self, module: str, parts: Mapping[str, Tensor], said: Mapping[str, Any]
    ) -> FormattedWeight | None:
        if (fp8 := _Fp8.of(parts)) is None:
            return None
        outputs, inputs = fp8.shape
        rows, columns = wanted = self.scales_shape(fp8.shape)
        if fp8.scales.shape != wanted:
            raise ValueError(
                f"{full_name(module, fp8.leaf)} has shape {list(fp8.scales.shape)}; scales of "
                f"blocks of {self.BLOCK} x {self.BLOCK} of {list(fp8.shape)} would have "
                f"{list(wanted)}"
            )
        return fp8.weight(self, outputs * inputs + rows * columns * FLOAT32_BYTES)

    def scales_shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Of a weight's scales; blocks at its edges may be cut."""
        return -(-shape[0] // self.BLOCK), -(-shape[1] // self.BLOCK)
