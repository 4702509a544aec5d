"""One stream with speculation and without, on the starter: an edit of a file, and ordinary chat.

    python -m benchmarks.speculation [--task edit|chat] [--rounds 3] [--threads N]

The same engine answers both in turn, so that a noisy machine hits both alike; a figure is the
median over the rounds, and answers must be the same token by token. `cpu` is the processor's time
of the thread that computes, which other work on the machine does not lengthen (all of it, with one
thread); `wall` is what a client sees.

The edit is a file of 60 lines that stands in the prompt and is written again with two names
changed and two lines more. The starter is too small to do that, so its answer is fed to it: every
row is computed and sampled as ever, and then given the token of the edited file at its place.
Chat is what the model says by itself.
"""

from __future__ import annotations

import argparse
import time
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from msgspec import structs
from tokenizers import Tokenizer

from benchmarks.report import median, record, starter_folder
from penstock.wire import LoadSpec, Sampling, Submit
from penstock.worker.core.drafts.drafting import Drafting
from penstock.worker.engine.sampler import Sampled, Sampler
from penstock.worker.loading import load_engine

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from penstock.worker.core.engine import GenerateEngine
    from penstock.worker.engine.requests import RequestState

LINES = 60
NEW = 300  # tokens of a chat's answer
END = 2  # the token that ends one
GREEDY = Sampling(temperature=0)
TASK = "Rename StepGate to MemoryGate and expected to envelope, and log what is turned away."
QUESTIONS = (
    "Explain in a few paragraphs how a lighthouse works and why ships need one.",
    "Write a letter to a friend about a journey through the mountains in autumn.",
    "What should I think of when I buy a used bicycle?",
)


@dataclass(slots=True)
class Answer:
    """One answer, from its first token on."""

    tokens: list[int] = field(default_factory=list)
    steps: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0


def main() -> None:
    """Measure and print both tasks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--task", choices=("both", "edit", "chat"), default="both")
    options = parser.parse_args()
    folder = options.model or starter_folder()
    spec = LoadSpec(
        *(folder.name, str(folder), "cpu", "float32"),
        memory_bytes=2 << 30,
        threads=options.threads,
        speculation="auto",
        profile_dir=str(folder.parent.parent / "profiles"),
        capped=False,
    )
    engine = load_engine(spec, lambda *_: None)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def ids(text: str) -> list[int]:
        found: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return found

    warm = Sampling(temperature=0.8, top_p=0.95, seed=1)
    chat = [Submit(1, ids(_turn(question)), NEW, warm, [END]) for question in QUESTIONS]
    if options.task != "edit":
        record("speculation-chat", _compared(engine, chat, options.rounds))
    if options.task == "chat":
        return
    before, after = _edit()
    edited = [*ids(after), END]
    edit = Submit(1, ids(_turn(f"{before}\n\n{TASK}")), len(edited), GREEDY, [END])
    with _fed(edit, edited):
        record("speculation-edit", _compared(engine, [edit], options.rounds))


def _compared(engine: GenerateEngine, asked: list[Submit], rounds: int) -> dict[str, float]:
    drafting = engine._scheduler.drafting
    before = drafting.figures()["lookup"]
    wall, cpu, steps, count = [], [], 0, 0
    for _ in range(rounds):
        for request in asked:
            off = _answer(engine, request, Drafting())
            on = _answer(engine, request, drafting)
            if off.tokens != on.tokens:
                raise SystemExit("speculation has changed an answer")
            wall.append(off.wall_s / on.wall_s)
            cpu.append(off.cpu_s / on.cpu_s)
            steps, count = steps + on.steps, count + off.steps
    verified, accepted = (
        now - then for now, then in zip(drafting.figures()["lookup"], before, strict=True)
    )
    engine._scheduler.drafting = drafting
    return {
        "times_as_fast_cpu": round(median(cpu), 2),
        "times_as_fast_wall": round(median(wall), 2),
        "tokens_a_step": round(count / steps, 2),
        "accepted": round(accepted / max(verified, 1), 3),
        "tokens": count // rounds,
    }


def _answer(engine: GenerateEngine, request: Submit, drafting: Drafting) -> Answer:
    engine._scheduler.drafting = drafting
    engine.submit(structs.replace(request))
    answer = Answer()
    while engine.has_work():
        wall, cpu = time.perf_counter(), time.thread_time()
        outputs = engine.step()
        if answer.tokens:  # decoding
            answer.wall_s += time.perf_counter() - wall
            answer.cpu_s += time.thread_time() - cpu
            answer.steps += 1
        answer.tokens += [token for output in outputs for token in output.tokens]
    return answer


@contextmanager
def _fed(request: Submit, answer: list[int]) -> Iterator[None]:
    """Whatever is sampled, the answer is this one."""
    first, sample = len(request.prompt), Sampler.sample

    def fed(self: Sampler, logits: Tensor, sequences: list[RequestState], *more: Any) -> Sampled:
        sampled = sample(self, logits, sequences, *more)
        places = [min(sequence.position - first, len(answer) - 1) for sequence in sequences]
        return replace(sampled, tokens=[answer[place] for place in places])

    with mock.patch.object(Sampler, "sample", fed):
        yield


def _edit() -> tuple[str, str]:
    """The file, and what it becomes."""
    source = Path(__file__).parent.parent / "src/penstock/worker/core/gate.py"
    lines = source.read_text().splitlines()[20 : 20 + LINES]
    edited = "\n".join(lines).replace("StepGate", "MemoryGate").replace("expected", "envelope")
    found = edited.partition("self.rejected = False")
    told = '        if not fits:\n            log.info("turned away: %s", shape)\n'
    return "\n".join(lines), f"{found[0]}{found[1]}\n{told}{found[2]}"


def _turn(question: str) -> str:
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


if __name__ == "__main__":
    main()
