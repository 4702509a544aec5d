"""What `/api/generate` and `/api/chat` of Ollama take beside a question, over a fake worker."""

from __future__ import annotations

import contextlib
import json
import time
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from penstock.errors import BadRequest
from penstock.server.protocols.ollama.fields import duration_s
from penstock.server.protocols.ollama.go_template import template_pieces
from penstock.testing.fake_server import add_model, serving
from penstock.testing.fake_worker import FakeModel

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    home: Path = tmp_path_factory.mktemp("home")
    add_model(home, "echo")
    add_model(home, "ends", FakeModel(answer="done"))
    add_model(home, "slow", FakeModel(step_s=0.05, load_s=0.3))
    with serving(home) as server, httpx.Client(base_url=server.url, timeout=30) as client:
        yield client


def generate(client: httpx.Client, status: int = 200, model: str = "echo", **body: Any) -> Any:
    options = {"num_predict": 60, **body.pop("options", {})}
    answer = client.post(
        "/api/generate", json={"model": model, "stream": False, "options": options, **body}
    )
    assert answer.status_code == status, answer.text
    return answer.json()


def lines(client: httpx.Client, path: str, **body: Any) -> list[Any]:
    with client.stream("POST", path, json=body) as answer:
        assert answer.status_code == 200
        return [json.loads(line) for line in answer.iter_lines()]


def test_raw_is_taken_as_it_stands(client: httpx.Client) -> None:
    said = generate(client, prompt="abc", raw=True, options={"num_predict": 7})
    assert said["response"] == "abcabca"
    assert said["prompt_eval_count"] == 3
    assert "context" not in said
    refused = generate(client, 400, prompt="abc", raw=True, system="s")
    assert "raw" in refused["error"]


def test_options_that_are_not_kept_are_refused_by_name(client: httpx.Client) -> None:
    refused = generate(client, 400, prompt="abc", options={"mirostat": 2})
    assert "`options.mirostat` is not supported" in refused["error"]
    generate(client, prompt="abc", options={"mirostat": 0, "tfs_z": 1.0, "num_predict": 2})


def test_the_window_of_penalties(client: httpx.Client) -> None:
    refused = generate(client, 400, prompt="q", options={"repeat_last_n": 5000,
                                                         "repeat_penalty": 1.1})  # fmt: skip
    assert "`repeat_last_n`" in refused["error"]
    for options in ({"repeat_last_n": 5000}, {"repeat_last_n": -1, "repeat_penalty": 1.1},
                    {"repeat_last_n": 0, "repeat_penalty": 1.1},
                    {"repeat_last_n": 64, "repeat_penalty": 1.1}):  # fmt: skip
        generate(client, prompt="q", options=options)


def test_a_window_of_the_clients_own_changes_nothing(client: httpx.Client) -> None:
    """Nearly all clients send one; the prompt is served whole all the same."""
    for size in (8, 1 << 20):
        said = generate(client, prompt="a" * 100, raw=True,
                        options={"num_ctx": size, "num_keep": 4, "num_predict": 3})  # fmt: skip
        assert (said["prompt_eval_count"], said["response"]) == (100, "aaa")


def test_a_raw_answer_is_as_long_as_it_likes_without_a_number(client: httpx.Client) -> None:
    answer = client.post(
        "/api/generate",
        json={"model": "ends", "prompt": "a" * 20, "raw": True, "stream": False},
    )
    assert answer.json()["response"] == "done"
    assert answer.json()["done_reason"] == "stop"


def test_a_template_of_the_clients_own(client: httpx.Client) -> None:
    template = "{{ if .System }}<s>{{ .System }}</s>{{ end }}[{{ .Prompt }}]{{ .Response }}!"
    said = generate(client, prompt="q", system="x", template=template, options={"num_predict": 11})
    assert said["response"] == "<s>x</s>[q]"
    assert said["prompt_eval_count"] == 11
    refused = generate(client, 400, prompt="q", template="{{ range .Messages }}{{ end }}")
    assert "range .Messages" in refused["error"]


def test_the_context_goes_on_from_what_was_said(client: httpx.Client) -> None:
    first = generate(client, prompt="one", options={"num_predict": 4})
    assert bytes(first["context"]).decode() == "user: one\nassistant: user"
    streamed = lines(client, "/api/generate", model="echo", prompt="one",
                     options={"num_predict": 4})  # fmt: skip
    assert streamed[-1]["context"] == first["context"]
    second = generate(client, prompt="two", context=first["context"])
    assert second["response"].startswith("user: one\nassistant: useruser: two\nassistant: ")
    assert second["prompt_eval_count"] == len(first["context"]) + len("user: two\nassistant: ")
    assert "context" in generate(client, 400, prompt="x", context=[1 << 40])["error"]
    assert "4096" in generate(client, 400, prompt="x", context=[1] * 5000)["error"]


def test_the_end_of_an_answer_is_part_of_the_context(client: httpx.Client) -> None:
    said = generate(client, model="ends", prompt="q")
    assert bytes(token for token in said["context"] if token < 256).decode().endswith("done")


def test_suffix_needs_a_model_that_fills_in(client: httpx.Client) -> None:
    refused = generate(client, 400, prompt="def f(", suffix="return x")
    assert "filling in the middle" in refused["error"]
    refused = client.post(
        "/v1/completions", json={"model": "echo", "prompt": "a", "suffix": "b"}
    ).json()
    assert refused["error"]["param"] == "suffix"


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_logprobs(client: httpx.Client, path: str) -> None:
    body: Any = {"model": "echo", "options": {"num_predict": 3}, "logprobs": True}
    body |= {"prompt": "q", "messages": [{"role": "user", "content": "q"}], "top_logprobs": 2}
    whole = client.post(path, json={**body, "stream": False}).json()
    assert [entry["token"] for entry in whole["logprobs"]] == ["u", "s", "e"]
    assert whole["logprobs"][0]["logprob"] == -0.5
    assert len(whole["logprobs"][0]["top_logprobs"]) == 2
    streamed = lines(client, path, **body)
    assert [e for line in streamed for e in line.get("logprobs", [])] == whole["logprobs"]
    refused = client.post(path, json={**body, "logprobs": False})
    assert refused.status_code == 400


def test_numbers_of_clients_without_integers(client: httpx.Client) -> None:
    said = generate(client, prompt="q", options={"num_predict": 5.0, "top_k": 40.0, "seed": 3.0})
    assert said["eval_count"] == 5


@pytest.mark.parametrize("stream", [False, True])
def test_durations_are_those_of_the_work(client: httpx.Client, stream: bool) -> None:
    client.post("/admin/api/models/slow/unload").raise_for_status()
    body = {"model": "slow", "prompt": "q", "options": {"num_predict": 8}, "stream": stream}
    answer = client.post("/api/generate", json=body)
    said = json.loads(answer.text.splitlines()[-1])
    second = 1e9
    assert said["load_duration"] > 0.3 * second
    assert said["prompt_eval_duration"] > 0.04 * second
    assert said["eval_duration"] > 7 * 0.04 * second  # eight steps, the first for the prompt
    parts = ("load_duration", "prompt_eval_duration", "eval_duration")
    assert said["total_duration"] > sum(said[part] for part in parts)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("1h30m", 5400), ("300ms", 0.3), ("0", 0), ("0s", 0), (90, 90), (0.5, 0.5), ("2.5m", 150)],
)
def test_durations_as_their_clients_write_them(text: str | float, seconds: float) -> None:
    assert duration_s(text, "keep_alive") == pytest.approx(seconds)


@pytest.mark.parametrize("text", [-1, "-1", "-10m"])
def test_a_negative_duration_is_for_ever(text: str | float) -> None:
    assert duration_s(text, "keep_alive") == float("inf")


@pytest.mark.parametrize("text", ["", "soon", "1 day", "m", "1hh", "--1"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(BadRequest, match="keep_alive"):
        duration_s(text, "keep_alive")


@pytest.mark.parametrize(
    ("template", "rendered"),
    [
        ("{{ .Prompt }}", "q"),
        ("a\n{{- .Prompt -}}\nb", "aqb"),
        ("{{ if .System }}S{{ else }}N{{ end }}{{ .Prompt }}", "Nq"),
        ("{{ if not .System }}N{{ end }}", "N"),
        ("{{ if .System }}{{ if .Prompt }}x{{ end }}{{ end }}y", "y"),
        ("{{ .Prompt }}{{ if .Response }}A:{{ .Response }}{{ end }}end", "qA:"),
        ("{{/* nothing */}}{{ .Suffix }}", ""),
        ("{{ if .System -}}\n a{{ else -}}\n b {{- end }} c", "b c"),
        ("{{-.Prompt-}}}} {", "q}} {"),
        ("", ""),
    ],
)
def test_templates(template: str, rendered: str) -> None:
    assert "".join(template_pieces(template, Prompt="q", System="", Suffix="")) == rendered


@pytest.mark.parametrize(
    "template", ["{{ if .Prompt }}", "{{ end }}", "{{ .Tools }}", "{{ x }}", "{{ .Prompt", "{{-}}"]
)
def test_templates_that_cannot_be_kept(template: str) -> None:
    with pytest.raises(BadRequest, match="template"):
        template_pieces(template, Prompt="q")


def test_what_a_prompt_contains_is_not_read_as_a_template() -> None:
    pieces = template_pieces("{{ .Prompt }}", Prompt="{{ .System }}", System="s")
    assert pieces == ["{{ .System }}"]


@pytest.mark.parametrize(
    "unit", [" ", "{{a", "{{", "{{-", "{{ if .Prompt }}", "{{ if " + " " * 99, "{{- "]
)
def test_a_template_is_read_once_from_end_to_end(unit: str) -> None:
    began = time.monotonic()
    with contextlib.suppress(BadRequest):
        template_pieces(unit * (65_536 // len(unit)), Prompt="q")
    assert time.monotonic() - began < 10  # matching anew at every brace would take minutes


def test_a_template_that_makes_far_more_of_a_body_is_refused_before_it_does(
    client: httpx.Client,
) -> None:
    fields = {"prompt": "word " * 20_000, "template": "{{ .Prompt }}" * 5000}
    refused = generate(client, 400, **fields)
    assert "`template` makes a prompt of 500000000 characters" in refused["error"]
    assert "server.max_body" in refused["error"]
    # Without a question too, when the model is only loaded.
    system = {"system": fields["prompt"], "template": "{{ .System }}" * 5000}
    assert "server.max_body" in generate(client, 400, **system)["error"]
    assert generate(client, prompt="ab", template="{{ .Prompt }}" * 2, options={"num_predict": 4})
