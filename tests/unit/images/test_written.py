"""Images as clients write them."""

from __future__ import annotations

import base64

import pytest

from penstock.images import BadImage, from_base64, from_url

DATA = b"\x89PNG and so on"
CODE = base64.b64encode(DATA).decode()


@pytest.mark.parametrize(
    "url",
    [
        f"data:image/png;base64,{CODE}",
        f"DATA:image/JPEG;charset=utf-8;base64,{CODE}",
        f"data:;base64,{CODE}",
        f"data:application/octet-stream;base64,{CODE}",
        f"data:image/webp;base64,{CODE[:5]}\n{CODE[5:]}",
    ],
)
def test_data_urls(url: str) -> None:
    assert from_url(url) == DATA


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("https://example.com/a.png", r"address \(https:…\); this server fetches nothing"),
        ("ftp:" + "x" * 1000, "fetches nothing"),
        (f"data:text/plain;base64,{CODE}", "'text/plain', which is no image"),
        (f"data:image/png,{CODE}", "not in base64"),
        ("data:image/png;base64", "not in base64"),
        ("data:image/png;base64,", "empty"),
        ("data:image/png;base64,A", "not valid base64"),
        ("data:image/png;base64,ÄÖ", "not valid base64"),
    ],
)
def test_other_addresses(url: str, words: str) -> None:
    with pytest.raises(BadImage, match=words) as refusal:
        from_url(url)
    assert len(str(refusal.value)) < 300


def test_base64_alone() -> None:
    assert from_base64(CODE) == DATA
