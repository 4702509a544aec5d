"""The command line: what is printed, what is said when it cannot be done."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import socket
import subprocess
import sys
import termios
import time
from typing import TYPE_CHECKING, Any

import pytest

from penstock import cli
from penstock.testing.fake_server import FakeServer, add_model, serving
from penstock.testing.fake_worker import FakeModel
from penstock.tiers import DiskTier, Payload, Quota

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    add_model(home, "fake")
    return home


@pytest.fixture(autouse=True)
def _isolated(home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PENSTOCK_HOME", str(home))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))


@pytest.fixture(scope="module")
def server(home: Path) -> Iterator[FakeServer]:
    with serving(home) as server:
        yield server


def run(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert cli.main(arguments) == code
    printed = capsys.readouterr()
    return printed.out if code == 0 else printed.err


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    return json.loads(run(capsys, *arguments, "--json"))


def test_list(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    [row] = as_json(capsys, "list")
    assert row["name"] == "fake"
    assert row["path"] == str(home / "models" / "fake")
    assert {"kind", "architecture", "parameters", "bytes", "context"} <= set(row)
    assert row["kv_dtype"] == "auto"
    assert "LlamaForCausalLM" in run(capsys, "list")


def test_the_format_of_kv_is_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = as_json(capsys, "plan", "fake")
    monkeypatch.setenv("PENSTOCK_MODELS_KV_DTYPE", "int8")
    [row] = as_json(capsys, "list")
    assert row["kv_dtype"] == "int8"
    planned = as_json(capsys, "plan", "fake")
    assert planned["kv_dtype"] == "int8"
    assert 0 < planned["kv_bytes_per_token"] < plain["kv_bytes_per_token"]
    assert "for KV in int8 at" in run(capsys, "plan", "fake")
    monkeypatch.setenv("PENSTOCK_MODELS_KV_DTYPE", "fp8")
    assert "auto, int8" in run(capsys, "plan", "fake", code=1)


def test_list_of_nothing_says_how_to_begin(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    assert "penstock pull" in run(capsys, "list")


def test_pull_of_a_shape(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    row = as_json(capsys, "pull", "random:tiny-llama")
    assert row["name"] == "random:tiny-llama"
    assert "already" in run(capsys, "pull", "random:tiny-llama")
    assert "nonsense" in run(capsys, "pull", "random:nonsense", code=1)


def test_ps(capsys: pytest.CaptureFixture[str], server: FakeServer) -> None:
    run(capsys, "chat", "--url", server.url, "--model", "fake", "--max-tokens", "2", "hi")
    [row] = as_json(capsys, "ps", "--url", server.url)
    assert {"name", "state", "pid", "bytes", "context", "leases", "idle_s"} <= set(row)
    assert (row["state"], row["kv_dtype"]) == ("ready", "float32")
    assert "ready" in run(capsys, "ps", "--url", server.url)


def test_load_unload_and_pin(capsys: pytest.CaptureFixture[str], server: FakeServer) -> None:
    url = ("--url", server.url)
    assert run(capsys, "load", "fake", *url).startswith("fake is ready on cpu: ")
    assert "stays in memory" in run(capsys, "pin", "fake", *url)
    assert "yes" in run(capsys, "ps", *url)
    assert "may be unloaded" in run(capsys, "pin", "fake", "--off", *url)
    assert run(capsys, "unload", "fake", *url) == "fake is unloaded.\n"
    assert run(capsys, "unload", "fake", *url) == "fake was not loaded.\n"
    assert as_json(capsys, "ps", *url) == []
    assert run(capsys, "ps", *url) == "No model is loaded.\n"
    assert as_json(capsys, "load", "fake", *url)["state"] == "ready"
    for command in ("load", "unload", "pin"):
        assert "There is no model 'no/body'" in run(capsys, command, "no/body", *url, code=1)


def test_names_that_lead_nowhere_are_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, home: Path
) -> None:
    add_model(tmp_path, "other")
    settings = tmp_path / "s.toml"
    settings.write_text(
        f"[models]\ndirs = ['{tmp_path}/models']\n"
        "[models.fake]\nalias = ['other']\n[models.absent]\nttl = 5\n",
        "utf-8",
    )
    problems = as_json(capsys, "doctor", "--quick", "--config", str(settings))["problems"]
    assert ["'other'" in problems[0], "'absent'" in problems[1]] == [True, True]
    assert problems[1] in run(capsys, "doctor", "--quick", "--config", str(settings))
    rows = {row["name"]: row for row in as_json(capsys, "list", "--config", str(settings))}
    assert rows["fake"]["aliases"] == ["other"]


def test_no_server_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["ps"], ["chat"], ["load", "m"], ["unload", "m"], ["pin", "m"]):
        said = run(capsys, *command, "--url", "http://127.0.0.1:9", code=1)
        assert "http://127.0.0.1:9" in said
        assert "penstock serve" in said


def test_chat_asks_once(capsys: pytest.CaptureFixture[str], server: FakeServer) -> None:
    answer = as_json(capsys, "chat", "--url", server.url, "--max-tokens", "8", "hi")
    assert answer["content"] == "user: hi"
    assert answer["usage"]["completion_tokens"] == 8
    assert run(capsys, "chat", "--url", server.url, "--max-tokens", "8", "hi") == "user: hi\n"


def test_chat_takes_the_servers_default_or_one_that_can_answer(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    add_model(tmp_path, "a-broken", FakeModel(load_error_code="model_exceeds_memory"))
    for name in ("b-absent", "c-unloaded", "d-ready"):
        add_model(tmp_path, name)

    def chosen(server: FakeServer) -> str:
        said = as_json(capsys, "chat", "--url", server.url, "--max-tokens", "2", "hi")
        return str(said["model"])

    with serving(tmp_path) as server:
        url = ("--url", server.url)
        run(capsys, "load", "a-broken", *url, code=1)
        run(capsys, "load", "c-unloaded", *url)
        run(capsys, "unload", "c-unloaded", *url)
        assert chosen(server) == "b-absent"
        run(capsys, "unload", "b-absent", *url)
        run(capsys, "load", "d-ready", *url)
        assert chosen(server) == "d-ready"
    (tmp_path / "penstock.toml").write_text(
        "[models]\ndefault = 'mine'\n[models.c-unloaded]\nalias = ['mine']\n", "utf-8"
    )
    with serving(tmp_path) as server:
        run(capsys, "load", "d-ready", "--url", server.url)
        assert chosen(server) == "c-unloaded"


def test_chat_keeps_the_conversation(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, server: FakeServer
) -> None:
    typed = iter(["one", KeyboardInterrupt(), "/clear", "two", "/exit"])

    def read(_: str) -> str:
        line = next(typed)
        if isinstance(line, BaseException):
            raise line
        return str(line)

    monkeypatch.setattr("builtins.input", read)
    printed = run(capsys, "chat", "--url", server.url, "--max-tokens", "9")
    assert "user: one\n" in printed
    assert printed.count("Ctrl-C stops an answer") == 2
    assert "user: two\n" in printed


def test_the_servers_refusal_is_passed_on(
    capsys: pytest.CaptureFixture[str], server: FakeServer
) -> None:
    said = run(capsys, "chat", "--url", server.url, "--model", "nobody", "hi", code=1)
    assert "404" in said
    assert "fake" in said


def test_doctor(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_SERVER_PORT", "1234")
    monkeypatch.setenv("PENSTOCK_TYPO", "1")
    report = as_json(capsys, "doctor", "--quick")
    origins = {row["key"]: row["origin"] for row in report["settings"]}
    assert origins["server.port"] == "environment PENSTOCK_SERVER_PORT"
    assert report["ignored_variables"] == ["PENSTOCK_TYPO"]
    assert "1234" in run(capsys, "doctor", "--quick")
    levels = {finding["what"]: finding["level"] for finding in report["findings"]}
    assert levels["port"] == levels["versions"] == "ok"


def test_doctor_finds_what_is_wrong(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each problem has its remedy, and the exit code says that there is one."""
    monkeypatch.setenv("PENSTOCK_MODELS_DEVICE", "cuda")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("PENSTOCK_SERVER_PORT", str(taken.getsockname()[1]))
        assert cli.main(["doctor", "--json"]) == 1
    found = {one["what"]: one for one in json.loads(capsys.readouterr().out)["findings"]}
    assert found["port"]["level"] == "problem"
    assert "--port" in found["port"]["remedy"]
    assert "MiB/s" in found["disk"]["said"]
    assert found["torch"]["level"] in ("ok", "problem")  # by whether there is a card


def test_top_prints_a_frame(capsys: pytest.CaptureFixture[str], server: FakeServer) -> None:
    as_json(capsys, "load", "fake", "--url", server.url)
    shown = run(capsys, "top", "--once", "--url", server.url)
    assert "booked of" in shown
    assert "fake" in shown
    assert "No request is in hand." in shown
    states = as_json(capsys, "top", "--url", server.url)
    assert states["requests"]["total"] == 0
    assert "ram" in states["memory"]["domains"]


def test_top_in_a_terminal(capsys: pytest.CaptureFixture[str], server: FakeServer) -> None:
    """It draws, follows the terminal's size, and ends with q, whatever was pressed before."""
    as_json(capsys, "load", "fake", "--url", server.url)
    terminal, inside = pty.openpty()
    termios.tcsetwinsize(terminal, (30, 100))
    command = [sys.executable, "-m", "penstock", "top", "--url", server.url]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
    with subprocess.Popen(
        command, stdin=inside, stdout=inside, stderr=inside, env=environment
    ) as top:
        try:
            os.close(inside)
            assert widest(drawn(terminal, lambda text: "fake" in text)) <= 100
            termios.tcsetwinsize(terminal, (30, 140))
            drawn(terminal, lambda text: widest(text) > 100)
            os.write(terminal, b"\x1b[A\x1b[Bx")  # keys that mean nothing
            drawn(terminal, lambda text: "fake" in text)
            os.write(terminal, b"q")
            with contextlib.suppress(OSError):  # the terminal ends with it
                while os.read(terminal, 1 << 16):
                    pass
            assert top.wait(20) == 0
        finally:
            top.kill()
            os.close(terminal)


def drawn(terminal: int, enough: Callable[[str], bool]) -> str:
    """What is drawn from now on, until it is enough."""
    text, deadline = "", time.monotonic() + 60
    while not enough(text):
        assert time.monotonic() < deadline, text
        if select.select([terminal], [], [], 1)[0]:
            text += os.read(terminal, 1 << 16).decode(errors="replace")
    return text


def widest(text: str) -> int:
    plain = text.replace("\x1b[H", "\n")  # a frame begins at the top
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", plain)
    return max(len(line.rstrip("\r")) for line in plain.split("\n"))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--host", "0.0.0.0"], "--api-key"),
        (["--port", "x"], "server.port"),
        (["--memory", "lots"], "memory.limit"),
        (["--model", "nobody"], "fake"),
        (["--device", "tpu"], "cuda"),
    ],
)
def test_serve_refuses_in_a_sentence(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    says: str,
) -> None:
    # The process's log handlers belong to the tests here.
    monkeypatch.setattr("penstock.server.logs.configure", lambda *_: None)
    assert says in run(capsys, "serve", "--port", "0", *arguments, code=1)


def test_a_wrong_command_line() -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", "--nonsense"])
    assert ended.value.code == 2
    assert cli.main([]) == 2


def test_the_command_imports_little_before_it_knows_its_work() -> None:
    code = (
        "import sys; import penstock.cli; penstock.cli.build_parser(); "
        "sys.exit(sorted({'torch', 'transformers', 'httpx', 'rich', 'uvicorn'} & set(sys.modules))"
        " != [])"
    )
    assert subprocess.run([sys.executable, "-c", code], env=os.environ, check=False).returncode == 0


def test_the_catalog_never_imports_torch() -> None:
    code = (
        "import sys, penstock.catalog, penstock.sources, penstock.shapes;"
        "print(sorted({'torch', 'transformers', 'numba'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_cache_stats_verify_and_clear(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "kv"))
    monkeypatch.setenv("PENSTOCK_CACHE_SIZE", "1GiB")
    found = as_json(capsys, "cache", "stats")
    assert found["models"] == [] and found["free_bytes"] > 0
    assert not (tmp_path / "kv").exists(), "looking makes nothing"
    tier = DiskTier(tmp_path / "kv", Quota(1 << 30), "fingerprint", label="SmolLM2")
    for number in range(3):
        tier.save(bytes([number]), [Payload("attention", bytes(1000))])
    (tmp_path / "kv" / "note.txt").write_text("mine")
    found = as_json(capsys, "cache", "stats")
    [model] = found["models"]
    assert (model["model"], model["files"], model["bytes"]) == ("SmolLM2", 3, 3 * 5096)
    assert found["quota_bytes"] == 1 << 30 and found["held_bytes"] == 8 * 4096
    printed = run(capsys, "cache", "stats")
    assert "of at most 1.0 GiB" in printed and "SmolLM2" in printed
    assert "3 files" in run(capsys, "cache", "verify")

    damaged = min((tmp_path / "kv").glob("*.kv"))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    assert cli.main(["cache", "verify"]) == 1
    printed = capsys.readouterr().out
    assert f"{damaged.name} is damaged" in printed and "1 of them removed" in printed
    assert as_json(capsys, "cache", "clear") == {"files": 2, "bytes": 2 * 5096}
    assert sorted(path.name for path in (tmp_path / "kv").iterdir()) == ["note.txt", "usage"]


def test_an_unusable_cache_directory_is_a_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "file"))
    assert "cache.dir" in run(capsys, "cache", "clear", code=1)
