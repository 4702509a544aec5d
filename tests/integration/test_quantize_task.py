"""Models quantised by the command: served exactly, whole or not there, within booked memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from penstock import cli
from penstock.catalog import Catalog, read_card
from penstock.errors import Cancelled
from penstock.memory.limits import QUANTIZE_BYTES
from penstock.memory.readings.gauge import read_process
from penstock.sources import conversion
from penstock.sources.quantize import quantize
from penstock.sources.staging import Staging
from penstock.testing import quantised, tiny
from penstock.testing.exactness import MODES, Mode, Reference, compare_mode
from penstock.testing.fake_server import add_model, serving
from penstock.testing.model_folders import LLAMA, llama_tensors, write_model
from penstock.worker.backends.cpu import CpuBackend
from penstock.worker.models.build import config_of
from penstock.worker.quantize import making

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = [tiny.prompt(length, seed) for seed, length in enumerate((1, 17, 40, 90))]
CROWDED = Mode("crowded", step_tokens=64, step_sequences=6, pool_tokens=128, give_way_every=7)
SHAPES = {
    "llama": {"hidden_size": 192, "intermediate_size": 320},
    "qwen3_moe": {"hidden_size": 128, "moe_intermediate_size": 64},
}
SMALL = LLAMA | {"hidden_size": 64, "intermediate_size": 128}


@pytest.mark.parametrize("wanted", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("architecture", SHAPES)
def test_tokens_equal_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str, wanted: str
) -> None:
    monkeypatch.setattr(CpuBackend, "extent_bytes", 1 << 14)
    plain = tiny.save(architecture, tmp_path / "plain", **SHAPES[architecture])
    (made := tmp_path / "made").mkdir()
    making.quantize(plain, made, config_of(str(plain), "plain"), wanted, lambda done, total: None)
    reference = Reference.load(quantised.save_numbers(made, tmp_path / "numbers"))
    for mode in (MODES[2], CROWDED):
        tally = compare_mode(reference, made, mode, PROMPTS, 24)
        assert (tally.tokens, tally.ties) == (len(PROMPTS) * 24, 0)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "none"))
    monkeypatch.chdir(tmp_path)
    folder = write_model(tmp_path / "models" / "plain", SMALL, llama_tensors(SMALL))
    (folder / "tokenizer.json").write_text('{"of": "plain"}')
    (folder / "generation_config.json").write_text('{"temperature": 0.5}')
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    return tmp_path


def leftovers(home: Path) -> list[str]:
    return [path.name for path in (home / "models" / ".pull").iterdir() if path.is_dir()]


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert cli.main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


_KILLED = """
import os, signal
from pathlib import Path
from penstock.catalog import read_card
from penstock.sources.quantize import quantize
def progress(phase, done, total):
    if phase == "quantise":
        os.kill(os.getpid(), signal.SIGKILL)
home = Path(os.environ["PENSTOCK_HOME"])
quantize(read_card(home / "models" / "plain", "plain"), "int4", "four", home, progress)
"""


@pytest.mark.proof  # the killed one's process needs a free core to notice
def test_the_command_after_one_that_was_killed(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    killed = subprocess.run([sys.executable, "-c", _KILLED], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert Catalog([home / "models"]).scan().keys() == {"plain"}
    assert len(leftovers(home)) == 1
    row = printed(capsys, "quantize", "plain", "--to", "fp8")
    assert leftovers(home) == []
    made = home / "models" / "plain-fp8"
    assert sorted(path.name for path in made.iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors", "penstock.json",
        "tokenizer.json",
    ]  # fmt: skip
    assert (row["name"], row["path"], row["formats"]) == ("plain-fp8", str(made), ["fp8-channel"])
    assert row["source"] == "quantize:fp8:plain"
    listed = {row["name"]: row for row in printed(capsys, "list")}
    assert listed["plain-fp8"] == row
    assert row["stored_bytes"] < listed["plain"]["stored_bytes"]
    # As it is there, nothing is begun.
    began = made.stat().st_ino
    assert printed(capsys, "quantize", "plain", "--to", "fp8") == row
    assert made.stat().st_ino == began


def test_a_disk_that_becomes_full_is_a_sentence(home: Path) -> None:
    """Files of more than 16 blocks are not allowed: as little as there can be room for."""
    command = [sys.executable, "-m", "penstock", "quantize", "plain", "--to", "int8"]
    done = subprocess.run(
        ["sh", "-c", 'ulimit -f 16; exec "$@"', "sh", *command],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "plain could not be converted: File too large" in done.stderr
    assert "Traceback" not in done.stderr
    assert Catalog([home / "models"]).scan().keys() == {"plain"}


def test_too_little_memory_is_refused_with_numbers(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["quantize", "plain", "--to", "int8", "--memory", "100MiB"]
    assert cli.main(arguments) == 1
    said = capsys.readouterr().err
    assert "no room for 512.0 MiB more of quantize in ram: 0.0 MiB of the limit of 100.0" in said


def test_what_it_holds_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """A quarter of a gigabyte, mostly in a few large weights."""
    large = LLAMA | {"hidden_size": 1024, "intermediate_size": 10240, "num_hidden_layers": 2}
    write_model(tmp_path / "models" / "plain", large, llama_tensors(large))
    card = read_card(tmp_path / "models" / "plain")
    pids: list[int] = []
    held: list[int] = []
    assert card.weight_bytes > 256 << 20

    def progress(phase: str, done: int, total: int) -> None:
        if phase == "quantise" and (reading := read_process(pids[0])) is not None:
            held.append(reading.anonymous_bytes)

    quantize(card, "int4", "four", tmp_path, progress, pids.append)
    assert len(held) > 2
    assert max(held) < QUANTIZE_BYTES
    assert max(held) - held[0] < 64 << 20


def test_a_conversion_that_says_nothing_can_be_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = tmp_path / "python"
    silent.write_text("#!/bin/sh\nexec sleep 60\n")
    silent.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(silent))
    pids: list[int] = []

    def progress(phase: str, done: int, total: int) -> None:
        raise Cancelled("enough")

    began = time.monotonic()
    with Staging(tmp_path / "models", "x") as staging, pytest.raises(Cancelled):
        conversion.convert("tokenizer", tmp_path, staging, progress, began=pids.append)
    assert time.monotonic() - began < 30
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def test_a_server_makes_one_as_a_task(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add_model(home, "fake")
    with serving(home) as server, httpx.Client(base_url=server.url, timeout=30) as client:
        began = client.post(
            "/admin/api/tasks", json={"kind": "quantize", "model": "plain", "to": "int8"}
        ).json()
        path = f"/admin/api/tasks/{began['id']}"
        memory = client.get("/admin/api/memory").json()["domains"]["ram"]
        owner = f"quantize {began['id']}"
        assert memory["owners"][owner] == {"process": QUANTIZE_BYTES}
        assert client.post(f"{path}/cancel").json()["cancelled"]
        deadline = time.monotonic() + 30
        while (row := client.get(path).json())["state"] == "running":
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert (row["state"], row["subject"]) == ("cancelled", "plain to int8")
        refused = client.post(
            "/admin/api/tasks", json={"kind": "quantize", "model": "plain", "to": "int3"}
        )
        assert refused.status_code == 400
        url = ["--url", server.url]
        made = printed(capsys, "quantize", "plain", "--to", "int8", "--name", "eight", *url)
        assert (made["name"], made["formats"]) == ("eight", ["ct-pack"])
        names = [row["name"] for row in client.get("/admin/api/catalog").json()["models"]]
        assert names == ["eight", "fake", "plain"]
        assert owner not in client.get("/admin/api/memory").json()["domains"]["ram"]["owners"]
        plan = printed(capsys, "plan", "eight", *url)
        assert (plan["formats"], plan["stored_bytes"]) == (["ct-pack"], made["stored_bytes"])
        assert leftovers(home) == []
        for model, sentence in (("eight", "is quantised already"), ("none", "no model 'none'")):
            assert cli.main(["quantize", model, "--to", "int4", *url]) == 1
            assert sentence in capsys.readouterr().err
