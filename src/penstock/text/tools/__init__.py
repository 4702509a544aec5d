"""How models write calls of tools: one dialect a file, chosen by the model's chat template.

A dialect has two sides. `parse` reads calls out of the model's text as it comes; `calls` is the
same as a grammar, by which a call can be enforced. Neither knows requests or protocols.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.text.tools.deepseek import DeepSeek
from penstock.text.tools.gemma import Gemma
from penstock.text.tools.glm import Glm
from penstock.text.tools.harmony import Harmony
from penstock.text.tools.hermes import Hermes
from penstock.text.tools.kimi import Kimi
from penstock.text.tools.llama import LlamaJson
from penstock.text.tools.minimax import MiniMax
from penstock.text.tools.mistral import Mistral
from penstock.text.tools.pythonic import Pythonic
from penstock.text.tools.qwen_coder import QwenCoder

if TYPE_CHECKING:
    from penstock.text.tools.dialect import Dialect

# Those with the most telling marks first; Hermes is also what a model without any is told to write.
DIALECTS: tuple[Dialect, ...] = (
    Harmony(),
    DeepSeek(),
    Kimi(),
    MiniMax(),
    Mistral(),
    Gemma(),
    Glm(),
    QwenCoder(),
    Hermes(),
    Pythonic(),
    LlamaJson(),
)


def by_name(name: str) -> Dialect | None:
    """The dialect that a setting names."""
    return next((dialect for dialect in DIALECTS if dialect.name == name), None)


def chosen_for(template: str) -> Dialect | None:
    """The dialect that a chat template teaches; None when it teaches none."""
    return next((dialect for dialect in DIALECTS if dialect.taught_by(template)), None)
