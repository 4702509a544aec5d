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
from penstock.memory.bookings import ProcessBooking
from penstock.memory.domains import RAM
from penstock.memory.ledger import Ledger, Purpose
from penstock.server.pipeline import lookups
from penstock.server.pipeline.model_texts import Texts
from penstock.server.residency.memory_arbiter import MemoryArbiter
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
        monkeypatch.setattr(lookups, "_FOUND_S", 0.0)
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
    ledger = Ledger({RAM: 1 << 30})

    async def read() -> None:
        texts = Texts(
            ledger, MemoryArbiter(ledger, dict, 1.0), ProcessBooking(ledger, "server", 0), 1.0
        )
        card = read_card(folder)
        forgotten, loop = asyncio.Event(), asyncio.get_running_loop()
        old = weakref.ref(
            (await texts.of(card, file_marks(folder))).tokenizer,
            lambda _: loop.call_soon_threadsafe(forgotten.set),
        )
        assert (await texts.of(card, file_marks(folder))).tokenizer is old()
        (folder / "chat_template.jinja").write_text("{{ messages }}", "utf-8")
        new = await texts.of(card, file_marks(folder))
        assert new.tokenizer.chat_template == "{{ messages }}"
        # The thread that read it may not have been given the core since, and still refers to it.
        await asyncio.wait_for(forgotten.wait(), 10)

    asyncio.run(read())


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_those_who_wait_for_memory_for_a_tokenizer_are_counted(tmp_path: Path) -> None:
    folder = add_model(tmp_path, "fake")
    card, files = read_card(folder), file_marks(folder)
    ledger = Ledger({RAM: 1 << 30})

    async def read() -> None:
        arbiter = MemoryArbiter(ledger, dict, 1.0)
        texts = Texts(ledger, arbiter, ProcessBooking(ledger, "server", 0), 30.0)
        full = ledger.reserve("somebody", {(RAM, Purpose.KV): 1 << 30})
        readers = [asyncio.create_task(texts.of(card, files)) for _ in range(3)]
        await turns()
        assert texts.waiting == {"fake": 3}
        readers.pop().cancel()
        await turns()
        assert texts.waiting == {"fake": 2}
        full.release()
        arbiter.wake()
        async with asyncio.timeout(30):
            await asyncio.gather(*readers)
        assert texts.waiting == {}

    asyncio.run(read())


def test_a_read_does_not_wait_for_the_requests_that_wait_for_it(tmp_path: Path) -> None:
    folder = add_model(tmp_path, "fake")
    tokenizer = folder / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text("utf-8") + " " * (1 << 20), "utf-8")
    with (
        serving(tmp_path, server_max_bodies=1 << 20) as server,
        httpx.Client(base_url=server.url, timeout=10) as client,
    ):
        assert said(client)


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
