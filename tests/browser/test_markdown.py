"""What a model writes becomes text, lists, tables and code, and never markup."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from playwright.sync_api import Browser, Page

RENDER = """async (text) => {
  const { markdown } = await import(document.baseURI + "web/js/markdown.js");
  const root = document.createElement("div");
  root.append(...markdown(text));
  return root.innerHTML;
}"""


@pytest.fixture(scope="module")
def render(browser: Browser, open_url: str) -> Iterator[Callable[[str], str]]:
    page: Page = browser.new_page()
    page.goto(f"{open_url}/")

    def call(text: str) -> str:
        rendered: Any = page.evaluate(RENDER, text)
        return str(rendered)

    yield call
    page.close()


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("one\ntwo\n\nthree", "<p>one\ntwo</p><p>three</p>"),
        ("# A *b*", "<h3>A <em>b</em></h3>"),
        ("**a** `b*c*` ~~d~~", "<p><strong>a</strong> <code>b*c*</code> <del>d</del></p>"),
        ("snake_case_name and 2 * 3 * 4", "<p>snake_case_name and 2 * 3 * 4</p>"),
        ("- a\n- b\n  - c\n", "<ul><li>a</li><li>b<ul><li>c</li></ul></li></ul>"),
        ("3. a\n4. b", '<ol start="3"><li>a</li><li>b</li></ol>'),
        ("> a\n> b", "<blockquote><p>a\nb</p></blockquote>"),
        ("a\n***\nb", "<p>a</p><hr><p>b</p>"),
    ],
)
def test_blocks(render: Callable[[str], str], text: str, wanted: str) -> None:
    assert render(text) == wanted


def test_tables_and_code(render: Callable[[str], str]) -> None:
    table = render("| a | b |\n|---|--:|\n| 1 | `2` |")
    assert "<th>a</th><th>b</th>" in table
    assert "<td>1</td><td><code>2</code></td>" in table
    code = render("```python\nif a < b: # less\n    pass\n```")
    assert "<span>python</span>" in code
    assert '<span class="c-word">if</span> a &lt; b: <span class="c-note"># less</span>' in code
    assert "<pre" in render("```\nan answer that is cut off")


@pytest.mark.parametrize(
    "text",
    [
        "<script>alert(1)</script>",
        "<img src=x onerror=alert(1)>",
        "[a](javascript:alert(1))",
        "[a](data:text/html,<script>alert(1)</script>)",
        "![a](https://elsewhere.example/pixel.png)",
        '**<b onclick="alert(1)">**',
        "```\n</code></pre><script>alert(1)</script>\n```",
        "[<script>](https://a.example)",
        '[a](https://a.example"onmouseover="alert(1))',
    ],
)
def test_nothing_becomes_markup(render: Callable[[str], str], browser: Browser, text: str) -> None:
    page = browser.new_page()
    page.set_content(render(text))
    tags = page.evaluate("[...document.body.querySelectorAll('*')].map((n) => n.localName)")
    assert set(tags) <= {"p", "a", "strong", "div", "span", "pre", "code", "button", "svg", "path"}
    links = page.evaluate("[...document.querySelectorAll('a')].map((n) => n.protocol + n.rel)")
    assert set(links) <= {"https:noopener noreferrer nofollow"}
    handlers = page.evaluate(
        "[...document.querySelectorAll('*')].flatMap((n) => n.getAttributeNames())"
        ".filter((name) => name.startsWith('on'))"
    )
    assert handlers == []
    page.close()


def test_hostile_texts_do_not_take_long(render: Callable[[str], str]) -> None:
    for text in (
        "**" * 5000,
        "[" * 10_000,
        "> " * 5000 + "a",
        "`" * 9999,
        "- " * 5000,
        "_a" * 9000,
    ):
        assert render(text)
