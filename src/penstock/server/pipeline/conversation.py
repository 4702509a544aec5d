"""One conversation to be continued, whatever protocol it came in, and what becomes of it.

Every protocol turns its body into a `Conversation`; `prepare` renders and tokenises it, decides
how the answer is held to a form and read, and refuses what needs no loaded model to be refused.
Knows no protocol's field names beyond those that a refusal points at.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from penstock import wire
from penstock.errors import BadRequest
from penstock.grammars.messages import Outcome
from penstock.server.fields.generation import GenerationFields, refuse_conflicts
from penstock.server.http.threads import build_grammar, run_in_thread
from penstock.server.pipeline.front_door import FrontDoor
from penstock.server.pipeline.generation import Job
from penstock.server.pipeline.grammar_writing import keep, writing_bytes
from penstock.server.pipeline.images import (
    Picture,
    added_tokens,
    check_taken,
    image_token,
    laid_out,
    looked_at,
    spread,
    taken_out,
)
from penstock.text.chat_format import Thinking, ToolUse
from penstock.text.grammars.grammar import GrammarSource
from penstock.text.grammars.json_form import style_of
from penstock.text.template_sandbox import PromptTooLarge

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from penstock.catalog import Card
    from penstock.config import ModelSettings
    from penstock.memory.clients.requests import RequestMemory
    from penstock.server.http.exchange import Exchange
    from penstock.server.pipeline.grammars import Verdict
    from penstock.server.pipeline.model_texts import Text
    from penstock.server.pipeline.services import PipelineServices
    from penstock.text.chat_format import OutputSpec
    from penstock.text.grammars.grammar import Format
    from penstock.text.tools.dialect import Tool
    from penstock.wire import Media, TokenIds

Result = TypeVar("Result")

# Of a prompt while it is made: its pieces, the whole, and what a template has put together first.
RENDER_FACTOR = 3
_ROOM_GROWTH = 4  # when a prompt has turned out to be larger than expected
_FREE_BYTES = 16 << 10  # what a template says besides; no more than the request's own objects take


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


async def prepare(exchange: Exchange, asked: Conversation, services: PipelineServices) -> Job:
    """Everything up to the token ids; refuses what needs no loaded model to be refused."""
    # What the prompt's text takes beyond what was booked for it with the body.
    with exchange.memory.detached() as text_memory:
        return await _prepare(exchange, asked, services, text_memory)


async def _prepare(
    exchange: Exchange,
    asked: Conversation,
    services: PipelineServices,
    text_memory: RequestMemory,
) -> Job:
    asked.fields.check()
    asked.fields.check_choices(services.config.server.max_choices)
    if not asked.messages:
        raise BadRequest(
            f"`{asked.prompt_field}` is empty; there must be at least one message.",
            param=asked.prompt_field,
        )
    card = await services.generator(asked.fields.model)
    exchange.record["model"] = card.name
    settings = services.settings(card)
    fields = asked.fields.completed(settings)
    max_tokens = settings.max_tokens if asked.max_tokens is None else asked.max_tokens
    fields.check_min_tokens(max_tokens)
    text = await services.text(card)
    asked, pictures = await _seen(exchange, asked, services, card, text)
    sampling = fields.sampling(card.sampling_defaults, card.vocab_size, asked.logprobs)
    stop_token_ids = fields.stop_tokens(card.eos_token_ids, card.vocab_size)
    render = partial(_render, card, text, asked, settings)
    prompt_text = await _in_booked_memory(exchange.memory, text_memory, render)
    output = await _OutputChecks(exchange, services, card, text, asked).spec(prompt_text)
    door = FrontDoor(services, card, exchange.memory, asked.prompt_field)
    # The template has written the special tokens already, unless the client knows better.
    added = fields.add_special_tokens is True
    prompt, media = await _tokens(door, text, prompt_text, pictures, added=added)
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
        output=output,
        media=media,
        pictures=pictures,
    )


async def _seen(
    exchange: Exchange, asked: Conversation, services: PipelineServices, card: Card, text: Text
) -> tuple[Conversation, list[Picture]]:
    """The conversation as a template may see it, and its images, which this model takes."""
    shown, sent = taken_out(asked.messages)
    check_taken(card, sent, services.config.server.max_images)
    if not sent:
        return asked, []
    assert card.vision is not None
    token = image_token(text.tokenizer, card)
    look = partial(looked_at, sent, card.vision, token, services.settings(card))
    pictures = await run_in_thread(exchange.memory.size, look)
    return replace(asked, messages=shown), pictures


async def _tokens(
    door: FrontDoor, text: Text, prompt: str, pictures: list[Picture], *, added: bool
) -> tuple[TokenIds, list[Media]]:
    """A prompt's tokens, those of its images among them, and where these are."""
    if not pictures:
        return await door.encode(text.tokenizer, prompt, add_special_tokens=added), []
    token, more = image_token(text.tokenizer, door.card), added_tokens(pictures)
    prompt = laid_out(prompt, pictures, token)
    ids = await door.encode(text.tokenizer, prompt, add_special_tokens=added, more=more)
    assert door.card.vision is not None
    await door.memory.grow(2 * wire.TOKEN_ID_BYTES * (len(ids) + more))
    return spread(ids, pictures, door.card.vision.token_id)


async def _in_booked_memory(
    memory: RequestMemory, beyond: RequestMemory, render: Callable[[int], str]
) -> str:
    """What a template makes. Usually little beside what was sent, for which the body's booking has
    room; a template that makes more of it is tried again when that is booked."""
    max_bytes = memory.size // 2 + _FREE_BYTES
    while True:
        try:
            return await run_in_thread(memory.size, partial(render, max_bytes))
        except PromptTooLarge:
            max_bytes *= _ROOM_GROWTH
            await beyond.grow(RENDER_FACTOR * max_bytes - beyond.size)


def _render(
    card: Card,
    text: Text,
    asked: Conversation,
    settings: ModelSettings,
    max_bytes: int | None = None,
) -> str:
    """The prompt; blocking. The template is told what the settings say, unless the client says
    otherwise."""
    if text.template is None or text.chat_format is None:
        raise BadRequest(
            f"The model {card.name!r} has no chat template; use /v1/completions.", param="model"
        )
    chat_format = text.chat_format
    mark = "" if card.vision is None else image_token(text.tokenizer, card)
    return text.template.render(
        text.form.shaped(chat_format.messages(asked.messages, asked.tools), mark),
        add_generation_prompt=asked.add_generation_prompt and not asked.continues,
        continue_final_message=asked.continues,
        tools=chat_format.shown_tools(asked.tools),
        arguments={
            **settings.template_arguments,
            **chat_format.arguments(asked.thinking),
            **asked.template_arguments,
        },
        max_bytes=max_bytes,
    )


@dataclass(frozen=True, slots=True)
class _OutputChecks:
    """Finds an `OutputSpec` whose grammar compiles."""

    exchange: Exchange
    services: PipelineServices
    card: Card
    text: Text
    asked: Conversation

    async def spec(self, prompt: str) -> OutputSpec:
        """How to answer `prompt`; refuses a form of the answer that cannot be enforced."""
        asked, memory = self.asked, self.exchange.memory
        size = await self._writing_bytes(asked.tools.tools)
        async with memory.holding(size):
            spec = await self._in_thread(partial(self._planned, prompt))
            if spec.grammar is None:
                return spec
            keep(memory, spec.grammar)
        found = await self._verdict(spec.grammar)
        if found.outcome is Outcome.INVALID and asked.tools.tools:
            loose = await self._loose()
            if loose:
                async with memory.holding(size):
                    spec = await self._in_thread(partial(self._planned, prompt, loose))
                assert spec.grammar is not None  # and smaller than the one that is booked
                found = await self._verdict(spec.grammar)
        found.refuse("tools" if asked.format is None else asked.format.param)
        return spec

    async def _loose(self) -> set[str]:
        """Tools whose schemas cannot be enforced by themselves."""
        names: set[str] = set()
        for tool in self.asked.tools.callable:
            async with self.exchange.memory.holding(await self._writing_bytes([tool])):
                source = await self._in_thread(partial(_arguments_of, tool))
                if (await self._verdict(source)).outcome is Outcome.INVALID:
                    names.add(tool.name)
        return names

    async def _verdict(self, source: GrammarSource) -> Verdict:
        grammars, caller = self.services.grammars, self.exchange.caller
        return await grammars.verdict(self.card, self.text.tokenizer, source, caller)

    async def _writing_bytes(self, tools: Sequence[Tool]) -> int:
        weigh = partial(writing_bytes, self.asked.format, tools)
        return await self._in_thread(weigh) if tools else weigh()

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        if self.asked.format is None and not self.asked.tools.tools:
            return await run_in_thread(self.exchange.memory.size, work)
        return await build_grammar(work)

    def _planned(self, prompt: str, loose: Collection[str] = ()) -> OutputSpec:
        """How the answer is to be constrained and parsed; blocking."""
        asked, chat_format = self.asked, self.text.chat_format
        assert chat_format is not None
        style = style_of(self.services.settings(self.card).json_style)
        spec = chat_format.answer(
            prompt, asked.tools, asked.format, asked.thinking, style=style, loose=loose
        )
        if spec.grammar is not None:
            refuse_conflicts(asked.fields)
        return spec


def _arguments_of(tool: Tool) -> GrammarSource:
    return GrammarSource(tool.alone())
