"""Ollama's `/api/chat`, `/api/generate`, `/api/tags` and `/api/show`, for clients that speak only
that. It streams unless told otherwise, and a request that says nothing only has the model loaded.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from penstock import __version__
from penstock.errors import BadRequest
from penstock.server.api.answers import collect, send_stream
from penstock.server.api.conversation import Conversation, prepare
from penstock.server.api.exchange import decode_json
from penstock.server.api.fields import GenerationFields
from penstock.server.api.formats import schema_format
from penstock.server.api.generation import Generation
from penstock.server.api.messages import OpenAITools, openai_tool_use
from penstock.server.api.ollama_answer import ChatAnswer, GenerateAnswer, OllamaAnswer
from penstock.text.grammar import Format
from penstock.text.manner import Thinking

if TYPE_CHECKING:
    from penstock.catalog import Card
    from penstock.server.api.exchange import Exchange
    from penstock.server.api.generation import Job
    from penstock.server.api.services import Services


class Options(msgspec.Struct):
    """`options`, as far as they mean something here."""

    num_predict: int | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    repeat_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None


class OllamaFunction(msgspec.Struct):
    """A call that the assistant made; its arguments are an object."""

    name: str
    arguments: dict[str, Any] = {}


class OllamaCall(msgspec.Struct):
    """One of `tool_calls`."""

    function: OllamaFunction
    id: str | None = None


class OllamaMessage(msgspec.Struct):
    """One message."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class _Common(msgspec.Struct, kw_only=True):
    model: str
    stream: bool | None = None
    format: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    options: Options | None = None
    think: bool | str | None = None
    keep_alive: str | float | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to answer: the model is only to be loaded, or unloaded."""
        raise NotImplementedError

    def conversation(self) -> Conversation:
        """The same in the words of every protocol."""
        raise NotImplementedError

    @property
    def unloads(self) -> bool:
        """Whether the model is to be kept for no time at all: 0, or a text such as `0s`."""
        return {digit for digit in str(self.keep_alive) if digit.isdigit()} == {"0"}

    def settings(self) -> GenerationFields:
        """How to choose tokens."""
        options = self.options or Options()
        return GenerationFields(
            model=self.model,
            temperature=options.temperature,
            top_p=options.top_p,
            top_k=options.top_k,
            min_p=options.min_p,
            seed=options.seed,
            stop=options.stop or None,
            repetition_penalty=options.repeat_penalty,
            presence_penalty=options.presence_penalty,
            frequency_penalty=options.frequency_penalty,
        )

    def wanted_format(self) -> Format | None:
        """`"json"`, or a schema."""
        raw = bytes(self.format)
        if raw in (b"", b"null", b'""'):
            return None
        if raw == b'"json"':
            return Format("json_object", None, "format")
        return schema_format(self.format, "format")

    def thinking(self) -> Thinking:
        """On, off, or how much."""
        if isinstance(self.think, str):
            return Thinking(enabled=True, effort=self.think)
        return Thinking(enabled=self.think)

    def most_tokens(self) -> int | None:
        """`num_predict`; none or less is as many as there is room for."""
        wanted = None if self.options is None else self.options.num_predict
        return wanted if wanted is not None and wanted > 0 else None


class OllamaChatFields(_Common, kw_only=True):
    """The body of `/api/chat`."""

    messages: list[OllamaMessage] = []
    tools: OpenAITools = msgspec.field(default_factory=msgspec.Raw)

    @property
    def is_empty(self) -> bool:
        """Without messages."""
        return not self.messages

    def conversation(self) -> Conversation:
        """Message by message."""
        return Conversation(
            fields=self.settings(),
            messages=[_template_message(m, index) for index, m in enumerate(self.messages)],
            max_tokens=self.most_tokens(),
            tools=openai_tool_use(self.tools, None, None),
            format=self.wanted_format(),
            thinking=self.thinking(),
        )


class OllamaGenerateFields(_Common, kw_only=True):
    """The body of `/api/generate`."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    suffix: str | None = None
    images: list[str] | None = None

    @property
    def is_empty(self) -> bool:
        """Without a question."""
        return not self.prompt

    def conversation(self) -> Conversation:
        """One question, with the system's word before it."""
        if self.suffix or self.images or self.raw:
            name = "suffix" if self.suffix else "images" if self.images else "raw"
            raise BadRequest(f"`{name}` is not supported.", param=name)
        messages = [{"role": "user", "content": self.prompt}]
        if self.system:
            messages.insert(0, {"role": "system", "content": self.system})
        return Conversation(
            fields=self.settings(),
            messages=messages,
            max_tokens=self.most_tokens(),
            format=self.wanted_format(),
            thinking=self.thinking(),
            prompt_field="prompt",
        )


_Fields = TypeVar("_Fields", bound=_Common)
_chat_decoder = msgspec.json.Decoder(OllamaChatFields)
_generate_decoder = msgspec.json.Decoder(OllamaGenerateFields)


async def chat(exchange: Exchange, services: Services) -> None:
    """`/api/chat`."""
    await _respond(exchange, services, _chat_decoder, ChatAnswer)


async def generate(exchange: Exchange, services: Services) -> None:
    """`/api/generate`."""
    await _respond(exchange, services, _generate_decoder, GenerateAnswer)


async def _respond(
    exchange: Exchange,
    services: Services,
    decoder: msgspec.json.Decoder[_Fields],
    form: type[OllamaAnswer],
) -> None:
    job: Job | None = None
    async with exchange.body() as body:
        fields = await decode_json(decoder, body)
        if not fields.is_empty:
            asked = await exchange.apart(fields.conversation)
            job = await exchange.while_connected(prepare(exchange, asked, services))
    if job is None:
        await _load_or_unload(exchange, services, fields, form)
        return
    answer = form(job.card.name)
    generation = Generation(exchange, services, job)
    with services.metrics.observe(exchange, generation, job.card.name):
        if fields.stream is not False:
            keepalive_after_s = services.config.server.keepalive_after_s
            await send_stream(exchange, generation, answer, keepalive_after_s)
        else:
            [pieces] = await collect(exchange, generation, 1)
            await exchange.send_json(answer.whole(pieces, generation.usage))


async def _load_or_unload(
    exchange: Exchange, services: Services, fields: _Common, form: type[OllamaAnswer]
) -> None:
    card = await services.generator(fields.model)
    if fields.unloads:
        await exchange.while_connected(services.residency.unload(card.name))
    else:
        await exchange.while_connected(services.residency.load(card.name))
    await exchange.send_json(form(card.name).nothing("unload" if fields.unloads else "load"))


async def tags(exchange: Exchange, services: Services) -> None:
    """The models that generate."""
    cards = await asyncio.to_thread(services.catalog.scan)
    models = [
        _model(card, name)
        for card in services.reachable(cards)
        if card.kind == "generate"
        for name in (card.name, *services.settings(card).alias)
    ]
    await exchange.send_json({"models": models})


class ShowFields(msgspec.Struct):
    """The body of `/api/show`."""

    model: str = ""
    name: str = ""  # what older clients call it


async def show(exchange: Exchange, services: Services) -> None:
    """What is known of one model."""
    async with exchange.body() as body:
        fields = await decode_json(msgspec.json.Decoder(ShowFields), body)
    card = await services.find(fields.model or fields.name)
    text = await services.text(card) if card.kind == "generate" else None
    template = None if text is None else text.tokenizer.chat_template
    capabilities = ["completion"]
    if text is not None and text.manner is not None:
        capabilities += ["tools"] if text.manner.shows_tools else []
        capabilities += ["thinking"] if text.manner.thinks else []
    await exchange.send_json(
        {
            "details": _details(card),
            "template": template or "",
            "parameters": "",
            "model_info": {
                "general.architecture": card.model_type,
                "general.parameter_count": card.parameters,
                f"{card.model_type}.context_length": card.context,
            },
            "capabilities": capabilities,
            "modified_at": _modified(card),
        }
    )


async def version(exchange: Exchange, services: Services) -> None:
    """Which server this is."""
    await exchange.send_json({"version": __version__})


def _model(card: Card, name: str) -> dict[str, object]:
    return {
        "name": name,
        "model": name,
        "modified_at": _modified(card),
        "size": card.weight_bytes,
        "digest": "",
        "details": _details(card),
    }


def _details(card: Card) -> dict[str, object]:
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": card.model_type,
        "families": [card.model_type],
        "parameter_size": f"{card.parameters / 1e9:.2f}B",
        "quantization_level": "",
    }


def _modified(card: Card) -> str:
    try:
        seconds = card.path.stat().st_mtime
    except OSError:  # removed since the scan
        seconds = 0.0
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _template_message(message: OllamaMessage, index: int) -> dict[str, Any]:
    if message.images:
        raise BadRequest(
            f"`messages[{index}].images`: this model takes text only.",
            param=f"messages[{index}].images",
        )
    result: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.thinking:
        result["reasoning_content"] = message.thinking
    if message.tool_name:
        result["name"] = message.tool_name
    if message.tool_call_id:
        result["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        result["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": call.function.arguments},
            }
            for call in message.tool_calls
        ]
    return result
