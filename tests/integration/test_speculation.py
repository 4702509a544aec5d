"""Whatever is guessed, the answer is that of plain decoding: token by token, score by score."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from penstock.testing import tiny
from penstock.testing.exactness import Mode, poisoned_blocks, start_engine
from penstock.testing.fake_proposers import KINDS, Gambler, Liar, Oracle, draft_with
from penstock.wire import Finish, LogitBias, Sampling, Submit, Thinking, TokenLogprobs, token_ids
from penstock.worker.backends import executor as executor_module
from penstock.worker.backends.cpu import CpuBackend
from penstock.worker.backends.verifying import take_verified
from penstock.worker.core.drafts.drafting import Drafting
from penstock.worker.core.plan import Plan
from penstock.worker.models.batch import build_batch

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from penstock.testing.fake_proposers import Fake
    from penstock.wire import Output
    from penstock.worker.core.engine import GenerateEngine
    from penstock.worker.core.plan import Slice

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = [tiny.prompt(length, seed) for seed, length in enumerate((1, 17, 40, 90))]
NEW_TOKENS = 24
GREEDY = Sampling(temperature=0)
# One for each prompt, and between them all that shapes a token.
MANY_WAYS = (
    Sampling(temperature=0.8, top_p=0.9, seed=3, repetition_penalty=1.3, frequency_penalty=0.4),
    Sampling(temperature=0, logprobs=3, presence_penalty=0.5, penalty_window=10),
    Sampling(temperature=1.1, top_k=20, min_p=0.01, seed=5, logit_bias=LogitBias.of({7: 3.0})),
    Sampling(temperature=0.6, seed=9, logprobs=0),
)
ROOMY = Mode("roomy", step_tokens=64, step_sequences=6, speculation="auto")
CROWDED = Mode("crowded", step_tokens=64, step_sequences=6, pool_tokens=128, speculation="auto")


@pytest.fixture(autouse=True)
def small_extents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuBackend, "extent_bytes", 1 << 14)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save("llama", tmp_path_factory.mktemp("tiny") / "llama")


class Answers:
    """What requests were given, and in how many steps."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[TokenLogprobs]] = {}
        self.finish: dict[int, Finish] = {}
        self.steps = self.drafts = self.accepted = 0

    def take(self, output: Output) -> None:
        assert output.failure is None, output.failure
        assert output.logprobs is None or len(output.logprobs) == len(output.tokens)
        assert 0 <= output.accepted <= min(output.drafts, len(output.tokens))
        self.tokens.setdefault(output.id, []).extend(output.tokens)
        self.logprobs.setdefault(output.id, []).extend(output.logprobs or [])
        self.drafts += output.drafts
        self.accepted += output.accepted
        if output.finish is not None:
            self.finish[output.id] = output.finish

    def scores(self) -> list[tuple[int, float]]:
        every = [score for number in sorted(self.logprobs) for score in self.logprobs[number]]
        return [(c.token, c.logprob) for score in every for c in (score.chosen, *score.top)]


def requests(hows: tuple[Sampling, ...] = (GREEDY,) * 4, **more: object) -> list[Submit]:
    return [
        Submit(number, list(prompt), NEW_TOKENS, how, **more)  # type: ignore[arg-type]
        for number, (prompt, how) in enumerate(zip(PROMPTS, hows, strict=True))
    ]


def collect(
    engine: GenerateEngine,
    asked: list[Submit],
    between_steps: Callable[[int], None] = lambda _: None,
) -> Answers:
    answers = Answers()
    for request in asked:
        engine.submit(request)
    while engine.has_work():
        for output in engine.step():
            answers.take(output)
        engine.check()
        answers.steps += 1
        between_steps(answers.steps)
    return answers


def plainly(engine: GenerateEngine, asked: list[Submit]) -> Answers:
    engine._scheduler.drafting = Drafting()
    answers = collect(engine, asked)
    assert answers.drafts == 0
    return answers


def same(one: Answers, other: Answers) -> None:
    assert one.tokens == other.tokens
    assert one.finish == other.finish
    ours, theirs = one.scores(), other.scores()
    assert [token for token, _ in ours] == [token for token, _ in theirs]
    assert [score for _, score in ours] == pytest.approx([s for _, s in theirs], abs=1e-4)


@pytest.mark.parametrize("architecture", tiny.SERVED)
def test_no_proposer_changes_a_token_of_any_architecture(architecture: str, tmp_path: Path) -> None:
    with poisoned_blocks():
        engine = start_engine(tiny.save(architecture, tmp_path), ROOMY)
        lookup = engine._scheduler.drafting
        plain = [plainly(engine, requests()), plainly(engine, requests(MANY_WAYS))]
        for kind in KINDS:
            for expected, hows in zip(plain, ((GREEDY,) * 4, MANY_WAYS), strict=True):
                engine.kv.clear()
                draft_with(engine, [kind(expected.tokens, tiny.VOCABULARY)])
                found = collect(engine, requests(hows))
                same(found, expected)
                assert found.drafts > 0
                assert (found.accepted == 0) == (kind is Liar)
                if kind is Oracle:
                    assert found.accepted == found.drafts
                    assert found.steps < expected.steps / 2
        engine._scheduler.drafting = lookup
        for expected, hows in zip(plain, ((GREEDY,) * 4, MANY_WAYS), strict=True):
            same(collect(engine, requests(hows)), expected)


def test_all_proposers_together_change_nothing(llama: Path) -> None:
    engine = start_engine(llama, ROOMY)
    expected = plainly(engine, requests(MANY_WAYS))
    made = [kind(expected.tokens, tiny.VOCABULARY) for kind in KINDS]
    for proposer in made:
        proposer.name = type(proposer).__name__
    drafting = draft_with(engine, made)
    same(collect(engine, requests(MANY_WAYS)), expected)
    assert drafting.counts["Oracle"].accepted > 0


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma2"])
@pytest.mark.parametrize("kind", KINDS)
def test_requests_that_give_way_have_the_same_answers(
    architecture: str, kind: type[Fake], tmp_path: Path
) -> None:
    """8 blocks, of which drafts take some while the others wait for theirs."""
    with poisoned_blocks():
        engine = start_engine(tiny.save(architecture, tmp_path), CROWDED)
        expected = plainly(engine, requests(MANY_WAYS))

        def give_way(step: int) -> None:
            scheduler = engine._scheduler
            if step % 5 == 0 and scheduler.running > 1:
                scheduler._preempt(scheduler._running[-1], Plan())

        draft_with(engine, [kind(expected.tokens, tiny.VOCABULARY)])
        before = engine.status().preemptions
        same(collect(engine, requests(MANY_WAYS), give_way), expected)
        assert engine.status().preemptions > before


def test_drafts_make_nobody_give_way(llama: Path) -> None:
    counts = []
    for kind in (None, Oracle, Liar):
        engine = start_engine(llama, CROWDED)
        expected = plainly(engine, requests())
        engine.kv.clear()
        before = engine.status().preemptions
        if kind is not None:
            draft_with(engine, [kind(expected.tokens, tiny.VOCABULARY)], most=15)
        same(collect(engine, requests()), expected)
        counts.append(engine.status().preemptions - before)
    plain, right, wrong = counts
    assert wrong == plain > 0
    assert right <= plain


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_ends_at_its_stop_token_and_at_its_length(llama: Path, kind: type[Fake]) -> None:
    engine = start_engine(llama, ROOMY)
    free = plainly(engine, requests())
    for place, minimum in ((1, 0), (6, 0), (7, 9), (NEW_TOKENS - 1, 0)):
        stops = sorted({tokens[place] for tokens in free.tokens.values()})
        asked = list(requests(stop_token_ids=stops, min_tokens=minimum))
        for request, length in zip(asked, (NEW_TOKENS, 2, 5, 11), strict=True):
            request.max_tokens = length
        expected = plainly(engine, list(asked))
        draft_with(engine, [kind(free.tokens, tiny.VOCABULARY)], most=15)
        same(collect(engine, list(asked)), expected)
        assert {Finish.STOP, Finish.LENGTH} >= set(expected.finish.values())


def test_choices_of_one_prompt_share_it_and_differ(llama: Path) -> None:
    def choices() -> list[Submit]:
        return [
            Submit(n, list(PROMPTS[3]), NEW_TOKENS, Sampling(temperature=1.0, seed=n))
            for n in range(5)
        ]

    engine = start_engine(llama, ROOMY)
    expected = plainly(engine, choices())
    assert len({tuple(tokens) for tokens in expected.tokens.values()}) == 5
    engine.kv.clear()
    draft_with(engine, [Gambler(expected.tokens, tiny.VOCABULARY)])
    same(collect(engine, choices()), expected)


def test_found_kv_has_no_draft_in_it(llama: Path) -> None:
    """A second turn begins with the first one's answer, whose blocks were written beside drafts."""
    with poisoned_blocks():
        engine = start_engine(llama, ROOMY)
        first = plainly(engine, requests())
        engine.kv.clear()

        def turns() -> list[Submit]:
            return [
                Submit(n, [*prompt, *first.tokens[n], 5, 6], NEW_TOKENS, GREEDY)
                for n, prompt in enumerate(PROMPTS)
            ]

        second = plainly(engine, turns())
        engine.kv.clear()
        for kind in (Liar, Gambler):
            draft_with(engine, [kind(first.tokens, tiny.VOCABULARY)], most=15)
            same(collect(engine, requests()), first)
            before = engine.status().reused_tokens
            same(plainly(engine, turns()), second)
            assert engine.status().reused_tokens > before
            engine.kv.clear()


def test_a_cancelled_request_leaves_the_others_as_they_are(llama: Path) -> None:
    engine = start_engine(llama, ROOMY)
    expected = plainly(engine, requests(MANY_WAYS))
    draft_with(engine, [Gambler(expected.tokens, tiny.VOCABULARY)])

    def cancel(step: int) -> None:
        if step == 3:
            engine.cancel(1)

    found = collect(engine, requests(MANY_WAYS), cancel)
    assert len(found.tokens.pop(1)) < NEW_TOKENS
    expected.tokens.pop(1)
    assert found.tokens == expected.tokens


def test_a_step_without_memory_is_tried_again_without_drafts(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start_engine(llama, ROOMY)
    expected = plainly(engine, requests(MANY_WAYS))
    draft_with(engine, [Oracle(expected.tokens, tiny.VOCABULARY)])
    seen: list[int] = []
    budgets = set()

    def failing(plan: Plan, *more: object) -> object:
        seen.append(plan.drafts)
        budgets.add(engine._recovery.budget)
        if plan.drafts:
            raise MemoryError
        return build_batch(plan, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(executor_module, "build_batch", failing)
    found = collect(engine, requests(MANY_WAYS))
    same(found, expected)
    assert [drafts for drafts in seen if drafts] == [seen[1]]  # once, and not again for some steps
    assert engine.status().oom_steps == 1
    assert budgets == {None}  # no step was made smaller for it


def test_a_thinking_budget_holds_in_every_row(llama: Path) -> None:
    thinking = Thinking(end=[11, 12], open=True, budget=5)
    engine = start_engine(llama, ROOMY)
    expected = plainly(engine, requests(MANY_WAYS, thinking=thinking))
    for tokens in expected.tokens.values():
        assert tokens[5:7] == [11, 12] or 12 in tokens[:7]
    for kind in KINDS:
        draft_with(engine, [kind(expected.tokens, tiny.VOCABULARY)])
        found = collect(engine, requests(MANY_WAYS, thinking=thinking))
        same(found, expected)
        assert found.drafts > 0


def test_the_comparison_sees_a_draft_that_is_taken_unverified(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start_engine(llama, ROOMY)
    expected = plainly(engine, requests())

    def trusting(
        samplers: list[Slice], tokens: list[int], logprobs: list[object], result: object
    ) -> None:
        take_verified(samplers, tokens, logprobs, result)  # type: ignore[arg-type]
        for piece in samplers:
            if piece.drafts:
                result.outputs[piece.request_id].tokens[:1] = [  # type: ignore[attr-defined]
                    piece.drafts[0]
                ]

    monkeypatch.setattr(executor_module, "take_verified", trusting)
    draft_with(engine, [Liar(expected.tokens, tiny.VOCABULARY)])
    assert collect(engine, requests()).tokens != expected.tokens


def test_an_answer_that_repeats_itself_is_looked_up(llama: Path) -> None:
    """Of two tokens that are allowed: soon whatever follows has followed before."""
    how = Sampling(temperature=0, allowed_ids=token_ids([3, 5]).tobytes())

    def asked() -> list[Submit]:
        return [Submit(0, list(PROMPTS[2]), 120, how)]

    engine = start_engine(llama, ROOMY)
    lookup = engine._scheduler.drafting
    expected = plainly(engine, asked())
    engine._scheduler.drafting = lookup
    found = collect(engine, asked())
    assert found.tokens == expected.tokens
    assert engine.status().drafts == {"lookup": (found.drafts, found.accepted)}
    assert found.accepted > 0
    assert found.steps + found.accepted == expected.steps
