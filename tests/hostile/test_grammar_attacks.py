"""Grammars that crash, stall or outgrow what compiles them: each costs its own request a 400."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx
import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.memory.readings.gauge import children_of
from penstock.testing.grammar_routes import any_request, requests_with
from penstock.testing.hostile import IS_STRICT, read_at_rest, under_attack
from penstock.testing.hostile_grammars import (
    chained_references,
    chained_rules,
    crossed,
    json_schema,
    many_properties,
    pattern_properties,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from penstock.testing.hostile import Damage, Target

SETTINGS = {"PENSTOCK_SERVER_GRAMMAR_TIMEOUT_S": "1"}
# A refusal comes within the processor time that a compile may take; the machine may be busy.
REFUSED_S = 120.0

HONEST = {
    "type": "object",
    "properties": {"name": {"enum": ["sea", "sky"]}, "depth": {"type": "boolean"}},
    "required": ["name", "depth"],
    "additionalProperties": False,
}


def ask(target: Target, fields: dict[str, Any], **more: Any) -> httpx.Response:
    """One request, refused or answered."""
    body = {**target.chat_body(max_tokens=16, temperature=0), **fields, **more}
    return httpx.post(f"{target.url}/v1/chat/completions", json=body, timeout=300)


def honest(target: Target) -> float:
    """A request with an ordinary schema, which must be kept; the time it took."""
    began = time.monotonic()
    answer = ask(target, {"response_format": json_schema(HONEST)}, max_tokens=120, temperature=1)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    if choice["finish_reason"] == "stop":
        jsonschema.validate(json.loads(choice["message"]["content"]), HONEST)
    return time.monotonic() - began


def survived(damage: Damage) -> None:
    """The claims of every attack, the books among them."""
    read_at_rest(damage)
    print(damage)  # noqa: T201 - shown when it fails
    damage.check()


@pytest.mark.parametrize(
    ("attack", "size"),
    [
        (chained_references, 1000),
        (chained_rules, 3500),
        (pattern_properties, 620),
        (pattern_properties, 1000),
        (crossed, 7),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_monstrous_grammar_is_refused(
    target: Target, attack: Callable[[int], dict[str, Any]], size: int
) -> None:
    with under_attack(target) as damage:
        began = time.monotonic()
        answer = ask(target, attack(size))
        assert time.monotonic() - began < REFUSED_S
        assert answer.status_code == 400, answer.text[:2000]
        words = answer.json()["error"]["message"]
        assert "cannot be enforced" in words
        assert honest(target) < REFUSED_S
        again = time.monotonic()
        assert ask(target, attack(size)).status_code == 400
        assert time.monotonic() - again < 5.0, "a refusal is kept"
    survived(damage)


def test_eight_that_take_hours_at_once_and_honest_requests_beside_them(target: Target) -> None:
    with under_attack(target) as damage, ThreadPoolExecutor(8) as pool:
        attacks = [pool.submit(ask, target, pattern_properties(900 + n)) for n in range(8)]
        times = [honest(target) for _ in range(3)]
        statuses = [attack.result().status_code for attack in attacks]
    assert statuses == [400] * 8
    assert max(times) < REFUSED_S
    survived(damage)


def test_many_different_large_grammars_at_once(target: Target) -> None:
    """More than there is room for: they take turns, and nobody's steps shrink."""
    with under_attack(target) as damage, ThreadPoolExecutor(16) as pool:
        attacks = [pool.submit(ask, target, many_properties(1500, n)) for n in range(16)]
        assert honest(target) < REFUSED_S
        answers = [attack.result() for attack in attacks]
    assert {answer.status_code for answer in answers} == {200}, [a.text[:300] for a in answers]
    survived(damage)
    assert honest(target) < REFUSED_S


def host_of(target: Target) -> int:
    """The model's grammar host."""
    [pid] = [pid for pid in children_of_all(target.server.pid) if "gramm" in name_of(pid)]
    return pid


def name_of(pid: int) -> str:
    with open(f"/proc/{pid}/comm") as comm:  # noqa: PTH123
        return comm.read()


def children_of_all(pid: int) -> list[int]:
    found: list[int] = []
    for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208
        with open(f"/proc/{pid}/task/{thread}/children") as children:  # noqa: PTH123
            found += map(int, children.read().split())
    return found


COUNTING = {"guided_regex": "(one two three four five six seven eight nine ten ){40}"}


def test_a_stream_goes_on_when_its_matcher_and_then_the_host_are_killed(target: Target) -> None:
    expected = ask(target, COUNTING, max_tokens=150).json()["choices"][0]["message"]["content"]
    seen: list[str] = []

    def listen() -> None:
        body = {**target.chat_body(max_tokens=150, temperature=0, stream=True), **COUNTING}
        url = f"{target.url}/v1/chat/completions"
        with httpx.stream("POST", url, json=body, timeout=120) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    seen.append(event["choices"][0]["delta"].get("content") or "")

    stream = threading.Thread(target=listen)
    stream.start()
    for whom in ("matcher", "host"):
        before = len(seen)
        while len(seen) < before + 10 and stream.is_alive():
            time.sleep(0.01)
        host = host_of(target)
        for pid in children_of(host) if whom == "matcher" else (host,):
            os.kill(pid, signal.SIGKILL)
    stream.join(120)
    assert "".join(seen) == expected
    assert honest(target) < REFUSED_S


BY_EVERY_ROUTE = [chained_references(1000), *([pattern_properties(620)] if IS_STRICT else [])]


@pytest.mark.parametrize("made", BY_EVERY_ROUTE)
def test_no_other_route_lets_one_in(target: Target, made: dict[str, Any]) -> None:
    with under_attack(target) as damage:
        for path, body in requests_with(target.model, made):
            began = time.monotonic()
            answer = httpx.post(target.url + path, json=body, timeout=300)
            assert time.monotonic() - began < REFUSED_S
            assert answer.status_code == 400, f"{path}: {answer.text[:1000]}"
            assert "cannot be enforced" in answer.text, f"{path}: {answer.text[:1000]}"
        assert honest(target) < REFUSED_S
    survived(damage)


VARIATIONS = st.randoms(use_true_random=False)


def check_variation(target: Target, random: Random) -> None:
    began = time.monotonic()
    path, body = any_request(target.model, random)
    answer = httpx.post(target.url + path, json=body, timeout=300)
    assert answer.status_code in (200, 400), answer.text[:1000]
    assert time.monotonic() - began < REFUSED_S


def test_variations(target: Target) -> None:
    @settings(
        max_examples=6, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
    @given(VARIATIONS)
    def vary(random: Random) -> None:
        check_variation(target, random)

    with under_attack(target) as damage:
        vary()
        assert honest(target) < REFUSED_S
    survived(damage)


@pytest.mark.proof
def test_a_crowd_of_variations(target: Target) -> None:
    """Eight attackers for minutes; what honest clients see, to the letter."""

    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
    @given(VARIATIONS)
    def vary(random: Random) -> None:
        check_variation(target, random)

    with under_attack(target) as damage, ThreadPoolExecutor(8) as pool:
        attacks = [pool.submit(vary) for _ in range(8)]
        while not all(attack.done() for attack in attacks):
            assert honest(target) < REFUSED_S
        for attack in attacks:
            attack.result()
    survived(damage)
