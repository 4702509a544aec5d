"""An engine without torch: real processes and sockets for tests of everything around a model.

`Supervisor(home, engine_module="penstock.testing.fake_worker", preload=FAKE_PRELOAD)` serves it.
It answers with the tokens of the prompt, over and over. How a model misbehaves is written in its
folder (`FakeModel.write`); a folder without that file gets a well-behaved one.
"""

from __future__ import annotations

import os
import signal
import time
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from penstock.catalog import read_card
from penstock.errors import by_code
from penstock.memory.cost import CostModel, GroupCost, KvCost, Measured, fit
from penstock.wire import (
    Candidate,
    EngineKind,
    Finish,
    Freed,
    Grant,
    LoadSpec,
    Output,
    Ready,
    Status,
    Submit,
    TokenLogprobs,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.worker.core.engine_contract import Progress

FAKE_PRELOAD = ("penstock.worker.loop", "penstock.testing.fake_worker")

BEHAVIOUR_FILE = "fake.json"
LIVES_FILE = "lives"  # one byte per load begun, so that tests can count them
BLOCK_TOKENS = 16
TOKEN_BYTES = 1 << 10
STEP_BYTES = 1 << 20
PROCESS_BYTES = 24 << 20


class FakeModel(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the fake behaves. `bad_lives` bounds the misbehaviour to the first loads."""

    context: int = 4096
    load_s: float = 0.0
    load_error_code: str | None = None  # a `PenstockError` of that code
    load_bug: bool = False  # an exception that is none of ours
    load_death: bool = False
    step_s: float = 0.0
    die_at_token: int | None = None  # SIGKILL to itself instead of that token of an answer
    hang_at_token: int | None = None
    failing_steps: int = 0  # that many steps raise first
    answer: str | None = None  # what it says, a token per byte, instead of the prompt's tokens
    answer_to: dict[str, str] = {}  # what it says instead when the prompt has the key in it
    tokens_a_step: int = 1  # of each answer, as if guesses had been right
    wants_reload: bool = False  # from its first idle moment
    bad_lives: int = 1 << 30

    def write(self, folder: Path) -> Path:
        """Put it into a model folder; returns the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / BEHAVIOUR_FILE).write_bytes(msgspec.json.encode(self))
        return folder


def lives(folder: Path) -> int:
    """How many times a worker has begun to load this folder."""
    file = folder / LIVES_FILE
    return file.stat().st_size if file.exists() else 0


def load_engine(spec: LoadSpec, progress: Progress) -> FakeEngine:
    """The engine that a worker asks for, after the trouble that the folder asks for."""
    folder = Path(spec.path)
    model = FakeModel()
    if (folder / BEHAVIOUR_FILE).exists():
        model = msgspec.json.decode((folder / BEHAVIOUR_FILE).read_bytes(), type=FakeModel)
        with (folder / LIVES_FILE).open("ab") as file:
            file.write(b".")
        if lives(folder) > model.bad_lives:
            model = FakeModel(context=model.context, load_s=model.load_s, step_s=model.step_s)
    progress("weights", 0, 100)
    time.sleep(model.load_s)
    if model.load_death:
        os.kill(os.getpid(), signal.SIGKILL)
    if model.load_error_code is not None:
        raise by_code(model.load_error_code)(f"The fake model {spec.name} refuses to load.")
    if model.load_bug:
        raise RuntimeError("a bug in the loader")
    progress("weights", 100, 100)
    kv_bytes = spec.memory_bytes - STEP_BYTES
    if spec.engine is EngineKind.ENCODE:
        encoder = read_card(folder).encoder
        assert encoder is not None
        return FakeEngine(spec, model, dimensions=encoder.dimensions)
    if spec.kv_tokens is not None:
        kv_bytes = min(kv_bytes, spec.kv_tokens * TOKEN_BYTES)
    return FakeEngine(spec, model, kv_bytes=kv_bytes)


@dataclass(slots=True)
class _Request:
    submit: Submit
    answer: bytes | None = None
    answered: int = 0
    prompt_told: bool = False


@dataclass(slots=True)
class FakeEngine:
    """Speaks the protocol of `penstock.worker.core.engine_contract.Engine`."""

    spec: LoadSpec
    model: FakeModel
    requests: dict[int, _Request] = field(default_factory=dict)
    steps: int = 0
    accepted: int = 0
    kv_bytes: int = 0  # the latest grant
    dimensions: int = 0  # of an encoder's answers

    @property
    def wants_reload(self) -> bool:
        return self.model.wants_reload

    def ready(self) -> Ready:
        window = min(self.model.context, self.spec.max_context or self.model.context)
        kv_tokens = window if self.dimensions else self.kv_bytes // TOKEN_BYTES
        return Ready(
            pid=0,
            device=self.spec.device,
            dtype="float32",
            kv_dtype="float32",
            weight_bytes=1 << 20,
            kv_tokens=kv_tokens,
            context=min(window, kv_tokens),
            load_s=0.0,
            cost=_cost(self.spec),
            process_bytes=PROCESS_BYTES,
            step_bytes=STEP_BYTES,
            kv_bytes=self.kv_bytes,
            kv_unit_bytes=1,
            kv_overhead_bytes=0,
            step_tokens=self.spec.step_tokens,
            overhead_bytes=PROCESS_BYTES,
        )

    def submit(self, request: Submit) -> None:
        self.requests[request.id] = _Request(request, self._answer(list(request.prompt)))

    def cancel(self, request_id: int) -> None:
        self.requests.pop(request_id, None)

    def grant(self, grant: Grant) -> Freed:
        if self.dimensions:
            return Freed(0)
        before = self.kv_bytes
        self.kv_bytes = max(grant.kv_bytes, self._needed_bytes())
        return Freed(max(0, before - self.kv_bytes), self.kv_bytes)

    def shed(self, size: int) -> Freed:
        return self.grant(Grant(max(0, self.kv_bytes - size), STEP_BYTES))

    def notices(self) -> list[str]:
        return []

    def _needed_bytes(self) -> int:
        lengths = (len(r.submit.prompt) + r.submit.max_tokens for r in self.requests.values())
        return TOKEN_BYTES * sum(lengths)

    def has_work(self) -> bool:
        return bool(self.requests)

    def tidy(self, called: Callable[[], bool]) -> float | None:
        return None

    def close(self) -> None:
        pass

    def probe(self) -> None:
        self.steps += 1

    def step(self) -> list[Output]:
        self.steps += 1
        time.sleep(self.model.step_s)
        if self.steps <= self.model.failing_steps:
            raise RuntimeError("a bug in the engine")
        batch = list(self.requests.values())[: self.spec.step_sequences]
        outputs = [self._several(request) for request in batch]
        for output in outputs:
            if output.finish is not None:
                del self.requests[output.id]
        return outputs

    def status(self) -> Status:
        running = min(len(self.requests), self.spec.step_sequences)
        return Status(
            running=running,
            waiting=len(self.requests) - running,
            kv_capacity_bytes=256 * BLOCK_TOKENS * TOKEN_BYTES,
            kv_free_bytes=(256 - min(len(self.requests), 256)) * BLOCK_TOKENS * TOKEN_BYTES,
            step_tokens=running,
            step_s=self.model.step_s,
            host_s=0.0,
            preemptions=0,
            steps=self.steps,
            drafts={"fake": (2 * self.accepted, self.accepted)},
            kv_committed_bytes=min(self._needed_bytes(), self.kv_bytes),
            wants_reload=self.wants_reload,
        )

    def _answer(self, prompt: list[int]) -> bytes | None:
        asked = bytes(token for token in prompt if token < 256).decode(errors="replace")
        for words, answer in self.model.answer_to.items():
            if words in asked:
                return answer.encode()
        return None if self.model.answer is None else self.model.answer.encode()

    def _token(self, request: _Request) -> int:
        submit, text = request.submit, request.answer
        if text is None:
            return submit.prompt[request.answered % len(submit.prompt)]
        if request.answered < len(text) or not submit.stop_token_ids:
            return text[request.answered % len(text)]
        return submit.stop_token_ids[0]

    def _vector(self, submit: Submit) -> bytes:
        """The text's length, its first and last token and where its second segment begins."""
        assert submit.encoding is not None
        second, ids = submit.encoding.second, submit.prompt
        told = [len(ids), ids[0], ids[-1], -1 if second is None else second]
        values = array("f", told + [0.5] * self.dimensions)
        return values[: submit.encoding.dimensions or self.dimensions].tobytes()

    def _several(self, request: _Request) -> Output:
        output = self._advance(request)
        while len(output.tokens) < self.model.tokens_a_step and output.finish is None:
            more = self._advance(request)
            output.tokens += more.tokens
            if output.logprobs is not None:
                output.logprobs += more.logprobs or []
            output.finish = more.finish
            output.drafts, output.accepted = self.model.tokens_a_step, len(output.tokens) - 1
        self.accepted += output.accepted
        return output

    def _advance(self, request: _Request) -> Output:
        submit = request.submit
        if request.answered == self.model.die_at_token:
            os.kill(os.getpid(), signal.SIGKILL)
        if request.answered == self.model.hang_at_token:
            time.sleep(3600)
        output = Output(submit.id)
        if submit.encoding is not None:
            request.answered += 1
            output.vector, output.finish = self._vector(submit), Finish.STOP
            return output
        if submit.prompt_logprobs is not None and not request.prompt_told:
            known = [_logprobs(token, submit.prompt_logprobs) for token in submit.prompt[1:]]
            output.prompt_logprobs = [None, *known]
        request.prompt_told = True
        token = self._token(request)
        request.answered += 1
        output.tokens = [token]
        if submit.sampling.logprobs is not None:
            output.logprobs = [_logprobs(token, submit.sampling.logprobs)]
        if token in submit.stop_token_ids and request.answered > submit.min_tokens:
            output.finish = Finish.STOP
        elif request.answered >= submit.max_tokens:
            output.finish = Finish.LENGTH
        return output


def _cost(spec: LoadSpec) -> CostModel:
    largest = Measured(spec.step_tokens, spec.step_sequences, 1 << 20, spec.step_tokens, STEP_BYTES)
    if spec.engine is EngineKind.ENCODE:
        return fit([largest], KvCost((), BLOCK_TOKENS))
    return fit([largest], KvCost((GroupCost(TOKEN_BYTES * BLOCK_TOKENS),), BLOCK_TOKENS))


def _logprobs(token: int, alternatives: int) -> TokenLogprobs:
    """The token at -0.5, and its neighbours each less likely than the one before."""
    top = [Candidate(token + rank, -0.5 - rank) for rank in range(alternatives)]
    return TokenLogprobs(Candidate(token, -0.5), top)
