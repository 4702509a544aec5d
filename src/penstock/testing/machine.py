"""A machine of which every byte is known, to be profiled: no more fits than it says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.catalog.kv_formats import kv_format
from penstock.wire import LoadSpec
from penstock.worker.backends.cpu import CpuBackend
from penstock.worker.backends.cpu.meter import RamMeter
from penstock.worker.core.backend import StepResult
from penstock.worker.core.plan import StepLimits
from penstock.worker.kv.arena import LayerGeometry
from penstock.worker.kv.cache import KvCache
from penstock.worker.kv.groups import LayerGroup, cost_of
from penstock.worker.kv.memory import KvMemory
from penstock.worker.profiling.context import ProfileContext

if TYPE_CHECKING:
    from penstock.wire import Submit, TokenIds
    from penstock.worker.core.gate import StepShape
    from penstock.worker.core.plan import Plan

MIB = 1 << 20
BLOCK_TOKENS = 16
LAYERS = dict.fromkeys(range(4), LayerGeometry(4, 64, 64))
TOKEN_BYTES = 8192
GROUPS = (LayerGroup(tuple(LAYERS), None, TOKEN_BYTES, BLOCK_TOKENS),)


class Machine:
    """Executor, meter and cap at once: a step costs what `cost` says and not a byte more fits."""

    includes_host = True
    noise_bytes, floor_bytes = RamMeter.noise_bytes, RamMeter.floor_bytes
    control_group: str | None = None

    def __init__(self, token_bytes: int = 50_000) -> None:
        self.token_bytes = token_bytes
        self.memory = KvMemory(
            GROUPS, LAYERS, kv_format("auto", "float32"), CpuBackend(), [8 * 1024], MIB
        )
        self.limit: int | None = None
        self.highest = 0
        self.steps: list[StepShape] = []
        self.failures_to_come = 0  # of steps beside a full arena
        self.more_beside_kv = 0  # bytes that a step takes beside a full arena, and not before
        self.kept_bytes = 0  # from the first step on
        self.bug = False

    def admit(self, request: Submit, answered: TokenIds, scored: int) -> None:
        pass

    def forget(self, request_id: int) -> None:
        pass

    def cost(self, shape: StepShape) -> int:
        return MIB + self.token_bytes * shape.tokens + 8 * shape.context + 9000 * shape.logit_rows

    def compute(self, plan: Plan) -> StepResult:
        if self.bug:
            raise RuntimeError("shapes cannot be multiplied")
        self.steps.append(plan.shape)
        needed = self.memory.committed_bytes + self.cost(plan.shape)
        if self.memory.committed_bytes > 16 * MIB:
            needed += self.more_beside_kv
        if self.limit is not None and needed > self.limit:
            raise MemoryError
        if self.failures_to_come and self.memory.committed_bytes > 16 * MIB:
            self.failures_to_come -= 1
            raise MemoryError
        self.highest = max(self.highest, needed)
        return StepResult()

    def held(self) -> int:
        kept = self.kept_bytes if self.steps else 0
        return 1000 * MIB + kept

    def begin_step(self, rows: int) -> None:
        self.mark()

    def mark(self) -> None:
        self.highest = 0

    def peak(self) -> int:
        return 1000 * MIB + self.highest - self.memory.committed_bytes

    def drop_caches(self) -> None:
        pass

    def allow_fragmentation(self, taken_bytes: int) -> int:
        return 0

    def set_base(self) -> None:
        pass

    def move(self, kv_bytes: int, step_bytes: int) -> None:
        self.limit = kv_bytes + step_bytes


class Eye:
    """An encoder whose largest image takes that much."""

    max_pixels = 1 << 20
    encode_s = 0.5

    def __init__(self, stage_bytes: int) -> None:
        self.stage_bytes = stage_bytes
        self.measured = 0

    def fitted(self, _meter: object, most_bytes: int) -> tuple[int, int]:
        self.measured += 1
        assert self.stage_bytes <= most_bytes
        return self.max_pixels, self.stage_bytes


def make_context(
    machine: Machine, memory_bytes: int, drafts: int = 0, **more: object
) -> ProfileContext:
    spec = LoadSpec("m", "/models/m", "cpu", "auto", memory_bytes, **more)  # type: ignore[arg-type]
    return ProfileContext(
        spec=spec,
        backend=CpuBackend(),
        executor=machine,  # type: ignore[arg-type]
        memory=machine.memory,
        kv=KvCache(GROUPS, machine.memory.arenas, cost_of(GROUPS, spec.step_tokens), memory_bytes),
        meter=machine,
        cap=machine,
        limits=StepLimits(spec.step_tokens, spec.step_sequences, BLOCK_TOKENS, 128),
        window=4096,
        vocabulary=100,
        dtype="float32",
        row_bytes=64,
        routes=False,
        fingerprint="f" * 64,
        weight_bytes=1 << 30,
        drafts=drafts,
    )
