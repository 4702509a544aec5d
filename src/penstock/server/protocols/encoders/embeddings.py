"""`/v1/embeddings`: texts or token ids in, a vector of each out."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal, cast

import msgspec
from msgspec import Meta

from penstock.catalog.encoders import EMBED
from penstock.errors import BadRequest, shortened
from penstock.server.fields.generation import Name  # noqa: TC001 - msgspec reads it
from penstock.server.fields.unsupported import Unsupported, refuse_fields
from penstock.server.fields.whole_numbers import (
    Limit,
    Positive,
    Priority,
    WholeNumbers,
)
from penstock.server.http.long_json import send_json_pieces
from penstock.server.pipeline.answers import read_request
from penstock.server.pipeline.encoding.run import EncodeJob, EncodeRun
from penstock.server.pipeline.encoding.texts import MAX_TEXTS, EncodeText
from penstock.server.protocols.encoders.asked import (
    AskedModel,
    asked_model,
    check_cut,
    reading,
)
from penstock.server.protocols.encoders.vectors import (
    json_base64,
    json_numbers,
    json_vectors,
    vector_bytes,
)
from penstock.server.protocols.prompts import PROMPT_SCHEMA, PromptField, decode_prompt
from penstock.wire import Encoding

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.server.http.exchange import Exchange
    from penstock.server.pipeline.encoding.texts import Reading
    from penstock.server.protocols.services import Services

_INPUT = PromptField("input", "at most {most} are allowed in one request")
Inputs = list[str] | list[list[int]]  # all of one kind


class EmbeddingFields(WholeNumbers, kw_only=True):
    """The body of an embeddings request."""

    input: Annotated[msgspec.Raw, Meta(extra_json_schema=PROMPT_SCHEMA)]
    model: Name | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Positive | None = None
    user: str | None = None
    # What vLLM's users are used to.
    truncate_prompt_tokens: Limit | None = None
    priority: Priority | None = None
    messages: Unsupported = msgspec.field(default_factory=msgspec.Raw)
    # Names of prompts in the model's files; `input_type` is what Cohere's clients call it.
    prompt_name: str | None = None
    input_type: str | None = None

    def check(self) -> None:
        """What needs no model to be refused."""
        refuse_fields(self, ("messages",))
        check_cut(self.truncate_prompt_tokens, "truncate_prompt_tokens")
        if None not in (self.prompt_name, self.input_type) and self.prompt_name != self.input_type:
            raise BadRequest(
                "`prompt_name` and `input_type` are two names of one field and say different "
                "things.",
                param="input_type",
            )


_decoder = msgspec.json.Decoder(EmbeddingFields)


async def embeddings(exchange: Exchange, services: Services) -> None:
    """The endpoint."""
    fields, job = await read_request(
        exchange, _decoder, lambda fields: prepare(exchange, fields, services)
    )
    run = EncodeRun(exchange, services, job)
    with run.observed():
        vectors = await exchange.while_connected(run.run())
        written = json_base64 if fields.encoding_format == "base64" else json_numbers
        pieces = await json_vectors(vectors, partial(_item, written))
        tokens = run.usage.prompt_tokens
        ending = {
            "model": job.card.name,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }
        parts = [b'{"object":"list","data":[', *pieces, b"],", msgspec.json.encode(ending)[1:]]
        await send_json_pieces(exchange, parts)


def _item(written: Callable[[bytes], bytes], number: int, vector: bytes) -> bytes:
    return b'{"object":"embedding","index":%d,"embedding":%s}' % (number, written(vector))


async def prepare(exchange: Exchange, fields: EmbeddingFields, services: Services) -> EncodeJob:
    """Everything up to the token ids."""
    fields.check()
    model = await asked_model(exchange, services, fields.model, EMBED, fields.priority)
    dimensions = model.dimensions(fields.dimensions)
    inputs = await exchange.run_in_thread_if_large(partial(_inputs, fields.input, model.window))
    reads = await reading(exchange, services, model, "input", fields.truncate_prompt_tokens)
    prompt = fields.prompt_name if fields.prompt_name is not None else fields.input_type
    texts = await encoded(reads, model, inputs, prompt, fields.dimensions)
    as_base64 = fields.encoding_format == "base64"
    return EncodeJob(
        model.card,
        texts,
        "input",
        vector_bytes(dimensions, as_base64=as_base64),
        model.priority,
    )


async def encoded(
    reads: Reading,
    model: AskedModel,
    inputs: Inputs,
    prompt_name: str | None = None,
    dimensions: int | None = None,
) -> list[EncodeText]:
    """Inputs as texts for the model, with a prompt of its files before them if one is named."""
    if lists := [ids for ids in inputs if not isinstance(ids, str)]:
        if prompt_name:
            raise BadRequest(
                "`prompt_name` needs texts: nothing is added to token ids.", param="prompt_name"
            )
        return await reads.ids(lists, Encoding(dimensions=dimensions))
    prompt = _prompt(model, prompt_name)
    texts = [f"{prompt}{text}" if prompt else text for text in inputs if isinstance(text, str)]
    skipped = 0
    if prompt and not model.encoder.pools_prompt:
        skipped = await reads.prompt_tokens(prompt)
    encoding = Encoding(dimensions=dimensions, skipped=skipped)
    return await reads.texts(texts, encoding)


def _prompt(model: AskedModel, name: str | None) -> str:
    """What the model's files put before a text of that name, or before any."""
    prompts = model.encoder.prompts
    if name is None:
        default = model.encoder.default_prompt
        return "" if default is None else prompts.get(default, "")
    if name not in prompts:
        known = ", ".join(sorted(prompts)) or "none"
        raise BadRequest(
            f"The model {model.card.name} has no prompt {shortened(name)!r}; its files name: "
            f"{known}.",
            param="prompt_name",
        )
    return prompts[name]


def _inputs(raw: msgspec.Raw, window: int) -> Inputs:
    """All texts, or all lists of token ids; blocking."""
    given = decode_prompt(raw, MAX_TEXTS, window, _INPUT)
    if isinstance(given, str):
        return [given]
    kinds = set(map(type, given))
    if not given or len(kinds) > 1:
        what = "mixes kinds" if given else "is an empty list"
        raise BadRequest(
            f"`input` {what}; it is a text, a list of texts, token ids or lists of them.",
            param="input",
        )
    if kinds == {int}:
        return [cast("list[int]", given)]
    if len(given) > MAX_TEXTS:
        raise BadRequest(
            f"`input` has {len(given)} inputs; {_INPUT.allowed.format(most=MAX_TEXTS)}.",
            param="input",
        )
    return cast("list[str] | list[list[int]]", given)
