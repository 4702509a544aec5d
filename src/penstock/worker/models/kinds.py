"""Which of transformers' automatic classes makes a model, and whose attention its parts have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from penstock.catalog.vision import TYPES
from penstock.worker.models import attention

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Of an encoder of images torch's own, whose memory grows with the patches and not their square.
_WITH_IMAGES = {
    "": "sdpa",
    "text_config": attention.IMPLEMENTATION,
    "vision_config": "sdpa",
}


def sees(config: PretrainedConfig) -> bool:
    """Whether it is of a type that has an encoder of images beside its language model."""
    return config.model_type in TYPES


def class_for(config: PretrainedConfig) -> Any:
    """The class that has such models."""
    return AutoModelForImageTextToText if sees(config) else AutoModelForCausalLM


def implementation_for(config: PretrainedConfig) -> str | dict[str, str]:
    """What to give a model for its attention, so that its text goes through ours."""
    return _WITH_IMAGES if sees(config) else attention.IMPLEMENTATION
