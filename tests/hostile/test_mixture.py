"""A short mixture of all attacks beside three honest clients; the long one is in tests/proof."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.testing.honest import ATTACKER_KEY, HONEST_KEYS, KEYS, besieged

if TYPE_CHECKING:
    from penstock.testing.hostile import Target

SETTINGS = KEYS
KEY = HONEST_KEYS[0]
SECONDS = 15.0


def test_honest_clients_in_a_crowd_of_attackers(target: Target) -> None:
    target.attacker_key = ATTACKER_KEY
    siege = besieged(target, SECONDS, seed=1, rounds=0)
    print(siege)  # noqa: T201 - shown when it fails
    siege.check()
    assert siege.longest_wait_s < 60, str(siege)
    words = target.server.log.read_text("utf-8", "replace")
    assert "Traceback" not in words, words[words.index("Traceback") - 500 :][:3000]
