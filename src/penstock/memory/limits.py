"""How much memory penstock may use, and what a load may take of it.

Pure functions over readings and settings; nothing is booked or measured here. The constants below
are stated estimates that stand until a load measures its own steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.config import parse_size
from penstock.errors import ModelTooLarge

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.memory.gauge import GpuReading, RamReading

MIB = 1 << 20
GIB = 1 << 30

RAM_SPARE = (GIB, 0.08)  # `auto` leaves the larger of the two to everything else
GPU_SPARE = (512 * MIB, 0.02)

TEMPLATE_BYTES = 400 * MIB  # torch and transformers, once for all workers
# Private bytes of a worker before weights: the interpreter's own, thread stacks, library state.
RAM_PROCESS_BYTES = 128 * MIB
GPU_PROCESS_BYTES = 640 * MIB  # a CUDA context and its libraries' workspaces

MIN_KV_TOKENS = 128  # less than this serves no one
MAX_WINDOWS = 64  # KV for more full windows than this has no use
KV_SHARE = 0.5  # of what is free, so that another model still finds room
_ACTIVATION_VALUES = 24  # per token and hidden value, live at the widest point of a layer
_LOGIT_VALUES = 6  # per sequence and vocabulary entry: logits, their copies, sampling
_STEP_BASE_BYTES = 64 * MIB


def resolve_limit(setting: str, capacity_bytes: int, spare: tuple[int, float]) -> int:
    """`auto`, a percentage or a size, as bytes; never more than there is."""
    text = setting.strip()
    if text == "auto":
        return capacity_bytes - max(spare[0], int(capacity_bytes * spare[1]))
    if text.endswith("%"):
        return int(capacity_bytes * float(text[:-1]) / 100)
    return min(parse_size(text), capacity_bytes)


def resolve_limits(
    ram_setting: str, gpu_setting: str, ram: RamReading, gpus: Sequence[GpuReading]
) -> dict[str, int]:
    """The limit of each domain: `ram`, and `gpu:N` for each GPU."""
    limits = {"ram": resolve_limit(ram_setting, ram.capacity_bytes, RAM_SPARE)}
    for gpu in gpus:
        limits[f"gpu:{gpu.index}"] = resolve_limit(gpu_setting, gpu.total_bytes, GPU_SPARE)
    return limits


def domain_of(device: str) -> str:
    """The memory that a device computes in: `cpu` in `ram`, `cuda:N` in `gpu:N`."""
    return "ram" if device == "cpu" else device.replace("cuda", "gpu")


@dataclass(frozen=True, slots=True)
class LoadNeed:
    """What is known of a model before it is loaded."""

    name: str
    domain: str
    weight_bytes: int  # in the dtype it is served in
    kv_bytes_per_token: int
    context: int
    step_bytes: int
    kv_bytes: int | None = None  # the user's own figure


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What a load takes from its domain."""

    domain: str
    fixed_bytes: int  # process, weights and step
    kv_bytes: int

    @property
    def total_bytes(self) -> int:
        """Everything this model can come to hold."""
        return self.fixed_bytes + self.kv_bytes


def step_reserve(
    step_tokens: int, step_sequences: int, hidden_size: int, vocab_size: int, item_bytes: int
) -> int:
    """Bytes set aside for the temporaries of the largest step."""
    activations = step_tokens * hidden_size * _ACTIVATION_VALUES * item_bytes
    logits = step_sequences * vocab_size * _LOGIT_VALUES * 4  # sampled in float32
    return _STEP_BASE_BYTES + activations + logits


def plan_load(need: LoadNeed, limits: Mapping[str, int], held: Sequence[LoadPlan]) -> LoadPlan:
    """The room for a model's KV beside the models in `held`, or `ModelTooLarge`."""
    in_ram = need.domain == "ram"
    process_bytes = RAM_PROCESS_BYTES if in_ram else GPU_PROCESS_BYTES
    fixed = process_bytes + need.weight_bytes + need.step_bytes
    limit = limits[need.domain] - (TEMPLATE_BYTES if in_ram else 0)
    others = sum(plan.total_bytes for plan in held if plan.domain == need.domain)
    room = limit - others - fixed
    least = min(MIN_KV_TOKENS, need.context) * need.kv_bytes_per_token
    if room < least:
        raise _too_large(need, limits[need.domain], others, limits[need.domain] - room + least)
    if need.kv_bytes is not None:
        if not least <= need.kv_bytes <= room:
            raise ModelTooLarge(
                f"kv_bytes of the model {need.name!r} is {_mib(need.kv_bytes)}, but between "
                f"{_mib(least)} (the least that serves a request) and {_mib(room)} can be given "
                f"under the limit of {_mib(limits[need.domain])}{_held(others)}.",
                numbers=_numbers(need.domain, need.kv_bytes, room),
            )
        return LoadPlan(need.domain, fixed, need.kv_bytes)
    window = need.context * need.kv_bytes_per_token
    # One whole window comes before the share left to others.
    kv = max(int(room * KV_SHARE), min(window, room))
    return LoadPlan(need.domain, fixed, min(kv, MAX_WINDOWS * window))


def _too_large(need: LoadNeed, limit: int, others: int, needed: int) -> ModelTooLarge:
    knob = "memory.limit" if need.domain == "ram" else "memory.gpu_limit"
    return ModelTooLarge(
        f"The model {need.name!r} does not fit into {need.domain}: with {_mib(need.weight_bytes)} "
        f"of weights, {_mib(need.step_bytes)} for a step and the smallest KV it comes to "
        f"{_mib(needed - others)}, and the limit is {_mib(limit)}{_held(others)}. Raise "
        f"{knob}, or lower step_tokens or step_sequences of the model.",
        numbers=_numbers(need.domain, needed, limit),
    )


def _held(others: int) -> str:
    return f", of which other loaded models hold {_mib(others)}: unload one" if others else ""


def _numbers(domain: str, needed: int, limit: int) -> dict[str, str | int]:
    return {"reason": "memory", "domain": domain, "needed_bytes": needed, "limit_bytes": limit}


def _mib(size: int) -> str:
    return f"{size / MIB:,.0f} MiB"
