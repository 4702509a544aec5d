"""The `template` of an Ollama request: the part of Go's templates that a single prompt needs.

`{{ .System }}`, `{{ .Prompt }}`, `{{ .Suffix }}`, `{{ .Response }}` (where the answer begins),
`if`, `if not`, `else` and `end`, with `-` to trim. Anything else is refused by name. One pass over
the template: nothing is matched twice, and values are not copied.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.errors import BadRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

_VARIABLES = (".System", ".Prompt", ".Suffix", ".Response")
MAX_TEMPLATE_CHARACTERS = 1 << 16


def template_pieces(template: str, **values: str) -> list[str]:
    """What the template writes before the answer; joined, it may be far longer than the values."""
    if len(template) > MAX_TEMPLATE_CHARACTERS:
        raise BadRequest(
            f"`template` has {len(template)} characters; at most {MAX_TEMPLATE_CHARACTERS} are "
            "allowed.",
            param="template",
        )
    rendering = _Rendering(values)
    for text, action in _parts(template):
        rendering.write(text)
        if action is not None and rendering.act(action):
            return rendering.written
    if rendering.open:
        raise _refused("an `if` has no `end`")
    return rendering.written


def _parts(template: str) -> Iterator[tuple[str, str | None]]:
    """Each text, and the action behind it."""
    position, trims = 0, False
    while (begin := template.find("{{", position)) >= 0:
        end = template.find("}}", begin + 2)
        if end < 0:
            raise _refused("a `{{` has no `}}`")
        text, action = template[position:begin], template[begin + 2 : end]
        if trims:
            text = text.lstrip()
        if action.startswith("-"):
            text, action = text.rstrip(), action[1:]
        trims = action.endswith("-")
        position = end + 2
        yield text, action.removesuffix("-").strip()
    rest = template[position:]
    yield rest.lstrip() if trims else rest, None


@dataclass(slots=True)
class _Rendering:
    values: dict[str, str]
    written: list[str] = field(default_factory=list)
    open: list[bool] = field(default_factory=list)  # whether each `if` around us holds
    false: int = 0  # of them do not

    def write(self, text: str) -> None:
        if text and not self.false:
            self.written.append(text)

    def act(self, action: str) -> bool:
        """Do what an action says; True where the answer begins."""
        match action.split():
            case [".Response"]:
                return not self.false
            case [variable] if variable in _VARIABLES:
                self.write(self.values.get(variable[1:], ""))
            case ["if", *negation, variable] if negation in ([], ["not"]) and (
                variable in _VARIABLES
            ):
                # The answer is not there yet, but what is put before it is.
                known = variable == ".Response" or bool(self.values.get(variable[1:]))
                self._begin(known is not bool(negation))
            case ["else"] if self.open:
                self._begin(not self._end())
            case ["end"] if self.open:
                self._end()
            case _ if not (action.startswith("/*") and action.endswith("*/")):
                raise _refused(f"{action[:80]!r} is not among them")
        return False

    def _begin(self, holds: bool) -> None:
        self.open.append(holds)
        self.false += not holds

    def _end(self) -> bool:
        holds = self.open.pop()
        self.false -= not holds
        return holds


def _refused(why: str) -> BadRequest:
    return BadRequest(
        "`template` can have .System, .Prompt, .Suffix, .Response, if, if not, else and end; "
        f"{why}. Without it the model's own template is used.",
        param="template",
    )
