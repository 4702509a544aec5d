"""`/tokenize` and `/detokenize`, in vLLM's words and in llama.cpp's. The model need not be loaded.

A text may be longer than the model's window: that is what some ask for.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

import msgspec

from penstock.errors import BadRequest
from penstock.memory.clients.requests import TOKEN_BYTES
from penstock.server.fields.generation import GenerationFields, Name, check_token_ids
from penstock.server.fields.unsupported import Unsupported, refuse_fields
from penstock.server.http.exchange import decode_json
from penstock.server.http.free_form import decode_small, kept_as_text
from penstock.server.http.long_json import json_list, json_of_tokens, send_json_pieces
from penstock.server.pipeline.conversation import Conversation, prepare
from penstock.server.pipeline.front_door import FrontDoor
from penstock.server.protocols.chat_messages import (
    Message,
    TemplateArguments,
    refuse_two_ends,
    template_arguments,
    template_messages,
)
from penstock.server.protocols.tool_fields import OpenAITools, openai_tool_use
from penstock.wire import token_ids

if TYPE_CHECKING:
    from penstock.catalog import Card
    from penstock.server.http.exchange import Exchange
    from penstock.server.protocols.services import Services
    from penstock.text.tokenizer import Tokenizer
    from penstock.wire import TokenIds

_MAX_TEXTS = 256  # between token ids; each is encoded by itself
_MAX_IDS_BYTES = 4 << 20


class TokenizeFields(msgspec.Struct, kw_only=True):
    """A text: vLLM's `prompt` or llama.cpp's `content`. Or a conversation, in `messages`."""

    model: Name | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    messages: list[Message] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: OpenAITools = msgspec.field(default_factory=msgspec.Raw)
    chat_template_kwargs: TemplateArguments = msgspec.field(default_factory=msgspec.Raw)
    chat_template: Unsupported = msgspec.field(default_factory=msgspec.Raw)
    mm_processor_kwargs: Unsupported = msgspec.field(default_factory=msgspec.Raw)
    content: str | list[str | int] | None = None
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None

    def check(self) -> None:
        """Exactly one thing is to be counted, and nothing is asked for that would change it."""
        refuse_fields(self, ("chat_template", "mm_processor_kwargs"))
        given = [n for n in ("prompt", "messages", "content") if getattr(self, n) is not None]
        if len(given) != 1:
            raise BadRequest(
                f"One of `prompt`, `messages` and `content` is needed; there are {len(given)}.",
                param=given[1] if given else "prompt",
            )

        refuse_two_ends(self.add_generation_prompt, self.continue_final_message)

    def conversation(self) -> Conversation:
        """The messages as a chat has them."""
        return Conversation(
            fields=GenerationFields(model=self.model, add_special_tokens=self.add_special_tokens),
            messages=template_messages(self.messages or []),
            tools=openai_tool_use(self.tools, None, None),
            template_arguments=template_arguments(self.chat_template_kwargs),
            add_generation_prompt=self.add_generation_prompt is not False,
            continues=bool(self.continue_final_message),
        )


class DetokenizeFields(msgspec.Struct):
    """The body of `/detokenize`."""

    tokens: Annotated[msgspec.Raw, kept_as_text(list[int])]
    model: Name | None = None


_tokenize_decoder = msgspec.json.Decoder(TokenizeFields)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeFields)


async def tokenize(exchange: Exchange, services: Services) -> None:
    """The token ids."""
    async with exchange.body() as body:
        fields = await decode_json(_tokenize_decoder, body)
        fields.check()
        work = _ids(exchange, fields, services)
        card, tokenizer, ids = await exchange.while_connected(work)
    if fields.content is not None:
        item = partial(_item, tokenizer) if fields.with_pieces else _same
        parts = [b'{"tokens":', *await json_list(exchange.memory, ids, item), b"}"]
    else:
        window = min(card.context, services.settings(card).max_context or card.context)
        parts = [b'{"count":%d,"max_model_len":%d,"tokens":' % (len(ids), window)]
        parts += [*await json_list(exchange.memory, ids, _same), b',"token_strs":']
        named = fields.return_token_strs
        parts += [
            *(await json_list(exchange.memory, ids, tokenizer.token) if named else [b"null"]),
            b"}",
        ]
    await send_json_pieces(exchange, parts)


async def detokenize(exchange: Exchange, services: Services) -> None:
    """The text; both peers' names for it."""
    async with exchange.body() as body:
        fields = await decode_json(_detokenize_decoder, body)
        card = await services.served(fields.model)
        tokenizer = (await services.text(card)).tokenizer
        text = await exchange.while_connected(_text(exchange, fields, card, tokenizer))
    await send_json_pieces(exchange, [b'{"prompt":"', *text, b'","content":"', *text, b'"}'])


async def _text(
    exchange: Exchange, fields: DetokenizeFields, card: Card, tokenizer: Tokenizer
) -> list[bytes]:
    """The text as JSON without its quotes."""
    holds = "400,000 ids or so"

    def read() -> list[int]:
        ids = decode_small(fields.tokens, list[int], "tokens", _MAX_IDS_BYTES, holds)
        if ids is None:
            raise BadRequest("`tokens` is null; it is a list of token ids.", param="tokens")
        check_token_ids(ids, card.vocab_size, "tokens")
        return ids

    ids = await exchange.run_in_thread_if_large(read)
    await exchange.memory.grow(TOKEN_BYTES * len(ids))
    return (await json_of_tokens(exchange.memory, tokenizer, ids)).pieces


async def _ids(
    exchange: Exchange, fields: TokenizeFields, services: Services
) -> tuple[Card, Tokenizer, TokenIds]:
    if fields.messages is not None:
        asked = await exchange.run_in_thread_if_large(fields.conversation)
        job = await prepare(exchange, asked, services)
        return job.card, job.tokenizer, job.prompts[0]
    card = await services.served(fields.model)
    tokenizer = (await services.text(card)).tokenizer
    if fields.content is not None:
        return card, tokenizer, await _mixed(exchange, fields, services, card, tokenizer)
    door = FrontDoor(services, card, exchange.memory, "prompt")
    added = fields.add_special_tokens is not False
    ids = await door.tokens(tokenizer, fields.prompt or "", add_special_tokens=added)
    return card, tokenizer, ids


async def _mixed(
    exchange: Exchange,
    fields: TokenizeFields,
    services: Services,
    card: Card,
    tokenizer: Tokenizer,
) -> TokenIds:
    """The ids of texts and ids in turn; special tokens are added to what comes first."""
    door = FrontDoor(services, card, exchange.memory, "content")
    read = partial(_runs, fields, card, tokenizer)
    ids = token_ids(())
    for number, run in enumerate(await exchange.run_in_thread_if_large(read)):
        if isinstance(run, str):
            added = bool(fields.add_special) and number == 0
            ids.extend(await door.tokens(tokenizer, run, add_special_tokens=added))
        else:
            await exchange.memory.grow(ids.itemsize * len(run))
            ids.extend(run)
    return ids


def _runs(fields: TokenizeFields, card: Card, tokenizer: Tokenizer) -> list[str | list[int]]:
    """llama.cpp's `content`, a text or texts and ids in turn, with neighbouring ids together."""
    parts = [fields.content] if isinstance(fields.content, str) else fields.content or []
    check_token_ids(
        [token for token in parts if isinstance(token, int)], card.vocab_size, "content"
    )
    runs: list[str | list[int]] = []
    for part in parts:
        if isinstance(part, str):
            runs.append(part)
        elif runs and isinstance(run := runs[-1], list):
            run.append(part)
        else:
            runs.append([part])
    texts = [run for run in runs if isinstance(run, str)]
    if len(texts) > _MAX_TEXTS:
        raise BadRequest(
            f"`content` has {len(texts)} texts; at most {_MAX_TEXTS} are allowed.", param="content"
        )
    if fields.parse_special is False and any(map(tokenizer.has_special_text, texts)):
        raise BadRequest(
            "`parse_special` is false, but `content` has the text of a special token; this "
            "server reads it as that token.",
            param="parse_special",
        )
    return runs


def _same(token: int) -> int:
    return token


def _item(tokenizer: Tokenizer, token: int) -> dict[str, object]:
    """llama.cpp's way to show a token with its text."""
    return {"id": token, "piece": _piece(tokenizer, token)}


def _piece(tokenizer: Tokenizer, token: int) -> str | list[int]:
    """The token's text, or its bytes where they are only part of a character."""
    raw = tokenizer.token_bytes(token)
    try:
        return raw.decode() or tokenizer.token(token) or ""
    except UnicodeDecodeError:
        return list(raw)
