"""llm, the command line, by extra-openai-models.yaml: a prompt, a conversation, a schema."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

MODEL = os.environ["MODEL"]
home = Path(tempfile.mkdtemp())
(home / "extra-openai-models.yaml").write_text(
    f"- model_id: here\n  model_name: {MODEL}\n  api_base: {os.environ['URL']}/v1\n"
    "  supports_schema: true\n  supports_tools: true\n"
)


def llm(*arguments: str) -> str:
    command = [str(Path(sys.executable).with_name("llm")), *arguments]
    environment = {**os.environ, "LLM_USER_PATH": str(home), "OPENAI_API_KEY": "none"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


assert llm("-m", "here", "-o", "max_tokens", "10", "Say hello.").strip()
assert llm("-c", "-o", "max_tokens", "10", "Again.").strip()
assert llm("-m", "here", "--no-stream", "-o", "max_tokens", "10", "Say hello.").strip()
schema = {
    "type": "object",
    "properties": {"swims": {"type": "boolean"}},
    "required": ["swims"],
    "additionalProperties": False,
}
said = llm("-m", "here", "--schema", json.dumps(schema), "-o", "max_tokens", "200", "Invent one.")
assert isinstance(json.loads(said)["swims"], bool)
