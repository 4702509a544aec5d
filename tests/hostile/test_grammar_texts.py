"""Grammars that take long to read, or come to many times their size, before anything compiles."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from penstock.testing.hostile import read_at_rest, under_attack
from penstock.testing.hostile_grammars import (
    GRAMMARS,
    anything_everywhere,
    definitions_of_no_kind,
    gbnf_backwards,
    gbnf_blanks,
    gbnf_recursion,
    nested_identities,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.testing.hostile import Target


@pytest.mark.parametrize(
    "make",
    [
        anything_everywhere,
        gbnf_backwards,
        *(
            pytest.param(make, marks=pytest.mark.proof)
            for make in (definitions_of_no_kind, nested_identities, gbnf_blanks, gbnf_recursion)
        ),
    ],
)
def test_twenty_at_once(target: Target, make: Callable[[int], dict[str, Any]]) -> None:
    body = {**target.chat_body(max_tokens=4), **make(GRAMMARS[make])}
    with under_attack(target) as damage, ThreadPoolExecutor(20) as pool:
        url = f"{target.url}/v1/chat/completions"
        asked = [pool.submit(httpx.post, url, json=body, timeout=300) for _ in range(20)]
        statuses = {answer.result().status_code for answer in asked}
    assert statuses <= {200, 400}
    read_at_rest(damage)
    print(damage)  # noqa: T201 - shown when it fails
    assert damage.kills == 0
    assert not damage.health.faults
    assert not damage.stream.faults
    assert damage.small_chat is not None
    assert damage.small_chat.status_code == 200
    assert damage.highest_bytes <= damage.target.limit_bytes
    assert damage.rest is not None
    assert damage.rest.figures["requests"]["used_bytes"] == 0
