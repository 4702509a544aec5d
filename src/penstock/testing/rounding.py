"""How far narrow numbers are from float32: the engine's, and those of plain transformers.

All three models have the same weights, rounded to bfloat16, so that what differs is the computing
alone. The engine computes several sequences together, cut at random, and all rows are compared.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import torch
from transformers import AutoModelForCausalLM

from penstock.testing import tiny
from penstock.wire import LoadSpec, Sampling, Submit
from penstock.worker.core.plan import Plan
from penstock.worker.core.sequence import Sequence
from penstock.worker.loading import load_engine

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

    from torch import Tensor

    from penstock.worker.core.engine import GenerateEngine

LENGTHS = (1, 3, 16, 17, 40, 65, 130, 200)
_LONGEST_CHUNK = 48


def rounding_errors(folder: Path, device: str, seed: int) -> tuple[float, float]:
    """Of the engine and of eager transformers, both bfloat16: the median row's, relative.

    The median, since in bfloat16 a token now and then goes to other experts than in float32, and
    then its row says nothing about rounding.
    """
    texts = [tiny.prompt(length, seed + number) for number, length in enumerate(LENGTHS)]
    exact = _eager_rows(folder, torch.float32, device, texts)
    eager = _eager_rows(folder, torch.bfloat16, device, texts)
    spec = LoadSpec(
        *(folder.name, str(folder), device, "bfloat16", 1 << 30),
        step_tokens=512,
        step_sequences=24,
        capped=False,
    )
    engine = load_engine(spec, lambda *_: None)
    ours = mixed_rows(engine, texts, random.Random(seed))
    return _median_error(ours, exact), _median_error(eager, exact)


@torch.inference_mode()
def mixed_rows(engine: GenerateEngine, texts: list[list[int]], chance: random.Random) -> Tensor:
    """Logits of every position of every text, in order; steps are mixtures made by chance."""
    sequences = []
    for number, text in enumerate(texts):
        request = Submit(number, text, 1, Sampling(temperature=0), prompt_logprobs=0)
        sequence = Sequence(request, number, frozenset())
        sequence.kv = engine.kv.open(sequence.tokens)
        engine.kv.admit(sequence.kv, engine.kv.match(sequence.kv, 0), len(text), fetch=False)
        engine.kv.extend(sequence.kv, len(text))
        sequences.append(sequence)
    executor: Any = engine.executor
    found: dict[int, list[Tensor]] = {number: [] for number in range(len(texts))}
    try:
        while left := [sequence for sequence in sequences if sequence.pending]:
            plan = _mixture(chance.sample(left, chance.randint(1, len(left))), chance)
            logits = executor.logits(plan)
            row = 0
            for piece in plan.slices:
                # A graph's logits are overwritten by its next step.
                found[piece.request_id].append(logits[row : row + piece.count].clone())
                sequences[piece.request_id].computed = piece.end
                row += piece.count
    finally:
        for sequence in sequences:
            engine.kv.release(sequence.kv)
    return torch.cat([rows for number in found for rows in found[number]])


def _mixture(chosen: list[Sequence], chance: random.Random) -> Plan:
    plan = Plan()
    for sequence in chosen:
        most = min(sequence.pending, _LONGEST_CHUNK)
        count = chance.choice([1, most, chance.randint(1, most)])
        group = plan.decodes if count == 1 else plan.chunks
        group.append(sequence.slice(count))
    return plan


@torch.inference_mode()
def _eager_rows(folder: Path, dtype: torch.dtype, device: str, texts: list[list[int]]) -> Tensor:
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    )
    for parameter in model.parameters():
        parameter.copy_(parameter.bfloat16())
    model = model.to(device=device, dtype=dtype).eval()
    rows = [
        model(input_ids=torch.tensor([text], device=device), use_cache=False).logits[0]
        for text in texts
    ]
    return torch.cat(rows).float()


def _median_error(rows: Tensor, exact: Tensor) -> float:
    return float(((rows - exact).norm(dim=-1) / exact.norm(dim=-1)).median())
