"""Whether the server is as `/openapi.json` says: schemathesis makes requests out of it, sound and
unsound, over a fake model, and compares every answer with the description. Nothing may be a 5xx,
but for tasks of operators, of which only so many run at a time.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from penstock.testing.fake_server import add_encoder, add_model, serving
from penstock.testing.fake_worker import FakeModel

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.proof

SECONDS = int(os.environ.get("OPENAPI_PROOF_S", "600"))
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
    "allow_header_conformance",
)
_TASKS = "/admin/api/tasks"
_SETTINGS = f"""
[[operations]]
include-name = "POST {_TASKS}"
checks.not_a_server_error.expected-statuses = ["2xx", "3xx", "4xx", 503]
"""
CALL = 'Well.<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def _known_models(description: Any, names: list[str]) -> Any:
    """The same with the models there are, which a client reads from `/v1/models`: with any text for
    a name nearly every answer would be that there is no such model."""
    for schema in description["components"]["schemas"].values():
        if "model" in schema.get("properties", {}):
            # An empty one is the default model, and so is none where the description allows it.
            nullable = "null" in json.dumps(schema["properties"]["model"])
            schema["properties"]["model"] = {"enum": [*names, "", *[None][: int(nullable)]]}
    return description


def test_every_answer_is_as_described(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add_model(tmp_path, "echo", FakeModel(context=256))
    add_model(tmp_path, "caller", FakeModel(context=2048, answer=CALL))
    add_encoder(tmp_path, "embedder", FakeModel(context=256))
    add_encoder(tmp_path, "reranker", FakeModel(context=256), scores=True)
    known = ["echo", "caller", "embedder", "reranker", "nobody"]
    with serving(tmp_path, models_default="echo") as server:
        description = httpx.get(f"{server.url}/openapi.json").json()
        file = tmp_path / "openapi.json"
        file.write_text(json.dumps(_known_models(description, known)))
        (tmp_path / "settings.toml").write_text(_SETTINGS)
        run = subprocess.run(
            [
                sys.executable,
                "-c",
                "from schemathesis.cli import schemathesis; schemathesis()",
                "--config-file=settings.toml",
                "run",
                str(file),
                f"--url={server.url}",
                f"--checks={','.join(CHECKS)}",
                f"--max-time={SECONDS}",
                "--phases=examples,coverage,fuzzing",
                "--continue-on-failure",
                "--suppress-health-check=all",
                "--generation-database=none",
                "--no-color",
            ],
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
        )
        alive = httpx.get(f"{server.url}/ready").status_code
        metrics = httpx.get(f"{server.url}/metrics").text
    counts: Counter[tuple[str, str]] = Counter()
    for labels, number in re.findall(r"penstock_requests_total\{(.*)\} (\S+)", metrics):
        route, status = re.findall(r'(?:route|status)="([^"]*)"', labels)
        counts["tasks" if route == _TASKS else "others", status] += int(float(number))
    with capsys.disabled():
        print(run.stdout[-1500:], dict(counts))  # noqa: T201
    assert run.returncode == 0, run.stdout[-20_000:] + run.stderr[-2_000:]
    assert {said for said in counts if said[1] >= "500"} <= {("tasks", "503")}
    assert alive == 200
