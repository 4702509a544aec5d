"""Connections without end: pipelines, heads, idle sockets, and clients that never read."""

from __future__ import annotations

import resource
import time
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.testing.hostile import read_at_rest, under_attack
from penstock.testing.sockets import Crowd, crowd, send_all, sending

if TYPE_CHECKING:
    from penstock.testing.hostile import Damage, Target

TINY = b"GET /health HTTP/1.1\r\n\r\n"
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
MIB = 1 << 20


@pytest.fixture(autouse=True, scope="module")
def files() -> None:
    """This process needs as many sockets as it opens."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def check(damage: Damage) -> None:
    """The usual claims; and what connections hold is booked."""
    read_at_rest(damage).check()
    assert damage.unbooked_peak_bytes <= 0.02 * damage.target.limit_bytes, str(damage)


def operator_works(target: Target) -> None:
    begun = time.monotonic()
    answer = target.admin("POST", f"/admin/api/models/{target.model}/pin", pinned=True)
    assert answer.status_code == 200, answer.text
    assert time.monotonic() - begun < 5


@pytest.mark.parametrize("request_", [TINY, b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n"])
def test_pipelines_that_nobody_reads(target: Target, request_: bytes) -> None:
    with crowd(target, 100) as some, under_attack(target, min_s=3) as damage:
        for _ in range(4):
            send_all(some, request_ * 14_000)
            time.sleep(0.3)
        operator_works(target)
    check(damage)


@pytest.mark.parametrize(
    ("count", "header"), [(500, b"a:\r\n"), (500, b"a:b\r\n"), (200, b"x-some-header: value\r\n")]
)
def test_unfinished_heads(target: Target, count: int, header: bytes) -> None:
    with crowd(target, count) as some, under_attack(target, min_s=3) as damage:
        send_all(some, HEAD + header * 32_000)
        time.sleep(1)
        operator_works(target)
    answers = [answer for answer in some_answers(some) if answer]
    assert all(answer.startswith((b"HTTP/1.1 431", b"HTTP/1.1 503")) for answer in answers)
    check(damage)


def some_answers(some: Crowd) -> list[bytes]:
    return some.answers() if all(sock.fileno() >= 0 for sock in some.sockets) else []


def test_heads_that_come_byte_by_byte(target: Target) -> None:
    head = HEAD + b"x-long: " + b"y" * 50_000
    with (
        crowd(target, 600) as some,
        under_attack(target, min_s=4) as damage,
        sending(some, lambda number: head[number * 500 : number * 500 + 500], every_s=0.05),
    ):
        time.sleep(2)
        operator_works(target)
    check(damage)


def test_idle_sockets_give_way(target: Target) -> None:
    with crowd(target, 3000) as some, under_attack(target, min_s=3) as damage:
        assert target.memory()["connections"]["open"] <= 1024 + 16
        deadline = time.monotonic() + 10
        while some.still_open() > 1024:  # those that were not accepted yet look open
            assert time.monotonic() < deadline
            time.sleep(0.1)
        operator_works(target)
    check(damage)
    assert target.memory()["connections"]["gave_way"] >= 1900


def test_many_addresses_of_one_machine(target: Target) -> None:
    sources = [f"127.0.{number // 250}.{number % 250 + 2}" for number in range(500)]
    with crowd(target, 1500, sources) as some, under_attack(target, min_s=3) as damage:
        send_all(some, HEAD + b"a:b\r\n" * 100)
        operator_works(target)
    check(damage)


@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/web/session"])
def test_requests_that_keep_every_connection_busy(target: Target, path: bytes) -> None:
    """All places are taken by requests in hand, whose bodies do not come; others find one."""
    head = HEAD.replace(b"/v1/chat/completions", path)
    with crowd(target, 1100) as some:
        send_all(some, head + b"content-length: 3000\r\n\r\n{")
        time.sleep(1)
        for _ in range(3):
            assert target.chat().status_code == 200
        operator_works(target)
        assert target.server.get("/health") == {"status": "ok"}
    assert target.chat().status_code == 200


@pytest.mark.parametrize(
    "payload",
    [
        b"transfer-encoding: chunked\r\n\r\n" + b"1;" + b"x=y;" * 500_000,
        b"transfer-encoding: chunked\r\n\r\n" + b"1;x=y\r\n \r\n" * 100_000,
        b"transfer-encoding: chunked\r\n\r\n0\r\n" + b"a: b\r\n" * 100_000,
        b"transfer-encoding: chunked\r\n\r\n0\r\na: " + b"b" * 1_000_000,
        b"transfer-encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 300_000,
        b"content-length: 5\r\n\r\n{}   " * 2,
        b"content-length: 2\r\ncontent-length: 9\r\n\r\n{}",
        b"content-length: 9\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        b"content-length: -1\r\n\r\n{}",
        b"content-length: 99999999999999999999999\r\n\r\n{}",
    ],
    ids=[
        "extension", "extensions", "trailers", "a trailer", "tiny chunks", "too long",
        "two lengths", "length and chunks", "negative", "enormous",
    ],
)  # fmt: skip
def test_framing_that_lies(target: Target, payload: bytes) -> None:
    with crowd(target, 40) as some, under_attack(target) as damage:
        for _ in range(3):
            send_all(some, HEAD + payload)
            time.sleep(0.1)
        operator_works(target)
    check(damage)


PIECES = st.sampled_from(
    [
        TINY, HEAD, b"\r\n", b"\r\n\r\n", b"a: b\r\n", b"content-length: 10\r\n",
        b"transfer-encoding: chunked\r\n", b"expect: 100-continue\r\n", b"connection: close\r\n",
        b"5\r\nhello\r\n", b"0\r\n\r\n", b"{}", b"\x00" * 20, b"GET / HTTP/1.0\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01\x02\x00", b"upgrade: h2c\r\n",
        b"OPTIONS * HTTP/1.1\r\n\r\n", b"CONNECT x:1 HTTP/1.1\r\n\r\n",
        b"GET http://[ HTTP/1.1\r\n\r\n",
        b"content-encoding: gzip\r\n", b"x: " + b"y" * 5000 + b"\r\n", b"0" * 300,
    ]
)  # fmt: skip


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(pieces=st.lists(PIECES, min_size=1, max_size=12), repeat=st.integers(1, 300))
def test_anything_on_the_wire(target: Target, pieces: list[bytes], repeat: int) -> None:
    before = target.server.pid
    with crowd(target, 3) as some:
        send_all(some, b"".join(pieces) * repeat)
        time.sleep(0.01)
        assert target.server.get("/health") == {"status": "ok"}
    assert target.server.pid == before


def test_at_last_everything_is_as_before(target: Target) -> None:
    deadline = time.monotonic() + 90
    while (held := target.memory()["connections"])["open"] > 3:
        assert time.monotonic() < deadline, held
        time.sleep(0.2)
    assert held["held_bytes"] < 200_000
    assert target.chat().status_code == 200
    words = target.server.log.read_text("utf-8", "replace")
    assert "Traceback" not in words, words[words.index("Traceback") - 500 :][:3000]
