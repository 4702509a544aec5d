"""Memory limits from settings and readings, and the estimates used until something is measured.

Pure functions over readings and settings; nothing is booked or measured here. The constants below
are stated estimates that stand until a process or a load has measured the real thing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.config import parse_size
from penstock.memory.domains import RAM

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.memory.domains import Domain
    from penstock.memory.readings.gauge import GpuReading, RamReading

MIB = 1 << 20
GIB = 1 << 30

RAM_SPARE = (GIB, 0.08)  # `auto` leaves the larger of the two to everything else
GPU_SPARE = (512 * MIB, 0.02)

SERVER_BYTES = 128 * MIB  # this process, until it is read
FORK_SERVER_BYTES = 400 * MIB  # torch and transformers, once for all workers, until it is read
# Private bytes of a worker before weights: the interpreter's own, thread stacks, library state.
RAM_PROCESS_BYTES = 128 * MIB
# torch and transformers, and some rows of a weight on their way to fewer bits.
QUANTIZE_BYTES = 512 * MIB
GPU_PROCESS_BYTES = 1024 * MIB  # a CUDA context, compiled code, libraries' workspaces

MIN_KV_TOKENS = 128  # less than this serves no one
MAX_WINDOWS = 64  # KV for more full windows than this has no use
# Thought to be taken by a pixel while its image is decoded and prepared, until that is measured.
IMAGE_PIXEL_BYTES = 24
# Of a file while it arrives: in the buffer, as a message, and as the message's field.
IMAGE_FILE_COPIES = 3
SPARE = (256 * MIB, 0.02)  # the smaller of the two stays free on the machine, beyond every limit
_LOADING_BASE_BYTES = 64 * MIB  # buffers of the reader and the converter
_ACTIVATION_VALUES = 24  # per token and hidden value, live at the widest point of a layer
_LOGIT_VALUES = 6  # per sequence and vocabulary entry: logits, their copies, sampling
_STEP_BASE_BYTES = 64 * MIB

_GRAMMARS_SHARE = 16  # of the limit
_GRAMMARS_MIN, _GRAMMARS_MAX = 64 << 20, 256 << 20


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
) -> dict[Domain, int]:
    """The limit of each domain: RAM and each GPU."""
    limits = {RAM: resolve_limit(ram_setting, ram.capacity_bytes, RAM_SPARE)}
    for gpu in gpus:
        limits[gpu.domain] = resolve_limit(gpu_setting, gpu.total_bytes, GPU_SPARE)
    return limits


def resolve_tier(setting: str, ram_limit_bytes: int) -> int:
    """RAM for KV of models that compute elsewhere."""
    return resolve_limit("25%" if setting == "auto" else setting, ram_limit_bytes, RAM_SPARE)


def resolve_grammars(setting: str, ram_limit_bytes: int) -> int:
    """RAM for the grammars of one model, its vocabulary aside."""
    if setting == "auto":
        return max(_GRAMMARS_MIN, min(ram_limit_bytes // _GRAMMARS_SHARE, _GRAMMARS_MAX))
    return max(_GRAMMARS_MIN // 2, resolve_limit(setting, ram_limit_bytes, RAM_SPARE))


def limit_setting(domain: Domain) -> str:
    """The setting that limits a domain, for sentences that name it."""
    return "memory.limit" if domain.is_ram else "memory.gpu_limit"


def resolve_capacities(ram: RamReading, gpus: Sequence[GpuReading]) -> dict[Domain, int]:
    """What each domain can ever hold, whoever uses it."""
    return {RAM: ram.capacity_bytes} | {gpu.domain: gpu.total_bytes for gpu in gpus}


def resolve_spare(setting: int | None, capacity_bytes: int) -> int:
    """What stays free of the capacity: the user's figure, or a little."""
    if setting is not None:
        return min(setting, capacity_bytes)
    return min(SPARE[0], int(capacity_bytes * SPARE[1]))


def step_reserve(
    step_tokens: int, step_sequences: int, hidden_size: int, vocab_size: int, item_bytes: int
) -> int:
    """Bytes set aside for the temporaries of the largest step."""
    activations = step_tokens * hidden_size * _ACTIVATION_VALUES * item_bytes
    logits = step_sequences * vocab_size * _LOGIT_VALUES * 4  # sampled in float32
    return _STEP_BASE_BYTES + activations + logits


def loading_reserve(hidden_size: int, vocab_size: int) -> int:
    """Bytes beside the weights while they are read: the largest tensor, stored and converted."""
    return _LOADING_BASE_BYTES + 2 * hidden_size * vocab_size * 4
