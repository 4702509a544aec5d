"""Ten minutes of a random mixture of all attacks beside three honest clients, in a cage.

`PENSTOCK_ATTACK_S` sets another length and `PENSTOCK_ATTACK_SEED` repeats a run. Times are judged
as they are: run it on a machine that has nothing else to do.
"""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.testing.attacks import ATTACKS
from penstock.testing.cage import NoCage
from penstock.testing.hard_cap import at_rest
from penstock.testing.honest import ATTACKER_KEY, HONEST_KEYS, KEYS, besieged
from penstock.testing.hostile import UNBOOKED_SHARE, caged, home_for
from penstock.testing.hostile_requests import any_request

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from random import Random

    from penstock.testing.hostile import Target

pytestmark = pytest.mark.proof

SECONDS = float(os.environ.get("PENSTOCK_ATTACK_S", "600"))
SEED = int(os.environ.get("PENSTOCK_ATTACK_SEED", "0")) or secrets.randbelow(10**6)


@pytest.fixture
def target(starter_folder: Path, tmp_path: Path) -> Iterator[Target]:
    folder = home_for(starter_folder, tmp_path)
    environment = {**KEYS, "PENSTOCK_MODELS_THREADS": "1"}
    try:
        with caged(folder, "2GiB", tmp_path / "log", HONEST_KEYS[0], **environment) as target:
            target.attacker_key = ATTACKER_KEY
            yield target
    except NoCage as reason:
        pytest.skip(str(reason))


@settings(
    max_examples=max(20, int(SECONDS)),
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(random=st.randoms(use_true_random=False))
def check_variation(target: Target, random: Random) -> None:
    """One request of any kind; hypothesis makes it smaller when it finds a fault."""
    path, body = any_request(target.model, random)
    headers = {"authorization": f"Bearer {ATTACKER_KEY}"}
    answer = httpx.post(target.url + path, content=body, headers=headers, timeout=300)
    assert answer.status_code < 500 or answer.status_code == 503, answer.text[:1000]
    assert target.server.get("/health") == {"status": "ok"}


def test_variations(target: Target) -> None:
    before = target.workers()
    check_variation(target)
    assert target.workers() == before
    rest = at_rest(target.server, target.cage, target.folder)
    assert rest.figures["requests"]["used_bytes"] == 0
    assert abs(rest.read_bytes - rest.booked_bytes) <= UNBOOKED_SHARE * target.limit_bytes


def test_honest_clients_notice_nothing(target: Target) -> None:
    siege = besieged(target, SECONDS, SEED)
    print(f"seed {SEED}, {SECONDS:.0f} s\n{siege}")  # noqa: T201
    assert siege.fought is not None
    if SECONDS >= 300:
        assert set(siege.fought.waves) == {attack.__name__ for attack in ATTACKS}
    siege.check()
    words = target.server.log.read_text("utf-8", "replace")
    assert "Traceback" not in words, words[words.index("Traceback") - 500 :][:3000]
    siege.check_times()
