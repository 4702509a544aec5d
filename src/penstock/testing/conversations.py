"""Conversations whose turns find the KV of the turns before: does any way of finding it change
a token? Every answer is compared with transformers', which keeps nothing.
"""

from __future__ import annotations

import random
import shutil
import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.testing.exactness import Mode, Reference, Tally, poisoned_blocks, run, start_engine
from penstock.wire import Grant

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.worker.core.engine import GenerateEngine

_SHAKES = 0.25  # of the steps


@dataclass(frozen=True, slots=True)
class History:
    """Where a turn finds the KV of the one before."""

    name: str
    restarts: bool = False  # a new engine for every turn: only the disk remembers
    disk: bool = True
    alone: bool = False  # one request after the other, so that nothing is shared at once
    pool_tokens: int | None = None  # so little KV that requests give way and blocks are given up
    device: str = "cpu"
    tier_bytes: int = 0  # of RAM, on a GPU
    poisoned: bool = True  # what is given back is overwritten at once
    # The memory for KV falls and rises at random steps, so that the youngest give way wherever
    # they are: in a prompt, in an answer, while blocks are read for them.
    shaken: bool = False
    kv_dtype: str = "auto"

    def __str__(self) -> str:
        return self.name


@dataclass(slots=True)
class Found:
    """What was compared, and how much of it was not computed."""

    tally: Tally
    prompt_tokens: int = 0
    reused_tokens: int = 0
    tier_hits: int = 0
    preemptions: int = 0
    evictions: int = 0

    def add(self, engine: GenerateEngine) -> None:
        """The figures of an engine at its end."""
        status = engine.status()
        self.prompt_tokens += status.prompt_tokens
        self.reused_tokens += status.reused_tokens
        self.preemptions += status.preemptions
        self.evictions += status.evictions
        self.tier_hits += int(status.tier.get("hits", 0) + status.tier.get("ram_hits", 0))


@dataclass(frozen=True, slots=True)
class Talk:
    """The first prompts, and what is said in every later turn, by conversation."""

    openings: list[list[int]]
    turns: int
    answer: int  # tokens
    said: int  # tokens between two answers
    vocabulary: int


def compare(
    reference: Reference, folder: Path, history: History, talk: Talk, workdir: Path
) -> Found:
    """Hold the conversations; raises `Mismatch`."""
    shutil.rmtree(workdir, ignore_errors=True)
    # Short steps, so that there are many moments in a prompt.
    step_tokens = 32 if history.shaken else 128
    mode = Mode(
        history.name,
        step_tokens=step_tokens,
        pool_tokens=history.pool_tokens,
        kv_dtype=history.kv_dtype,
    )
    cache = workdir / "kv" if history.disk else None
    found = Found(Tally())
    chance = random.Random(7)
    prompts = [list(opening) for opening in talk.openings]
    engine: GenerateEngine | None = None
    with poisoned_blocks() if history.poisoned else nullcontext():
        for _ in range(talk.turns):
            if engine is None:
                engine = start_engine(
                    folder, mode, device=history.device, cache=cache, tier_bytes=history.tier_bytes
                )
                while history.disk and "saved" not in engine.status().tier:
                    time.sleep(0.01)  # the digest of the weights
            groups = [[prompt] for prompt in prompts] if history.alone else [prompts]
            answers = [
                tokens for group in groups for tokens in _answers(engine, group, history, talk)
            ]
            for prompt, tokens in zip(prompts, answers, strict=True):
                found.tally.compare(reference, prompt, tokens)
                said = [chance.randrange(talk.vocabulary) for _ in range(talk.said)]
                prompt.extend(tokens + said)
            if history.restarts:
                found.add(engine)
                engine.close()
                engine = None
    if engine is not None:
        found.add(engine)
        engine.close()
    return found


def _answers(
    engine: GenerateEngine, prompts: list[list[int]], history: History, talk: Talk
) -> list[list[int]]:
    if not history.shaken:
        return run(engine, prompts, talk.answer)
    shaker = _Shaker(engine, random.Random(sum(map(len, prompts))))
    answers = run(engine, prompts, talk.answer, between_steps=shaker.shake)
    shaker.rest()
    return answers


@dataclass(slots=True)
class _Shaker:
    """Moves the grant now and then, as a server does whose other models want memory too."""

    engine: GenerateEngine
    chance: random.Random
    max_bytes: int = 0

    def __post_init__(self) -> None:
        self.max_bytes = self.engine.kv.limit_bytes

    def shake(self) -> None:
        """After a step."""
        if self.chance.random() < _SHAKES:
            some = self.chance.randrange(self.max_bytes)
            self._grant(self.chance.choice((0, some, self.max_bytes)))

    def rest(self) -> None:
        """All of it again, so that whatever comes next is taken."""
        self._grant(self.max_bytes)

    def _grant(self, kv_bytes: int) -> None:
        self.engine.grant(Grant(kv_bytes, self.engine.profile.step_bytes))
        self.engine.check()
