"""The fields of a request as the OpenAI and vLLM protocols name them, and which values are sane.

Types and plain ranges are msgspec's; what needs more than one field or the model's vocabulary is
checked here too. It turns fields into what a worker is asked for, and knows no HTTP.
"""

from __future__ import annotations

import secrets
from hashlib import blake2b
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, cast

import msgspec
from msgspec import Meta

from penstock import sampling, wire
from penstock.errors import BadRequest, shortened
from penstock.server.fields.aliases import AliasedFields
from penstock.server.fields.formats import (
    ResponseFormat,
    StructuredOutputs,
    only_one,
    top_level_formats,
)
from penstock.server.fields.whole_numbers import (  # noqa: TC001 - msgspec reads them
    Choices,
    Count,
    Limit,
    PenaltyWindow,
    Priority,
    Seed,
    TopK,
)
from penstock.server.http.free_form import decode_small, is_given, kept_as_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.config import ModelSettings
    from penstock.text.grammars.grammar import Format

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
# Every answer of a request has its own in the worker, which holds them for as long as it runs. Some
# hundreds are what OpenAI takes; whole vocabularies are what grammars are for.
MAX_LOGIT_BIASES = 1024
MAX_ALLOWED_TOKEN_IDS = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_PENALTY_WINDOW = 4096
_MAX_BIAS_BYTES = 64 * MAX_LOGIT_BIASES  # with digits and white space to spare
_MAX_ID_BYTES = 32  # of one in a list, likewise
_INT64 = sampling.INT64
_SEED_MASK = _INT64
# What the settings of a model may say for requests that do not.
_SETTINGS = (*sampling.BY_NAME, "max_tokens", "priority")

Temperature = Annotated[float, sampling.range_of("temperature")]
TopP = Annotated[float, sampling.range_of("top_p")]
MinP = Annotated[float, sampling.range_of("min_p")]
RepetitionPenalty = Annotated[float, sampling.range_of("repetition_penalty")]
Penalty = Annotated[float, sampling.range_of("presence_penalty")]
Name = Annotated[str, Meta(max_length=1024)]  # of a model
UNLIMITED = -1  # as many tokens as there is room for
Bias = Annotated[float, Meta(ge=-100, le=100)]
# OpenAI's form, or llama.cpp's, where `false` forbids a token.
Biases = dict[str, Bias] | list[tuple[int | str, Bias | bool]]
TokenList = Annotated[msgspec.Raw, kept_as_text(list[int])]


class StreamOptions(msgspec.Struct):
    """`stream_options`."""

    include_usage: bool | None = None


class SamplingFields(AliasedFields, kw_only=True):
    """How tokens are chosen and which form the answer has: what chat, completions and responses
    have in common. None is the same as leaving a field out."""

    length_field: ClassVar[str] = "max_tokens"

    model: Name | None = None
    stream: bool | None = None
    seed: Seed | None = None
    stop: str | list[str] | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[msgspec.Raw, kept_as_text(Biases)] = msgspec.field(
        default_factory=msgspec.Raw
    )
    # What vLLM's users are used to.
    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    stop_token_ids: TokenList = msgspec.field(default_factory=msgspec.Raw)
    allowed_token_ids: TokenList = msgspec.field(default_factory=msgspec.Raw)
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    priority: Priority | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    # What llama.cpp's are.
    grammar: str | None = None
    json_schema: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    repeat_last_n: PenaltyWindow | None = None
    # What SGLang's are.
    ebnf: str | None = None
    regex: str | None = None

    def one_format(self, own: Format | None) -> Format | None:
        """The form that the answer must have: by a field of the protocol's own, or by those that
        are known from other servers."""
        guided = StructuredOutputs(
            self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar
        )
        wanted: list[Format | None] = [*guided.formats("guided_")]
        if self.structured_outputs is not None:
            wanted += self.structured_outputs.formats()
        wanted.append(own)
        wanted += top_level_formats(
            self.json_schema, grammar=self.grammar, ebnf=self.ebnf, regex=self.regex
        )
        return only_one(wanted)


class GenerationFields(SamplingFields, kw_only=True):
    """What chat and completions have in common."""

    length_aliases = (*AliasedFields.length_aliases, "max_output_tokens")

    stream_options: StreamOptions | None = None
    max_tokens: Limit | None = None
    max_output_tokens: Limit | None = None  # of responses
    n: Choices | None = None
    response_format: ResponseFormat | None = None

    def check(self) -> None:
        """Refuse what can be refused without knowing the model."""
        self.refuse_unsupported()
        if self.stream_options is not None and not self.stream:
            raise BadRequest("`stream_options` needs `stream` to be true.", param="stream_options")
        self.stops()
        self._check_penalty_window()

    def _check_penalty_window(self) -> None:
        """A worker keeps the tokens of a window for as long as the answer runs."""
        if (self.repeat_last_n or 0) <= MAX_PENALTY_WINDOW:
            return
        for name in sampling.PENALTIES:
            if getattr(self, name) not in (None, sampling.BY_NAME[name].neutral):
                raise BadRequest(
                    f"`repeat_last_n` is {self.repeat_last_n}; beside `{name}` it may be up to "
                    f"{MAX_PENALTY_WINDOW}, or -1 for the whole context, or 0 for no penalties.",
                    param="repeat_last_n",
                )

    def completed(self, settings: ModelSettings) -> Self:
        """The same, with the user's settings for the model where the client is silent."""
        said = {name: getattr(settings, name) for name in _SETTINGS if getattr(self, name) is None}
        return msgspec.structs.replace(self, **said)

    def format(self) -> Format | None:
        """The form that the answer must have, if one was asked for."""
        own = None if self.response_format is None else self.response_format.format()
        return self.one_format(own)

    def check_choices(self, most: int) -> None:
        """Refuse more answers to one prompt than a request may have."""
        if (self.n or 1) > most:
            raise BadRequest(
                f"`n` is {self.n}; at most {most} answers are allowed (server.max_choices).",
                param="n",
            )

    def check_min_tokens(self, max_tokens: int | None) -> None:
        """Refuse an answer that would have to be longer than it may be."""
        if max_tokens not in (None, UNLIMITED) and (self.min_tokens or 0) > max_tokens:
            raise BadRequest(
                f"`min_tokens` is {self.min_tokens}, which is more than the {max_tokens} tokens "
                "that the answer may have.",
                param="min_tokens",
            )

    def stops(self) -> list[str]:
        """The stop strings."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if self.stop == "":  # of programs with an empty text field
            stops = []
        if len(stops) > MAX_STOPS:
            raise BadRequest(
                f"`stop` has {len(stops)} strings; at most {MAX_STOPS} are allowed.", param="stop"
            )
        if not all(stops):
            raise BadRequest("`stop` has an empty string.", param="stop")
        if any(len(stop) > MAX_STOP_CHARACTERS for stop in stops):
            raise BadRequest(
                f"`stop` has a string of over {MAX_STOP_CHARACTERS} characters.", param="stop"
            )
        return stops

    def stop_tokens(self, eos_token_ids: Sequence[int], vocab_size: int) -> list[int]:
        """The token ids that end the answer."""
        own = _token_ids(self.stop_token_ids, "stop_token_ids", MAX_STOP_TOKEN_IDS, vocab_size)
        return list(dict.fromkeys(own if self.ignore_eos else [*eos_token_ids, *own]))

    def sampling(
        self, defaults: Mapping[str, float], vocab_size: int, logprobs: int | None
    ) -> wire.Sampling:
        """How the worker is to choose; the model's own defaults stand where the client is silent.

        The seed is that of the first choice, see `seed_of`.
        """

        said = {name: getattr(self, name) for name in sampling.BY_NAME}
        if self.repeat_last_n == 0:
            said |= {name: sampling.BY_NAME[name].neutral for name in sampling.PENALTIES}
        allowed = _token_ids(
            self.allowed_token_ids, "allowed_token_ids", MAX_ALLOWED_TOKEN_IDS, vocab_size
        )
        values: dict[str, Any] = sampling.resolve(said, defaults, vocab_size)
        return wire.Sampling(
            **values,
            penalty_window=max(self.repeat_last_n or 0, 0),
            logit_bias=self._biases(vocab_size),
            allowed_ids=wire.token_ids(allowed).tobytes(),
            seed=secrets.randbits(63) if self.seed is None else self.seed & _SEED_MASK,
            logprobs=logprobs,
        )

    def _biases(self, vocab_size: int) -> wire.LogitBias | None:
        holds = f"{MAX_LOGIT_BIASES} tokens"
        decoded: Biases | None = decode_small(
            self.logit_bias, cast("type[Biases]", Biases), "logit_bias", _MAX_BIAS_BYTES, holds
        )
        said = list(decoded.items()) if isinstance(decoded, dict) else decoded or []
        if len(said) > MAX_LOGIT_BIASES:
            raise BadRequest(
                f"`logit_bias` has {len(said)} tokens; at most {MAX_LOGIT_BIASES} are allowed.",
                param="logit_bias",
            )
        biases = {_biased_token(token): _bias(bias) for token, bias in said}
        check_token_ids(biases, vocab_size, "logit_bias")
        return wire.LogitBias.of(biases) if biases else None


def _biased_token(said: int | str) -> int:
    # isdecimal: int() would also take "+1", " 1" and "1_0". No id has 20 digits.
    if isinstance(said, str) and not (said.isascii() and said.isdecimal() and len(said) < 20):
        raise BadRequest(
            f"`logit_bias` has the key {shortened(said, 40)!r}; keys are token ids.",
            param="logit_bias",
        )
    return int(said)


def _bias(said: float | bool) -> float:
    if said is True:
        raise BadRequest("`logit_bias` has true; a bias is a number or false.", param="logit_bias")
    return -100.0 if said is False else said


def _token_ids(raw: msgspec.Raw, param: str, most: int, vocab_size: int) -> list[int]:
    """Ids that a field lists, each once."""
    said = decode_small(raw, list[int], param, _MAX_ID_BYTES * most, f"{most} token ids")
    if said == [] and param == "allowed_token_ids":
        raise BadRequest("`allowed_token_ids` is empty: no token could be chosen.", param=param)
    ids = list(dict.fromkeys(said or []))
    if len(ids) > most:
        raise BadRequest(
            f"`{param}` has {len(ids)} token ids; at most {most} are allowed.", param=param
        )
    check_token_ids(ids, vocab_size, param)
    return ids


def check_token_ids(ids: Any, vocab_size: int, param: str) -> None:
    """Refuse ids that the model does not have."""
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        wrong = next(token for token in ids if not 0 <= token < vocab_size)
        raise BadRequest(
            f"`{param}` has the token id {shortened(str(wrong), 40)}; "
            f"the model's ids are 0 to {vocab_size - 1}.",
            param=param,
        )


def seed_of(seed: int, choice: int) -> int:
    """The seed of choice number `choice`: the first has the request's own."""
    if choice == 0:
        return seed
    digest = blake2b(f"{seed}:{choice}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) & _SEED_MASK


def refuse_conflicts(fields: GenerationFields) -> None:
    """A form of the answer decides where it ends; what forbids that end cannot be kept."""
    for name in ("ignore_eos", "min_tokens", "allowed_token_ids"):
        value = getattr(fields, name)
        if is_given(value) if isinstance(value, msgspec.Raw) else value:
            raise BadRequest(
                f"`{name}` cannot be kept together with a required form of the answer "
                "(response_format, tools or a grammar).",
                param=name,
            )
