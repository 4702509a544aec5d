"""Tokenizers and templates are those of the files that a model is served from."""

from __future__ import annotations

import asyncio
import os
import weakref
from typing import TYPE_CHECKING

import httpx
import pytest

from penstock.catalog import read_card
from penstock.catalog.scan import file_marks
from penstock.memory.baseline import Baseline
from penstock.memory.ledger import Ledger
from penstock.memory.requests import RequestPool
from penstock.server.api import services
from penstock.server.api.services import Texts
from penstock.testing.fake_server import TEMPLATE, add_model, serving

if TYPE_CHECKING:
    from pathlib import Path

MODELS = "/admin/api/models/fake"


def said(client: httpx.Client) -> str:
    body = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    answer = client.post("/v1/chat/completions", json=body).raise_for_status().json()
    return str(answer["choices"][0]["message"]["content"])


@pytest.mark.parametrize("loaded_by", ["an operator", "a request"])
def test_an_edited_template_holds_once_the_model_is_loaded_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loaded_by: str
) -> None:
    if loaded_by == "a request":  # else the load itself looks at the files
        monkeypatch.setattr(services, "_CARD_S", 0.0)
    template = add_model(tmp_path, "fake", template="old" + TEMPLATE) / "chat_template.jinja"
    with serving(tmp_path) as server, httpx.Client(base_url=server.url, timeout=30) as client:
        assert said(client) == "old"
        template.write_text("new" + TEMPLATE, "utf-8")
        assert said(client) == "old"
        assert client.post(f"{MODELS}/unload").json()["unloaded"]
        if loaded_by == "an operator":
            client.post(f"{MODELS}/load").raise_for_status()
        assert said(client) == "new"


def test_what_was_read_of_other_files_is_forgotten(tmp_path: Path) -> None:
    folder = add_model(tmp_path, "fake")
    ledger = Ledger({"ram": 1 << 30})

    async def read() -> None:
        texts = Texts(RequestPool(ledger, 1 << 20, 1 << 26, 1.0), Baseline(ledger, "server", 0))
        card = read_card(folder)
        old = weakref.ref((await texts.of(card, file_marks(folder))).tokenizer)
        assert (await texts.of(card, file_marks(folder))).tokenizer is old()
        (folder / "chat_template.jinja").write_text("{{ messages }}", "utf-8")
        new = await texts.of(card, file_marks(folder))
        assert new.tokenizer.chat_template == "{{ messages }}"
        assert old() is None

    asyncio.run(read())


def test_a_file_that_only_looks_the_same_has_other_marks(tmp_path: Path) -> None:
    folder = add_model(tmp_path, "fake")
    (folder / "additional_chat_templates").mkdir()
    for name in ("tokenizer.json", "additional_chat_templates/rag.jinja"):
        file = folder / name
        file.write_text("aaaa", "utf-8")
        before, times = file_marks(folder), file.stat()
        copy = folder / "copy"
        copy.write_text("bbbb", "utf-8")
        os.utime(copy, ns=(times.st_atime_ns, times.st_mtime_ns))
        assert file_marks(folder) == before
        copy.rename(file)
        assert file_marks(folder) != before
