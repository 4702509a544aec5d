"""The seeds of choices, and whose word counts where several speak."""

from __future__ import annotations

from penstock.config import ModelSettings
from penstock.server.api.fields import GenerationFields, seed_of


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
