"""How much a model is to think, by the names that OpenAI's and other servers have for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Protocol, TypeVar

from msgspec import Meta

from penstock.errors import BadRequest
from penstock.server.fields.generation import UNLIMITED
from penstock.server.fields.whole_numbers import Limit, WholeNumbers
from penstock.text.chat_format import Thinking

if TYPE_CHECKING:
    from collections.abc import Mapping

Value = TypeVar("Value")
Effort = Annotated[str, Meta(max_length=64)]


class Reasoning(WholeNumbers):
    """`reasoning`, of OpenAI's responses and of OpenRouter."""

    effort: Effort | None = None
    summary: str | None = None
    enabled: bool | None = None
    exclude: bool | None = None  # think, but leave it out of the answer
    max_tokens: Limit | None = None


class ThinkingObject(WholeNumbers):
    """`thinking`, as Anthropic has it."""

    type: str | None = None  # only "disabled" means that there is to be none
    budget_tokens: Limit | None = None

    @property
    def enabled(self) -> bool | None:
        """Whether the model is to think."""
        return None if self.type in (None, "auto", "adaptive") else self.type != "disabled"


class ReasoningFields(Protocol):
    """The fields of a body. What two of them say must be the same."""

    include_reasoning: bool | None
    reasoning: Reasoning | None
    reasoning_effort: Effort | None
    enable_thinking: bool | None  # Qwen
    thinking: bool | ThinkingObject | None
    thinking_budget: Limit | None
    thinking_token_budget: Limit | None  # vLLM
    thinking_budget_tokens: Limit | None  # llama.cpp
    reasoning_budget: Limit | None  # llama.cpp


def wanted_thinking(fields: ReasoningFields) -> Thinking:
    """How much the model is to think."""
    reasoning = fields.reasoning or Reasoning()
    said = fields.thinking
    nested = said if isinstance(said, ThinkingObject) else ThinkingObject()
    switches = {
        "enable_thinking": fields.enable_thinking,
        "thinking": said if isinstance(said, bool) else nested.enabled,
        "reasoning.enabled": reasoning.enabled,
    }
    budgets = {
        "thinking_budget": fields.thinking_budget,
        "thinking_token_budget": fields.thinking_token_budget,
        "thinking_budget_tokens": fields.thinking_budget_tokens,
        "reasoning_budget": fields.reasoning_budget,
        "thinking.budget_tokens": nested.budget_tokens,
        "reasoning.max_tokens": reasoning.max_tokens,
    }
    efforts = {"reasoning_effort": fields.reasoning_effort, "reasoning.effort": reasoning.effort}
    budget = _one(budgets)
    return Thinking(_one(switches), _one(efforts), None if budget == UNLIMITED else budget)


def shows_reasoning(fields: ReasoningFields) -> bool:
    """Whether it is part of the answer."""
    excluded = fields.reasoning is not None and fields.reasoning.exclude
    return fields.include_reasoning is not False and not excluded


def _one(said: Mapping[str, Value | None]) -> Value | None:
    """What was said, by whichever name; refuses two different things."""
    kept: Value | None = None
    first = ""
    for name, value in said.items():
        if value is None:
            continue
        if kept is not None and value != kept:
            raise BadRequest(f"`{name}` and `{first}` say different things.", param=name)
        kept, first = value, name
    return kept
