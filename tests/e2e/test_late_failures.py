"""A stream that fails after it has begun, as the official packages tell it to their users."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anthropic
import openai
import pytest

from penstock.testing.fake_server import add_model, serving
from penstock.testing.fake_worker import FakeModel

if TYPE_CHECKING:
    from collections.abc import Iterator

HI: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    home = tmp_path_factory.mktemp("home")
    for route in ("chat", "completions", "responses", "messages"):
        add_model(home, f"dies-in-{route}", FakeModel(die_at_token=3, step_s=0.02))
    with serving(home) as server:
        yield server.url


def test_openai(url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        streams: list[Any] = [
            client.chat.completions.create(model="dies-in-chat", messages=HI, stream=True),
            client.completions.create(model="dies-in-completions", prompt="hi", stream=True),
        ]
        for stream in streams:
            seen = 0
            with pytest.raises(openai.APIError, match="dies-in-") as failed:
                for _ in stream:
                    seen += 1
            assert seen > 0
            assert failed.value.code == "worker_restarted"
        events = list(client.responses.create(model="dies-in-responses", input="hi", stream=True))
    last = events[-1]
    assert last.type == "response.failed"
    assert last.response.status == "failed"
    assert last.response.error is not None
    assert "dies-in-responses" in last.response.error.message


def test_anthropic(url: str) -> None:
    with anthropic.Anthropic(base_url=url, api_key="none") as client:
        seen = 0
        with (
            pytest.raises(anthropic.APIStatusError, match="dies-in-messages") as failed,
            client.messages.stream(model="dies-in-messages", max_tokens=9, messages=HI) as stream,
        ):
            for _ in stream:
                seen += 1
    assert seen > 0
    assert failed.value.type == "overloaded_error"
