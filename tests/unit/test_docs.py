"""What the documentation names is there: links, settings, tests, metrics, events, error codes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock import config, errors
from penstock.config.knobs import knobs
from penstock.config.settings import SECTIONS
from penstock.memory.ledger import Purpose
from penstock.testing import config_page, module_page

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "benchmarks").glob("*.md")),
]
MODULES = ROOT / "docs" / "modules.md"  # names modules, which look like settings
OPERATIONS = (ROOT / "docs" / "operations.md").read_text("utf-8")
SOURCES = {path: path.read_text("utf-8") for path in (ROOT / "src").rglob("*.py")}


def quoted(pattern: str, text: str) -> set[str]:
    """What stands in back-quotes and looks like this."""
    return set(re.findall(rf"`({pattern})`", text))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text("utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page != MODULES],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_settings_exist(page: Path) -> None:
    known = {f"{name}.{key}" for name, section in SECTIONS.items() for key in knobs(section)}
    sections = "|".join(SECTIONS)
    named = quoted(rf"(?:{sections})\.[a-z_]+", page.read_text("utf-8"))
    assert {name for name in named - known if not name.endswith((".md", ".py"))} == set()


def test_tests_that_are_named_exist() -> None:
    page = (ROOT / "docs" / "memory-internals.md").read_text("utf-8")
    tests = "".join(path.read_text("utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name in quoted(r"test_\w+", page) if f"def {name}(" not in tests] == []
    assert [path for path in quoted(r"tests/\S+\.py", page) if not (ROOT / path).exists()] == []


def test_every_error_code_is_explained() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    codes = {kind.code for kind in kinds if issubclass(kind, errors.PenstockError)}
    assert (codes | {config.ConfigError.code}) - quoted(r"\w+", OPERATIONS) == set()


def test_every_event_is_explained() -> None:
    added = r'(?:events\.add|self\._note)\(\s*"([a-z ]+)"(?: if [\w.]+ else "([a-z ]+)")?'
    found = {kind for text in SOURCES.values() for pair in re.findall(added, text) for kind in pair}
    assert len(found) > 20
    assert found - {""} - quoted(r"[a-z ]+", OPERATIONS) == set()


def test_every_metric_is_explained() -> None:
    [source] = [text for path, text in SOURCES.items() if path.name == "metrics.py"]
    metrics = set(re.findall(r'"(penstock_\w+)"', source))
    assert metrics - quoted(r"penstock_\w+", OPERATIONS) == set()
    named = {name.removesuffix("_total") for name in re.findall(r"penstock_\w+", OPERATIONS)}
    assert named <= metrics


def test_every_purpose_is_explained() -> None:
    page = (ROOT / "docs" / "memory.md").read_text("utf-8")
    shown = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    assert set(shown) == {purpose.value for purpose in Purpose}


def test_every_module_has_its_line() -> None:
    """`python -m penstock.testing.module_page` writes the page."""
    assert module_page.PAGE.read_text("utf-8") == module_page.render()


def test_every_setting_has_its_line() -> None:
    """`python -m penstock.testing.config_page` writes the page."""
    assert config_page.PAGE.read_text("utf-8") == config_page.render()
