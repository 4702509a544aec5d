"""From a model folder to an engine that answers: weights, probe, arena, self-check.

A model is refused here, with a sentence, when penstock would not compute it exactly: weights that
are missing, layers that never reach our attention, or logits that differ from the model's own.
"""

from __future__ import annotations

import json
import logging
import time
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from msgspec.structs import replace
from transformers import AutoConfig, AutoModelForCausalLM

from penstock.errors import ModelTooLarge, ModelUnusable
from penstock.wire import Ready
from penstock.worker import profile_store
from penstock.worker.caps import Cap, CudaCap, NoCap, OuterCap, RamCap
from penstock.worker.engine.executor import Executor
from penstock.worker.engine.generate import GenerateEngine
from penstock.worker.engine.grammar import Vocabulary
from penstock.worker.engine.runner import Runner
from penstock.worker.kv.arena import Arena, BlockLayout
from penstock.worker.kv.blocks import BlockPool
from penstock.worker.kv.disk_reader import ShelfSpec
from penstock.worker.kv.identity import ModelFiles, numerics
from penstock.worker.kv.shelf import Shelf
from penstock.worker.meter import (
    copied_bytes,
    device_overhead_bytes,
    meter_for,
    own_bytes,
)
from penstock.worker.models import attention, verify, weights
from penstock.worker.models.kernels import kernels_for
from penstock.worker.models.kernels.reference import ReferenceKernels
from penstock.worker.profile import Bench, Profile, profile, remember
from penstock.worker.scheduling.plan import StepLimits

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.nn import Module
    from transformers import PretrainedConfig, PreTrainedModel

    from penstock.wire import LoadSpec
    from penstock.worker.engine.cuda_executor import CudaExecutor
    from penstock.worker.models.kernels.interface import Kernels

    Progress = Callable[[str, int, int], None]

log = logging.getLogger(__name__)

BLOCK_TOKENS = 16
# A chunk is shortened at the end of a long context, so that no step takes much longer than others.
STEP_PAIRS = {"cpu": 1 << 20, "cuda": 1 << 26}
EXTENTS = 128  # of an arena, if they are not larger than they need to be

# Rotary tables that change with the longest position in a batch: exact only below the length at
# which they would change, so that is the window served.
_LENGTH_DEPENDENT_ROPE = ("longrope", "dynamic")


def load_engine(spec: LoadSpec, progress: Progress) -> GenerateEngine:
    """Load the model of `spec`; raises a PenstockError that says what is wrong with it."""
    clock = _Phases()
    device = torch.device(spec.device)
    _prepare_torch(spec.threads)
    files = ModelFiles.now(Path(spec.path), with_code=spec.trust_remote_code)
    config = _read_config(spec)
    dtype = _resolve_dtype(spec.dtype, config, device)
    text = config.get_text_config()
    vocabulary = Vocabulary(Path(spec.path), text.vocab_size)
    if device.type != "cpu":
        vocabulary.read()  # weights come in meanwhile, and graphs are captured
    model = _load_model(spec, config, dtype, device, progress)
    clock.ended("weights")
    kernels = kernels_for(device, dtype)
    kernels.adopt(model)
    _leave_the_weights_stream(device)
    window = _window(text, spec)
    fingerprint = profile_store.fingerprint(spec, dtype, window, BLOCK_TOKENS)
    proven = profile_store.load(spec.profile_dir, fingerprint) if device.type == "cpu" else None
    geometry = dict(proven.layers) if proven is not None else verify.probe(model, text)
    layout = BlockLayout(tuple(geometry.values()), BLOCK_TOKENS, dtype)
    arena = _arena(spec, layout, window, device)
    slots = {layer: slot for slot, layer in enumerate(geometry)}
    pool = BlockPool(arena.blocks, arena.extent_blocks, arena)
    runner = Runner(model, arena, kernels, _windows(text), slots)
    executor = _executor(runner, vocabulary, spec, window)
    # What graphs keep comes out of the grant, and is booked apart.
    spec = replace(spec, memory_bytes=max(0, spec.memory_bytes - executor.graph_bytes))
    shelf = _shelf(spec, arena, kernels, files)  # before anything is measured, since it has buffers
    outer = _outer_cap(spec, model) if spec.capped and device.type == "cpu" else None
    bench = Bench(
        spec=spec,
        executor=executor,
        arena=arena,
        pool=pool,
        meter=meter_for(device),
        cap=_cap(spec, arena, outer),
        limits=StepLimits(
            tokens=spec.step_tokens,
            sequences=spec.step_sequences,
            block_tokens=BLOCK_TOKENS,
            logit_rows=2 * spec.step_sequences,
            reserve=spec.reserve,
            pairs=STEP_PAIRS[device.type],
        ),
        window=window,
        vocabulary=text.vocab_size,
        row_bytes=model.get_input_embeddings().weight.shape[1] * model.dtype.itemsize,
        routes=_routing_matters(model),
        fingerprint=fingerprint,
    )
    clock.ended("kernels")
    progress("profile", 0, 0)
    measured = profile(bench)
    clock.ended("profile")
    ready = _ready(bench, measured, outer)
    ready.queue_bytes = 0 if shelf is None else shelf.queue_bytes
    engine = GenerateEngine(bench, measured, ready, shelf)
    if not measured.proven:
        verify.compare_with_own_attention(model, engine, text)
        remember(bench, measured, geometry)
    known = ready.weight_bytes + executor.graph_bytes + arena.committed_bytes
    ready.device_overhead_bytes = device_overhead_bytes(device, known)
    engine.open()
    clock.ended("comparison")
    ready.phases = clock.phases
    ready.load_s = sum(clock.phases.values())
    log.info("loaded in %.2f s: %s", ready.load_s, clock.phases)
    return engine


def _prepare_torch(threads: int | None) -> None:
    if threads:
        torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    # Threads are started before the process is capped, of which some would die.
    torch.zeros(torch.get_num_threads() << 16).add_(1)
    attention.register()


def _leave_the_weights_stream(device: torch.device) -> None:
    """Compute on another stream from now on.

    Torch's allocator has memory for each stream apart. Where weights were packed there are holes
    between them: steps of some sizes would settle there, others find them too small and take more
    beside them, and what steps hold together would be more than the largest of them.
    """
    if device.type == "cuda":
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        torch.cuda.set_stream(stream)


def _ready(bench: Bench, measured: Profile, outer: OuterCap | None) -> Ready:
    """What was loaded, as the server is told."""
    spec, arena, model = bench.spec, bench.arena, bench.executor.model
    kv_tokens = (measured.kv_blocks - 1) * BLOCK_TOKENS
    copied = copied_bytes(_tensors(model), Path(spec.path)) if arena.in_ram else 0
    private, beside = own_bytes(copied, arena.committed_bytes if arena.in_ram else 0)
    return Ready(
        pid=0,
        device=spec.device,
        dtype=str(arena.layout.dtype).removeprefix("torch."),
        weight_bytes=sum(tensor.nbytes for tensor in _tensors(model)),
        kv_bytes_per_token=arena.layout.token_bytes,
        kv_tokens=kv_tokens,
        context=min(bench.window, kv_tokens),
        load_s=0.0,
        cost=measured.cost,
        process_bytes=private,
        step_bytes=measured.step_bytes,
        kv_bytes=measured.kv_bytes,
        kv_unit_bytes=arena.unit_bytes,
        step_tokens=measured.limits.tokens,
        graph_bytes=bench.executor.graph_bytes,
        outer_cap=str(outer.group) if outer is not None else None,
        overhead_bytes=beside,
        copied_bytes=copied,
        kept_bytes=measured.kept_bytes if measured.proven else 0,
    )


class _Phases:
    """How long each part of a load took."""

    def __init__(self) -> None:
        self._since = time.perf_counter()
        self.phases: dict[str, float] = {}

    def ended(self, name: str) -> None:
        """What was done since the last one was this."""
        now = time.perf_counter()
        self.phases[name] = round(now - self._since, 3)
        self._since = now


def _executor(
    runner: Runner, vocabulary: Vocabulary, spec: LoadSpec, window: int
) -> Executor | CudaExecutor:
    """What runs plans on this device; graphs are captured here, before anything is measured."""
    if isinstance(runner.kernels, ReferenceKernels):
        return Executor(runner, vocabulary)
    from penstock.worker.engine.cuda_executor import CudaExecutor
    from penstock.worker.engine.cuda_runner import CudaRunner

    on_device = CudaRunner(runner, spec.step_sequences, window)
    on_device.capture(spec.step_sequences)
    return CudaExecutor(on_device, vocabulary)


def _shelf(spec: LoadSpec, arena: Arena, kernels: Kernels, files: ModelFiles) -> Shelf | None:
    """KV in RAM, for an arena that is elsewhere, and on disk."""
    tier_bytes = 0 if arena.in_ram else spec.tier_bytes
    disk = ShelfSpec.of(spec, files, numerics(arena.layout, arena.device, kernels))
    if disk is None and not tier_bytes:
        return None
    return Shelf(arena, disk, spec.memory_bytes, tier_bytes)


def _arena(spec: LoadSpec, layout: BlockLayout, window: int, device: torch.device) -> Arena:
    """Addresses for the largest grant there may ever be; nothing is committed yet."""
    largest = max(spec.memory_bytes, spec.largest_memory_bytes or 0)
    blocks = largest // layout.block_bytes
    if spec.kv_tokens is not None:
        blocks = max(blocks, 1 + -(-spec.kv_tokens // BLOCK_TOKENS))
    # More than every sequence of a step at full length could never be used.
    blocks = min(blocks, 1 + spec.step_sequences * -(-window // BLOCK_TOKENS))
    if blocks < 2:
        raise ModelTooLarge(
            f"{spec.name} leaves {spec.memory_bytes} bytes for KV and steps, and one block of "
            f"{BLOCK_TOKENS} tokens takes {layout.block_bytes}: raise --memory.",
            numbers={"needed_bytes": 2 * layout.block_bytes, "limit_bytes": spec.memory_bytes},
        )
    # Small enough that whole extents waste little of the grant.
    extent_bytes = blocks * layout.block_bytes // EXTENTS
    return Arena(layout, blocks, device, extent_bytes)


def _outer_cap(spec: LoadSpec, model: PreTrainedModel) -> OuterCap | None:
    outer = OuterCap.enter()
    if outer is not None:
        tensors = _tensors(model)
        outer.mapped_bytes = sum(t.nbytes for t in tensors) - copied_bytes(tensors, Path(spec.path))
    return outer


def _cap(spec: LoadSpec, arena: Arena, outer: OuterCap | None) -> Cap:
    if not spec.capped:
        return NoCap()
    return RamCap(arena, outer) if arena.in_ram else CudaCap(arena.device)


def _read_config(spec: LoadSpec) -> PretrainedConfig:
    try:
        config = AutoConfig.from_pretrained(
            spec.path, local_files_only=True, trust_remote_code=spec.trust_remote_code
        )
    except (ValueError, KeyError, OSError) as error:
        raise ModelUnusable(f"{spec.name}: config.json cannot be used: {error}") from error
    # Quantised checkpoints need loaders of their own; serving them as if they were plain is wrong.
    if getattr(config, "quantization_config", None) is not None:
        method = dict(config.quantization_config).get("quant_method", "unknown")
        raise ModelUnusable(
            f"{spec.name} is quantised ({method}), which is not served yet: "
            "use the unquantised checkpoint or a GGUF file, which is de-quantised at pull."
        )
    return deepcopy(config)  # transformers keeps and changes the object it is given


def _resolve_dtype(wanted: str, config: PretrainedConfig, device: torch.device) -> torch.dtype:
    if wanted != "auto":
        dtype = getattr(torch, wanted, None)
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ModelUnusable(f"--dtype {wanted} is not one of auto, float32, bfloat16, float16.")
        return dtype
    if device.type == "cpu":
        return torch.float32  # narrower types are slower on CPUs without instructions for them
    stored = getattr(config.get_text_config(), "dtype", None) or config.dtype
    return stored if stored in (torch.bfloat16, torch.float16) else torch.bfloat16


def _load_model(
    spec: LoadSpec,
    config: PretrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress,
) -> PreTrainedModel:
    folder = Path(spec.path)
    files = sorted(folder.glob("*.safetensors"))
    total = sum(file.stat().st_size for file in files)
    progress("weights", 0, total)
    seed = _random_seed(folder)
    if seed is not None:
        model = _random_model(config, dtype, device, seed)
    else:
        told = partial(progress, "weights")
        model = None
        if not spec.trust_remote_code:  # whose model may be another than transformers' own
            model = weights.stream(config, attention.IMPLEMENTATION, dtype, device, files, told)
        if model is None:
            model = _stored_model(spec, config, dtype)
    model = model.to(device).eval().requires_grad_(False)
    progress("weights", total, total)
    return model


def _stored_model(spec: LoadSpec, config: PretrainedConfig, dtype: torch.dtype) -> Any:
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            spec.path,
            config=config,
            dtype=dtype,
            attn_implementation=attention.IMPLEMENTATION,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=spec.trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported, and refused below with their names
        )
    except (ValueError, KeyError, OSError, RuntimeError, ImportError) as error:
        # Older model code looks its attention up in a table of its own.
        if isinstance(error, KeyError) and error.args == (attention.IMPLEMENTATION,):
            raise ModelUnusable(
                f"{spec.name}: models of type {config.model_type} have attention code of their "
                "own, which penstock cannot page."
            ) from error
        raise ModelUnusable(f"{spec.name} cannot be loaded: {error}") from error
    _refuse_incomplete(spec.name, report)
    return model


def _refuse_incomplete(name: str, report: dict[str, Any]) -> None:
    """transformers fills what it does not find, or cannot use, with random numbers."""
    if missing := sorted(report["missing_keys"]):
        raise ModelUnusable(
            f"{name}: {len(missing)} weights are missing from its safetensors files, the first "
            f"is {missing[0]}: pull the model again."
        )
    if mismatched := sorted(report["mismatched_keys"]):
        weight, stored, expected = mismatched[0]
        raise ModelUnusable(
            f"{name}: {len(mismatched)} weights have another shape than config.json asks for, the "
            f"first is {weight}: {list(stored)} instead of {list(expected)}."
        )


def _random_model(
    config: PretrainedConfig, dtype: torch.dtype, device: torch.device, seed: int
) -> Any:
    torch.manual_seed(seed)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attention.IMPLEMENTATION
        )


def _random_seed(folder: Path) -> int | None:
    """The seed of a folder that names a shape instead of holding weights."""
    note = folder / "penstock.json"
    if not note.exists():
        return None
    seed: int | None = json.loads(note.read_text()).get("random_seed")
    return seed


def _window(text: PretrainedConfig, spec: LoadSpec) -> int:
    window: int = text.max_position_embeddings
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    kind = rope.get("rope_type", rope.get("type"))
    if kind in _LENGTH_DEPENDENT_ROPE:
        original = rope.get("original_max_position_embeddings") or getattr(
            text, "original_max_position_embeddings", None
        )
        window = min(window, original or window)
    return min(window, spec.max_context or window)


def _windows(text: PretrainedConfig) -> tuple[int | None, ...]:
    """Each layer's sliding window as the config has it, for models that put it only in the mask."""
    size = getattr(text, "sliding_window", None)
    # Without a list of kinds, a window is every layer's.
    kinds = getattr(text, "layer_types", None) or ["sliding_attention"] * text.num_hidden_layers
    return tuple(size if kind == "sliding_attention" else None for kind in kinds)


def _tensors(model: Module) -> tuple[Tensor, ...]:
    """What the model keeps; tied weights are one parameter and count once."""
    return (*model.parameters(), *model.buffers())


def _routing_matters(model: PreTrainedModel) -> bool:
    """Whether what a step takes depends on the experts that its tokens are sent to."""
    return any(
        name.rpartition(".")[2] == "experts" and not getattr(module.forward, "even", False)
        for name, module in model.named_modules()
    )
