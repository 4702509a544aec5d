"""All attacks of `tests/hostile` as waves of a few seconds, and random mixtures of them.

A wave is `attack(target, random)`: it does its worst, cleans up behind itself and returns the
statuses that it was answered with. `mixture` runs some of them at once for as long as it is told.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import socket
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

import httpx

from penstock.testing import grammar_routes
from penstock.testing.hostile_requests import any_request
from penstock.testing.sockets import crowd, send_all, sending

if TYPE_CHECKING:
    from penstock.testing.hostile import Target

_MIB = 1 << 20
_ANSWER_S = 30.0
_LEFT = -1  # the attacker did not wait for an answer, or was let go
TINY = b"GET /health HTTP/1.1\r\n\r\n"
CHAT = "/v1/chat/completions"

Statuses = list[int]
Attack = Callable[["Target", Random], Statuses]


def head_of(target: Target, path: str = CHAT) -> bytes:
    """The beginning of a head, with the attacker's key."""
    key = b"authorization: Bearer %b\r\n" % target.attacker_key.encode()
    return b"POST %b HTTP/1.1\r\nhost: localhost\r\n" % path.encode() + (
        key if target.attacker_key else b""
    )


def _send(target: Target, path: str, body: bytes, timeout_s: float = _ANSWER_S) -> int:
    headers = {"authorization": f"Bearer {target.attacker_key}"} if target.attacker_key else {}
    try:
        answer = httpx.post(target.url + path, content=body, headers=headers, timeout=timeout_s)
    except httpx.HTTPError:
        return _LEFT
    return answer.status_code


def _at_once(count: int, work: Callable[[int], int]) -> Statuses:
    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(work, range(count)))


def _chat(target: Target, **fields: object) -> bytes:
    return json.dumps(target.chat_body(**{"max_tokens": 8, **fields})).encode()


# --- requests ------------------------------------------------------------------------------------


def grammars(target: Target, random: Random) -> Statuses:
    """Some monstrous forms at once, by any route; half of the clients do not wait for the end."""
    made = [grammar_routes.any_request(target.model, random) for _ in range(random.randint(1, 6))]
    bodies = [(path, json.dumps(body).encode()) for path, body in made]
    patience = [random.choice([0.2, _ANSWER_S]) for _ in made]
    return _at_once(len(made), lambda n: _send(target, *bodies[n], patience[n]))


def requests(target: Target, random: Random) -> Statuses:
    """Some monstrous requests at once."""
    made = [any_request(target.model, random) for _ in range(random.randint(1, 4))]
    return _at_once(len(made), lambda n: _send(target, *made[n]))


def leavers(target: Target, random: Random) -> Statuses:
    """Clients that leave at every stage: in the head, in the body, waiting, in the answer."""
    body = _chat(target, max_tokens=2000, ignore_eos=True, stream=random.random() < 0.5)
    request = head_of(target) + b"content-length: %d\r\n\r\n" % len(body) + body
    for _ in range(random.randint(5, 60)):
        with contextlib.suppress(OSError), target.connect(timeout=5) as sock:
            sock.sendall(request[: random.choice([5, 60, len(request) - 9, len(request)])])
            if random.random() < 0.5:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            time.sleep(random.choice([0, 0, 0.05, 0.3]))
    return [_LEFT]


def slow_readers(target: Target, random: Random) -> Statuses:
    """Streams that nobody reads."""
    many = random.choice([1, 8])
    body = _chat(target, max_tokens=300, stream=True, n=many, logprobs=True, top_logprobs=20)
    with crowd(target, random.randint(1, 20)) as some:
        for sock in some.sockets:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        send_all(some, head_of(target) + b"content-length: %d\r\n\r\n" % len(body) + body)
        time.sleep(random.uniform(0.5, 3))
    return [_LEFT]


def background(target: Target, random: Random) -> Statuses:
    """Answers in the background, some of them cancelled, continued or deleted."""
    headers = {"authorization": f"Bearer {target.attacker_key}"} if target.attacker_key else {}
    asked = {"model": target.model, "max_output_tokens": 30, "background": True}
    text = "word " * random.choice([10, 2000, 200_000])
    body = json.dumps({**asked, "input": text}).encode().ljust(random.choice([0, 5_000_000]))
    with httpx.Client(base_url=target.url, headers=headers, timeout=_ANSWER_S) as client:
        answers = [client.post("/v1/responses", content=body) for _ in range(random.randint(2, 12))]
        for made in [answer.json()["id"] for answer in answers if answer.status_code == 200]:
            match random.randrange(4):
                case 0:
                    answers.append(client.delete(f"/v1/responses/{made}"))
                case 1:
                    more = {**asked, "input": "and", "previous_response_id": made}
                    answers.append(client.post("/v1/responses", json=more))
                case _:
                    answers.append(client.post(f"/v1/responses/{made}/cancel"))
    return [answer.status_code for answer in answers]


def names(target: Target, random: Random) -> Statuses:
    """Models that nobody has, by many at once, half of whom do not wait."""
    patience = [random.choice([0.05, _ANSWER_S]) for _ in range(random.randint(5, 40))]
    made = [_chat(target, model=f"none-{random.random()}") for _ in patience]
    return _at_once(len(made), lambda n: _send(target, CHAT, made[n], patience[n]))


# --- connections ---------------------------------------------------------------------------------


def pipelines(target: Target, random: Random) -> Statuses:
    """Requests one behind the other, whose answers nobody reads."""
    body = _chat(target, max_tokens=1)
    chat = head_of(target) + b"content-length: %d\r\n\r\n" % len(body) + body
    broken = head_of(target) + b"content-length: 2\r\n\r\n{]"
    unit = random.choice(
        [TINY, b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n", broken, TINY * 20 + chat]
    )
    with crowd(target, random.choice([5, 100])) as some:
        send_all(some, unit * (_MIB // 3 // len(unit)))
        time.sleep(random.uniform(0.2, 2))
    return [_LEFT]


def heads(target: Target, random: Random) -> Statuses:
    """Heads that do not end, quickly or byte by byte."""
    header = random.choice(
        [b"a:\r\n", b"x-some-header: value\r\n", b"x: " + b"y" * 60_000 + b"\r\n"]
    )
    with crowd(target, random.choice([20, 300])) as some:
        if random.random() < 0.5:
            send_all(some, head_of(target) + header * (60_000 // len(header)))
            time.sleep(1)
        else:
            with sending(some, lambda n: b"a" if n else head_of(target), every_s=0.1):
                time.sleep(random.uniform(1, 3))
    return [_LEFT]


def drips(target: Target, random: Random) -> Statuses:
    """Bodies that are announced and hardly come."""
    start = head_of(target) + b"content-length: %d\r\n\r\n{" % random.choice([100, _MIB, 30 * _MIB])
    with (
        crowd(target, random.choice([10, 100, 1100])) as some,
        sending(some, lambda n: b" " if n else start, every_s=0.3),
    ):
        time.sleep(random.uniform(1, 4))
    return [_LEFT]


def sign_ins(target: Target, random: Random) -> Statuses:
    """Keys that hardly come; none is needed for that."""
    start = b"POST /web/session HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n{"
    with (
        crowd(target, random.choice([20, 1100])) as some,
        sending(some, lambda n: b" " if n else start % random.choice([3000, 60_000]), every_s=0.5),
    ):
        time.sleep(random.uniform(1, 4))
    return [_LEFT]


def chunks(target: Target, random: Random) -> Statuses:
    """Chunked bodies of every abuse."""
    payload = random.choice(
        [
            b"1;" + b"x=y;" * 200_000,
            b"1;x=y\r\n \r\n" * 50_000,
            b"0\r\n" + b"a: b\r\n" * 50_000,
            b"1\r\n \r\n" * 200_000,
            b"0000000000000001\r\n{\r\n" * 20_000,
            b"ffffffffffffffff\r\n",
            b"-1\r\n",
            b"10\r\n{" + b" " * 100,
        ]
    )
    with crowd(target, random.choice([3, 40])) as some:
        send_all(some, head_of(target) + b"transfer-encoding: chunked\r\n\r\n" + payload)
        time.sleep(0.3)
    return [_LEFT]


def bombs(target: Target, random: Random) -> Statuses:
    """Little that becomes much: one long member, a million empty ones, a bad one."""
    makers: list[Callable[[], bytes]] = [
        lambda: gzip.compress(b" " * random.choice([_MIB, 31 * _MIB, 100 * _MIB])),
        lambda: gzip.compress(b"") * 100_000,
        lambda: zlib.compress(b"[" * (20 * _MIB)),
        lambda: gzip.compress(_chat(target)) + b"rubbish" * 1000,
        lambda: gzip.compress(b" " * _MIB)[:-9],
    ]
    packed = random.choice(makers)()
    coding = random.choice([b"gzip", b"deflate", b"gzip, gzip", b"br", b"gzip;q=1"])
    start = b"content-encoding: %b\r\ncontent-length: %d\r\n\r\n" % (coding, len(packed))
    with crowd(target, random.choice([1, 10])) as some:
        send_all(some, head_of(target) + start + packed)
        time.sleep(random.uniform(0.5, 2))
    return [_LEFT]


def idle_sockets(target: Target, random: Random) -> Statuses:
    """Connections that say nothing, or the beginning of another protocol."""
    said = random.choice(
        [b"", b"\x16\x03\x01\x02\x00", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\0" * 99]
    )
    with crowd(target, random.choice([100, 1100])) as some:
        send_all(some, said)
        for sock in some.sockets[::3]:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_WR)
        time.sleep(random.uniform(0.5, 2))
    return [_LEFT]


ATTACKS: tuple[Attack, ...] = (
    grammars, requests, leavers, slow_readers, background, names, pipelines, heads, drips, sign_ins,
    chunks, bombs, idle_sockets,
)  # fmt: skip


@dataclass(slots=True)
class Fought:
    """What a mixture did, and what it was answered."""

    waves: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)  # answers that nobody may get

    def note(self, name: str, statuses: Statuses) -> None:
        """One wave."""
        self.waves[name] += 1
        self.statuses.update(statuses)
        bad = {status for status in statuses if status >= 500 and status not in (503, 507)}
        if bad:
            self.faults.append(f"{name}: {sorted(bad)}")


def mixture(
    target: Target,
    seconds: float,
    seed: int,
    attackers: int = 3,
    attacks: tuple[Attack, ...] = ATTACKS,
) -> Fought:
    """So many attackers, each with one wave after another until the time is over."""
    fought, until = Fought(), time.monotonic() + seconds
    lock = threading.Lock()

    def attack(number: int) -> None:
        random = Random(seed * 1000 + number)
        while time.monotonic() < until:
            wave = random.choice(attacks)
            try:
                statuses = wave(target, random)
            except (OSError, httpx.HTTPError):  # an attacker's own trouble
                statuses = [_LEFT]
            with lock:
                fought.note(wave.__name__, statuses)

    with ThreadPoolExecutor(attackers) as threads:
        for done in [threads.submit(attack, number) for number in range(attackers)]:
            done.result()
    return fought
