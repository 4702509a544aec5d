"""Makes the files beside it: small weights written and de-quantised by the formats' own libraries.

    python make.py GPTQMODEL_SOURCE MODELOPT_SOURCE

Needs torch, safetensors, compressed-tensors 0.20.0, autoawq 0.2.9 and bitsandbytes 0.50.2, the
unpacked sources of gptqmodel 7.7.0 and nvidia-modelopt 0.47.0, and penstock for what it writes
itself. Each file has a weight's tensors by the last parts of their names, `numbers` as the library
de-quantises them, and in its metadata the library, and the quantization_config. Not a part of the
tests: they read the files only.
"""
# mypy: ignore-errors

import importlib
import json
import sys
import types
from pathlib import Path

import torch
from safetensors.torch import save_file

HERE = Path(__file__).parent
OUTPUTS, INPUTS, GROUP = 16, 64, 32


def weight(seed, outputs=OUTPUTS, inputs=INPUTS):
    chance = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(-2, 1, outputs)
    return torch.randn(outputs, inputs, generator=chance) * sizes[:, None]


def write(name, library, stored, numbers, said):
    tensors = {leaf: tensor.detach().clone().contiguous() for leaf, tensor in stored.items()}
    tensors["numbers"] = numbers.detach().clone().contiguous()
    metadata = {"library": library, "said": json.dumps(said)}
    save_file(tensors, HERE / f"{name}.safetensors", metadata=metadata)


def without_init(package, path):
    """So that only the modules asked for are imported."""
    module = types.ModuleType(package)
    module.__path__ = [str(path)]
    sys.modules[package] = module


def compressed_tensors():
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils.helpers import calculate_qparams, generate_gparam

    int4 = {"num_bits": 4, "type": "int", "group_size": GROUP, "strategy": "group"}
    channel = {"num_bits": 8, "strategy": "channel"}
    fp4 = {"num_bits": 4, "type": "float"}
    forms = {
        "ct-pack4": ("pack-quantized", {**int4, "symmetric": True}),
        "ct-pack4-asymmetric": ("pack-quantized", {**int4, "symmetric": False}),
        "ct-pack8": ("pack-quantized", {**int4, "num_bits": 8, "symmetric": False}),
        "ct-pack4-channel": ("pack-quantized", {**channel, "num_bits": 4, "type": "int"}),
        "ct-int8": ("int-quantized", {**channel, "type": "int"}),
        "ct-int8-asymmetric": ("int-quantized", {**channel, "type": "int", "symmetric": False}),
        "ct-fp8-channel": ("float-quantized", {**channel, "type": "float"}),
        "ct-fp8-tensor": (
            "float-quantized",
            {"num_bits": 8, "type": "float", "strategy": "tensor"},
        ),
        "ct-mxfp8": (
            "mxfp8-quantized",
            {**int4, "num_bits": 8, "type": "float", "scale_dtype": torch.uint8},
        ),
        "ct-mxfp4": (
            "mxfp4-pack-quantized",
            {**fp4, "group_size": 32, "strategy": "group", "scale_dtype": torch.uint8},
        ),
        "ct-nvfp4": (
            "nvfp4-pack-quantized",
            {
                **fp4,
                "group_size": 16,
                "strategy": "tensor_group",
                "scale_dtype": torch.float8_e4m3fn,
            },
        ),
        "ct-pack8-channel": ("pack-quantized", {**channel, "type": "int"}),
    }
    for seed, (name, (form, of)) in enumerate(forms.items()):
        args = QuantizationArgs(**of)
        scheme = QuantizationScheme(targets=["Linear"], weights=args, format=form)
        numbers = weight(seed).bfloat16()
        size = of.get("group_size") or INPUTS
        groups = numbers.view(OUTPUTS, -1, size)
        low, high = groups.amin(dim=2), groups.amax(dim=2)
        if of["strategy"] == "tensor":
            low, high = low.min().reshape(1), high.max().reshape(1)
        state, extra = {"weight": numbers}, {}
        if form.startswith("nvfp4"):
            extra["global_scale"] = generate_gparam(low.float().min(), high.float().max()).reshape(
                1
            )
            state["weight_global_scale"] = extra["global_scale"]
        scale, zero = calculate_qparams(low, high, args, **extra)
        state |= {"weight_scale": scale, "weight_zero_point": zero}
        compressor = BaseCompressor.get_value_from_registry(form)
        stored = compressor.compress(state, scheme)
        back = compressor.decompress(dict(stored), scheme)["weight"]
        plain = {key: value for key, value in of.items() if key != "scale_dtype"}
        said = {
            "quant_method": "compressed-tensors",
            "format": form,
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": plain}},
        }
        write(name, "compressed-tensors 0.20.0", stored, back, said)


def penstock():
    """What `penstock quantize` writes, as the library reads it."""
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    from penstock.worker.quantize.schemes import scheme_for

    for seed, name in enumerate(("int8", "int4", "fp8")):
        numbers = weight(60 + seed, inputs=256)
        scheme = scheme_for(name, [256], has_experts=False)
        stored = scheme.round(numbers, torch.bfloat16) | scheme.whole(tuple(numbers.shape))
        said = scheme.described({"lm_head"})
        of = QuantizationConfig.model_validate(said).config_groups["group_0"]
        compressor = BaseCompressor.get_value_from_registry(of.format)
        back = compressor.decompress(dict(stored), of)["weight"]
        write(f"penstock-{name}", "compressed-tensors 0.20.0", stored, back, said)


def autoawq():
    import importlib.util

    root = Path(importlib.util.find_spec("awq").submodule_search_locations[0])
    for package in ("awq", "awq.modules", "awq.modules.linear", "awq.utils"):
        without_init(package, root.joinpath(*package.split(".")[1:]))
    gemm = importlib.import_module("awq.modules.linear.gemm")
    packing = importlib.import_module("awq.utils.packing_utils")
    linear = torch.nn.Linear(INPUTS, 2 * OUTPUTS, bias=False)
    linear.weight.data = numbers = weight(20, outputs=2 * OUTPUTS)
    scales, zeros = asymmetric(numbers, 4, GROUP)
    codes = gemm.WQLinear_GEMM.from_linear(
        linear, 4, GROUP, scales=scales.t().contiguous(), zeros=zeros.t().contiguous()
    )
    stored = {name: getattr(codes, name) for name in ("qweight", "qzeros", "scales")}
    back = packing.dequantize_gemm(*stored.values(), 4, GROUP).t()
    said = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}
    write("awq", "autoawq 0.2.9", stored, back, said)


def asymmetric(numbers, bits, group):
    groups = numbers.view(len(numbers), -1, group)
    low, high = groups.amin(dim=2).clamp(max=0), groups.amax(dim=2).clamp(min=0)
    scales = ((high - low) / (2**bits - 1)).half().float()
    return scales, (-low / scales).round().clamp(0, 2**bits - 1)


def gptqmodel(source):
    root = Path(source) / "gptqmodel"
    for package in ("gptqmodel", "gptqmodel.models"):
        without_init(package, root.joinpath(*package.split(".")[1:]))
    sys.modules["gptqmodel"].DEBUG_ON = False
    torch_linear = importlib.import_module("gptqmodel.nn_modules.qlinear.torch")
    model = importlib.import_module("gptqmodel.utils.model")
    config = importlib.import_module("gptqmodel.quantization.config")
    forms = {
        "gptq": (4, False, 1),
        "gptq8": (8, False, 1),
        "gptq-order": (4, True, 1),
        "gptq-v2": (4, False, 2),
    }
    for seed, (name, (bits, ordered, version)) in enumerate(forms.items()):
        linear = torch.nn.Linear(INPUTS, OUTPUTS, bias=False)
        linear.weight.data = numbers = weight(30 + seed)
        order = torch.arange(INPUTS)
        if ordered:
            order = torch.randperm(INPUTS, generator=torch.Generator().manual_seed(seed))
        g_idx = torch.empty(INPUTS, dtype=torch.int32)
        g_idx[order] = torch.arange(INPUTS, dtype=torch.int32) // GROUP
        scales, zeros = asymmetric(numbers[:, order], bits, GROUP)
        made = torch_linear.TorchLinear(
            bits=bits,
            group_size=GROUP,
            sym=False,
            desc_act=ordered,
            in_features=INPUTS,
            out_features=OUTPUTS,
            bias=False,
            register_buffers=True,
        )
        # The library has zeros of v2 until it saves a file of v1, where 0 would not come back.
        zeros = zeros.clamp(min=1)
        made.pack_original(linear, scales, zeros, g_idx)
        made.post_init()
        back = made.dequantize_weight().t()
        if version == 1:
            said = config.QuantizeConfig(bits=bits, group_size=GROUP)
            model.convert_gptq_v2_to_v1_format_module(made, said)
        stored = {leaf: getattr(made, leaf) for leaf in ("qweight", "qzeros", "scales", "g_idx")}
        said = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": ordered}
        said["checkpoint_format"] = "gptq" if version == 1 else "gptq_v2"
        write(name, "gptqmodel 7.7.0", stored, back, said)


def modelopt(source):
    root = Path(source) / "modelopt"
    sys.path.insert(0, source)
    within = (
        "",
        ".torch",
        ".torch.quantization",
        *(f".torch.quantization.{n}" for n in ("qtensor", "backends")),
    )
    for package in (f"modelopt{rest}" for rest in within):
        without_init(package, root.joinpath(*package.split(".")[1:]))
    sys.modules["modelopt"].__version__ = "0.47.0"
    nvfp4 = importlib.import_module("modelopt.torch.quantization.qtensor.nvfp4_tensor")
    fp8 = importlib.import_module("modelopt.torch.quantization.qtensor.fp8_tensor")
    numbers = weight(40)
    tensor, scales, whole = nvfp4.NVFP4QTensor.quantize(numbers, 16)
    back = tensor.dequantize(
        dtype=torch.float32, scale=scales, double_scale=whole, block_sizes={-1: 16}
    )
    stored = {
        "weight": tensor._quantized_data,
        "weight_scale": scales,
        "weight_scale_2": whole.float(),
    }
    said = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    write("modelopt-nvfp4", "nvidia-modelopt 0.47.0", stored, back, said)
    tensor, scales = fp8.FP8QTensor.quantize(weight(41))
    back = tensor.dequantize(dtype=torch.float32, scale=scales)
    stored = {"weight": tensor._quantized_data, "weight_scale": scales.reshape(())}
    said = {"quant_method": "modelopt", "quant_algo": "FP8"}
    write("modelopt-fp8", "nvidia-modelopt 0.47.0", stored, back, said)


def bitsandbytes():
    from bitsandbytes import functional

    for seed, (kind, double) in enumerate([("nf4", False), ("nf4", True), ("fp4", False)]):
        # Double: more than 256 blocks, so that there is more than one scale of scales.
        numbers = weight(50 + seed, outputs=136, inputs=128) if double else weight(50 + seed)
        packed, state = functional.quantize_4bit(
            numbers, blocksize=64, quant_type=kind, compress_statistics=double
        )
        back = functional.dequantize_4bit(packed, state)
        stored = {"weight": packed}
        for leaf, value in state.as_dict(packed=True).items():
            stored[f"weight.{leaf}"] = value
        said = {"quant_method": "bitsandbytes", "load_in_4bit": True}
        name = f"bnb-{kind}{'-double' if double else ''}"
        write(name, "bitsandbytes 0.50.2", stored, back.half(), said)


if __name__ == "__main__":
    for make in (compressed_tensors, penstock, autoawq, bitsandbytes):
        make()
    gptqmodel(sys.argv[1])
    modelopt(sys.argv[2])
