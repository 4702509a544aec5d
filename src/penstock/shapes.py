"""Named model shapes without weights: `random:SHAPE`, for sizing, benchmarks and tests.

A shape is a plain transformers configuration. `write_folder` turns it into a model folder with a
tokenizer that spells any text as bytes and gives every other id a word, so that random output is
still text. The weights are made up by the worker, from the seed in `penstock.json`; here they are
only counted. No torch, no transformers.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from penstock import hybrid_shapes
from penstock.errors import ModelUnusable, UnknownModel, shortened

if TYPE_CHECKING:
    from pathlib import Path

PREFIX = "random:"
RANDOM_SEED = 0

BEGIN, END, TURN_START, TURN_END = "<|begin|>", "<|end|>", "<|turn|>", "<|turn_end|>"
_SPECIALS = (BEGIN, END, TURN_START, TURN_END)
_BYTES = 256

CHAT_TEMPLATE = (
    "{{ '" + BEGIN + "' }}"
    "{% for message in messages %}"
    "{{ '" + TURN_START + "' + message['role'] + '\\n' + message['content'] + '" + TURN_END + "' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '" + TURN_START + "assistant\\n' }}{% endif %}"
)


def _llama(**fields: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        **fields,
    }


def _qwen3(**fields: Any) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "vocab_size": 151936,
        "dtype": "bfloat16",
        **fields,
    }


_8B: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}
_FP8_BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
_INT4_GROUPS = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "symmetric": True, "group_size": 128},
        }
    },
}

SHAPES: dict[str, dict[str, Any]] = {
    "tiny-llama": _llama(
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        vocab_size=512,
        dtype="float32",
    ),
    # 8 layers x 32 heads x 128 x (K and V) x 4 bytes = 256 KiB of KV a token, but few weights.
    "big-kv": _llama(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=8,
        num_attention_heads=32,
        num_key_value_heads=32,
        head_dim=128,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        vocab_size=512,
        dtype="float32",
    ),
    "llama-1b": _llama(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=131072,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        vocab_size=128256,
        dtype="bfloat16",
    ),
    "qwen3-0.6b": _qwen3(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        tie_word_embeddings=True,
    ),
    "qwen3-8b": _qwen3(**_8B),
    # The same with the weights of its layers packed.
    "qwen3-8b-fp8": _qwen3(**_8B, quantization_config=_FP8_BLOCKS),
    "qwen3-8b-int4": _qwen3(**_8B, quantization_config=_INT4_GROUPS),
    "qwen3-8b-q4_k": _qwen3(**_8B, quantization_config={"quant_method": "gguf", "block": "Q4_K"}),
    # The same with a window for long contexts.
    "qwen3-8b-128k": _qwen3(**{**_8B, "max_position_embeddings": 131072}),
    # 128 experts of which 8 see a token: 30 billion weights, 3 billion of them for each.
    "qwen3-30b-a3b": _qwen3(
        architectures=["Qwen3MoeForCausalLM"],
        model_type="qwen3_moe",
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        tie_word_embeddings=False,
    ),
    **hybrid_shapes.SHAPES,
}


def shape_config(name: str) -> dict[str, Any]:
    """The configuration of `random:SHAPE`, complete with its special token ids."""
    shape = name.removeprefix(PREFIX)
    if shape not in SHAPES:
        raise UnknownModel(
            f"There is no shape {shortened(shape)!r}; the shapes are {', '.join(sorted(SHAPES))}."
        )
    end_ids = [_BYTES + _SPECIALS.index(END), _BYTES + _SPECIALS.index(TURN_END)]
    return {**SHAPES[shape], "bos_token_id": _BYTES, "eos_token_id": end_ids}


def count_parameters(config: dict[str, Any]) -> int:
    """Exactly the parameters that transformers builds for a configuration of an offered family."""
    family = config.get("model_type")
    try:
        if (hybrid := hybrid_shapes.count_parameters(config)) is not None:
            return hybrid
    except KeyError as missing:
        raise ModelUnusable(f"The shape has no {missing.args[0]}.") from None
    if family not in ("llama", "qwen3", "qwen3_moe"):
        raise ModelUnusable(
            f"Random weights exist for llama, qwen3, qwen3_moe, qwen3_5_text, qwen3_next, lfm2 and "
            f"mamba2 shapes, not for {family!r}."
        )
    try:
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        head_dim = config["head_dim"]
        query = config["num_attention_heads"] * head_dim
        key_value = config["num_key_value_heads"] * head_dim
        embedding = config["vocab_size"] * hidden
        layer_count, tied = config["num_hidden_layers"], config["tie_word_embeddings"]
    except KeyError as missing:
        raise ModelUnusable(f"The shape has no {missing.args[0]}.") from None
    attention = 2 * hidden * query + 2 * hidden * key_value
    norms = 2 * hidden + (0 if family == "llama" else 2 * head_dim)
    feed_forward = 3 * hidden * inner
    if family == "qwen3_moe":
        experts = config["num_experts"]
        feed_forward = experts * (3 * hidden * config["moe_intermediate_size"] + hidden)
    layer = attention + feed_forward + norms
    return int(embedding * (1 if tied else 2) + layer_count * layer + hidden)


def write_folder(name: str, folder: Path) -> None:
    """Fill `folder`, which exists, with everything of `random:SHAPE` but weights."""
    config = shape_config(name)
    files: dict[str, dict[str, Any]] = {
        "config.json": config,
        "generation_config.json": {
            "bos_token_id": config["bos_token_id"],
            "eos_token_id": config["eos_token_id"],
        },
        "tokenizer.json": tokenizer(config["vocab_size"]),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BEGIN,
            "eos_token": END,
            "model_max_length": config["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
        "penstock.json": {
            "source": PREFIX + name.removeprefix(PREFIX),
            "random_seed": RANDOM_SEED,
        },
    }
    for file_name, value in files.items():
        readable = file_name != "tokenizer.json"  # that one is megabytes
        text = json.dumps(value, ensure_ascii=False, indent=1 if readable else None)
        (folder / file_name).write_text(text, "utf-8")


def tokenizer(vocab_size: int) -> dict[str, Any]:
    """A `tokenizer.json`: 256 bytes, the special tokens, and a word for every further id."""
    vocabulary = {letter: index for index, letter in enumerate(byte_letters())}
    specials = [
        {
            "id": _BYTES + index,
            "content": content,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for index, content in enumerate(_SPECIALS)
    ]
    vocabulary.update((content, _BYTES + index) for index, content in enumerate(_SPECIALS))
    for index in range(len(vocabulary), vocab_size):
        vocabulary[_word(index)] = index
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": specials,
        "normalizer": None,
        "pre_tokenizer": {**byte_level, "use_regex": True},
        "post_processor": None,
        "decoder": {**byte_level, "use_regex": True},
        # No merges: text is always spelled byte by byte, the words only ever come out.
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": [],
        },
    }


def _word(index: int) -> str:
    """A made-up word of its own for each id: a space (as byte-level letter) and letters."""
    letters = ""
    while index:
        index, digit = divmod(index, 26)
        letters += chr(ord("a") + digit)
    return chr(0x120) + letters


def byte_letters() -> list[str]:
    """The printable character that stands for each byte in byte-level vocabularies.

    Bytes that print stand for themselves; the others take the code points from 256 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    letters: list[str] = []
    shifted = 0
    for byte in range(_BYTES):
        if byte in printable:
            letters.append(chr(byte))
        else:
            letters.append(chr(0x100 + shifted))
            shifted += 1
    return letters
