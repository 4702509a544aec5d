"""`/v1/completions`: a text or token ids in, what follows them out."""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar

import msgspec
from msgspec import Meta

from penstock.errors import BadRequest
from penstock.memory.admission import RequestNeed
from penstock.memory.clients.requests import TOKEN_BYTES
from penstock.server.fields.generation import (
    UNLIMITED,
    GenerationFields,
    check_token_ids,
    refuse_conflicts,
)
from penstock.server.fields.whole_numbers import Count, Limit, SmallCount  # noqa: TC001
from penstock.server.http.long_json import JsonText, json_of_text, json_of_tokens
from penstock.server.http.threads import run_in_thread_if_large
from penstock.server.pipeline.answers import read_request, respond
from penstock.server.pipeline.front_door import FrontDoor
from penstock.server.pipeline.generation import Job
from penstock.server.pipeline.grammar_writing import written
from penstock.server.protocols.logprobs import CompletionLogprobs
from penstock.server.protocols.openai.openai_answer import OpenAIAnswer, openai_finish
from penstock.server.protocols.prompts import PROMPT_SCHEMA, decode_prompt
from penstock.text.chat_format import OutputSpec
from penstock.text.grammars.grammar import GrammarSource, grammar_of
from penstock.text.grammars.json_form import style_of
from penstock.text.infill import InfillMarks, infill_form

if TYPE_CHECKING:
    from penstock.catalog import Card
    from penstock.server.http.exchange import Exchange
    from penstock.server.pipeline.pieces import Piece
    from penstock.server.protocols.services import Services
    from penstock.text.tokenizer import Tokenizer
    from penstock.wire import TokenIds


class CompletionFields(GenerationFields, kw_only=True):
    """The body of a completions request."""

    # What OpenAI's own servers do when a client says nothing.
    default_max_tokens: ClassVar[int | None] = 16
    length_aliases = (*GenerationFields.length_aliases, "max_completion_tokens")

    prompt: Annotated[msgspec.Raw, Meta(extra_json_schema=PROMPT_SCHEMA)]
    echo: bool | None = None
    logprobs: SmallCount | None = None
    suffix: str | None = None
    best_of: Count | None = None
    max_completion_tokens: Limit | None = None  # of chats

    def check(self) -> None:
        """As for all, and what only completions have."""
        super().check()
        if self.suffix and self.echo:
            raise BadRequest(
                "`suffix` and `echo` cannot be kept together: an answer between two texts follows "
                "neither.",
                param="suffix",
            )
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise BadRequest(
                "`best_of` is not supported; leave it out or make it equal to `n`.", param="best_of"
            )
        if self.max_tokens == 0 and not self.echo:
            raise BadRequest(
                "`max_tokens` is 0, which needs `echo` to be true.", param="max_tokens"
            )

    def prompts(self, max_choices: int, window: int) -> list[str] | list[list[int]]:
        """The prompts, all texts or all token ids, of a model with that window; blocking."""
        prompt = decode_prompt(self.prompt, max_choices // (self.n or 1), window)
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise BadRequest("`prompt` is an empty list.", param="prompt")
        kinds = set(map(type, prompt))
        if len(kinds) > 1:
            raise BadRequest(
                "`prompt` mixes kinds; it is a text, a list of texts, token ids or lists of them.",
                param="prompt",
            )
        prompts: list[str] | list[list[int]] = [prompt] if int in kinds else prompt  # type: ignore[assignment]
        if len(prompts) * (self.n or 1) > max_choices:
            raise BadRequest(
                f"`prompt` has {len(prompts)} prompts and `n` is {self.n or 1}; "
                f"together at most {max_choices} answers are allowed (server.max_choices).",
                param="prompt",
            )
        return prompts


decoder = msgspec.json.Decoder(CompletionFields)
_NO_TEXT = JsonText([], 0)


async def completions(exchange: Exchange, services: Services) -> None:
    """The endpoint."""
    fields, job = await read_request(
        exchange, decoder, lambda fields: prepare(exchange, fields, services)
    )
    fingerprint = services.fingerprint(job.card)
    await respond(
        exchange, services, job, lambda _: _Answer(job, fields, fingerprint), stream=fields.stream
    )


async def prepare(exchange: Exchange, fields: CompletionFields, services: Services) -> Job:
    """Everything up to the token ids; refuses what needs no loaded model to be refused."""
    max_choices = services.config.server.max_choices
    fields.check()
    fields.check_choices(max_choices)
    card = await services.generator(fields.model)
    exchange.record["model"] = card.name
    settings = services.settings(card)
    prompts = await exchange.run_in_thread_if_large(
        partial(fields.prompts, max_choices, card.context)
    )
    fields = fields.completed(settings)
    max_tokens = fields.default_max_tokens if fields.max_tokens is None else fields.max_tokens
    fields.check_min_tokens(max_tokens)
    text = await services.text(card)
    sampling = fields.sampling(card.sampling_defaults, card.vocab_size, fields.logprobs)
    stop_token_ids = fields.stop_tokens(card.eos_token_ids, card.vocab_size)
    marks: InfillMarks | None = None
    if fields.suffix:
        marks, ends = infill_form(text.tokenizer, "suffix")
        stop_token_ids = list(dict.fromkeys([*stop_token_ids, *ends]))
    door = FrontDoor(services, card, exchange.memory, "prompt")
    read = partial(_token_ids, fields, text.tokenizer, door, marks)
    ids = [await read(prompt) for prompt in prompts]
    echoed = None
    if fields.echo:
        await door.check(RequestNeed(max(map(len, ids)), None, "prompt"))
        echoed = await _echoed(exchange, prompts, text.tokenizer, fields.n or 1)
    return Job(
        card=card,
        tokenizer=text.tokenizer,
        prompts=ids,
        fields=fields,
        prompt_field="prompt",
        max_tokens=None if max_tokens == UNLIMITED else max_tokens,
        sampling=sampling,
        stop_token_ids=stop_token_ids,
        prompt_logprobs=fields.logprobs if fields.echo else None,
        output=await _output(exchange, fields, services, card, text.tokenizer),
        echoed=echoed,
    )


async def _output(
    exchange: Exchange,
    fields: CompletionFields,
    services: Services,
    card: Card,
    tokenizer: Tokenizer,
) -> OutputSpec:
    """Plain text, or what the client wants it to match."""
    wanted = fields.format()
    if wanted is None:
        return OutputSpec()
    refuse_conflicts(fields)
    style = style_of(services.settings(card).json_style)
    source = await written(
        exchange.memory, wanted, lambda: GrammarSource(grammar_of(wanted, style))
    )
    verdict = await services.grammars.verdict(card, tokenizer, source, exchange.caller)
    verdict.refuse(wanted.param)
    return OutputSpec(grammar=source)


async def _token_ids(
    fields: CompletionFields,
    tokenizer: Tokenizer,
    door: FrontDoor,
    marks: InfillMarks | None,
    prompt: str | list[int],
) -> TokenIds:
    added = fields.add_special_tokens is not False
    if marks is not None:
        ids: TokenIds = await _infilled(tokenizer, door, marks, prompt, fields.suffix or "", added)
    elif isinstance(prompt, str):
        ids = await door.encode(tokenizer, prompt, add_special_tokens=added)
    else:
        ids = prompt
        await door.check(RequestNeed(len(ids), None, "prompt"))
        size = TOKEN_BYTES * len(ids)
        await run_in_thread_if_large(
            size, partial(check_token_ids, ids, door.card.vocab_size, "prompt")
        )
        await door.memory.grow(size)
    if not ids:
        raise BadRequest("`prompt` comes to no token at all.", param="prompt")
    return ids


async def _infilled(
    tokenizer: Tokenizer,
    door: FrontDoor,
    marks: InfillMarks,
    prompt: str | list[int],
    suffix: str,
    added: bool,
) -> TokenIds:
    """A prompt and what comes behind the gap as one text; every prompt has the same suffix, so each
    text is checked before it is made and gone before the next."""
    if not isinstance(prompt, str):
        raise BadRequest("`suffix` needs a `prompt` that is a text.", param="suffix")
    least = tokenizer.min_tokens_of(prompt) + tokenizer.min_tokens_of(suffix)
    await door.check(RequestNeed(least, None, "prompt", at_least=True))
    with door.memory.detached() as working:
        await working.grow(sys.getsizeof(prompt) + sys.getsizeof(suffix))
        size = len(prompt) + len(suffix)
        text = await run_in_thread_if_large(size, partial(marks.prompt, prompt, suffix))
        return await door.encode(tokenizer, text, add_special_tokens=added)


async def _echoed(
    exchange: Exchange, prompts: list[str] | list[list[int]], tokenizer: Tokenizer, n: int
) -> list[JsonText]:
    """The prompts as answers repeat them; what that comes to in all of them is booked."""
    memory = exchange.memory
    echoed = [
        await json_of_text(memory, prompt)
        if isinstance(prompt, str)
        else await json_of_tokens(memory, tokenizer, prompt)
        for prompt in prompts
    ]
    # Each choice has it as a text of its own, and the whole answer has them all.
    await memory.grow(2 * n * sum(echo.size for echo in echoed))
    return echoed


class _Answer(OpenAIAnswer):
    """Pieces as OpenAI's completions protocol writes them, whole or as events."""

    def __init__(self, job: Job, fields: CompletionFields, fingerprint: str) -> None:
        super().__init__(job, fields, fingerprint, "text_completion", "cmpl")
        self._fields = fields
        self._offsets: dict[int, int] = {}  # characters of the prompt before a choice's answer

    def weight(self, pieces: list[Piece]) -> int:
        """With the prompts that they repeat."""
        return super().weight(pieces) + sum(self._echo(piece.choice).size for piece in pieces)

    def events(self, piece: Piece) -> bytes:
        """The event of one piece; the first one carries the echo."""
        echo = self._echo(piece.choice)
        choice = self._choice(piece.choice, [piece])
        if not (echo.size or piece.text or piece.logprobs) and piece.finish is None:
            return b""
        return self._chunk(choice)

    def _choice(self, index: int, pieces: list[Piece]) -> dict[str, object]:
        echo = self._echo(index)
        self._offsets.setdefault(index, echo.characters)
        text = msgspec.json.encode("".join(piece.text for piece in pieces))
        return {
            "index": index,
            "text": msgspec.Raw(b"".join([b'"', *echo.pieces, text[1:]])),
            "logprobs": self._logprobs(index, pieces),
            "finish_reason": openai_finish(pieces[-1].finish),
        }

    def _echo(self, index: int) -> JsonText:
        """The prompt's text, until the choice is rendered for the first time."""
        if self._job.echoed is None or index in self._offsets:
            return _NO_TEXT
        return self._job.echoed[index // self._job.n]

    def _logprobs(self, index: int, pieces: list[Piece]) -> dict[str, object] | None:
        if self._fields.logprobs is None:
            return None
        logprobs = CompletionLogprobs(self._job.tokenizer, self._fields.logprobs)
        for piece in pieces:
            if piece.prompt_logprobs is not None:
                prompt = self._job.prompts[index // self._job.n]
                logprobs.add_prompt(prompt, piece.prompt_logprobs)
            logprobs.add(piece, self._offsets[index])
        return logprobs.as_dict()
