"""kill -9 of a server that writes KV as fast as it can, again and again: what survives is whole."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from penstock.tiers import Quota, Store

pytestmark = pytest.mark.proof

KILLS = int(os.environ.get("PENSTOCK_KILLS", "50"))
QUOTA_BYTES = 256 << 20  # some 340 blocks, so that others are removed all the time
PROMPT = 700


def prompt(number: int) -> list[int]:
    return [100 + (number * 7919 + i * (number + 3)) % 40_000 for i in range(PROMPT)]


def ask(url: str, model: str, number: int) -> int:
    """Tokens of the prompt that were found."""
    body = {"model": model, "prompt": prompt(number), "max_tokens": 1, "temperature": 0}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=300)
    assert answer.status_code == 200, answer.text
    found: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


def workers_of(pid: int) -> list[int]:
    """Every process below this one."""
    found, queue = [], [pid]
    while queue:
        children = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", str(queue.pop())],
            capture_output=True,
            text=True,
            check=False,  # 1 says that there are none
        ).stdout.split()
        found += [int(child) for child in children]
        queue += [int(child) for child in children]
    return found


def test_nothing_that_survives_a_kill_is_wrong(
    starter_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "home"
    (home / "models").mkdir(parents=True)
    (home / "models" / starter_folder.name).symlink_to(starter_folder)
    profiles = starter_folder.parent.parent / "profiles"
    if profiles.exists():
        shutil.copytree(profiles, home / "profiles")
    (home / "penstock.toml").write_text(f'[cache]\nsize = "{QUOTA_BYTES}"\n')
    chance = random.Random(5)
    asked = hits = 0
    for kill in range(KILLS):
        command = [sys.executable, "-m", "penstock", "serve", "--json", "--port=0"]
        command += [f"--model={starter_folder.name}", f"--config={home / 'penstock.toml'}"]
        command += ["--memory=3GiB"]  # so that others on the machine change nothing
        environment = {**os.environ, "PENSTOCK_HOME": str(home)}
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert server.stdout is not None
        url = str(json.loads(server.stdout.readline())["url"])
        deadline = time.monotonic() + 300
        while httpx.get(f"{url}/ready", timeout=60).status_code != 200:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        if kill:
            # The latest that was written for certain: its end may have been lost, or given up.
            hits += ask(url, starter_folder.name, asked - 2) > 0
        for _ in range(2):
            ask(url, starter_folder.name, asked)
            asked += 1

        def one_more(url: str = url, number: int = asked) -> None:
            try:
                ask(url, starter_folder.name, number)
            except httpx.HTTPError:
                return  # killed in the middle of it

        asking = threading.Thread(target=one_more)
        asking.start()
        asked += 1
        time.sleep(chance.uniform(0.0, 1.5))
        children = workers_of(server.pid)
        server.send_signal(signal.SIGKILL)
        server.wait(30)
        server.stdout.close()
        asking.join()
        deadline = time.monotonic() + 30
        while any(Path(f"/proc/{child}").exists() for child in children):
            assert time.monotonic() < deadline, "a worker outlived its server"
            time.sleep(0.05)
        used = sum(file.stat().st_size for file in (home / "cache").rglob("*") if file.is_file())
        assert used <= QUOTA_BYTES
        store = Store(home / "cache", Quota.parse(str(QUOTA_BYTES)))
        verified = store.verify(lambda done, total: None)
        assert not verified.bad
    with capsys.disabled():
        print(  # noqa: T201 - what docs/proof.md records
            f"\n{KILLS} kills: {hits} of {KILLS - 1} next starts found KV; {verified.files} files "
            f"of {verified.bytes} bytes at the end, none ever damaged"
        )
    assert hits >= 0.8 * (KILLS - 1)
