"""The fields of a request as the OpenAI and vLLM protocols name them, and which values are sane.

Types and plain ranges are msgspec's; what needs more than one field or the model's vocabulary is
checked here too. It turns fields into what a worker is asked for, and knows no HTTP.
"""

from __future__ import annotations

import secrets
from hashlib import blake2b
from typing import TYPE_CHECKING, Annotated, Any, Self

import msgspec
from msgspec import Meta

from penstock import wire
from penstock.errors import BadRequest
from penstock.server.api.formats import ResponseFormat, StructuredOutputs, only_one

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.config import ModelSettings
    from penstock.text.grammar import Format

MAX_N = 128
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 4096
_INT64 = 2**63 - 1
_SEED_MASK = _INT64
# What the settings of a model may say for requests that do not.
_SETTINGS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "max_tokens",
    "priority",
)

Penalty = Annotated[float, Meta(ge=-2, le=2)]
Share = Annotated[float, Meta(ge=0, le=1)]
Count = Annotated[int, Meta(ge=0, le=_INT64)]


class StreamOptions(msgspec.Struct):
    """`stream_options`."""

    include_usage: bool | None = None


class GenerationFields(msgspec.Struct, kw_only=True):
    """What chat and completions have in common. None is the same as leaving a field out."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=_INT64)] | None = None
    stop: str | list[str] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    response_format: ResponseFormat | None = None
    # What vLLM's users are used to.
    top_k: Annotated[int, Meta(ge=-1, le=_INT64)] | None = None
    min_p: Share | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    stop_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    def check(self) -> None:
        """Refuse what can be refused without knowing the model."""
        if self.stream_options is not None and not self.stream:
            raise BadRequest("`stream_options` needs `stream` to be true.", param="stream_options")
        self.stops()

    def completed(self, settings: ModelSettings) -> Self:
        """The same, with the user's settings for the model where the client is silent."""
        said = {name: getattr(settings, name) for name in _SETTINGS if getattr(self, name) is None}
        return msgspec.structs.replace(self, **said)

    def format(self) -> Format | None:
        """The form that the answer must have, if one was asked for."""
        guided = StructuredOutputs(
            self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar
        )
        wanted: list[Format | None] = [*guided.formats("guided_")]
        if self.structured_outputs is not None:
            wanted += self.structured_outputs.formats()
        if self.response_format is not None:
            wanted.append(self.response_format.format())
        return only_one(wanted)

    def check_min_tokens(self, max_tokens: int | None) -> None:
        """Refuse an answer that would have to be longer than it may be."""
        if max_tokens is not None and (self.min_tokens or 0) > max_tokens:
            raise BadRequest(
                f"`min_tokens` is {self.min_tokens}, which is more than the {max_tokens} tokens "
                "that the answer may have.",
                param="min_tokens",
            )

    def stops(self) -> list[str]:
        """The stop strings."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
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
        own = self.stop_token_ids or []
        check_token_ids(own, vocab_size, "stop_token_ids")
        return list(dict.fromkeys(own if self.ignore_eos else [*eos_token_ids, *own]))

    def sampling(
        self, defaults: Mapping[str, float], vocab_size: int, logprobs: int | None
    ) -> wire.Sampling:
        """How the worker is to choose; the model's own defaults stand where the client is silent.

        The seed is that of the first choice, see `seed_of`.
        """

        def pick(name: str, otherwise: float) -> float:
            value = getattr(self, name)
            return float(defaults.get(name, otherwise) if value is None else value)

        top_k = int(pick("top_k", 0))
        return wire.Sampling(
            temperature=pick("temperature", 1.0),
            # A top_p of nothing still leaves the most likely token.
            top_p=max(pick("top_p", 1.0), 1e-6),
            top_k=min(max(top_k, 0), vocab_size),
            min_p=pick("min_p", 0.0),
            repetition_penalty=pick("repetition_penalty", 1.0),
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=self._biases(vocab_size),
            seed=secrets.randbits(63) if self.seed is None else self.seed & _SEED_MASK,
            logprobs=logprobs,
        )

    def _biases(self, vocab_size: int) -> dict[int, float]:
        biases: dict[int, float] = {}
        for key, bias in (self.logit_bias or {}).items():
            # isdecimal: int() would also take "+1", " 1" and "1_0". No id has 20 digits.
            if not (key.isascii() and key.isdecimal() and len(key) < 20):
                raise BadRequest(
                    f"`logit_bias` has the key {key[:40]!r}; keys are token ids.",
                    param="logit_bias",
                )
            biases[int(key)] = bias
        check_token_ids(biases, vocab_size, "logit_bias")
        return biases


def check_token_ids(ids: Any, vocab_size: int, param: str) -> None:
    """Refuse ids that the model does not have."""
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        wrong = next(token for token in ids if not 0 <= token < vocab_size)
        raise BadRequest(
            f"`{param}` has the token id {str(wrong)[:40]}; "
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
    for name in ("ignore_eos", "min_tokens"):
        if getattr(fields, name):
            raise BadRequest(
                f"`{name}` cannot be kept together with a required form of the answer "
                "(response_format, tools or a grammar).",
                param=name,
            )
