"""Fill-in-the-middle prompts: what stands before and behind a gap, in the marks a model knows.

Which marks those are is read from the vocabulary. Knows no protocol.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from penstock.errors import BadRequest

if TYPE_CHECKING:
    from penstock.text.tokenizer import Tokenizer


class InfillMarks(NamedTuple):
    """What a family writes before the text on the left, before that on the right, and behind both.
    Where the right comes first, `left` stands between them."""

    left: str
    right: str
    end: str = ""
    right_first: bool = False

    def prompt(self, prefix: str, suffix: str) -> str:
        """The text that the model continues with what belongs into the gap."""
        before, behind = f"{self.left}{prefix}", f"{self.right}{suffix}"
        return f"{behind}{before}" if self.right_first else f"{before}{behind}{self.end}"


_FAMILIES = (
    InfillMarks("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, Granite, Gemma
    InfillMarks("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    InfillMarks("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    InfillMarks("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001 - DeepSeek
    InfillMarks("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    InfillMarks("[PREFIX]", "[SUFFIX]", right_first=True),  # Codestral
)
# Ends of a text that a chat model does not count among its own.
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "<|file_sep|>", "<|file_separator|>", "▁<EOT>")


def infill_marks(tokenizer: Tokenizer) -> InfillMarks | None:
    """The marks that the vocabulary has; None: the model was not made for it."""
    return next((marks for marks in _FAMILIES if _ids(tokenizer, _tokens(marks))), None)


def infill_form(tokenizer: Tokenizer, param: str) -> tuple[InfillMarks, list[int]]:
    """How the prompt of a gap is written, and the tokens that end what is put there."""
    marks = infill_marks(tokenizer)
    if marks is None:
        raise BadRequest(
            f"`{param}`: this model has no tokens for filling in the middle; leave it out or use a "
            "model that was made for it (a coder model, usually).",
            param=param,
        )
    known = (tokenizer.token_id(end) for end in (*_tokens(marks), *_ENDS))
    return marks, [token for token in known if token is not None]


def _tokens(marks: InfillMarks) -> list[str]:
    return [mark for mark in (marks.left, marks.right, marks.end) if mark]


def _ids(tokenizer: Tokenizer, tokens: list[str]) -> bool:
    return all(tokenizer.token_id(token) is not None for token in tokens)
