"""Which form of content a chat template takes, found by trying."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.text.content_form import ContentForm
from penstock.text.template import ChatTemplate

PARTS = (
    "{% for m in messages %}{% for p in m['content'] %}{% if p['type'] == 'text' %}{{ p['text'] }}"
    "{% elif p['type'] == 'image' %}<image>{% endif %}{% endfor %}{% endfor %}"
)
TEXT = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}{% endfor %}"
PRINTED = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
BOTH = (
    "{% for m in messages %}{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for p in m['content'] %}{{ p['text'] if p['type'] == 'text' else '<image>' }}{% endfor %}"
    "{% endif %}{% endfor %}"
)
CONTENT: list[dict[str, Any]] = [{"type": "image"}, {"type": "text", "text": "hello"}]


@pytest.mark.parametrize(
    ("source", "text", "parts"),
    [(PARTS, False, True), (TEXT, True, False), (PRINTED, True, False), (BOTH, True, True)],
)
def test_templates_are_shown_what_they_take(source: str, text: bool, parts: bool) -> None:
    template = ChatTemplate(source)
    form = ContentForm.of(template)
    assert (form.text, form.parts) == (text, parts)
    plain: dict[str, Any] = {"role": "user", "content": "plain"}
    messages = [{"role": "user", "content": CONTENT}, plain]
    written = template.render(form.shaped(messages, "<image>"))
    assert (
        written.replace("user: ", "") == ("<image>hello" if parts else "<image>\nhello") + "plain"
    )
