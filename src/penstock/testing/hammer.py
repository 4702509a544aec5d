"""Many clients at once with everything that is hard on a server's memory, and a judge.

Each order says what may come of it; an answer that is incomplete, a refusal that is not in the
design's table or has no numbers, and a connection that hangs are faults. Real sockets through
httpx; knows the OpenAI protocol, nothing of penstock's insides.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

CLIENTS = 32
ENORMOUS = 1_000_000_000
_WINDOW_NUMBERS = {"reason", "needed_tokens", "limit_tokens"}
_MEMORY_NUMBERS = {
    "reason", "domain", "needed_tokens", "limit_tokens", "needed_bytes", "limit_bytes",
}  # fmt: skip

# How many of a hundred.
MIX = {
    "fits": 38,
    "alone": 8,  # more than half of the KV: no second one beside it
    "never": 14,  # a little more than can ever fit
    "long text": 3,  # 100,000 tokens and more, as text
    "long ids": 3,  # the same as token ids
    "abandoned": 14,
    "enormous": 8,  # max_tokens
    "many": 6,  # n
    "logprobs": 6,
}


@dataclass(frozen=True, slots=True)
class Target:
    """The model as the mix needs to know it."""

    model: str
    words: str  # a text of about ten tokens
    limit_tokens: int  # a prompt this long can never fit
    alone_tokens: int  # so long that only one such prompt fits; 0: there is none
    short_tokens: int = 48  # the longest of the small prompts
    answer_tokens: int = 16
    vocabulary: int = 256  # ids below this are harmless


@dataclass(frozen=True, slots=True)
class Order:
    """One request, and what may come of it."""

    kind: str
    body: bytes
    answers: int = 1
    stream: bool = False
    leave_after: int | None = None  # events, or tenths of a second where nothing is streamed
    may_be: frozenset[str] = frozenset({"answer", "overloaded"})


@dataclass(slots=True)
class Outcome:
    """What one client saw."""

    kind: str
    what: str  # answer, left, or the code of a refusal
    reason: str | None = None
    seconds: float = 0.0
    fault: str | None = None


@dataclass(slots=True)
class Tally:
    """All outcomes of a run."""

    outcomes: list[Outcome] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def faults(self) -> list[str]:
        """Everything that should not have been."""
        return [f"{one.kind}: {one.fault}" for one in self.outcomes if one.fault is not None]

    def count(self, kind: str | None = None, what: str | None = None) -> int:
        """Outcomes of a kind of request, of a kind of ending, or both."""
        return sum(kind in (None, o.kind) and what in (None, o.what) for o in self.outcomes)

    def refusals(self, reason: str) -> int:
        """Refusals that can never be otherwise, for this reason."""
        return sum(o.what == "context_length_exceeded" and o.reason == reason
                   for o in self.outcomes)  # fmt: skip

    def __str__(self) -> str:
        ends = Counter(f"{o.what}{f' ({o.reason})' if o.reason else ''}" for o in self.outcomes)
        kinds = Counter(o.kind for o in self.outcomes)
        slowest = max((o.seconds for o in self.outcomes), default=0.0)
        return (
            f"{len(self.outcomes)} requests in {self.seconds:.0f} s, the slowest {slowest:.1f} s; "
            f"{dict(kinds.most_common())}; {dict(ends.most_common())}"
        )


def orders(target: Target, count: int, seed: int) -> Iterator[Order]:
    """So many orders of the mix, in an order of their own; every kind is there."""
    dice = random.Random(seed)
    kinds = [kind for kind, share in MIX.items() for _ in range(max(1, count * share // 100))]
    kinds += ["fits"] * (count - len(kinds))
    dice.shuffle(kinds)
    maker = _Maker(target, dice)
    return (maker.make(kind) for kind in kinds)


class _Maker:
    """Makes orders; each kind of the mix is a method."""

    def __init__(self, target: Target, dice: random.Random) -> None:
        self._target = target
        self._dice = dice
        # More than 100,000 tokens, and than the window, however few a word has.
        long_tokens = max(110_000, target.limit_tokens + 1)
        self._refused = frozenset({"context_length_exceeded", "overloaded"})
        self._text = self._body(target.words * (long_tokens // 5), max_tokens=4)
        self._ids = self._body([5] * long_tokens, max_tokens=4)

    def make(self, kind: str) -> Order:
        """One order of a kind."""
        makers = {
            "fits": self._fits,
            "alone": self._alone,
            "never": self._never,
            "long text": lambda: Order("long text", self._text, may_be=self._refused),
            "long ids": lambda: Order("long ids", self._ids, may_be=self._refused),
            "abandoned": self._abandoned,
            "enormous": self._enormous,
            "many": self._many,
            "logprobs": self._logprobs,
        }
        return makers[kind]()

    def _body(self, prompt: object, **fields: object) -> bytes:
        body = {"model": self._target.model, "prompt": prompt, **fields}
        return json.dumps(body).encode()

    def _some(self, count: int) -> list[int]:
        return [self._dice.randrange(5, self._target.vocabulary) for _ in range(count)]

    def _small(self, **fields: object) -> bytes:
        prompt = self._some(self._dice.randrange(1, self._target.short_tokens))
        fields = {"max_tokens": self._dice.randrange(1, self._target.answer_tokens), **fields}
        return self._body(prompt, seed=self._dice.randrange(1 << 30), **fields)

    def _fits(self) -> Order:
        stream = self._dice.random() < 0.5
        return Order("fits", self._small(stream=stream), stream=stream)

    def _alone(self) -> Order:
        tokens = self._target.alone_tokens
        if not tokens:
            return self._fits()
        return Order("alone", self._body(self._some(tokens), max_tokens=4))

    def _never(self) -> Order:
        limit = self._target.limit_tokens
        body = self._body([7] * (limit + self._dice.randrange(max(limit // 2, 1))), max_tokens=4)
        return Order("never", body, may_be=self._refused)

    def _abandoned(self) -> Order:
        stream = self._dice.random() < 0.7
        body = self._small(stream=stream, max_tokens=ENORMOUS, ignore_eos=True)
        left = frozenset({"left", "answer", "overloaded"})
        return Order("abandoned", body, 1, stream, self._dice.randrange(1, 12), left)

    def _enormous(self) -> Order:
        """An answer as long as it likes; it ends at a letter that is bound to come."""
        stream = self._dice.random() < 0.5
        body = self._small(max_tokens=ENORMOUS, stop=["e", "a"], temperature=1.5, stream=stream)
        return Order("enormous", body, stream=stream)

    def _many(self) -> Order:
        n = self._dice.choice((4, 8, 16))
        return Order("many", self._small(n=n, max_tokens=4), answers=n)

    def _logprobs(self) -> Order:
        """Twenty alternatives a token, or so many in all that they are refused by name."""
        if self._dice.random() < 0.3:
            body = self._small(logprobs=20, n=200, max_tokens=ENORMOUS)
            named = frozenset({"invalid_request_error", "overloaded"})
            return Order("logprobs", body, 200, may_be=named)
        return Order("logprobs", self._small(logprobs=20, echo=True))


async def hammer(url: str, work: Iterable[Order], *, patience_s: float) -> Tally:
    """Let `CLIENTS` clients work through the orders, each with one at a time."""
    tally, started = Tally(), time.monotonic()
    left = iter(work)
    timeout = httpx.Timeout(patience_s, connect=30)
    limits = httpx.Limits(max_connections=CLIENTS, max_keepalive_connections=CLIENTS)

    async def one_client() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=timeout, limits=limits) as client:
            for order in left:
                begun = time.monotonic()
                try:
                    async with asyncio.timeout(patience_s):
                        outcome = await _place(client, order)
                except (TimeoutError, httpx.TimeoutException):
                    outcome = Outcome(order.kind, "hang", fault=f"no end after {patience_s:g} s")
                except httpx.HTTPError as error:
                    outcome = Outcome(order.kind, "broken", fault=repr(error))
                outcome.seconds = time.monotonic() - begun
                tally.outcomes.append(outcome)

    await asyncio.gather(*(one_client() for _ in range(CLIENTS)))
    tally.seconds = time.monotonic() - started
    return tally


async def _place(client: httpx.AsyncClient, order: Order) -> Outcome:
    if order.leave_after is not None and not order.stream:
        try:
            async with asyncio.timeout(order.leave_after / 10):
                return _judge(order, await _whole(client, order))
        except TimeoutError:
            return Outcome(order.kind, "left")
    if order.stream:
        return await _stream(client, order)
    return _judge(order, await _whole(client, order))


async def _whole(client: httpx.AsyncClient, order: Order) -> httpx.Response:
    return await client.post("/v1/completions", content=order.body)


async def _stream(client: httpx.AsyncClient, order: Order) -> Outcome:
    ends: dict[int, str] = {}
    async with client.stream("POST", "/v1/completions", content=order.body) as response:
        if response.status_code != 200:
            await response.aread()
            return _judge(order, response)
        events = 0
        async for line in response.aiter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                return _answered(order, list(ends.values()))
            content = json.loads(line.removeprefix("data: "))
            if "error" in content:
                return _refused(order, content["error"], None)
            for choice in content["choices"]:
                if choice["finish_reason"] is not None:
                    ends[choice["index"]] = choice["finish_reason"]
            events += 1
            if events == order.leave_after:
                return Outcome(order.kind, "left")
    return Outcome(order.kind, "cut", fault=f"the stream ended after {events} events")


def _judge(order: Order, response: httpx.Response) -> Outcome:
    content = response.json()
    if response.status_code == 200:
        return _answered(order, [choice["finish_reason"] for choice in content["choices"]])
    return _refused(order, content["error"], response)


def _answered(order: Order, ends: list[str]) -> Outcome:
    outcome = Outcome(order.kind, "answer")
    if "answer" not in order.may_be:
        outcome.fault = "answered, though it can never fit"
    elif len(ends) != order.answers or not set(ends) <= {"stop", "length"}:
        outcome.fault = f"{order.answers} answers were asked for and ended so: {ends}"
    return outcome


def _refused(order: Order, error: dict[str, Any], response: httpx.Response | None) -> Outcome:
    """`response` is None for an error inside a stream."""
    numbers = error.get("penstock") or {}
    outcome = Outcome(order.kind, str(error["code"]), numbers.get("reason"))
    status = None if response is None else response.status_code
    expected = {
        "context_length_exceeded": 400,
        "invalid_request_error": 400,
        "request_too_large": 413,
        "overloaded": 503,
    }
    if outcome.what not in order.may_be or outcome.what not in expected:
        outcome.fault = f"refused: {error}"
    elif "ended for want of memory" in error["message"]:
        outcome.fault = f"begun and not finished: {error}"
    elif status is not None and status != expected[outcome.what]:
        outcome.fault = f"status {status}: {error}"
    elif outcome.what == "context_length_exceeded":
        window = numbers.get("reason") == "window"  # which needs no look at the memory
        honest = set(numbers) == _MEMORY_NUMBERS or (window and set(numbers) == _WINDOW_NUMBERS)
        honest = honest and numbers["needed_tokens"] > numbers["limit_tokens"]
        outcome.fault = None if honest else f"numbers: {error}"
    elif outcome.what == "overloaded" and response is not None:
        after = response.headers.get("retry-after", "")
        outcome.fault = None if after.isdigit() else f"no Retry-After: {error}"
    elif outcome.what == "invalid_request_error" and not error.get("param"):
        outcome.fault = f"no field named: {error}"
    return outcome
