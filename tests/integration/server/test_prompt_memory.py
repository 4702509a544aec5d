"""What a chat template makes of a small body is booked before it is there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx

from penstock.testing.fake_server import add_model, serving, watch_bookings

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

TIMES = 60
TEMPLATE = f"{{% for _ in range({TIMES}) %}}{{{{ messages[0].content }}}}{{% endfor %}}"
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "x" * 100_000}]}


def test_a_template_that_repeats_its_messages_is_booked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_model(tmp_path, "fake", template=TEMPLATE)
    held = watch_bookings(monkeypatch)
    with serving(tmp_path) as server:
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=CHAT, timeout=60)
        assert answer.json()["error"]["code"] == "context_length_exceeded", answer.text
        assert max(held) >= 2 * TIMES * 100_000, "its pieces, and the whole"
        assert httpx.get(f"{server.url}/admin/api/memory").json()["requests"]["used_bytes"] == 0


def test_a_prompt_for_which_there_is_no_memory_is_refused(tmp_path: Path) -> None:
    add_model(tmp_path, "fake", template=TEMPLATE)
    with serving(tmp_path, server_max_bodies=1 << 20) as server:
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=CHAT, timeout=60)
        assert answer.status_code == 413, answer.text
        assert "server.max_bodies" in answer.json()["error"]["message"]
