"""From a model folder to an engine that makes vectors or scores: weights, check, profile."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModel, AutoModelForSequenceClassification
from transformers.utils.logging import disable_progress_bar

from penstock.catalog import read_card
from penstock.catalog.encoders import POOLINGS, RERANK
from penstock.catalog.geometry import read_first_position
from penstock.catalog.weights import read_json, weight_files
from penstock.errors import ModelUnusable
from penstock.wire import Ready
from penstock.worker.backends import open_backend
from penstock.worker.backends.meters import NoKv
from penstock.worker.core.profile import ServedModel
from penstock.worker.core.step_memory import StepMemory
from penstock.worker.encoding import verify
from penstock.worker.encoding.engine import EncodeEngine
from penstock.worker.encoding.executor import EncodeExecutor
from penstock.worker.encoding.heads import ScoreHead, VectorHead
from penstock.worker.encoding.profile import BLOCK_TOKENS, EncodeContext, profile, remember
from penstock.worker.encoding.runner import EncodeRunner
from penstock.worker.load_phases import LoadPhases
from penstock.worker.models import attention
from penstock.worker.models.build import kept_tensors, read_config, stored_model
from penstock.worker.process_memory import own_bytes
from penstock.worker.profiling import store

if TYPE_CHECKING:
    from penstock.catalog import Card
    from penstock.catalog.encoders import Encoder
    from penstock.wire import LoadSpec
    from penstock.worker.backends.base import Backend
    from penstock.worker.core.engine_contract import Progress
    from penstock.worker.encoding.profile import EncodeProfile

_POOLER = "pooler."  # of a task that the model was trained for: no vector needs it


def load_engine(spec: LoadSpec, progress: Progress) -> EncodeEngine:
    """Load the model of `spec`; raises a PenstockError that says what is wrong with it."""
    return load(spec, progress)[0]


def load(spec: LoadSpec, progress: Progress) -> tuple[EncodeEngine, EncodeRunner]:
    """An engine, and what computes for it."""
    clock = LoadPhases()
    backend = open_backend(spec.device)
    _prepare_torch(spec.threads)
    card = read_card(Path(spec.path), spec.name)
    window = min(spec.window or card.context, spec.max_context or card.context)
    model, runner = _build(spec, card, backend, progress)
    clock.ended("weights")
    verify.choose_way(runner, model, window)
    clock.ended("comparison")
    tensors = (*kept_tensors(model), *runner.head.tensors)
    weight_bytes = sum(tensor.nbytes for tensor in tensors)
    copied_bytes = backend.copied_bytes(tensors, Path(spec.path))
    progress("profile", 0, 0)
    context = EncodeContext(
        spec=spec,
        executor=EncodeExecutor(runner, backend.step_lock()),
        meter=backend.meter(NoKv()),
        cap=backend.cap(NoKv(), weight_bytes - copied_bytes, enforced=spec.capped),
        window=window,
        vocabulary=card.vocab_size,
        fingerprint=store.fingerprint(spec, backend.processor, model.dtype, window, BLOCK_TOKENS),
    )
    found = profile(context)
    remember(context, found)
    clock.ended("profile")
    ready = _ready(context, found, (weight_bytes, copied_bytes), str(model.dtype))
    ready.device_overhead_bytes = backend.overhead_bytes(weight_bytes)
    ready.phases = clock.phases
    ready.load_s = sum(clock.phases.values())
    served = ServedModel(window, card.vocab_size, backend.domain, spec.step_target_s)
    memory = StepMemory(found.profile, context.meter, context.cap)
    engine = EncodeEngine(context.executor, memory, found.profile, served, ready)
    memory.relieve()  # what the load has left in the heap is no step's
    return engine, runner


def _build(
    spec: LoadSpec, card: Card, backend: Backend, progress: Progress
) -> tuple[Any, EncodeRunner]:
    """The model with its weights, and what runs it."""
    if card.encoder is None:
        raise ModelUnusable(f"{spec.name} is of the kind {card.kind}; it makes no vectors.")
    wanted = spec.dtype
    if wanted == "auto":
        wanted = backend.kind.encoder_dtype_for(card.dtype)
    dtype = getattr(torch, wanted, None)
    if card.formats or not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        held = ", ".join(card.formats) or wanted
        raise ModelUnusable(
            f"{spec.name}: weights of encoders are plain ones, and these are {held}; choose the "
            "dtype float32, bfloat16 or float16 and a folder of plain safetensors."
        )
    total = sum(file.stat().st_size for file in weight_files(card.path))
    progress("weights", 0, total)
    config = read_config(spec)
    scores = card.kind == RERANK
    kind = AutoModelForSequenceClassification if scores else AutoModel
    model = stored_model(spec, config, dtype, kind, () if scores else (_POOLER,))
    model = model.to(backend.device).eval().requires_grad_(False)
    if not scores and getattr(model, "pooler", None) is not None:
        model.pooler = None
    progress("weights", total, total)
    encoder = _complete(spec, card.encoder, scores=scores)
    head: Any
    if scores:
        head = ScoreHead(model, encoder)
        base = head.base
    else:
        head, base = VectorHead(encoder, card.path, backend.device), model
    config_path = card.path / "config.json"
    first = read_first_position(read_json(config_path), config_path)
    return model, EncodeRunner(base, head, backend.prepare_encoder(), first)


def _complete(spec: LoadSpec, encoder: Encoder, *, scores: bool) -> Encoder:
    """With the pooling that the settings name, where the files do not."""
    if scores or (encoder.pooling and spec.pooling is None):
        return encoder
    if spec.pooling is None:
        raise ModelUnusable(
            f"{spec.name} has no modules.json, so nothing says how the rows of a text become its "
            f"vector; set models.{spec.name}.pooling to one of {', '.join(POOLINGS)}."
        )
    return dataclasses.replace(encoder, pooling=(spec.pooling,))


def _prepare_torch(threads: int | None) -> None:
    if threads:
        torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    # Threads are started before the process is capped, of which some would die.
    torch.zeros(torch.get_num_threads() << 16).add_(1)
    attention.register()
    disable_progress_bar()  # the log has no use for it


def _ready(
    context: EncodeContext, found: EncodeProfile, weights: tuple[int, int], dtype: str
) -> Ready:
    """What was loaded, as the server is told."""
    weight_bytes, copied_bytes = weights
    private, beside = own_bytes(copied_bytes, 0)
    return Ready(
        pid=0,
        device=context.spec.device,
        dtype=dtype.removeprefix("torch."),
        weight_bytes=weight_bytes,
        context=found.longest,
        load_s=0.0,
        cost=found.profile.cost,
        process_bytes=private,
        step_bytes=found.profile.step_bytes,
        step_tokens=found.profile.limits.tokens,
        outer_cap=context.cap.control_group,
        overhead_bytes=beside,
        copied_bytes=copied_bytes,
    )
