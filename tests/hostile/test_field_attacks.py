"""Fields that took far more than they weigh, in the server or in every step of the model."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import httpx
import pytest

from penstock.server.fields.generation import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_LOGIT_BIASES,
    MAX_STOP_TOKEN_IDS,
)
from penstock.testing import bodies
from penstock.testing.hostile import (
    IS_STRICT,
    UNBOOKED_PEAK_SHARE,
    read_at_rest,
    under_attack,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.testing.hostile import Target

VOCABULARY = 49_152
LARGE = 24 << 20


# `make proof` has the numbers of the attack; the short form shows the same bounds.
MANY = 128 if IS_STRICT else 4


def at_once(count: int, work: Callable[[int], httpx.Response]) -> list[httpx.Response]:
    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(work, range(count)))


@pytest.mark.parametrize(
    ("field", "value", "most"),
    [
        ("logit_bias", {str(token): -1 for token in range(VOCABULARY)}, MAX_LOGIT_BIASES),
        ("stop_token_ids", list(range(2, 49_002)), MAX_STOP_TOKEN_IDS),
        ("allowed_token_ids", list(range(VOCABULARY)), MAX_ALLOWED_TOKEN_IDS),
    ],
    ids=["logit_bias", "stop_token_ids", "allowed_token_ids"],
)
def test_a_word_on_every_token_for_many_answers(
    target: Target, field: str, value: object, most: int
) -> None:
    with under_attack(target) as damage:
        answers = at_once(4, lambda _: target.chat(**{field: value}, n=24, max_tokens=64))
    for answer in answers:
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, field)
        assert str(most) in error["message"]
    read_at_rest(damage).check()


def test_all_that_is_allowed_for_many_answers(target: Target) -> None:
    """Nothing of it may be missing in the books, before or after."""
    fields = {
        "logit_bias": {str(token): 0.5 for token in range(MAX_LOGIT_BIASES)},
        "allowed_token_ids": list(range(1000, 1000 + MAX_ALLOWED_TOKEN_IDS)),
        "stop_token_ids": list(range(40_000, 40_000 + MAX_STOP_TOKEN_IDS)),
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.1,
        "messages": [{"role": "user", "content": "Tell me about the sea. " * 150}],
    }
    with under_attack(target) as damage:
        for _ in range(2):
            answer = target.chat(**fields, n=MANY, max_tokens=16)
            assert answer.status_code == 200, answer.text
    read_at_rest(damage).check()


def test_bodies_of_many_small_values(target: Target) -> None:
    shapes = bodies.shapes()
    attacks = [
        (bodies.CHAT, "chat_template_kwargs: short keys"),
        (bodies.MESSAGES, "one input"),
        (bodies.RESPONSES, "reasoning"),
        (bodies.CHAT, "arguments"),
    ]
    made = {
        key: shapes[key](LARGE).replace(b'"fake"', f'"{target.model}"'.encode()) for key in attacks
    }

    def send(number: int) -> httpx.Response:
        key = attacks[number % len(attacks)]
        return httpx.post(target.url + key[0], content=made[key], timeout=120)

    with under_attack(target) as damage:
        answers = at_once(4, send)
    assert {answer.status_code for answer in answers} <= {400, 413, 503}, [
        answer.text[:300] for answer in answers
    ]
    assert damage.unbooked_peak_bytes <= UNBOOKED_PEAK_SHARE * target.limit_bytes, str(damage)
    read_at_rest(damage).check()


def test_a_body_of_many_values_that_is_taken(target: Target) -> None:
    """As many as are allowed: what they take is booked."""
    body = bodies.shapes()[bodies.CHAT, "arguments"](1 << 20)
    body = body.replace(b'"fake"', f'"{target.model}"'.encode())
    with under_attack(target) as damage:
        for _ in range(3):
            answer = httpx.post(target.url + bodies.CHAT, content=body, timeout=120)
            assert answer.json()["error"]["code"] == "context_length_exceeded", answer.text[:300]
    assert damage.unbooked_peak_bytes <= UNBOOKED_PEAK_SHARE * target.limit_bytes, str(damage)
    read_at_rest(damage).check()
