"""30 conversations with the starter model: found KV gives the tokens of computed KV."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from penstock.testing import conversations, prompts
from penstock.testing.conversations import History, Talk
from penstock.testing.exactness import Reference

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.proof

LENGTHS = tuple(20 + 37 * n % 400 for n in range(30))
HISTORIES = (
    History("arena", disk=False),
    History("restarts", restarts=True),
    History("crowded", pool_tokens=1600),
    History("crowded-without-disk", pool_tokens=1600, disk=False),
    History("shaken", shaken=True),
    History("shaken-restarts", shaken=True, restarts=True),
    History("shaken-crowded", shaken=True, pool_tokens=1600),
    History("shaken-without-disk", shaken=True, disk=False),
)


@pytest.fixture(scope="module")
def reference(starter_folder: Path) -> Reference:
    return Reference.load(starter_folder)


@pytest.mark.parametrize("history", HISTORIES, ids=str)
def test_found_kv_changes_no_token(
    reference: Reference,
    starter_folder: Path,
    history: History,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    openings = prompts.build(starter_folder / "tokenizer.json", LENGTHS)
    talk = Talk(openings, turns=3, answer=24, said=20, vocabulary=40_000)
    found = conversations.compare(reference, starter_folder, history, talk, tmp_path / "work")
    with capsys.disabled():
        print(f"\n{history}: {found}")  # noqa: T201 - recorded in docs/proof.md
    assert found.tally.tokens == len(openings) * talk.turns * talk.answer
    assert found.reused_tokens > 0
    assert (found.preemptions > 0) == (history.pool_tokens is not None or history.shaken)
