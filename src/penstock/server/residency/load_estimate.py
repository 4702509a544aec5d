"""What a model needs, from its card and settings alone: before a load, and for `plan`.

Estimates where nothing has been measured yet; a load replaces them with its own figures. It knows
cards, settings and arithmetic, no processes and no books.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.catalog.kv_formats import kv_format
from penstock.catalog.linear_formats import MADE_AT_LOAD
from penstock.catalog.weights import ITEM_BYTES
from penstock.memory.admission import LoadNeed, ModelCapacity
from penstock.memory.device_kinds import kind_of
from penstock.memory.domains import RAM, domain_of
from penstock.memory.ledger import Purpose
from penstock.memory.limits import (
    GPU_PROCESS_BYTES,
    IMAGE_FILE_COPIES,
    IMAGE_PIXEL_BYTES,
    MAX_WINDOWS,
    MIN_KV_TOKENS,
    RAM_PROCESS_BYTES,
    loading_reserve,
    step_reserve,
)
from penstock.wire import EngineKind, LoadSpec, Reserve

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.catalog import Card
    from penstock.catalog.kv_formats import KvFormat
    from penstock.config import ModelSettings
    from penstock.memory.cost import KvCost
    from penstock.memory.domains import Domain
    from penstock.memory.ledger import Needs

SMALLEST_STEP_TOKENS = 64  # a worker halves its step down to this before it gives up
BLOCK_TOKENS = 16  # what a worker is thought to use until it says


@dataclass(frozen=True, slots=True)
class Storage:
    """Where workers keep things between loads."""

    profiles: Path
    cache: Path | None = None  # KV; None: it is not kept on disk
    cache_size: str = "auto"
    tier_bytes: int = 0  # of RAM, for KV of models on other devices, over all of them


@dataclass(frozen=True, slots=True)
class LoadEstimate:
    """A card, on a device, in a dtype, under its settings."""

    card: Card
    settings: ModelSettings
    device: str
    dtype: str
    step_tokens: int  # the largest step
    step_sequences: int

    @property
    def domain(self) -> Domain:
        """Where it computes."""
        return domain_of(self.device)

    @property
    def window(self) -> int:
        """The longest sequence, memory aside."""
        return min(self.card.context, self.settings.max_context or self.card.context)

    @property
    def kv_format(self) -> KvFormat:
        """How KV is kept."""
        return kv_format(self.settings.kv_dtype, self.dtype)

    @property
    def kv(self) -> KvCost:
        """What KV costs as it is kept."""
        return self.card.kv_cost(
            self.kv_format, BLOCK_TOKENS, self.window, self.step_tokens, self.dtype
        )

    def _kv_bytes(self, tokens: int) -> int:
        """KV for one sequence of so many tokens."""
        return self.kv.sequence(tokens) + self.kv.chunk_bytes

    @property
    def weight_bytes(self) -> int:
        """Weights as they are served."""
        return self.card.bytes_in_memory(self.dtype, self.made, kind_of(self.device))

    @property
    def made(self) -> str:
        """The format that weights are rounded to at load; "": none, as of encoders."""
        made = self.settings.dtype in MADE_AT_LOAD and self.card.encoder is None
        return self.settings.dtype if made else ""

    @property
    def at_worker(self) -> int:
        """Sequences that it can have at once. Texts of an encoder are a step's work and no more, so
        there are those of the next step as well."""
        return self.step_sequences * (1 if self.card.encoder is None else 2)

    @property
    def image_bytes(self) -> int:
        """Booked for images beside the step, whatever they take while they are encoded."""
        if self.card.vision is None or not self._image_pixels:
            return 0
        return self.settings.image_bytes + IMAGE_FILE_COPIES * self.settings.image_file_bytes

    @property
    def _image_pixels(self) -> int:
        return self.settings.image_pixels if self.domain.is_ram else 0

    def step_bytes(self, tokens: int | None = None) -> int:
        """Thought to be taken by a step of so many tokens; otherwise by the largest."""
        if self.card.encoder is not None:
            # A text is computed whole; of its rows no logits are made.
            tokens = min(tokens or max(self.step_tokens, self.window), self.window)
            return step_reserve(tokens, 0, self.card.hidden_size, 0, ITEM_BYTES[self.dtype])
        tokens = min(tokens or self.step_tokens, self.step_tokens, self.window)
        return self.image_bytes + step_reserve(
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
        if not self.domain.is_ram:
            needs[self.domain, Purpose.PROCESS] = GPU_PROCESS_BYTES
            needs[RAM, Purpose.PROCESS] = RAM_PROCESS_BYTES
        return needs

    @property
    def kv_min_bytes(self) -> int:
        """KV that it keeps, whatever others need: what serves anyone at all, and what the user
        wants it to have. A figure for all of its KV leaves no room for another."""
        least = self._kv_bytes(min(MIN_KV_TOKENS, self.window))
        if (own := self._own_kv_bytes()) is not None:
            return max(own, least)
        tokens = self.settings.kv_min_tokens
        wanted = 0 if tokens is None else self._kv_bytes(tokens + BLOCK_TOKENS)
        return max(least, wanted, self.settings.kv_min_bytes or 0)

    def load_need(self) -> LoadNeed:
        """What to ask admission for."""
        window, least = self._kv_bytes(self.window), self.kv_min_bytes
        most = max(MAX_WINDOWS * window, least)
        # The user's own figure is neither cut nor exceeded.
        own = self._own_kv_bytes() is not None
        if own:
            window = most = least
        # The part of the largest step beyond the smallest comes out of the same grant.
        step = self.step_bytes() - self.step_bytes(SMALLEST_STEP_TOKENS)
        if not own and (self.settings.kv_min_tokens or self.settings.kv_min_bytes):
            least += step  # so that the user's minimum is left beside it
        # Where there is memory to spare, for the largest image too: between two steps it has that
        # of the step and whatever else is not KV.
        image = IMAGE_PIXEL_BYTES * self._image_pixels if self.image_bytes else 0
        return LoadNeed(
            *(self.card.name, self.domain, self.fixed(), least),
            *(max(window, least) + step, most + step + image),
        )

    def spec(self, kv_bytes: int, largest_bytes: int, storage: Storage) -> LoadSpec:
        """The order to a worker that may use `kv_bytes` and its step, later `largest_bytes`."""
        settings = self.settings
        memory_bytes = kv_bytes + self.step_bytes(SMALLEST_STEP_TOKENS)
        return LoadSpec(
            name=self.card.name,
            path=str(self.card.path),
            device=self.device,
            dtype=self.made or self.dtype,
            kv_dtype=settings.kv_dtype,
            memory_bytes=memory_bytes,
            largest_memory_bytes=max(largest_bytes, memory_bytes),
            kv_tokens=self._own_kv_tokens(),
            profile_dir=str(storage.profiles),
            cache_dir=None if storage.cache is None else str(storage.cache),
            cache_size=storage.cache_size,
            tier_bytes=0 if self.domain.is_ram else storage.tier_bytes,
            reserve=Reserve(settings.reserve),
            window=self.card.context,
            max_context=settings.max_context,
            step_tokens=self.step_tokens,
            step_sequences=self.step_sequences,
            step_target_s=settings.step_target_s,
            threads=settings.threads,
            trust_remote_code=settings.trust_remote_code,
            engine=EngineKind.GENERATE if self.card.encoder is None else EngineKind.ENCODE,
            pooling=None if settings.pooling == "auto" else settings.pooling,
            image_pixels=settings.image_pixels if self.card.vision is not None else 0,
            image_bytes=settings.image_bytes,
            image_file_bytes=settings.image_file_bytes,
            speculation=settings.speculation,
        )

    def capacity(self) -> ModelCapacity:
        """The model as admission sees it while it is not loaded: no profile, weights only."""
        return ModelCapacity(
            name=self.card.name,
            domain=self.domain,
            window=self.window,
            kv=self.kv,
            kv_now_bytes=None,
            fixed_bytes=self.weight_bytes,
            overhead_bytes=self.kv.chunk_bytes,
        )

    def planned_capacity(self) -> ModelCapacity:
        """The same as if loaded with no KV yet: all that a load is thought to keep."""
        fixed = {key: size for key, size in self.fixed().items() if key[0] == self.domain}
        fixed.pop((self.domain, Purpose.LOADING))
        fixed[self.domain, Purpose.STEP] = self.step_bytes()
        return replace(self.capacity(), fixed_bytes=sum(fixed.values()), kv_now_bytes=0)

    def summary(self) -> dict[str, object]:
        """What `plan` says of a model before anything is loaded."""
        return {
            "model": self.card.name,
            "device": self.device,
            "dtype": self.dtype,
            "kv_dtype": self.kv_format.name,
            "formats": list(self.card.formats),
            "stored_bytes": self.card.weight_bytes,
            "weight_bytes": self.weight_bytes,
            "step_bytes": self.step_bytes(),
        }

    def _own_kv_tokens(self) -> int | None:
        if self.settings.kv_tokens is not None:
            return self.settings.kv_tokens
        if self.settings.kv_bytes is not None and self.kv.token_bytes:
            return max(self.kv.tokens_within(self.settings.kv_bytes - self.kv.chunk_bytes), 1)
        return None

    def _own_kv_bytes(self) -> int | None:
        tokens = self._own_kv_tokens()
        # One block more: the one that padded rows point at.
        return None if tokens is None else self._kv_bytes(tokens + BLOCK_TOKENS)


def estimate_load(
    card: Card, settings: ModelSettings, device: str, limit_bytes: int
) -> LoadEstimate:
    """`auto` and what was left open, decided for a device of which `limit_bytes` may be used."""
    kind = kind_of(device)
    usual_tokens, usual_sequences = kind.step_within(limit_bytes)
    tokens = settings.step_tokens or usual_tokens
    # Beside the decodes of a step there must be tokens left for a chunk.
    sequences = settings.step_sequences or max(1, min(usual_sequences, tokens // 2))
    given = settings.dtype not in {"auto", *MADE_AT_LOAD}
    usual = kind.dtype_for if card.encoder is None else kind.encoder_dtype_for
    dtype = settings.dtype if given else usual(card.dtype)
    return LoadEstimate(card, settings, device, dtype, tokens, sequences)


def fitting(
    capacity: ModelCapacity, kv_bytes: int, context: int | None, concurrency: int | None
) -> dict[str, object]:
    """What so much KV allows: the longest context, sequences at a length, a length at a number."""
    longest = capacity.tokens_in(kv_bytes)
    length = min(context or longest, capacity.window)
    each = max(capacity.bytes_for(length), 1)
    at_once = (kv_bytes - capacity.overhead_bytes) // each if length <= longest else 0
    if not capacity.kv.groups:
        kv_bytes, at_once = 0, 1  # nothing is kept: as many as a step takes
    result: dict[str, object] = {
        "domain": str(capacity.domain),
        "window": capacity.window,
        **capacity.kv.figures(length),
        "kv_bytes": kv_bytes,
        "longest_context": longest,
        "context": length,
        "concurrency_at_context": max(at_once, 0),
    }
    if concurrency:
        share = capacity.overhead_bytes + (kv_bytes - capacity.overhead_bytes) // concurrency
        result["concurrency"] = concurrency
        result["context_at_concurrency"] = capacity.tokens_in(share)
    if context or concurrency:
        count = concurrency or 1
        result["needed_bytes"] = capacity.bytes_for(length) * count
        result["fits"] = length <= longest and capacity.bytes_for(length) * count <= kv_bytes
    return result
