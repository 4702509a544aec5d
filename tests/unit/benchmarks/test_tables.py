"""The pages of results are what the result files say."""

from __future__ import annotations

import re
import subprocess
from typing import TYPE_CHECKING

import pytest
from benchmarks import claims, report, tables

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.name)
def test_a_page_is_what_the_results_say(page: Path) -> None:
    text = page.read_text("utf-8")
    assert tables.rendered(text) == text, "run `python -m benchmarks.tables`"


def test_every_file_of_results_is_on_one_page() -> None:
    pages = [page.read_text("utf-8") for page in tables.PAGES]
    shown = [topic for page in pages for topic in tables.shown_topics(page)]
    assert sorted(shown) == sorted([*claims.topics(), claims.MACHINES])


def test_claims_have_one_id_known_machines_and_commands_that_exist() -> None:
    found = [claim for topic in claims.topics() for claim in claims.read(topic)]
    named = [path for claim in found for path in re.findall(r"tests/[\w/.]+", claim.command)]
    assert [path for path in named if not (tables.ROOT / path).exists()] == []
    assert len({claim.id for claim in found}) == len(found)
    machines = {run.machine for claim in found for run in claim.runs}
    assert machines <= claims.machines().keys()


def test_the_latest_run_is_shown_and_earlier_ones_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(claims, "RESULTS", tmp_path)
    first = claims.Run("aaaaaaa", "cpu-2", {"tokens_per_s": 1})
    claims.write("topic", [claims.Claim("speed", "It is fast", "run it", [first])], tmp_path)
    claims.append("speed", claims.Run("bbbbbbb", "cpu-2", {"tokens_per_s": 2000}), tmp_path)
    [claim] = claims.read("topic", tmp_path)
    assert [run.commit for run in claim.runs] == ["aaaaaaa", "bbbbbbb"]
    monkeypatch.setattr(claims, "read", lambda topic: [claim])
    page = tables.rendered("<!-- results: topic -->\nold\n<!-- end of results -->\n")
    assert "| It is fast<br>`run it` | tokens per s: 2,000 | bbbbbbb | cpu-2 |" in page
    assert "aaaaaaa" not in page
    assert "old" not in page


def test_what_was_never_measured_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    claim = claims.Claim("speed", "It is fast", "run it", [])
    monkeypatch.setattr(claims, "read", lambda topic: [claim])
    block = "<!-- results: topic -->\n<!-- end of results -->\n"
    assert tables.rendered(block) == block


def test_a_run_is_recorded_only_where_the_machine_has_a_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    added: list[tuple[str, claims.Run]] = []
    monkeypatch.setattr(claims, "append", lambda claim, run: added.append((claim, run)))
    git = subprocess.CompletedProcess([], 0, stdout="abc1234\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: git)
    monkeypatch.delenv("PENSTOCK_BENCH_MACHINE", raising=False)
    report.record("speed", {"ms": 1})
    assert not added
    monkeypatch.setenv("PENSTOCK_BENCH_MACHINE", "cpu-2")
    report.record("speed", {"ms": 1})
    [(claim, run)] = added
    assert (claim, run.machine, run.result) == ("speed", "cpu-2", {"ms": 1})
    assert capsys.readouterr().out.count('"claim": "speed"') == 2


def test_a_claim_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="speed"):
        claims.append("speed", claims.Run("aaaaaaa", "cpu-2", {}), tmp_path)
