"""One table of sampling parameters, from which everything else follows."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from penstock import sampling, wire
from penstock.config import ModelSettings
from penstock.server.fields.generation import GenerationFields
from penstock.server.protocols.ollama.fields import Options


def test_every_parameter_is_a_setting_a_field_and_on_the_wire() -> None:
    settings = {field.name for field in dataclasses.fields(ModelSettings)}
    assert sampling.BY_NAME.keys() <= settings
    assert sampling.BY_NAME.keys() <= set(GenerationFields.__struct_fields__)
    assert sampling.BY_NAME.keys() <= set(wire.Sampling.__struct_fields__)
    assert {each.ollama for each in sampling.PARAMETERS} <= set(Options.__struct_fields__)


def test_what_nobody_says_is_the_neutral_value_and_the_default_on_the_wire() -> None:
    values = sampling.resolve({}, {}, 100)
    assert values == {each.name: each.neutral for each in sampling.PARAMETERS}
    assert {name: getattr(wire.Sampling(), name) for name in sampling.BY_NAME} == values


def test_the_client_comes_before_the_author_who_sets_only_what_authors_may() -> None:
    author = {"temperature": 0.6, "top_k": 20.0, "presence_penalty": 1.0}
    values = sampling.resolve({"temperature": 0.0, "top_p": 0.0}, author, 10)
    assert values["temperature"] == 0.0
    assert 0 < values["top_p"] < 0.001
    assert values["top_k"] == 10  # no more than there are tokens
    assert values["presence_penalty"] == 0.0


@pytest.mark.parametrize("parameter", sampling.PARAMETERS, ids=lambda each: each.name)
def test_a_field_takes_its_range_and_no_more(parameter: sampling.SamplingParameter) -> None:
    kind = int if parameter.whole else float
    for value in (parameter.low, min(parameter.high, 2**31)):
        msgspec.convert({parameter.name: kind(value)}, GenerationFields)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({parameter.name: kind(parameter.low - 1)}, GenerationFields)


def test_the_most_demanding_request_changes_every_parameter() -> None:
    values = sampling.demanding()
    assert all(values[each.name] != each.neutral for each in sampling.PARAMETERS)
