"""Models on the page: how far a load is, fetching and quantising them, and folders that are bad."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx
import pytest
from huggingface_hub import constants

from penstock import shapes
from penstock.testing.fake_hub import FakeHub, playing_hub
from penstock.testing.fake_server import add_model, serving
from penstock.testing.fake_worker import FakeModel
from penstock.testing.model_folders import LLAMA, llama_tensors, write_model
from penstock.testing.screenshots import faults

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from penstock.testing.browser import Tab


# Weights of 4 MiB, of which the hub sends the half.
PLAIN = {**LLAMA, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 1 << 13}


def plain_model(folder: Path) -> Path:
    """Weights, not a shape that is filled with random numbers."""
    folder.mkdir(parents=True)
    shapes.write_folder("tiny-llama", folder)
    (folder / "penstock.json").unlink()
    return write_model(folder, PLAIN, llama_tensors(PLAIN))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("models")
    add_model(home, "slow-to-load", FakeModel(load_s=2))
    plain_model(home / "models" / "plain")
    (home / "models" / "half").mkdir()
    (home / "models" / "half" / "config.json").write_text('{"architectures": ["Nobody"]}')
    return home


@pytest.fixture(scope="module")
def url(home: Path) -> Iterator[str]:
    with serving(home) as server:
        yield server.url


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A hub whose weights stop coming half-way."""
    folder = plain_model(tmp_path / "repository")
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    with playing_hub(files) as address:
        FakeHub.stalls.clear()
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield


def tasks(url: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = httpx.get(f"{url}/admin/api/tasks").json()
    return rows


def test_a_load_says_how_far_it_is(url: str, open_tab: Callable[..., Tab]) -> None:
    page = open_tab(url).show("models")
    card = page.locator('[data-model="slow-to-load"]')
    card.get_by_role("button", name="Load", exact=True).click()
    card.get_by_text("Loading the model: reading the weights: 0 B of 100 B").wait_for()
    assert card.locator("progress").get_attribute("max") == "100"
    card.locator('[data-state="ready"]').wait_for()
    assert card.locator("progress").count() == 0


def test_a_load_is_cancelled(url: str, open_tab: Callable[..., Tab]) -> None:
    page = open_tab(url, expected=("503", "409", "499")).show("models")
    card = page.locator('[data-model="slow-to-load"]')
    if card.get_by_role("button", name="Unload").count():
        card.get_by_role("button", name="Unload").click()
    card.get_by_role("button", name="Load", exact=True).click()
    card.locator("progress").wait_for()
    card.get_by_role("button", name="Cancel").click()
    card.locator('[data-state="absent"]').wait_for()


def test_a_load_goes_on_when_the_page_is_closed(url: str, open_tab: Callable[..., Tab]) -> None:
    httpx.post(f"{url}/admin/api/models/slow-to-load/unload").raise_for_status()
    page = open_tab(url).show("models")
    card = page.locator('[data-model="slow-to-load"]')
    card.get_by_role("button", name="Load", exact=True).click()
    card.get_by_text("reading the weights").wait_for()
    page.reload()
    card.locator('[data-state="ready"]').wait_for()


def test_a_folder_that_cannot_be_served_says_why(url: str, open_tab: Callable[..., Tab]) -> None:
    page = open_tab(url).show("models")
    [sentence] = httpx.get(f"{url}/admin/api/catalog").json()["problems"].values()
    page.locator('[data-problem="half"]', has_text=sentence).wait_for()


def test_a_model_is_fetched_and_the_fetching_cancelled(
    url: str, hub: None, open_tab: Callable[..., Tab]
) -> None:
    page = open_tab(url, expected=("400",)).show("models")
    field = page.get_by_label("Source")
    field.fill("hf:org/name")
    page.get_by_role("button", name="Fetch").click()
    running = page.locator('[data-task="running"]', has_text="hf:org/name")
    running.get_by_text("download: ").wait_for()
    [row] = tasks(url)
    assert 0 < row["done"] < row["total"]
    bar = running.locator("progress")
    assert 0 < float(bar.get_attribute("value") or 0) < float(bar.get_attribute("max") or 0)
    running.get_by_role("button", name="Cancel").click()
    running.get_by_text("Cancelling").wait_for()
    FakeHub.stalls.set()
    page.locator('[data-task="cancelled"]', has_text="hf:org/name").wait_for()
    assert page.locator('[data-model="org/name"]').count() == 0

    field.fill("hf:org/name")  # it goes on where it was
    page.get_by_role("button", name="Fetch").click()
    page.locator('[data-task="done"]', has_text="fetched: org/name").wait_for()
    page.locator('[data-model="org/name"] [data-state="absent"]').wait_for()

    field.fill("somewhere")
    page.get_by_role("button", name="Fetch").click()
    page.locator(".notice.bad", has_text="`source` is 'somewhere'").wait_for()


@pytest.mark.parametrize("what", ["Quantise", "Settings", "Will it fit?"])
def test_what_is_below_a_model_fits_on_a_phone(
    url: str, open_tab: Callable[..., Tab], what: str
) -> None:
    page = open_tab(url, width=390).show("models")
    card = page.locator('[data-model="plain"]')
    card.get_by_role("button", name=what).click()
    card.locator(".details :is(select, input, .verdict)").first.wait_for()
    assert faults(page) == []


def test_a_model_is_quantised(url: str, open_tab: Callable[..., Tab]) -> None:
    tab = open_tab(url)
    tab.page.context.set_default_timeout(60_000)
    page = tab.show("models")
    shape = page.locator('[data-model="slow-to-load"]')
    shape.wait_for()
    assert shape.get_by_role("button", name="Quantise").count() == 0  # it has no weights on disk
    card = page.locator('[data-model="plain"]')
    card.get_by_role("button", name="Quantise").click()
    card.get_by_label("Format").select_option("int8")
    card.get_by_role("button", name="Begin").click()
    card.get_by_role("button", name="Quantising").wait_for()
    card.locator('[data-task="done"]', has_text="made: plain-int8").wait_for()
    made = page.locator('[data-model="plain-int8"]')
    made.wait_for()
    assert made.get_by_role("button", name="Quantise").count() == 0  # it is quantised
