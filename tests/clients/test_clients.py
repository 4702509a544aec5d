"""Clients as their users have them, against `penstock serve` with the starter model.

Each is installed, in its newest version, into a folder of its own and runs one script of `scripts/`
there: what a user does first. The folders are kept (`PENSTOCK_CLIENTS`, else in `~/.cache`), so
that a second run needs no network. What was tried with which version is in docs/clients.md.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = pytest.mark.proof

SCRIPTS = Path(__file__).parent / "scripts"
MODEL = "SmolLM2-135M-Instruct"
_INSTALL_S, _RUN_S = 900, 600
_VERSIONS = """
import sys
from importlib.metadata import version
print(*(f"{name} {version(name)}" for name in sys.argv[1:]), sep=", ")
"""


@dataclass(frozen=True)
class Client:
    """A script and the packages that it needs; the first is the client."""

    script: str
    packages: tuple[str, ...]

    @property
    def folder(self) -> Path:
        """Where it is installed."""
        root = os.environ.get("PENSTOCK_CLIENTS", "~/.cache/penstock-clients")
        return Path(root).expanduser() / Path(self.script).stem

    def installed(self) -> list[str]:
        """Install it, if it is not there; the command that runs its script."""
        done = self.folder / "installed"
        if not done.exists() or done.read_text() != " ".join(self.packages):
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
            self._install()
            done.write_text(" ".join(self.packages))
        return self._command()

    def _install(self) -> None:
        raise NotImplementedError

    def _command(self) -> list[str]:
        raise NotImplementedError

    def version(self) -> str:
        """What was installed."""
        raise NotImplementedError


class PythonClient(Client):
    """A package of PyPI, in a virtual environment."""

    @property
    def _python(self) -> str:
        return str(self.folder / "bin" / "python")

    def _install(self) -> None:
        _run([sys.executable, "-m", "venv", str(self.folder)], _INSTALL_S)
        _run([self._python, "-m", "pip", "install", "--quiet", *self.packages], _INSTALL_S)

    def _command(self) -> list[str]:
        return [self._python, str(SCRIPTS / self.script)]

    def version(self) -> str:
        names = [package.partition("[")[0] for package in self.packages]
        return _run([self._python, "-c", _VERSIONS, *names], 60).strip()


class NodeClient(Client):
    """A package of npm, in a folder of its own."""

    def _install(self) -> None:
        (self.folder / "package.json").write_text('{"private": true}')
        _run(["npm", "install", "--silent", *self.packages], _INSTALL_S, self.folder)

    def _command(self) -> list[str]:
        # Beside its packages, since that is where Node looks for them.
        shutil.copy(SCRIPTS / self.script, self.folder)
        return ["node", str(self.folder / self.script)]

    def version(self) -> str:
        files = (self.folder / "node_modules" / name / "package.json" for name in self.packages)
        found = (json.loads(file.read_text()) for file in files)
        return ", ".join(f"{package['name']} {package['version']}" for package in found)


CLIENTS: tuple[Client, ...] = (
    PythonClient("openai_python.py", ("openai",)),
    PythonClient("anthropic_python.py", ("anthropic",)),
    PythonClient("litellm_python.py", ("litellm", "mcp")),  # which it needs for tools
    PythonClient(
        "langchain_python.py",
        ("langchain-openai", "langchain-anthropic", "langchain-ollama"),
    ),
    PythonClient(
        "llamaindex_python.py",
        ("llama-index-core", "llama-index-llms-openai-like", "llama-index-llms-ollama"),
    ),
    PythonClient("instructor_python.py", ("instructor",)),
    PythonClient("pydantic_ai_python.py", ("pydantic-ai-slim[openai,anthropic]",)),
    PythonClient("openai_agents_python.py", ("openai-agents",)),
    PythonClient("dspy_python.py", ("dspy",)),
    PythonClient("ollama_python.py", ("ollama",)),
    PythonClient("llm_python.py", ("llm",)),
    PythonClient("guidance_python.py", ("guidance", "openai")),
    PythonClient("outlines_python.py", ("outlines", "openai")),
    PythonClient("haystack_python.py", ("haystack-ai",)),
    PythonClient("aider_python.py", ("aider-chat",)),
    NodeClient("openai_node.mjs", ("openai",)),
    NodeClient("anthropic_node.mjs", ("@anthropic-ai/sdk",)),
    NodeClient("ollama_node.mjs", ("ollama",)),
    NodeClient("ai_node.mjs", ("ai", "@ai-sdk/openai-compatible", "@ai-sdk/openai", "zod")),
)


def test_every_script_is_run() -> None:
    assert {client.script for client in CLIENTS} == {file.name for file in SCRIPTS.iterdir()}


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.script)
def test_client(real_url: str, client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    if isinstance(client, NodeClient) and shutil.which("npm") is None:
        pytest.skip("there is no npm here")
    command = client.installed()
    with capsys.disabled():
        print(f"\n{client.version()}")  # noqa: T201
    _run(command, _RUN_S, environment={"URL": real_url, "MODEL": MODEL})


def _run(
    command: list[str],
    seconds: float,
    folder: Path | None = None,
    environment: dict[str, str] | None = None,
) -> str:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        command,
        cwd=folder,
        env={**env, **(environment or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    return done.stdout
