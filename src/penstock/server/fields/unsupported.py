"""Fields of other servers that would change an answer and that this one does not keep.

Left out in silence they would give an answer that was not asked for. So they are refused by name,
unless they say what happens anyway.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

import msgspec
from msgspec import Meta, Raw

from penstock.errors import BadRequest
from penstock.server.fields.whole_numbers import WholeNumbers
from penstock.server.http.free_form import is_given

if TYPE_CHECKING:
    from collections.abc import Iterable

_field = msgspec.field
Unsupported = Annotated[Raw, Meta(description="Not supported: refused unless it changes nothing.")]

# What all of them may say: nothing of the kind is wanted.
_OFF = (b"false", b"[]", b"{}", b'""', b"0", b"0.0")
# Here a zero is a number like any other.
_COUNTS_FROM_ZERO = ("prompt_logprobs",)
# And what some may say beside: their own way to say nothing.
_NEUTRAL: dict[str, tuple[bytes, ...]] = {
    "adaptive_target": (b"-1", b"-1.0"),
    "best_of": (b"1",),
    "encoder_repetition_penalty": (b"1", b"1.0"),
    "function_call": (b'"none"', b'"auto"'),
    "guidance_scale": (b"1", b"1.0"),
    "length_penalty": (b"1", b"1.0"),
    "n_cmpl": (b"1",),
    "reasoning_format": (b'"auto"', b'"deepseek"'),
    "t_max_predict_ms": (b"-1",),
    "tfs_z": (b"1", b"1.0"),
    "top_n_sigma": (b"-1", b"-1.0"),
    "num_beams": (b"1",),
    "typ_p": (b"1", b"1.0"),
    "typical": (b"1", b"1.0"),
    "typical_p": (b"1", b"1.0"),
}
# What to do instead, where there is something.
_INSTEAD = {
    "bad_words": "give their tokens a `logit_bias` of -100",
    "cache_salt": "use an API key of your own: KV is never shared between keys",
    "chat_template": "set it for the model (docs/models.md)",
    "function_call": "use `tool_choice`",
    "functions": "use `tools`",
    "container": "tools run at the client",
    "context_management": "send a shorter conversation",
    "guided_whitespace_pattern": "how JSON is laid out is a setting (models.json_style)",
    "lora_path": "an adapter that is merged into a model's files is a model of its own",
    "mcp_servers": "give their tools as `tools` and call them at the client",
    "min_length": "use `min_tokens`",
    "n_cmpl": "use `n`",
    "n_probs": "use `logprobs`",
    "previous_input_messages": "use `previous_response_id`",
    "prompt": "use `instructions` and `input`",
    "prompt_logprobs": "use /v1/completions with `echo` and `logprobs`",
    "truncate_prompt_tokens": "send a shorter prompt",
    "use_beam_search": "use `n` and choose among the answers",
}


def refuse_fields(body: msgspec.Struct, names: Iterable[str]) -> None:
    """Refuse the first of these fields that would change the answer."""
    for name in names:
        raw = getattr(body, name)
        if not is_given(raw) or _changes_nothing(name, raw):
            continue
        instead = f"; {_INSTEAD[name]}" if name in _INSTEAD else ""
        raise BadRequest(f"`{name}` is not supported{instead}.", param=name)


def _changes_nothing(name: str, raw: Raw) -> bool:
    if len(memoryview(raw)) >= 16:
        return False
    said = bytes(raw)
    if said == b"0" and name in _COUNTS_FROM_ZERO:
        return False
    return said in (*_OFF, *_NEUTRAL.get(name, ()))


class UnsupportedFields(WholeNumbers, kw_only=True):
    """Fields that are known by name only."""

    also_unsupported: ClassVar[tuple[str, ...]] = ()  # of a subclass

    # OpenAI
    functions: Unsupported = _field(default_factory=Raw)
    function_call: Unsupported = _field(default_factory=Raw)
    audio: Unsupported = _field(default_factory=Raw)
    web_search_options: Unsupported = _field(default_factory=Raw)
    # vLLM
    bad_words: Unsupported = _field(default_factory=Raw)
    cache_salt: Unsupported = _field(default_factory=Raw)
    chat_template: Unsupported = _field(default_factory=Raw)
    early_stopping: Unsupported = _field(default_factory=Raw)
    guided_whitespace_pattern: Unsupported = _field(default_factory=Raw)
    include_stop_str_in_output: Unsupported = _field(default_factory=Raw)
    length_penalty: Unsupported = _field(default_factory=Raw)
    logprob_token_ids: Unsupported = _field(default_factory=Raw)
    logits_processors: Unsupported = _field(default_factory=Raw)
    mm_processor_kwargs: Unsupported = _field(default_factory=Raw)
    prompt_embeds: Unsupported = _field(default_factory=Raw)
    prompt_logprobs: Unsupported = _field(default_factory=Raw)
    repetition_detection: Unsupported = _field(default_factory=Raw)
    return_assistant_tokens_mask: Unsupported = _field(default_factory=Raw)
    return_prompt_text: Unsupported = _field(default_factory=Raw)
    return_token_ids: Unsupported = _field(default_factory=Raw)
    return_token_offsets: Unsupported = _field(default_factory=Raw)
    return_tokens_as_token_ids: Unsupported = _field(default_factory=Raw)
    truncate_prompt_tokens: Unsupported = _field(default_factory=Raw)
    use_beam_search: Unsupported = _field(default_factory=Raw)
    vllm_xargs: Unsupported = _field(default_factory=Raw)
    # llama.cpp
    adaptive_target: Unsupported = _field(default_factory=Raw)
    dry_multiplier: Unsupported = _field(default_factory=Raw)
    dynatemp_range: Unsupported = _field(default_factory=Raw)
    grammar_lazy: Unsupported = _field(default_factory=Raw)
    lora: Unsupported = _field(default_factory=Raw)
    min_keep: Unsupported = _field(default_factory=Raw)
    mirostat: Unsupported = _field(default_factory=Raw)
    n_cmpl: Unsupported = _field(default_factory=Raw)
    n_indent: Unsupported = _field(default_factory=Raw)
    n_probs: Unsupported = _field(default_factory=Raw)
    post_sampling_probs: Unsupported = _field(default_factory=Raw)
    reasoning_format: Unsupported = _field(default_factory=Raw)
    response_fields: Unsupported = _field(default_factory=Raw)
    return_tokens: Unsupported = _field(default_factory=Raw)
    samplers: Unsupported = _field(default_factory=Raw)
    t_max_predict_ms: Unsupported = _field(default_factory=Raw)
    tfs_z: Unsupported = _field(default_factory=Raw)
    top_n_sigma: Unsupported = _field(default_factory=Raw)
    typical_p: Unsupported = _field(default_factory=Raw)
    xtc_probability: Unsupported = _field(default_factory=Raw)
    # SGLang
    custom_logit_processor: Unsupported = _field(default_factory=Raw)
    lora_path: Unsupported = _field(default_factory=Raw)
    no_stop_trim: Unsupported = _field(default_factory=Raw)
    return_hidden_states: Unsupported = _field(default_factory=Raw)
    stop_regex: Unsupported = _field(default_factory=Raw)
    # transformers, KoboldCpp, text-generation-webui
    encoder_repetition_penalty: Unsupported = _field(default_factory=Raw)
    epsilon_cutoff: Unsupported = _field(default_factory=Raw)
    eta_cutoff: Unsupported = _field(default_factory=Raw)
    guidance_scale: Unsupported = _field(default_factory=Raw)
    min_length: Unsupported = _field(default_factory=Raw)
    mirostat_mode: Unsupported = _field(default_factory=Raw)
    negative_prompt: Unsupported = _field(default_factory=Raw)
    no_repeat_ngram_size: Unsupported = _field(default_factory=Raw)
    num_beams: Unsupported = _field(default_factory=Raw)
    penalty_alpha: Unsupported = _field(default_factory=Raw)
    smoothing_factor: Unsupported = _field(default_factory=Raw)
    top_a: Unsupported = _field(default_factory=Raw)
    typ_p: Unsupported = _field(default_factory=Raw)
    typical: Unsupported = _field(default_factory=Raw)

    def refuse_unsupported(self) -> None:
        """Refuse the first that would change the answer."""
        refuse_fields(self, (*UnsupportedFields.__struct_fields__, *self.also_unsupported))
