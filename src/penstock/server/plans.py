"""What a model needs, from its card and settings alone: before a load, and for `plan`.

Estimates where nothing has been measured yet; a load replaces them with its own figures. It knows
cards, settings and arithmetic, no processes and no books.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.catalog.weights import ITEM_BYTES
from penstock.memory.admission import LoadNeed, ModelRoom
from penstock.memory.ledger import Purpose
from penstock.memory.limits import (
    GPU_PROCESS_BYTES,
    MAX_WINDOWS,
    MIN_KV_TOKENS,
    RAM_PROCESS_BYTES,
    domain_of,
    loading_reserve,
    step_reserve,
)
from penstock.wire import LoadSpec, Reserve

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.catalog import Card
    from penstock.config import ModelSettings
    from penstock.memory.ledger import Needs

SMALLEST_STEP_TOKENS = 64  # a worker halves its step down to this before it gives up
# Tokens and sequences of the largest step, where the user does not say. A large GPU needs thousands
# of rows to be busy, and has the memory for them.
USUAL_STEP = (1024, 64)
ROOMY_GPU_STEP = (8192, 128)
ROOMY_GPU_BYTES = 16 << 30
BLOCK_TOKENS = 16  # what a worker is thought to use until it says


@dataclass(frozen=True, slots=True)
class Storage:
    """Where workers keep things between loads."""

    profiles: Path
    cache: Path | None = None  # KV; None: it is not kept on disk
    cache_size: str = "auto"
    tier_bytes: int = 0  # of RAM, for KV of models on other devices, over all of them


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """A card, on a device, in a dtype, under its settings."""

    card: Card
    settings: ModelSettings
    device: str
    dtype: str
    step_tokens: int  # the largest step
    step_sequences: int

    @property
    def domain(self) -> str:
        """Where it computes."""
        return domain_of(self.device)

    @property
    def window(self) -> int:
        """The longest sequence, memory aside."""
        return min(self.card.context, self.settings.max_context or self.card.context)

    @property
    def kv_bytes_per_token(self) -> int:
        """KV of one token in the served dtype."""
        return self.card.kv_bytes_per_token(ITEM_BYTES[self.dtype])

    @property
    def weight_bytes(self) -> int:
        """Weights in the served dtype."""
        return self.card.bytes_in_memory(self.dtype)

    def step_bytes(self, tokens: int | None = None) -> int:
        """Thought to be taken by a step of so many tokens; otherwise by the largest."""
        tokens = min(tokens or self.step_tokens, self.step_tokens, self.window)
        return step_reserve(
            tokens,
            self.step_sequences,
            self.card.hidden_size,
            self.card.vocab_size,
            ITEM_BYTES[self.dtype],
        )

    def fixed(self) -> Needs:
        """What a load books beside KV; the smallest step, since a worker can do with it."""
        needs: Needs = {
            (self.domain, Purpose.PROCESS): RAM_PROCESS_BYTES,
            (self.domain, Purpose.WEIGHTS): self.weight_bytes,
            (self.domain, Purpose.LOADING): loading_reserve(
                self.card.hidden_size, self.card.vocab_size
            ),
            (self.domain, Purpose.STEP): self.step_bytes(SMALLEST_STEP_TOKENS),
        }
        if self.domain != "ram":
            needs[self.domain, Purpose.PROCESS] = GPU_PROCESS_BYTES
            needs["ram", Purpose.PROCESS] = RAM_PROCESS_BYTES
        return needs

    @property
    def kv_least_bytes(self) -> int:
        """KV that it keeps, whatever others need: what serves anyone at all, and what the user
        wants it to have. A figure for all of its KV leaves no room for another."""
        least = min(MIN_KV_TOKENS, self.window) * self.kv_bytes_per_token
        if (own := self._own_kv_bytes()) is not None:
            return max(own, least)
        tokens = self.settings.kv_least_tokens
        wanted = 0 if tokens is None else (tokens + BLOCK_TOKENS) * self.kv_bytes_per_token
        return max(least, wanted, self.settings.kv_least_bytes or 0)

    def load_need(self) -> LoadNeed:
        """What to ask admission for."""
        window, least = self.window * self.kv_bytes_per_token, self.kv_least_bytes
        most = max(MAX_WINDOWS * window, least)
        # The user's own figure is neither cut nor exceeded.
        own = self._own_kv_bytes() is not None
        if own:
            window = most = least
        # The part of the largest step beyond the smallest comes out of the same grant.
        step = self.step_bytes() - self.step_bytes(SMALLEST_STEP_TOKENS)
        if not own and (self.settings.kv_least_tokens or self.settings.kv_least_bytes):
            least += step  # so that the user's minimum is left beside it
        return LoadNeed(
            self.card.name, self.domain, self.fixed(), least, max(window, least) + step, most + step
        )

    def spec(self, kv_bytes: int, largest_bytes: int, storage: Storage) -> LoadSpec:
        """The order to a worker that may use `kv_bytes` and its step, later `largest_bytes`."""
        settings = self.settings
        memory_bytes = kv_bytes + self.step_bytes(SMALLEST_STEP_TOKENS)
        return LoadSpec(
            name=self.card.name,
            path=str(self.card.path),
            device=self.device,
            dtype=self.dtype,
            memory_bytes=memory_bytes,
            largest_memory_bytes=max(largest_bytes, memory_bytes),
            kv_tokens=self._own_kv_tokens(),
            profile_dir=str(storage.profiles),
            cache_dir=None if storage.cache is None else str(storage.cache),
            cache_size=storage.cache_size,
            tier_bytes=0 if self.domain == "ram" else storage.tier_bytes,
            reserve=Reserve(settings.reserve),
            max_context=settings.max_context,
            step_tokens=self.step_tokens,
            step_sequences=self.step_sequences,
            step_target_s=settings.step_target_s,
            threads=settings.threads,
            trust_remote_code=settings.trust_remote_code,
        )

    def room(self) -> ModelRoom:
        """The model as admission sees it while it is not loaded: no profile, weights only."""
        return ModelRoom(
            name=self.card.name,
            domain=self.domain,
            window=self.window,
            kv_bytes_per_token=self.kv_bytes_per_token,
            block_tokens=BLOCK_TOKENS,
            kv_now_bytes=None,
            fixed_bytes=self.weight_bytes,
        )

    def planned_room(self) -> ModelRoom:
        """The same as if loaded with no KV yet: all that a load is thought to keep."""
        fixed = {key: size for key, size in self.fixed().items() if key[0] == self.domain}
        fixed.pop((self.domain, Purpose.LOADING))
        fixed[self.domain, Purpose.STEP] = self.step_bytes()
        return replace(self.room(), fixed_bytes=sum(fixed.values()), kv_now_bytes=0)

    def summary(self) -> dict[str, object]:
        """What `plan` says of a model before anything is loaded."""
        return {
            "model": self.card.name,
            "device": self.device,
            "dtype": self.dtype,
            "weight_bytes": self.weight_bytes,
            "step_bytes": self.step_bytes(),
        }

    def _own_kv_tokens(self) -> int | None:
        if self.settings.kv_tokens is not None:
            return self.settings.kv_tokens
        if self.settings.kv_bytes is not None and self.kv_bytes_per_token:
            return max(self.settings.kv_bytes // self.kv_bytes_per_token, 1)
        return None

    def _own_kv_bytes(self) -> int | None:
        tokens = self._own_kv_tokens()
        # One block more: the one that padded rows point at.
        return None if tokens is None else (tokens + BLOCK_TOKENS) * self.kv_bytes_per_token


def plan_for(card: Card, settings: ModelSettings, device: str, limit_bytes: int) -> ModelPlan:
    """`auto` and what was left open, decided for a device of which `limit_bytes` may be used."""
    roomy = device != "cpu" and limit_bytes >= ROOMY_GPU_BYTES
    usual_tokens, usual_sequences = ROOMY_GPU_STEP if roomy else USUAL_STEP
    tokens = settings.step_tokens or usual_tokens
    # Beside the decodes of a step there must be tokens left for a chunk.
    sequences = settings.step_sequences or max(1, min(usual_sequences, tokens // 2))
    dtype = serving_dtype(settings.dtype, card.dtype, device)
    return ModelPlan(card, settings, device, dtype, tokens, sequences)


def serving_dtype(wanted: str, stored: str, device: str) -> str:
    """`auto`: float32 on a CPU, where narrow types are slow; on a GPU a 16-bit type."""
    if wanted != "auto":
        return wanted
    if device == "cpu":
        return "float32"
    return stored if stored in {"bfloat16", "float16"} else "bfloat16"


def fitting(
    room: ModelRoom, kv_bytes: int, context: int | None, concurrency: int | None
) -> dict[str, object]:
    """What so much KV allows: the longest context, sequences at a length, a length at a number."""
    longest = room.tokens_in(kv_bytes)
    length = min(context or longest, room.window)
    each = max(room.bytes_for(length), 1)
    at_once = (kv_bytes - room.overhead_bytes) // each if length <= longest else 0
    result: dict[str, object] = {
        "domain": room.domain,
        "window": room.window,
        "kv_bytes_per_token": room.kv_bytes_per_token,
        "kv_bytes": kv_bytes,
        "longest_context": longest,
        "context": length,
        "concurrency_at_context": max(at_once, 0),
    }
    if concurrency:
        share = room.overhead_bytes + (kv_bytes - room.overhead_bytes) // concurrency
        result["concurrency"] = concurrency
        result["context_at_concurrency"] = room.tokens_in(share)
    if context or concurrency:
        count = concurrency or 1
        result["needed_bytes"] = room.bytes_for(length) * count
        result["fits"] = length <= longest and room.bytes_for(length) * count <= kv_bytes
    return result
