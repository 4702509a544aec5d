"""Which weights of a checkpoint are packed, in which formats; what is not known is refused."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from penstock.catalog.linear_formats.base import (
    FLOATS,
    FormattedWeight,
    LinearFormat,
    full_name,
    split_name,
)
from penstock.catalog.linear_formats.four_bits import BitsAndBytes4, Mxfp4, Nvfp4, Nvfp4ModelOpt
from penstock.catalog.linear_formats.fp8 import BlockFp8, ChannelFp8, Mxfp8
from penstock.catalog.linear_formats.gguf import GGUF_BLOCKS
from penstock.catalog.linear_formats.integers import Awq, CtInt8, CtPacked, Gptq, GptqV2
from penstock.catalog.linear_formats.made import Int8
from penstock.errors import ModelUnusable

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from penstock.catalog.weights import Tensor
    from penstock.memory.device_kinds import DeviceKind

# The first that a module's tensors are in.
_SAFETENSORS: tuple[LinearFormat, ...] = (
    ChannelFp8(),
    Mxfp8(),
    BlockFp8(),
    CtInt8(),
    CtPacked(),
    Gptq(),
    GptqV2(),
    Awq(),
    Mxfp4(),
    Nvfp4(),
    Nvfp4ModelOpt(),
    BitsAndBytes4(),
)
STORED = (*_SAFETENSORS, *GGUF_BLOCKS.values())
# By the `dtype` setting that asks for them.
MADE_AT_LOAD: dict[str, LinearFormat] = {"int8": Int8()}

# A weight without a kernel of its own is de-quantised tile by tile into memory of this size, of
# which a model with packed weights has one; small models have less than their device allows.
_MIN_SCRATCH_BYTES = 1 << 20
_SCRATCH_SHARE = 16  # th part of the packed weights

_QUANTISED_DTYPES = frozenset({"F8_E4M3", "F8_E5M2", "F8_E8M0", "F4", "F6_E2M3", "F6_E3M2"})
# Last words of names that belong to packed weights of some format, and those that do unless they
# are floats.
_PACKED_LEAF = re.compile(
    r"qweight|qzeros|g_idx|qscale_\w+|SCB|_blocks|_scales|\w+_scale_inv|weight\.\w+(\.\w+)?"
    r"|weight_(packed|scale\w*|zero_point|shape|global_scale|g_idx)|bitmask|compressed"
)
_CODES_LEAF = re.compile(r"weight|qweight|weight_packed|_blocks")
# For activations or KV that are rounded as well: not used, since both stay floats.
_UNUSED_LEAF = re.compile(
    r"activation_scale|input_(global_)?scale(_ub)?|input_zero_point|output_scale|qscale_act"
    r"|[qkv]_scale|kv_scale|prob_scale"
)
_SERVED_BLOCKS = ([BlockFp8.BLOCK] * 2, [1, Mxfp8.GROUP])
# Layouts with the tensor names of others, and computations beyond a product with a weight.
_REFUSED_LAYOUTS = frozenset(
    {"gemv", "gemv_fast", "llm-awq", "marlin", "marlin-24", "bitblas", "qqq", "paroquant", "gemma"}
)


def quantisation(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A configuration's `quantization_config`; empty if it has none."""
    text = config.get("text_config")
    for place in (config, text if isinstance(text, dict) else {}):
        if said := place.get("quantization_config"):
            return said if isinstance(said, dict) else {"quant_method": said}
    return {}


def packed_linears(
    tensors: Mapping[str, Tensor], dtype: str, path: Path, said: Mapping[str, Any]
) -> dict[str, FormattedWeight]:
    """A checkpoint's packed weights by the names of their modules, for a `dtype` setting.

    `said` is its quantization_config. ModelUnusable names the first tensor of a format that is not
    known.
    """
    made = MADE_AT_LOAD.get(dtype)
    found: dict[str, FormattedWeight] = {}
    for module, parts in _modules(tensors).items():
        linear = _packed(module, parts, path, said)
        if linear is None and made is not None:
            linear = made.find(module, parts, said)
        if linear is not None:
            found[module] = linear
    return found


def check_quantisation(config: Mapping[str, Any], packed: bool, path: Path) -> None:
    """Refuse files whose configuration says something else of them than their headers do: what they
    mean is not known."""
    if not (said := quantisation(config)):
        return
    block = said.get("weight_block_size")
    if block is not None and block not in _SERVED_BLOCKS:
        raise ModelUnusable(
            f"{path}: weight_block_size is {block}; blocks of {BlockFp8.BLOCK} x {BlockFp8.BLOCK} "
            "are served: use another checkpoint of this model."
        )
    for key in ("quant_method", "version", "checkpoint_format", "format"):
        layout = said.get(key)
        if isinstance(layout, str) and layout.lower() in _REFUSED_LAYOUTS:
            raise ModelUnusable(
                f"{path}: {key} of quantization_config is {layout!r}, which is not served: use "
                "another checkpoint of this model."
            )
    rotations = said.get("transform_config")
    if isinstance(rotations, dict) and rotations.get("config_groups"):
        raise ModelUnusable(
            f"{path}: quantization_config has a transform_config; weights for activations that "
            "are rotated are not served: use another checkpoint of this model."
        )
    if not packed:
        raise ModelUnusable(
            f"{path}: quantization_config ({said.get('quant_method')}) says that the model is "
            "quantised, but none of its weights are stored in a packed format: use the "
            "unquantised checkpoint."
        )


def scratch_bytes(packed_bytes: int, kind: DeviceKind) -> int:
    """Size of the tile for de-quantised weights, by the model's bytes of packed weights."""
    if not packed_bytes:
        return 0
    return min(max(packed_bytes // _SCRATCH_SHARE, _MIN_SCRATCH_BYTES), kind.tile_bytes)


def is_unused(name: str) -> bool:
    """Whether a tensor is for roundings of activations or KV, which are not done."""
    return _UNUSED_LEAF.fullmatch(name.rpartition(".")[2]) is not None


def _modules(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    modules: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        module, leaf = split_name(name)
        modules.setdefault(module, {})[leaf] = tensor
    return modules


def _packed(
    module: str, parts: Mapping[str, Tensor], path: Path, said: Mapping[str, Any]
) -> FormattedWeight | None:
    for known in STORED:
        try:
            linear = known.find(module, parts, said)
        except ValueError as error:
            raise ModelUnusable(f"{path}: {error}.") from error
        if linear is not None:
            _refuse_packed(module, parts, linear.tensors, path)
            return linear
    _refuse_packed(module, parts, frozenset(), path)
    return None


def _refuse_packed(
    module: str, parts: Mapping[str, Tensor], read: frozenset[str], path: Path
) -> None:
    # The codes say most about what is wrong.
    for leaf, tensor in sorted(parts.items(), key=lambda part: not _CODES_LEAF.fullmatch(part[0])):
        if leaf in read or _UNUSED_LEAF.fullmatch(leaf):
            continue
        packed = tensor.dtype in _QUANTISED_DTYPES or _PACKED_LEAF.fullmatch(leaf)
        if packed or (tensor.dtype not in FLOATS and _CODES_LEAF.fullmatch(leaf)):
            raise ModelUnusable(
                f"{path}: {full_name(module, leaf)} ({tensor.dtype} {list(tensor.shape)}) is "
                "quantised in a format that is not served, or other tensors of it are missing; "
                f"those served are {', '.join(known.name for known in _SAFETENSORS)}. Use another "
                "checkpoint, or a GGUF file."
            )
