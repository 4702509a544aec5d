"""The seeds of choices, and whose word counts where several speak."""

from __future__ import annotations

import msgspec
import pytest

from penstock import errors
from penstock.config import ModelSettings
from penstock.errors import BadRequest
from penstock.server.fields.generation import GenerationFields, seed_of
from penstock.server.fields.unsupported import UnsupportedFields
from penstock.server.protocols.openai.chat import ChatFields
from penstock.server.protocols.openai.reasoning_fields import wanted_thinking
from penstock.server.protocols.openai.responses_fields import ResponseFields


def test_seeds_of_choices_differ_and_repeat() -> None:
    seeds = [seed_of(7, choice) for choice in range(100)]
    assert seeds[0] == 7
    assert len(set(seeds)) == 100
    assert seeds == [seed_of(7, choice) for choice in range(100)]
    assert seed_of(8, 1) not in seeds
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_the_client_then_the_settings_then_the_model() -> None:
    settings = ModelSettings(temperature=0.5, top_k=7, presence_penalty=1.0, priority=-3)
    asked = GenerationFields(temperature=0.0, frequency_penalty=0.25)
    fields = asked.completed(settings)
    sampling = fields.sampling({"temperature": 0.9, "top_k": 3, "top_p": 0.8}, 100, None)
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.0, 7, 0.8)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1.0, 0.25)
    assert (fields.priority, asked.priority) == (-3, None)


def chat(**fields: object) -> ChatFields:
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    return msgspec.json.decode(msgspec.json.encode(body), type=ChatFields)


@pytest.mark.parametrize("name", [*UnsupportedFields.__struct_fields__, "echo", "best_of"])
def test_what_is_not_kept_is_refused_by_name_unless_it_asks_for_nothing(name: str) -> None:
    nothings: tuple[object, ...] = (None, False, [], {}, "", 0)
    for nothing in nothings:
        if (name, nothing) != ("prompt_logprobs", 0) or nothing is False:
            chat(**{name: nothing}).check()
    for something in (True, 2, "x", ["x"], {"x": 1}):
        with pytest.raises(BadRequest, match=f"`{name}` is not supported") as refused:
            chat(**{name: something}).check()
        assert refused.value.param == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("function_call", "auto"),
        ("length_penalty", 1.0),
        ("typical_p", 1),
        ("num_beams", 1),
        ("typ_p", 1.0),
        ("n_cmpl", 1),
        ("adaptive_target", -1.0),
    ],
)
def test_what_changes_nothing_is_taken(name: str, value: object) -> None:
    chat(**{name: value}).check()


def test_a_zero_may_ask_for_something() -> None:
    with pytest.raises(BadRequest, match="`prompt_logprobs` is not supported"):
        chat(prompt_logprobs=0).check()


@pytest.mark.parametrize("window", [4097, 8192])
@pytest.mark.parametrize("penalty", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_penalties_over_a_window_that_is_too_long(penalty: str, window: int) -> None:
    with pytest.raises(BadRequest, match=f"beside `{penalty}` it may be up to 4096"):
        chat(**{penalty: 1.5, "repeat_last_n": window}).check()
    chat(**{penalty: 1.5, "repeat_last_n": -1}).check()
    chat(repeat_last_n=window, repetition_penalty=1.0, presence_penalty=0).check()


def test_penalties_that_are_to_count_nothing_are_off() -> None:
    author = {"repetition_penalty": 1.3}
    sampling = chat(repeat_last_n=0, presence_penalty=1.0).sampling(author, 100, None)
    assert (sampling.repetition_penalty, sampling.presence_penalty) == (1.0, 0.0)
    assert chat(repeat_last_n=64).sampling(author, 100, None).repetition_penalty == 1.3


@pytest.mark.parametrize(("said", "meant"), [(8, 8), (8.0, 8), (0, 0), (-1, None), (None, None)])
def test_the_budget_of_reasoning_by_vllms_name(said: float | None, meant: int | None) -> None:
    assert wanted_thinking(chat(thinking_token_budget=said)).budget == meant
    same = chat(thinking_token_budget=said, thinking_budget=said)
    assert wanted_thinking(same).budget == meant
    if said is not None:
        with pytest.raises(BadRequest, match="say different things"):
            wanted_thinking(chat(thinking_token_budget=said, thinking_budget=3))


@pytest.mark.parametrize(
    ("said", "meant"), [(8, 8), (8.0, 8), (-1, None), (-1.0, None), (None, None)]
)
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_a_limit_may_be_written_in_several_ways(
    name: str, said: float | None, meant: int | None
) -> None:
    wanted = chat(**{name: said}).requested_tokens()
    assert wanted == meant
    assert not isinstance(wanted, float)


def test_a_new_message_and_the_last_one_cannot_both_be_written() -> None:
    with pytest.raises(BadRequest, match="only one can be kept"):
        chat(add_generation_prompt=True, continue_final_message=True).conversation()
    assert chat(continue_final_message=True).conversation().continues


def test_biases_are_packed_once_for_all_answers() -> None:
    sampling = chat(logit_bias={"7": 1.5, "3": -2}).sampling({}, 100, None)
    assert sampling.logit_bias is not None
    assert len(sampling.logit_bias.ids) == len(sampling.logit_bias.values) == 8
    assert chat(logit_bias={}).sampling({}, 100, None).logit_bias is None


def test_many_items_of_one_turn_are_joined_in_a_moment() -> None:
    """A text that grows by pieces would be copied for each: minutes for so many."""
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "x" * 100}]}
    said = {"role": "assistant", "content": "y" * 100}
    body = {"model": "m", "input": [thought, said] * 20_000}
    fields = msgspec.convert(body, ResponseFields)
    [message] = fields.conversation_after([]).messages
    assert message["content"] == "y" * 2_000_000
    assert message["reasoning_content"] == "x" * 2_000_000


@pytest.mark.parametrize("kind", [errors.BadRequest, errors.UnknownModel, errors.Overloaded])
def test_no_error_repeats_all_that_a_client_sent(kind: type[errors.PenstockError]) -> None:
    error = kind("x" * 1_000_000, param="y" * 1_000_000)
    assert len(error.message) < 5000
    assert error.param is not None
    assert len(error.param) < 200
    assert errors.shortened("short") == "short"
