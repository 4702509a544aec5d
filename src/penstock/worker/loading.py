"""From a model folder to an engine that answers: weights, probe, arena, self-check.

A model is refused, with a sentence, when penstock would not compute it exactly: weights that are
missing, layers that never reach our attention, or logits that differ from the model's own.
"""

from __future__ import annotations

import logging
import socket
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from msgspec.structs import replace

from penstock.catalog.geometry import read_window
from penstock.catalog.kv_formats import kv_format
from penstock.catalog.linear_formats import MADE_AT_LOAD
from penstock.catalog.weights import read_json
from penstock.errors import ModelTooLarge, ModelUnusable
from penstock.wire import Ready
from penstock.worker.backends import open_backend
from penstock.worker.backends.runner import Runner
from penstock.worker.core.drafts.control import DraftControl
from penstock.worker.core.drafts.drafting import Drafting
from penstock.worker.core.drafts.lookup import Lookup
from penstock.worker.core.engine import GenerateEngine
from penstock.worker.core.plan import StepLimits
from penstock.worker.core.profile import ServedModel
from penstock.worker.core.step_memory import StepMemory
from penstock.worker.engine.grammar import Grammars
from penstock.worker.kv.cache import KvCache
from penstock.worker.kv.groups import cost_of, split_layers
from penstock.worker.kv.identity import ModelFiles, numerics
from penstock.worker.kv.layout.layer_states import StateLayout
from penstock.worker.kv.memory import KvMemory
from penstock.worker.kv.offload.disk_reader import DiskSpec
from penstock.worker.kv.offload.tiers import KvOffload
from penstock.worker.kv.states.memory import StateMemory
from penstock.worker.load_phases import LoadPhases
from penstock.worker.models import attention, verify
from penstock.worker.models.build import (
    build_model,
    kept_tensors,
    read_config,
    routing_matters,
    sliding_windows,
)
from penstock.worker.models.recurrent.hook import install
from penstock.worker.models.shallow import first_layers
from penstock.worker.process_memory import own_bytes
from penstock.worker.profiling import store as profile_store
from penstock.worker.profiling.context import ProfileContext
from penstock.worker.profiling.images import ImageCost
from penstock.worker.profiling.profile import profile, remember
from penstock.worker.profiling.refining import Refinement
from penstock.worker.profiling.stress import NOISE_SHARE
from penstock.worker.profiling.timing import with_times
from penstock.worker.vision.loading import check_eyes, open_eyes, open_sight, prepared

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from penstock.wire import LoadSpec
    from penstock.worker.backends.base import Backend
    from penstock.worker.core.engine_contract import Progress
    from penstock.worker.core.profile import Profile
    from penstock.worker.kv.groups import LayerGroup
    from penstock.worker.models.kernels.interface import Kernels
    from penstock.worker.vision.loading import Sight

log = logging.getLogger(__name__)

BLOCK_TOKENS = 16
_MAX_SLOTS = 1 << 16  # of states, with their snapshots
EXTENTS = 128  # of an arena, if they are not larger than they need to be


def load_engine(spec: LoadSpec, progress: Progress) -> GenerateEngine:
    """Load the model of `spec`; raises a PenstockError that says what is wrong with it."""
    return load(spec, progress)[0]


def load(spec: LoadSpec, progress: Progress) -> tuple[GenerateEngine, ProfileContext]:
    """An engine, and what it was measured with."""
    clock = LoadPhases()
    backend = open_backend(spec.device)
    _prepare_torch(spec.threads)
    model = _load_model(spec, backend, progress, clock)
    kept = _kept(spec, backend, model)
    context = _profile_context(spec, backend, model, kept)
    clock.ended("kernels")
    progress("profile", 0, 0)
    measured = with_times(context, profile(context))
    open_eyes(spec, context, model.sight)
    clock.ended("profile")
    ready = _ready(context, measured, model)
    engine = _engine(context, measured, ready, kept)
    if not measured.proven:
        verify.compare_with_own_attention(
            *(model.module, context.executor, context.kv),
            *(model.text, ready.context, context.memory.format),
        )
        check_eyes(context, model.sight, ready)
        remember(context, measured, kept)
    booked = ready.weight_bytes + ready.graph_bytes + context.memory.committed_bytes
    ready.device_overhead_bytes = backend.overhead_bytes(booked)
    engine.open()
    clock.ended("comparison")
    ready.phases = clock.phases
    ready.load_s = sum(clock.phases.values())
    log.info("loaded in %.2f s: %s", ready.load_s, clock.phases)
    return engine, context


@dataclass(frozen=True, slots=True)
class _LoadedModel:
    """A model whose weights and kernels are in place."""

    module: PreTrainedModel
    text: PretrainedConfig
    dtype: torch.dtype
    kernels: Kernels
    sight: Sight
    files: ModelFiles  # as they were before the weights were read
    window: int
    fingerprint: str
    weight_bytes: int
    copied_bytes: int  # of them, not mapped from files


def _load_model(
    spec: LoadSpec, backend: Backend, progress: Progress, clock: LoadPhases
) -> _LoadedModel:
    folder = Path(spec.path)
    files = ModelFiles.now(folder, with_code=spec.trust_remote_code)
    config = read_config(spec)
    dtype = _resolve_dtype(spec.dtype, config, backend)
    module = build_model(spec, config, dtype, backend.device, progress)
    clock.ended("weights")
    sight = open_sight(spec, config, module)
    kernels = prepared(backend, sight, module, dtype)
    window = _window(spec)
    tensors = kept_tensors(module)
    return _LoadedModel(
        module=module,
        text=config.get_text_config(),
        dtype=dtype,
        kernels=kernels,
        sight=sight,
        files=files,
        window=window,
        fingerprint=profile_store.fingerprint(spec, backend.processor, dtype, window, BLOCK_TOKENS),
        weight_bytes=sum(tensor.nbytes for tensor in tensors),
        copied_bytes=backend.copied_bytes(tensors, folder),
    )


def _kept(spec: LoadSpec, backend: Backend, model: _LoadedModel) -> verify.Kept:
    """What each layer keeps: known from an earlier load, or by a forward."""
    known = None
    if not backend.full_steps_are_cheap:
        known = profile_store.load(spec.profile_dir, model.fingerprint)
    if known is None:
        found = verify.probe(model.module, model.text)
    else:
        install(model.module)
        found = verify.Kept(dict(known.layers), dict(known.states), known.prompts_differ)
    if found.states and not backend.serves_states:
        raise ModelUnusable(
            f"{spec.name} has {len(found.states)} layers with a recurrent state, which penstock "
            f'computes on CPUs only so far: load it with device = "cpu".'
        )
    return found


def _profile_context(
    spec: LoadSpec, backend: Backend, model: _LoadedModel, kept: verify.Kept
) -> ProfileContext:
    """All that steps need, measured or not."""
    windows = sliding_windows(model.text)
    form = kv_format(spec.kv_dtype, _name(model.dtype))
    groups = split_layers(
        {layer: shape.size_bytes(form) for layer, shape in kept.attention.items()},
        dict(enumerate(windows)),
        BLOCK_TOKENS,
        model.window,
        form,
    )
    addresses = _addresses(spec, groups, model.window)
    states = _states(spec, backend, kept, addresses[1])
    memory = KvMemory(groups, kept.attention, form, backend, *addresses, states)
    tier = _tier(spec, backend, memory, model)  # it has buffers, so before measuring
    cost = memory.cost(spec.step_tokens)
    kv = KvCache(groups, memory.arenas, cost, spec.memory_bytes, tier, states)
    kv.states.prompts_differ = kept.prompts_differ
    # Captures graphs, whose padded rows read the first block of each group: it is committed now.
    executor = backend.executor(
        Runner(model.module, memory, model.kernels, windows),
        _grammars(spec, model.text.vocab_size),
        spec.step_sequences,
        model.window,
    )
    # What graphs keep comes out of the grant, and is booked apart.
    spec = replace(spec, memory_bytes=max(0, spec.memory_bytes - executor.graph_bytes))
    kv.set_limit(spec.memory_bytes)
    mapped_bytes = model.weight_bytes - model.copied_bytes
    # A wrong draft would leave its state behind.
    drafts = backend.max_drafts if spec.speculation == "auto" and states is None else 0
    cheap = backend.full_steps_are_cheap
    return ProfileContext(
        spec=spec,
        backend=backend,
        executor=executor,
        memory=memory,
        kv=kv,
        meter=backend.meter(memory),
        cap=backend.cap(memory, mapped_bytes, enforced=spec.capped),
        limits=StepLimits(
            tokens=spec.step_tokens,
            sequences=spec.step_sequences,
            block_tokens=BLOCK_TOKENS,
            logit_rows=StepLimits.logit_rows_for(spec.step_sequences, drafts),
            reserve=spec.reserve,
            pairs=backend.step_pair_limit,
        ),
        window=model.window,
        vocabulary=model.text.vocab_size,
        dtype=_name(model.dtype),
        row_bytes=model.text.hidden_size * model.dtype.itemsize,
        routes=routing_matters(model.module),
        fingerprint=model.fingerprint,
        weight_bytes=model.weight_bytes,
        drafts=drafts,
        shallow=nullcontext if cheap else partial(first_layers, model.module, windows),
        repeats=2 if cheap else 4,
        images=ImageCost(model.sight.encoder, spec),
        noise_share=NOISE_SHARE if cheap else 0.07,
    )


def _drafting(context: ProfileContext, measured: Profile) -> Drafting | None:
    if not context.drafts:
        return None
    return Drafting([Lookup(measured.host_tokens)], context.drafts, DraftControl(measured.times))


def _grammars(spec: LoadSpec, vocabulary: int) -> Grammars:
    host = None if spec.grammar_fd is None else socket.socket(fileno=spec.grammar_fd)
    return Grammars(vocabulary, host)


def _engine(
    context: ProfileContext, measured: Profile, ready: Ready, kept: verify.Kept
) -> GenerateEngine:
    backend, kv = context.backend, context.kv
    served = ServedModel(
        window=context.window,
        vocabulary=context.vocabulary,
        domain=backend.domain,
        step_target_s=context.spec.step_target_s,
        drafting=_drafting(context, measured),
        idle_work=Refinement(context, measured, kept) if measured.provisional else None,
        calibrates=ready.queue_bytes > 0 and backend.full_steps_are_cheap,
    )
    memory = StepMemory(measured, context.meter, context.cap)
    return GenerateEngine(context.executor, kv, memory, measured, served, ready)


def _prepare_torch(threads: int | None) -> None:
    if threads:
        torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    # Threads are started before the process is capped, of which some would die.
    torch.zeros(torch.get_num_threads() << 16).add_(1)
    attention.register()


def _ready(context: ProfileContext, measured: Profile, model: _LoadedModel) -> Ready:
    """What was loaded, as the server is told."""
    spec, memory, kv = context.spec, context.memory, context.kv
    kv.cost = measured.cost.kv
    kv.set_limit(measured.kv_bytes)
    if spec.kv_tokens is not None:
        kv.ceiling_bytes = kv.need_bytes(spec.kv_tokens)
    kv_tokens = kv.max_tokens()
    committed = memory.committed_bytes if context.backend.is_process_memory else 0
    private, beside = own_bytes(model.copied_bytes, committed)
    return Ready(
        pid=0,
        device=spec.device,
        dtype=context.dtype,
        kv_dtype=memory.format.name,
        weight_bytes=model.weight_bytes,
        kv_tokens=kv_tokens,
        context=min(context.window, kv_tokens),
        load_s=0.0,
        cost=measured.cost,
        process_bytes=private,
        step_bytes=measured.step_bytes,
        kv_bytes=measured.kv_bytes,
        kv_unit_bytes=kv.unit_bytes,
        kv_overhead_bytes=kv.overhead_bytes,
        step_tokens=measured.limits.tokens,
        graph_bytes=context.executor.graph_bytes,
        outer_cap=context.cap.control_group,
        overhead_bytes=beside,
        copied_bytes=model.copied_bytes,
        kept_bytes=measured.kept_bytes if measured.proven else 0,
        queue_bytes=kv.queue_bytes,
        image_pixels=context.images.pixels,
        image_file_bytes=spec.image_file_bytes if context.images.pixels else 0,
        image_s=context.images.stage_s,
        no_images=model.sight.why,
    )


def _tier(
    spec: LoadSpec, backend: Backend, memory: KvMemory, model: _LoadedModel
) -> KvOffload | None:
    """KV in RAM, for arenas that are elsewhere, and on disk; without the states that belong to it,
    KV would be of no use."""
    if memory.states is not None:
        return None
    tier_bytes = 0 if backend.is_process_memory else spec.tier_bytes
    made = spec.dtype if spec.dtype in MADE_AT_LOAD else ""  # of the files, by rounding
    processor = f"{backend.processor} {made}".strip()
    disk = DiskSpec.of(spec, model.files, numerics(memory, model.dtype, processor, model.kernels))
    if disk is None and not tier_bytes:
        return None
    return KvOffload(memory.groups, memory.arenas, disk, spec.memory_bytes, tier_bytes)


def _addresses(
    spec: LoadSpec, groups: tuple[LayerGroup, ...], window: int
) -> tuple[list[int], int]:
    """Blocks of each group in the largest grant there may ever be, and the bytes of an extent."""
    largest = max(spec.memory_bytes, spec.largest_memory_bytes or 0)
    if spec.kv_tokens is not None:
        cost = cost_of(groups, spec.step_tokens)
        largest = max(largest, 2 * (cost.sequence(spec.kv_tokens) + cost.chunk_bytes))
    # More than every sequence of a step at full length could never be used.
    useful = 1 + spec.step_sequences * -(-window // BLOCK_TOKENS)
    blocks = [min(largest // group.block_bytes, useful) for group in groups]
    if min(blocks) < 2:
        needed = 2 * sum(group.block_bytes for group in groups)
        raise ModelTooLarge(
            f"{spec.name} leaves {spec.memory_bytes} bytes for KV and steps, and one block of "
            f"{BLOCK_TOKENS} tokens takes {needed // 2}: raise --memory.",
            numbers={"needed_bytes": needed, "limit_bytes": spec.memory_bytes},
        )
    # Small enough that whole extents waste little of the grant.
    size = sum(count * group.block_bytes for count, group in zip(blocks, groups, strict=True))
    return blocks, min(size, largest) // EXTENTS


def _states(
    spec: LoadSpec, backend: Backend, kept: verify.Kept, extent_bytes: int
) -> StateMemory | None:
    """Slots for recurrent states, as many as the largest grant there may ever be has room for."""
    if not kept.states:
        return None
    largest = max(spec.memory_bytes, spec.largest_memory_bytes or 0)
    size = StateLayout(tuple(kept.states.values())).slot_bytes
    if largest < 4 * size:
        raise ModelTooLarge(
            f"{spec.name} leaves {spec.memory_bytes} bytes for KV and steps, and the recurrent "
            f"state of one sequence takes {size}: raise --memory.",
            numbers={"needed_bytes": 4 * size, "limit_bytes": spec.memory_bytes},
        )
    return StateMemory(kept.states, min(largest // size, _MAX_SLOTS), backend, extent_bytes)


def _resolve_dtype(wanted: str, config: PretrainedConfig, backend: Backend) -> torch.dtype:
    """The type to compute in."""
    if wanted == "auto" or wanted in MADE_AT_LOAD:
        stored = getattr(config.get_text_config(), "dtype", None) or config.dtype
        wanted = backend.kind.dtype_for(_name(stored))
    dtype = getattr(torch, wanted, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ModelUnusable(
            f"--dtype {wanted} is not one of auto, float32, bfloat16, float16, int8."
        )
    return dtype


def _name(dtype: torch.dtype) -> str:
    """As settings have it."""
    return str(dtype).removeprefix("torch.")


def _window(spec: LoadSpec) -> int:
    """As the catalog has it: what the server lets in and what is served are the same number."""
    path = Path(spec.path) / "config.json"
    window = spec.window or read_window(read_json(path), path)
    return min(window, spec.max_context or window)
