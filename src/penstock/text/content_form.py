"""How a chat template takes the content of a message: as text, as a list of parts, or both.

Templates of models that see were written for one or the other, and what they make of the wrong one
is not an error but nonsense: letters one by one, or a list as Python prints it. So each is tried
once with a word.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.errors import BadRequest

if TYPE_CHECKING:
    from penstock.text.template import ChatTemplate

_WORD = "probeword"


@dataclass(frozen=True, slots=True)
class ContentForm:
    """What a template takes."""

    text: bool = True
    parts: bool = False

    @classmethod
    def of(cls, template: ChatTemplate) -> ContentForm:
        """By trying; blocking."""
        text = _WORD in _rendered(template, _WORD)
        shown = _rendered(template, [{"type": "text", "text": _WORD}])
        return cls(text, _WORD in shown and "'type'" not in shown)

    def shaped(self, messages: list[dict[str, Any]], image: str) -> list[dict[str, Any]]:
        """The messages so that the template understands them; `image` is what stands for an image
        in a text."""
        return [self._shaped(message, image) for message in messages]

    def _shaped(self, message: dict[str, Any], image: str) -> dict[str, Any]:
        content = message.get("content")
        if isinstance(content, str) and self.parts and not self.text:
            return {**message, "content": [{"type": "text", "text": content}]}
        if isinstance(content, list) and not self.parts:
            words = (image if part["type"] == "image" else part["text"] for part in content)
            return {**message, "content": "\n".join(words)}
        return message


def _rendered(template: ChatTemplate, content: object) -> str:
    try:
        return template.render([{"role": "user", "content": content}])
    except BadRequest:
        return ""
