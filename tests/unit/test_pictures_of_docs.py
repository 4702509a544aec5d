"""The pictures of the page in the docs: those that `make screenshots` makes, all of them small."""

from __future__ import annotations

import re
from pathlib import Path

from penstock.testing.screenshots import MOST_BYTES, PAGES, SHOWN

ROOT = Path(__file__).parents[2]


def test_the_docs_show_every_picture_and_no_other() -> None:
    text = (ROOT / "docs" / "dashboard.md").read_text("utf-8")
    shown = re.findall(r"\(images/([^)]+)\)", text)
    assert sorted(shown) == sorted(f"{name}.webp" for name in SHOWN)
    assert {name.split("-")[0] for name in SHOWN} == set(PAGES)
    kept = {path.name: path.stat().st_size for path in (ROOT / "docs" / "images").iterdir()}
    assert sorted(kept) == sorted(shown)
    assert max(kept.values()) <= MOST_BYTES
    [first] = re.findall(r"\(docs/images/([^)]+)\)", (ROOT / "README.md").read_text("utf-8"))
    assert first in kept


def test_the_docs_name_every_page() -> None:
    text = (ROOT / "docs" / "dashboard.md").read_text("utf-8")
    rows = re.findall(r"^\| ([A-Z]\w+) \|", text, re.MULTILINE)
    assert [row.lower() for row in rows] == list(PAGES)
    assert f"`1` to `{len(PAGES)}`" in text
