"""The examples of docs/clients.md, run as they stand against the real server; only the address is
another.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "clients.md"
ADDRESS = "http://127.0.0.1:8000"


def examples(language: str) -> list[str]:
    """The blocks of that language, in order."""
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)


PYTHON = examples("python")
CURL = [block for block in examples("sh") if block.startswith("curl")]


def test_they_are_found() -> None:
    assert len(PYTHON) >= 2
    assert len(CURL) >= 1
    assert all(ADDRESS in block for block in PYTHON + CURL)


@pytest.mark.parametrize("code", PYTHON, ids=lambda code: code.split()[1])
def test_python(real_url: str, code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code.replace(ADDRESS, real_url)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert not done.stderr


@pytest.mark.parametrize("command", CURL)
def test_curl(real_url: str, command: str) -> None:
    done = subprocess.run(
        ["bash", "-c", command.replace(ADDRESS, real_url)],
        capture_output=True,
        timeout=300,
        check=True,
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert answers
    assert not any("error" in answer for answer in answers)


def test_the_settings_of_codex_are_toml() -> None:
    [settings] = map(tomllib.loads, examples("toml"))
    provider = settings["model_providers"][settings["model_provider"]]
    assert provider == {"name": "penstock", "base_url": f"{ADDRESS}/v1", "wire_api": "responses"}
