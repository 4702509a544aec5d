"""Bodies that do not come, come slowly, are packed, or belong to clients that have left."""

from __future__ import annotations

import gzip
import json
import socket
import threading
import time
from typing import TYPE_CHECKING

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.testing.hostile import read_at_rest, under_attack
from penstock.testing.sockets import crowd, send_all, sending

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.testing.hostile import Target

MIB = 1 << 20
GRACE_S = 3.0
# Short deadlines, and so little for bodies that a few large ones fill it.
SETTINGS = {
    "PENSTOCK_SERVER_BODY_GRACE_S": str(GRACE_S),
    "PENSTOCK_SERVER_MAX_BODIES": str(8 * MIB),
}
POST = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"


def announced(size: int) -> bytes:
    return POST + b"content-length: %d\r\n\r\n" % size


def operator_works(target: Target) -> None:
    begun = time.monotonic()
    answer = target.admin("POST", f"/admin/api/models/{target.model}/pin", pinned=True)
    assert answer.status_code == 200, answer.text
    assert time.monotonic() - begun < 5


def wait_until_free(target: Target, patience_s: float) -> None:
    deadline = time.monotonic() + patience_s
    while (held := target.memory()["requests"])["used_bytes"] or held["waiting"]:
        assert time.monotonic() < deadline, held
        time.sleep(0.05)


def test_bodies_that_only_drip(target: Target) -> None:
    """80 sockets announce 1 MiB and send a byte now and then."""
    with (
        crowd(target, 80) as some,
        under_attack(target, min_s=GRACE_S + 2) as damage,
    ):
        send_all(some, announced(MIB))
        with sending(some, lambda _: b" ", every_s=0.5):
            time.sleep(1)
            assert target.memory()["requests"]["used_bytes"] < 80 * 200_000
            operator_works(target)
            assert target.chat().status_code == 200
            time.sleep(GRACE_S)
        answers = some.answers()
        assert all(b" 408 " in answer and b"server.body_rate" in answer for answer in answers)
    read_at_rest(damage).check()


def test_a_slow_link_is_not_a_drip(target: Target) -> None:
    """500 kB at 1 Mbit/s, which takes longer than the grace."""
    body = json.dumps(target.chat_body(max_tokens=2, metadata={"a": "b"})).encode()
    body = body.ljust(500_000)
    with target.connect() as sock:
        sock.sendall(announced(len(body)))
        for start in range(0, len(body), 12_500):
            sock.sendall(body[start : start + 12_500])
            time.sleep(0.1)
        assert sock.recv(15).startswith(b"HTTP/1.1 200")


def test_clients_that_have_left_keep_nothing(target: Target) -> None:
    """Requests that fill the pool and wait for more of it: gone with their connections."""
    with crowd(target, 40) as some:
        with sending(some, _large_body(2 * MIB)):
            deadline = time.monotonic() + 20
            while not (held := target.memory()["requests"])["waiting"]:
                assert time.monotonic() < deadline
                time.sleep(0.02)
        assert held["used_bytes"] > MIB
    wait_until_free(target, GRACE_S)


def _large_body(size: int) -> Callable[[int], bytes]:
    head = announced(size)
    return lambda number: head if number == 0 else b" " * 16_384


def test_small_requests_pass_large_ones(target: Target) -> None:
    """Large bodies wait for memory; a small chat does not wait for them."""
    with (
        crowd(target, 40) as some,
        under_attack(target, min_s=2) as damage,
        sending(some, _large_body(2 * MIB)),
    ):
        time.sleep(1)
        for _ in range(3):
            begun = time.monotonic()
            assert target.chat(max_tokens=1).status_code == 200
            assert time.monotonic() - begun < 10
        operator_works(target)
    read_at_rest(damage).check()


def test_a_large_request_is_served_among_small_ones(target: Target) -> None:
    """One that needs most of the pool, while small ones come without end."""
    stop = threading.Event()
    served: list[int] = []

    def small() -> None:
        while not stop.is_set():
            text = [{"role": "user", "content": "x" * 3000}]
            served.append(target.chat(messages=text, max_tokens=1).status_code)

    threads = [threading.Thread(target=small) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        body = target.chat_body(max_tokens=1)
        large = json.dumps(body).encode().ljust(6 * MIB)
        answer = httpx.post(f"{target.url}/v1/chat/completions", content=large, timeout=60)
        assert answer.status_code == 200, answer.text
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert set(served) == {200}
    wait_until_free(target, 5)


@pytest.mark.parametrize("zeros", [MIB, 31 * MIB, 200 * MIB])
def test_bombs(target: Target, zeros: int) -> None:
    """A few kilobytes that become many megabytes."""
    bomb = gzip.compress(b" " * zeros)
    request = POST + b"content-encoding: gzip\r\ncontent-length: %d\r\n\r\n" % len(bomb) + bomb
    with crowd(target, 20) as some, under_attack(target, min_s=2) as damage:
        send_all(some, request)
        time.sleep(1.5)
        operator_works(target)
    read_at_rest(damage).check()
    assert damage.unbooked_peak_bytes <= 0.04 * target.limit_bytes, str(damage)


def test_a_packed_chat_is_answered(target: Target) -> None:
    body = gzip.compress(b"\xef\xbb\xbf" + json.dumps(target.chat_body(max_tokens=2)).encode())
    headers = {"content-encoding": "gzip", "content-type": "application/json"}
    url = f"{target.url}/v1/chat/completions"
    assert httpx.post(url, content=body, headers=headers, timeout=60).status_code == 200
    refused = httpx.post(url, content=body, headers={"content-encoding": "br"}, timeout=60)
    assert refused.status_code == 415
    assert "gzip" in refused.json()["error"]["message"]
    assert refused.headers["accept-encoding"] == "gzip, deflate"


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_closes_its_sending_half_is_answered(
    target: Target, version: bytes, stream: bool
) -> None:
    body = json.dumps(target.chat_body(max_tokens=3, stream=stream)).encode()
    with target.connect() as sock:
        sock.sendall(announced(len(body)).replace(b"HTTP/1.1", b"HTTP/" + version) + body)
        sock.shutdown(socket.SHUT_WR)
        answer = b""
        while piece := sock.recv(65536):
            answer += piece
    head, _, content = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    if version == b"1.0":
        assert b"transfer-encoding" not in head.lower()
        assert b"connection: close" in head.lower()
        assert content.startswith(b"data: " if stream else b"{")
    if stream:
        assert b"data: [DONE]" in content


def test_a_client_that_leaves_before_its_answer_frees_its_place(target: Target) -> None:
    body = json.dumps(target.chat_body(max_tokens=100_000, ignore_eos=True)).encode()
    with target.connect() as sock:
        sock.sendall(announced(len(body)) + body)
        deadline = time.monotonic() + 20
        while not target.memory()["requests"]["used_bytes"]:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    wait_until_free(target, 5)


SENT = st.lists(
    st.sampled_from([b" ", b"{", b"}", b'"messages":[', b'{"role":', b"\x00", b"\xff", b"9" * 999]),
    max_size=20,
)


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(size=st.integers(0, 40 * MIB), sent=SENT, extra=st.sampled_from([b"", b"gzip", b"deflate"]))
def test_any_body_that_lies_about_itself(
    target: Target, size: int, sent: list[bytes], extra: bytes
) -> None:
    head = announced(size)
    if extra:
        head = head.replace(b"\r\n\r\n", b"\r\ncontent-encoding: " + extra + b"\r\n\r\n")
    with crowd(target, 5) as some:
        send_all(some, head + b"".join(sent))
        time.sleep(0.01)
        assert target.server.get("/health") == {"status": "ok"}


def test_at_last_everything_is_free(target: Target) -> None:
    wait_until_free(target, 20)
    assert target.chat().status_code == 200
    words = target.server.log.read_text("utf-8", "replace")
    assert "Traceback" not in words, words[words.index("Traceback") - 500 :][:3000]
