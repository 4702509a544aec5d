"""What a worker is told at its birth. Crosses the fork as plain data; knows no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """Which model to load and within what."""

    name: str
    path: str  # a model folder in Hugging Face layout
    device: str  # "cpu" or "cuda:0", already resolved
    dtype: str  # "float32", "bfloat16", "float16"; already resolved
    kv_bytes: int  # the most the KV arena may commit
    max_context: int | None = None  # the user's own limit below the model's window
    step_tokens: int = 512  # the most tokens computed in one step
    step_sequences: int = 64  # the most sequences in one step
    step_target_s: float | None = None  # chunks shrink to keep a step near this
    threads: int | None = None  # CPU threads; None: the machine's cores
    trust_remote_code: bool = False
