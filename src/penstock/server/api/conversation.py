"""One conversation to be continued, whatever protocol it came in, and what becomes of it.

Every protocol turns its body into a `Conversation`; `prepare` renders and tokenises it, settles
how the answer is held to a form and read, and refuses what needs no loaded model to be refused.
Knows no protocol's field names beyond those that a refusal points at.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock.errors import BadRequest
from penstock.server.api.fields import GenerationFields, refuse_conflicts
from penstock.server.api.front_door import FrontDoor
from penstock.server.api.generation import AnswerForm, Job
from penstock.server.api.limits import check_nesting
from penstock.text.manner import Thinking, ToolUse

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.catalog import Card
    from penstock.server.api.exchange import Exchange
    from penstock.server.api.services import Services, Text
    from penstock.text.grammar import Format


@dataclass(frozen=True, slots=True)
class Conversation:
    """What the client said, and what it wants to hear."""

    fields: GenerationFields
    messages: list[dict[str, Any]]  # as templates expect them
    max_tokens: int | None = None  # of the answer; None: as many as there is room for
    logprobs: int | None = None
    tools: ToolUse = field(default_factory=ToolUse)
    format: Format | None = None
    thinking: Thinking = field(default_factory=Thinking)
    template_arguments: dict[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continues: bool = False  # the last message is the beginning of the answer
    prompt_field: str = "messages"  # where a refusal points


async def prepare(exchange: Exchange, asked: Conversation, services: Services) -> Job:
    """Everything up to the token ids; refuses what needs no loaded model to be refused."""
    asked.fields.check()
    if not asked.messages:
        raise BadRequest(
            f"`{asked.prompt_field}` is empty; there must be at least one message.",
            param=asked.prompt_field,
        )
    check_nesting(asked.template_arguments, "chat_template_kwargs")
    card = await services.generator(asked.fields.model)
    settings = services.settings(card)
    fields = asked.fields.completed(settings)
    max_tokens = settings.max_tokens if asked.max_tokens is None else asked.max_tokens
    fields.check_min_tokens(max_tokens)
    text = await services.text(card)
    sampling = fields.sampling(card.sampling_defaults, card.vocab_size, asked.logprobs)
    stop_token_ids = fields.stop_tokens(card.eos_token_ids, card.vocab_size)
    told = settings.template_arguments
    prompt_text, form = await asyncio.to_thread(_render, card, text, asked, told)
    # The template has written the special tokens already.
    door = FrontDoor(services, card, exchange.share, asked.prompt_field)
    prompt = await door.encode(text.tokenizer, prompt_text, add_special_tokens=False)
    if not prompt:
        raise BadRequest(
            f"`{asked.prompt_field}` come to no token at all.", param=asked.prompt_field
        )
    return Job(
        card=card,
        tokenizer=text.tokenizer,
        prompts=[prompt],
        fields=fields,
        prompt_field=asked.prompt_field,
        max_tokens=max_tokens,
        sampling=sampling,
        stop_token_ids=stop_token_ids,
        form=form,
    )


def _render(
    card: Card, text: Text, asked: Conversation, told: Mapping[str, Any]
) -> tuple[str, AnswerForm]:
    """The prompt and the form of the answer; blocking. `told` is what the template is told, unless
    the client says otherwise."""
    if text.template is None or text.manner is None:
        raise BadRequest(
            f"The model {card.name!r} has no chat template; use /v1/completions.", param="model"
        )
    manner = text.manner
    messages = manner.messages(asked.messages, asked.tools)
    prompt = text.template.render(
        messages,
        add_generation_prompt=asked.add_generation_prompt and not asked.continues,
        continue_final_message=asked.continues,
        tools=manner.shown_tools(asked.tools),
        arguments={**told, **manner.arguments(asked.thinking), **asked.template_arguments},
    )
    plan = manner.answer(prompt, asked.tools, asked.format, asked.thinking)
    if plan.grammar is not None:
        refuse_conflicts(asked.fields)
    form = AnswerForm(plan.parser, plan.visible, plan.grammar, plan.thinking)
    return prompt, form
