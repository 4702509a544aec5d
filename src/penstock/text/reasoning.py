"""What a model thinks before it answers, and the marks it puts around that.

Only at the beginning of an answer, or where the prompt has opened it, is a mark a mark: behind
that the same letters are text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.text.parts import ReasoningDelta, TextDelta

if TYPE_CHECKING:
    from penstock.text.parsing import Parse, Source
    from penstock.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Tags:
    """The marks of one family."""

    open: str
    close: str

    def opened_by(self, prompt: str) -> bool:
        """Whether the answer begins inside."""
        return prompt.rstrip().endswith(self.open.rstrip())


# DeepSeek, Qwen, GLM, Kimi, MiniMax and many more; Magistral; Seed; Cohere; Gemma 4.
FAMILIES = (
    Tags("<think>", "</think>"),
    Tags("[THINK]", "[/THINK]"),
    Tags("<seed:think>", "</seed:think>"),
    Tags("<|START_THINKING|>", "<|END_THINKING|>"),
    Tags("<|channel>thought\n", "<channel|>"),
)


def tags_of(template: str, tokenizer: Tokenizer) -> Tags | None:
    """The marks that a model uses, by its template or its vocabulary; None: it does not think."""
    for tags in FAMILIES:
        if tags.close in template or tokenizer.token_id(tags.close) is not None:
            return tags
    return None


def read_reasoning(source: Source, tags: Tags, *, opened: bool) -> Parse[None]:
    """The reasoning, if there is any, and the space behind it."""
    if not opened:
        source.mark()
        yield from source.space()
        if not (yield from source.accept(tags.open)):
            yield TextDelta(source.since_mark())
            return
        source.unmark()
    else:
        # Models that were not told it is open already open it again.
        source.mark()
        yield from source.space()
        if (yield from source.accept(tags.open)):
            source.unmark()
        else:
            source.rewind()
    source.begin_reasoning()
    yield from source.space()
    yield from source.until(ReasoningDelta, tags.close)
    source.end_reasoning()
    yield from source.space()
