"""The official packages' own retries: told to come back later, they do, and are answered."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import anthropic
import httpx
import openai
import pytest

from penstock.testing.fake_server import add_model, serving
from penstock.testing.fake_worker import FakeModel

if TYPE_CHECKING:
    from collections.abc import Iterator

HI: list[Any] = [{"role": "user", "content": "hi"}]
ECHO = "user: hi"
MIN_TOLD_S = 1.0  # of Retry-After; left to themselves, the packages come back after half of it


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Room for one in line; while a model loads, its first request waits there."""
    home = tmp_path_factory.mktemp("home")
    for name in ("for-openai", "for-anthropic", "for-streams"):
        add_model(home, name, FakeModel(load_s=1.0))
    add_model(home, "too-large", FakeModel(load_error_code="model_exceeds_memory"))
    with serving(home, server_queue_requests=1) as server:
        yield server.url


@pytest.fixture
def first(url: str) -> Iterator[Any]:
    """Sends a model its first request and returns once that waits in the line."""
    with ThreadPoolExecutor(1) as pool, httpx.Client(base_url=url, timeout=30) as client:

        def send(model: str) -> None:
            body = {"model": model, "prompt": "first", "max_tokens": 5}
            pool.submit(client.post, "/v1/completions", json=body)
            deadline = time.monotonic() + 10
            while not any(
                row["model"] == model and row["place"] is not None
                for row in client.get("/admin/api/requests").json()
            ):
                assert time.monotonic() < deadline
                time.sleep(0.01)

        yield send


def answers(url: str, route: str, status: int) -> int:
    """How many times the server has answered so, by its own figures."""
    start = f'penstock_requests_total{{route="{route}",status="{status}"}}'
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith(start))


def test_openai_comes_back_after_a_503(url: str, first: Any) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        first("for-openai")
        started = time.monotonic()
        raw = client.chat.completions.with_raw_response.create(
            model="for-openai", messages=HI, max_tokens=8
        )
    assert raw.retries_taken == 1
    assert time.monotonic() - started >= MIN_TOLD_S
    assert raw.parse().choices[0].message.content == ECHO
    assert answers(url, "/v1/chat/completions", 503) == 1


def test_anthropic_comes_back_after_a_529(url: str, first: Any) -> None:
    with anthropic.Anthropic(base_url=url, api_key="none") as client:
        first("for-anthropic")
        started = time.monotonic()
        raw = client.messages.with_raw_response.create(
            model="for-anthropic", messages=HI, max_tokens=8
        )
    assert raw.retries_taken == 1
    assert time.monotonic() - started >= MIN_TOLD_S
    assert raw.parse().content[0].text == ECHO  # type: ignore[union-attr]
    assert answers(url, "/v1/messages", 529) == 1


def test_streams_come_back_too(url: str, first: Any) -> None:
    with (
        openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client,
        anthropic.Anthropic(base_url=url, api_key="none") as other,
        ThreadPoolExecutor(1) as pool,
    ):
        before = answers(url, "/v1/messages", 529), answers(url, "/v1/responses", 503)
        first("for-streams")

        def messages() -> str:
            with other.messages.stream(model="for-streams", messages=HI, max_tokens=8) as stream:
                return stream.get_final_text()

        said = pool.submit(messages)
        with client.responses.stream(
            model="for-streams", input="hi", max_output_tokens=8
        ) as events:
            deltas = [e.delta for e in events if e.type == "response.output_text.delta"]
        assert "".join(deltas) == ECHO
        assert said.result() == ECHO
    after = answers(url, "/v1/messages", 529), answers(url, "/v1/responses", 503)
    assert (after[0] - before[0], after[1] - before[1]) == (1, 1)


def test_what_can_never_be_is_not_asked_for_again(url: str) -> None:
    with (
        openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client,
        pytest.raises(openai.InternalServerError) as refused,
    ):
        client.chat.completions.create(model="too-large", messages=HI)
    assert refused.value.status_code == 507
    assert refused.value.code == "model_exceeds_memory"
    assert answers(url, "/v1/chat/completions", 507) == 1
