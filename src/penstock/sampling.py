"""The sampling parameters, once: range, neutral value, and who may set them under which name.

Request fields, per-model settings, the wire's `Sampling`, the model author's defaults and the most
demanding request of a profile all follow from this table. Knows no protocol's bodies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec import Meta

if TYPE_CHECKING:
    from collections.abc import Mapping

INT64 = 2**63 - 1


@dataclass(frozen=True, slots=True)
class SamplingParameter:
    """One of them, under OpenAI's and vLLM's name."""

    name: str
    low: float
    high: float
    neutral: float  # changes nothing
    demanding: float  # makes the sampler do its work
    ollama: str  # its name among Ollama's options
    whole: bool = False
    author: bool = True  # `generation_config.json` of a model may set it
    history: bool = False  # needs the tokens so far

    @property
    def meta(self) -> Meta:
        """The range, for a field of a request."""
        low, high = (int(self.low), int(self.high)) if self.whole else (self.low, self.high)
        return Meta(ge=low, le=high)


PARAMETERS = (
    SamplingParameter("temperature", 0, 2, 1.0, 0.8, "temperature"),
    SamplingParameter("top_p", 0, 1, 1.0, 0.9, "top_p"),
    SamplingParameter("top_k", -1, INT64, 0, 40, "top_k", whole=True),
    SamplingParameter("min_p", 0, 1, 0.0, 0.01, "min_p"),
    SamplingParameter("repetition_penalty", 0.01, 100, 1.0, 1.1, "repeat_penalty", history=True),
    SamplingParameter(
        "presence_penalty", -2, 2, 0.0, 0.1, "presence_penalty", author=False, history=True
    ),
    SamplingParameter(
        "frequency_penalty", -2, 2, 0.0, 0.1, "frequency_penalty", author=False, history=True
    ),
)
BY_NAME = {parameter.name: parameter for parameter in PARAMETERS}
PENALTIES = tuple(parameter.name for parameter in PARAMETERS if parameter.history)


def range_of(name: str) -> Meta:
    """The range of a parameter, for a field of a request."""
    return BY_NAME[name].meta


def demanding() -> dict[str, float]:
    """Values at which the sampler has all of its work to do."""
    return {p.name: int(p.demanding) if p.whole else p.demanding for p in PARAMETERS}


def resolve(
    said: Mapping[str, float | None], author: Mapping[str, float], vocab_size: int
) -> dict[str, float]:
    """What holds: the value that was said, else the model author's, else the neutral one."""
    values: dict[str, float] = {}
    for parameter in PARAMETERS:
        value = said.get(parameter.name)
        if value is None and parameter.author:
            value = author.get(parameter.name)
        values[parameter.name] = float(parameter.neutral if value is None else value)
    # A top_p of nothing still leaves the most likely token.
    values["top_p"] = max(values["top_p"], 1e-6)
    values["top_k"] = min(max(int(values["top_k"]), 0), vocab_size)
    return values
