"""Looking for models by name: who waits for whom when anybody may send any name."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import pytest

from penstock.catalog import Card, Catalog
from penstock.errors import Overloaded, UnknownModel
from penstock.server.pipeline import lookups
from penstock.server.pipeline.lookups import MAX_UNKNOWN, LookUps
from penstock.testing.fake_server import add_model

if TYPE_CHECKING:
    from pathlib import Path


class SlowCatalog(Catalog):
    """A disk that answers when it is told to."""

    def __init__(self, home: Path) -> None:
        super().__init__([home / "models"])
        self.scan()
        self.answers = threading.Event()
        self.answers.set()
        self.asked: list[str] = []

    def find(self, name: str) -> Card:
        self.asked.append(name)
        self.answers.wait(20)
        return super().find(name)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    for name in ("loaded", "other"):
        add_model(home, name)
    return home


def test_a_loaded_model_waits_for_no_look_up(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookups, "_FOUND_S", 0.0)

    async def run() -> None:
        catalog = SlowCatalog(home)
        models = LookUps(catalog, lambda name: name == "loaded")
        first = await models.card("loaded")
        catalog.answers.clear()
        other = asyncio.ensure_future(models.card("other"))
        for _ in range(3):
            assert await asyncio.wait_for(models.card("loaded"), 10) is first
        assert not other.done()
        catalog.answers.set()
        assert (await other).name == "other"
        await asyncio.gather(*models._again)
        assert catalog.asked == ["loaded", "other", "loaded"]  # it was looked for again, once

    asyncio.run(run())


def test_of_names_that_no_model_has_only_a_few_wait(home: Path) -> None:
    async def run() -> None:
        catalog = SlowCatalog(home)
        models = LookUps(catalog, lambda _: False)
        catalog.answers.clear()
        waiting = [asyncio.ensure_future(models.card(f"no {n}")) for n in range(MAX_UNKNOWN)]
        await asyncio.sleep(0)
        waiting[1].cancel()  # who leaves makes no room: its look-up is in line
        with pytest.raises(Overloaded):
            await models.card("one more")
        known = asyncio.ensure_future(models.card("other"))
        again = [asyncio.ensure_future(models.card("other")) for _ in range(50)]
        await asyncio.sleep(0)
        catalog.answers.set()
        assert {(await one).name for one in (known, *again)} == {"other"}
        ended = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(error) for error in ended].count(UnknownModel) == MAX_UNKNOWN - 1
        assert catalog.asked.count("other") == 1

    asyncio.run(run())


def test_what_is_not_there_is_not_looked_for_again_at_once(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        catalog = SlowCatalog(home)
        models = LookUps(catalog, lambda _: False)
        for _ in range(3):
            with pytest.raises(UnknownModel, match="Known models: loaded, other"):
                await models.card("new")
        assert catalog.asked == ["new"]
        models.expect_new()
        with pytest.raises(UnknownModel):
            await models.card("new")
        monkeypatch.setattr(lookups, "_MISSING_S", 0.0)
        with pytest.raises(UnknownModel):
            await models.card("new")
        assert catalog.asked == ["new"] * 3

    asyncio.run(run())


def test_a_loaded_model_whose_folder_is_gone_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookups, "_FOUND_S", 0.0)
    folder = add_model(tmp_path, "fake")

    async def run() -> None:
        catalog = SlowCatalog(tmp_path)
        models = LookUps(catalog, lambda _: True)
        card = await models.card("fake")
        folder.rename(tmp_path / "elsewhere")
        assert await models.card("fake") is card
        await asyncio.gather(*models._again)
        with pytest.raises(UnknownModel):
            await models.card("fake")
        assert models.files(card)

    asyncio.run(run())
