"""Found KV gives the tokens of computed KV: in the arena, after a restart, after giving way."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from penstock.testing import conversations, tiny
from penstock.testing.conversations import History, Talk
from penstock.testing.exactness import Mode, Reference, start_engine
from penstock.worker import loading
from penstock.worker.models.build import build_model

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel

pytestmark = pytest.mark.usefixtures("one_thread")

VOCABULARY = 100
LENGTHS = (40, 100, 70, 9, 130)
# The third begins like the second, and ends elsewhere.
OPENINGS = [[7 + (n + (i if i != 2 else 1)) % 80 for n in range(s)] for i, s in enumerate(LENGTHS)]
TALK = Talk(OPENINGS, turns=3, answer=10, said=12, vocabulary=VOCABULARY)
HISTORIES = (
    History("arena", disk=False),
    History("restarts", restarts=True),
    History("restarts-alone", restarts=True, alone=True),
    History("crowded", pool_tokens=208),
    History("crowded-without-disk", pool_tokens=208, disk=False),
    History("shaken", pool_tokens=640, shaken=True),
)


HISTORIES_OF_ROUNDED_KV = tuple(
    replace(history, kv_dtype="int8")
    for history in HISTORIES
    if history.name in {"restarts", "crowded", "shaken"}
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save("llama", tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference.load(folder)


@pytest.mark.parametrize("history", HISTORIES, ids=str)
def test_found_kv_changes_no_token(
    reference: Reference, folder: Path, history: History, tmp_path: Path
) -> None:
    found = conversations.compare(reference, folder, history, TALK, tmp_path / "work")
    assert found.tally.tokens == len(OPENINGS) * TALK.turns * TALK.answer
    # Without the disk, what is given up is gone.
    remembers = history.disk or history.pool_tokens is None
    assert found.reused_tokens > (found.prompt_tokens / 4 if remembers else 0)
    assert (found.tier_hits > 0) == (history.restarts or (history.disk and bool(found.evictions)))
    assert (found.preemptions > 0) == (history.pool_tokens is not None)


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
@pytest.mark.parametrize("history", HISTORIES_OF_ROUNDED_KV, ids=str)
def test_found_kv_in_8_bits_changes_no_token(
    architecture: str, history: History, tmp_path: Path
) -> None:
    """Codes and scales come back from the arena and from disk as they were."""
    folder = tiny.save(architecture, tmp_path / architecture)
    reference = Reference.load(folder, "int8")
    found = conversations.compare(reference, folder, history, TALK, tmp_path / "work")
    assert found.tally.tokens == len(OPENINGS) * TALK.turns * TALK.answer
    assert found.reused_tokens > 0
    assert found.tier_hits > 0 or not history.restarts
    assert found.evictions > 0 or history.pool_tokens is None


# A sliding window and full attention, a window alone, and sinks beside them.
@pytest.mark.parametrize("architecture", ["gemma3_text", "gpt_oss", "mistral"])
@pytest.mark.parametrize("history", HISTORIES, ids=str)
def test_found_kv_of_windows_changes_no_token(
    architecture: str, history: History, tmp_path: Path
) -> None:
    """Prefixes are found with a window's last blocks only, here, after a restart and from disk."""
    folder = tiny.save(architecture, tmp_path / architecture)
    reference = Reference.load(folder)
    found = conversations.compare(reference, folder, history, TALK, tmp_path / "work")
    assert found.tally.tokens == len(OPENINGS) * TALK.turns * TALK.answer
    assert found.reused_tokens > 0
    assert found.tier_hits > 0 or not history.restarts


def test_kv_of_a_model_that_was_replaced_while_it_was_loaded_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be found as the KV of what has taken its place."""
    folder = tiny.save("llama", tmp_path / "llama")

    def replaced(*args: Any) -> PreTrainedModel:
        model = build_model(*args)
        tiny.save("llama", folder, initializer_range=0.3)
        return model

    monkeypatch.setattr(loading, "build_model", replaced)
    engine = start_engine(folder, Mode("alone"), cache=tmp_path / "profiles" / "kv")
    notices: list[str] = []
    deadline = time.monotonic() + 20
    while not notices and time.monotonic() < deadline:
        notices += engine.notices()
        time.sleep(0.01)
    assert notices == [
        "KV of llama is not kept on disk: its files have changed since it was loaded"
    ]
    assert not (tmp_path / "profiles" / "kv").exists()
    engine.close()
