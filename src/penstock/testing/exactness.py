"""Are an engine's greedy tokens those of plain transformers? The question, for any model folder.

The reference is `generate` of the same folder, float32 on CPU, one prompt at a time. Tokens must
be equal except where the reference itself cannot decide: its two best logits lie within
`TIE_LOGITS` and the engine took the other one. From there on the engine's own tokens are the
prompt of a new reference, so that a tie hides nothing that follows it.
"""

from __future__ import annotations

import itertools
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from unittest import mock

import torch
from msgspec.structs import replace
from transformers import AutoModelForCausalLM, GenerationConfig

from penstock.wire import LoadSpec, Sampling, Submit
from penstock.worker.core.plan import Plan
from penstock.worker.kv.arena import Arena, ByteArena
from penstock.worker.kv.blocks import BlockPool
from penstock.worker.kv.layout.rounding import restored, rounded
from penstock.worker.kv.states.memory import StateMemory
from penstock.worker.loading import load_engine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path
    from typing import Any, Protocol

    from torch import Tensor
    from transformers import PreTrainedModel

    from penstock.wire import Media
    from penstock.worker.core.engine import GenerateEngine

    class Answers(Protocol):
        """Whose tokens are right."""

        @property
        def tie_logits(self) -> float: ...

        def greedy(self, prompt: Sequence[int], count: int) -> Expected: ...


TIE_LOGITS = 1e-4  # design principle 6
# Over KV in 8 bits: a key that differs in its last digit may be rounded to the next code, and so
# from one way of batching to another a few codes differ by one.
ROUNDED_TIE_LOGITS = 1e-2


class Mismatch(AssertionError):  # noqa: N818 - what was found, in the tests' own word
    """The engine chose a token that the reference clearly would not."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What the reference chose, and its two best tokens at each position."""

    tokens: list[int]
    best: list[tuple[int, int]]
    gaps: list[float]  # between the logits of the two


@dataclass(slots=True)
class Reference:
    """transformers' own answers for one model folder; each is computed once."""

    model: PreTrainedModel
    kv_dtype: str = "auto"
    _known: dict[tuple[tuple[int, ...], int], Expected] = field(default_factory=dict)

    @classmethod
    def load(cls, folder: Path, kv_dtype: str = "auto") -> Reference:
        """The folder's model with transformers' eager attention, which knows every soft-cap; over
        keys and values rounded to `kv_dtype`, if it is not "auto"."""
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
        )
        # The folder's own generation settings (penalties, end tokens) are not the model's logits.
        model.generation_config = GenerationConfig(pad_token_id=0)
        return cls(model.eval(), kv_dtype)

    @property
    def tie_logits(self) -> float:
        """How near to each other two logits are that either of them may win."""
        return TIE_LOGITS if self.kv_dtype == "auto" else ROUNDED_TIE_LOGITS

    @torch.inference_mode()
    def greedy(self, prompt: Sequence[int], count: int) -> Expected:
        """The next `count` tokens; no token ends the answer."""
        key = (tuple(prompt), count)
        if key not in self._known:
            ids = torch.tensor([list(prompt)])
            with self.rounding():
                # With an explicit mask no id is taken for padding.
                answer: Any = self.model.generate(
                    input_ids=ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=count,
                    do_sample=False,
                    output_logits=True,
                    return_dict_in_generate=True,
                )
            tops = [logits[0].float().topk(2) for logits in answer.logits]
            self._known[key] = Expected(
                answer.sequences[0, len(prompt) :].tolist(),
                [(int(top.indices[0]), int(top.indices[1])) for top in tops],
                [float(top.values[0] - top.values[1]) for top in tops],
            )
        return self._known[key]

    @contextmanager
    def rounding(self) -> Iterator[None]:
        """Within it the model's attention sees keys and values as KV keeps them.

        transformers' own function gets them as they are, all tokens at every step; what a vector is
        rounded to depends on that vector alone.
        """
        if self.kv_dtype == "auto":
            yield
            return
        code = sys.modules[type(self.model).__module__]
        plain = code.eager_attention_forward

        def over_rounded(module: Any, query: Tensor, *rest: Any, **named: Any) -> Any:
            key, value, *others = rest
            kept = (restored(*rounded(part), part.dtype) for part in (key, value))
            return plain(module, query, *kept, *others, **named)

        with mock.patch.object(code, "eager_attention_forward", over_rounded):
            yield


@dataclass(slots=True)
class Tally:
    """How much was compared, and how often the reference itself was undecided."""

    tokens: int = 0
    ties: int = 0
    preemptions: int = 0  # of the run that was compared

    def compare(self, reference: Answers, prompt: list[int], tokens: list[int]) -> None:
        """Raise `Mismatch` unless `tokens` are what the reference answers to `prompt`."""
        expected = reference.greedy(prompt, len(tokens))
        for place, (ours, theirs) in enumerate(zip(tokens, expected.tokens, strict=True)):
            self.tokens += 1
            if ours == theirs:
                continue
            if ours not in expected.best[place] or expected.gaps[place] > reference.tie_logits:
                raise Mismatch(
                    f"prompt of {len(prompt)} tokens, new token {place}: {ours} instead of "
                    f"{theirs}, whose logit leads by {expected.gaps[place]:.1e}"
                )
            self.ties += 1
            if rest := tokens[place + 1 :]:
                self.compare(reference, [*prompt, *tokens[: place + 1]], rest)
            return


@dataclass(frozen=True, slots=True)
class Mode:
    """One way of running the same requests; none may change a token."""

    name: str
    step_tokens: int = 512
    step_sequences: int = 24
    alone: bool = False  # one request after the other
    arrive_every: int = 0  # steps between two arrivals; 0: all at once
    pool_tokens: int | None = None  # so little KV that running requests must give way
    dtype: str = "float32"  # as in the settings
    kv_dtype: str = "auto"
    give_way_every: int = 0  # steps after which the youngest gives way, whether it must or not
    speculation: str = "off"
    max_context: int | None = None  # a short one is quickly profiled

    def __str__(self) -> str:
        return self.name


MODES = (
    Mode("alone", alone=True),
    Mode("at-once-chunks-of-512"),
    Mode("chunks-of-64", step_tokens=64),
    Mode("chunks-of-7", step_tokens=7, step_sequences=4),
    Mode("arrivals", step_tokens=64, arrive_every=5),
)


def start_engine(
    folder: Path,
    mode: Mode,
    memory_bytes: int = 1 << 30,
    device: str = "cpu",
    cache: Path | None = None,
    tier_bytes: int = 0,
) -> GenerateEngine:
    """The real engine over a folder; with `cache`, KV is kept in that directory, and on a
    GPU with `tier_bytes` in RAM."""
    spec = LoadSpec(
        name=folder.name,
        path=str(folder),
        device=device,
        dtype=mode.dtype,
        kv_dtype=mode.kv_dtype,
        memory_bytes=memory_bytes,
        max_context=mode.max_context,
        kv_tokens=mode.pool_tokens,
        step_tokens=mode.step_tokens,
        step_sequences=mode.step_sequences,
        speculation=mode.speculation,
        capped=False,
        profile_dir=None if cache is None else str(cache.parent),
        cache_dir=None if cache is None else str(cache),
        cache_size=str(8 << 30),
        tier_bytes=tier_bytes,
        image_pixels=1 << 16,
        image_bytes=1 << 20,
        image_file_bytes=1 << 20,
    )
    engine = load_engine(spec, lambda _phase, _done, _total: None)
    if tier_bytes:
        engine.kv.grant_tier(tier_bytes)
    if mode.pool_tokens is not None:
        for _ in range(500):  # so that more is let in than there is room for in the end
            engine.lengths.observe(1)
    return engine


def compare_mode(
    reference: Reference,
    folder: Path,
    mode: Mode,
    prompts: Sequence[list[int]],
    count: int,
    device: str = "cpu",
) -> Tally:
    """Run `prompts` in a mode over poisoned memory; raises `Mismatch`."""
    tally = Tally()
    with poisoned_blocks():
        engine = start_engine(folder, mode, device=device)
        if mode.alone:
            answers = [run(engine, [prompt], count)[0] for prompt in prompts]
        else:
            give_way = giving_way(engine, mode.give_way_every)
            answers = run(
                engine, prompts, count, arrive_every=mode.arrive_every, between_steps=give_way
            )
    for prompt, tokens in zip(prompts, answers, strict=True):
        assert len(tokens) == count
        tally.compare(reference, prompt, tokens)
    tally.preemptions = engine.status().preemptions
    return tally


def giving_way(engine: GenerateEngine, every: int) -> Callable[[], None]:
    """To be called between steps."""
    steps = itertools.count(1)

    def give_way() -> None:
        scheduler = engine._scheduler
        if every and next(steps) % every == 0 and scheduler.running > 1:
            scheduler._preempt(scheduler._running[-1], Plan())

    return give_way


def run(
    engine: GenerateEngine,
    prompts: Sequence[list[int]],
    count: int,
    *,
    arrive_every: int = 0,
    between_steps: Callable[[], None] = lambda: None,
    media: Sequence[Sequence[Media]] = (),
) -> list[list[int]]:
    """Greedy answers of `count` tokens to every prompt, `arrive_every` steps apart (0: at once);
    `media` has the images of each."""
    answers: list[list[int]] = [[] for _ in prompts]
    to_come = list(enumerate(prompts))
    steps = 0
    while to_come or engine.has_work():
        while to_come and (arrive_every == 0 or steps >= to_come[0][0] * arrive_every):
            number, prompt = to_come.pop(0)
            images = [replace(image) for image in media[number]] if media else []
            how = Sampling(temperature=0)
            engine.submit(Submit(number, list(prompt), count, how, media=images))
        for output in engine.step():
            assert output.failure is None, output.failure
            answers[output.id] += output.tokens
        engine.check()
        between_steps()
        steps += 1
    return answers


@contextmanager
def poisoned_blocks() -> Iterator[None]:
    """Within it, memory that no running sequence has written reads as NaN.

    Fresh extents and blocks that are given back are filled with it, so a kernel that reads one
    slot too many gives an answer that nobody can take for right. So are slots of states.
    """
    commit, give = ByteArena.commit, BlockPool.give

    def poisoned_commit(arena: ByteArena, extent: int) -> None:
        commit(arena, extent)
        first = extent * arena.extent_blocks
        _poison(arena, slice(first, first + arena.extent_blocks))

    def poisoned_give(pool: BlockPool, blocks: Sequence[int]) -> None:
        give(pool, blocks)
        if blocks and isinstance(pool._backing, ByteArena):  # and not trays
            _poison(pool._backing, torch.tensor(blocks, device=pool._backing.place))

    with (
        mock.patch.object(ByteArena, "commit", poisoned_commit),
        mock.patch.object(BlockPool, "give", poisoned_give),
    ):
        yield


def _poison(arena: ByteArena, blocks: slice | Tensor) -> None:
    arena.device.synchronize()  # they may be on their way to a tray
    for view in _floats(arena):
        view[blocks] = float("nan")


def _floats(arena: ByteArena) -> list[Tensor]:
    if isinstance(arena, StateMemory):
        both = [(layer.columns, layer.matrices) for layer in arena.layers.values()]
        return [view for pair in both for view in pair if view is not None]
    assert isinstance(arena, Arena)
    return [view for layer in arena.layers for view in layer.floats]
