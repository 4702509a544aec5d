"""aider, the command line, with one question and no editing."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

folder = tempfile.mkdtemp()
done = subprocess.run(
    [
        str(Path(sys.executable).with_name("aider")),
        "--model=openai/" + os.environ["MODEL"],
        "--no-git",
        "--no-show-model-warnings",
        "--no-check-update",
        "--analytics-disable",
        "--map-tokens=0",
        "--edit-format=ask",
        "--yes-always",
        "--message=Say hello.",
    ],
    env={
        **os.environ,
        "OPENAI_API_BASE": os.environ["URL"] + "/v1",
        "OPENAI_API_KEY": "none",
        "HOME": folder,
    },
    cwd=folder,
    stdin=subprocess.DEVNULL,
    capture_output=True,
    text=True,
    timeout=500,
    check=False,
)
assert done.returncode == 0, done.stdout + done.stderr
assert "Tokens:" in done.stdout, done.stdout + done.stderr
assert "litellm." not in done.stdout, done.stdout
