"""Malformed and extreme bodies: each a 4xx in OpenAI's shape that names the field; nobody dies."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx
import pytest
from bad_bodies import Bad, bad_bodies

if TYPE_CHECKING:
    from collections.abc import Iterator

TABLE = bad_bodies()


@pytest.fixture(scope="module")
def client(fake_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=fake_url, timeout=60) as client:
        yield client


def test_there_are_enough() -> None:
    assert len({(bad.route, bad.body) for bad in TABLE}) >= 200


@pytest.mark.parametrize("bad", TABLE, ids=lambda bad: bad.id)
def test_is_refused_by_name(client: httpx.Client, bad: Bad) -> None:
    answer = client.post(bad.route, content=bad.body, headers={"content-type": "application/json"})
    assert 400 <= answer.status_code < 500, answer.text
    error = answer.json()["error"]
    assert error["message"].endswith(".")
    assert error["code"]
    assert answer.headers["x-request-id"]
    if bad.param is None:
        assert error["param"] is None or error["param"] in {"messages", "prompt"}
    else:
        assert (error["param"] or "").startswith(bad.param), error


def test_nobody_died(client: httpx.Client) -> None:
    body = {"model": "fake", "prompt": "alive", "max_tokens": 5}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["text"] == "alive"
    assert client.get("/ready").status_code == 200
