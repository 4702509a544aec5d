"""Tiny random models that see, of every type that is served: folders with a processor, and what
transformers itself answers to a prompt with images.

As in `tiny`, weights are wide enough that what an architecture does peculiarly shows in its tokens.
"""

from __future__ import annotations

import io
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import models, pre_tokenizers
from transformers import AutoConfig, AutoModelForImageTextToText, GenerationConfig

from penstock.catalog.vision import read_vision
from penstock.catalog.weights import read_json
from penstock.testing.exactness import TIE_LOGITS, Expected
from penstock.wire import Media
from penstock.worker.vision.prepare import Preparer

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from transformers import PreTrainedModel

VOCABULARY = 320
CONTEXT = 1024
_IMAGE = 300  # token ids: the image's placeholder, and marks around images
_MARKS = {
    "<image>": 300, "<|image_pad|>": 300, "[IMG]": 300, "<IMG_CONTEXT>": 300,
    "<|vision_start|>": 301, "<|vision_end|>": 302, "<fake_token_around_image>": 303,
    "<global-img>": 304, "[IMG_BREAK]": 305, "[IMG_END]": 306, "<img>": 307, "</img>": 308,
    **{f"<row_{n // 3 + 1}_col_{n % 3 + 1}>": 309 + n for n in range(9)},
}  # fmt: skip
TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.25,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "initializer_range": 0.3,
}
_ROTARY = {
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3],
    }
}  # fmt: skip
_QWEN_TOWER = {
    "depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "in_channels": 3,
}  # fmt: skip
_QWEN_MARKS = {"image_token_id": _IMAGE, "vision_start_token_id": 301, "vision_end_token_id": 302}
_TILES_TOWER = {**_TOWER, "image_size": 32, "patch_size": 4}
_SQUARES = {
    "do_resize": True, "image_mean": [0.5, 0.4, 0.3], "image_std": [0.3, 0.3, 0.2],
}  # fmt: skip
_TILES = {
    **_SQUARES, "size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32},
    "do_image_splitting": True,
}  # fmt: skip
_QWEN_IMAGES = {
    "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 4, "merge_size": 2,
    "temporal_patch_size": 2, "size": {"shortest_edge": 256, "longest_edge": 64 * 32},
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Tiny:
    """One type's configuration, its image processor's, and how a template writes an image."""

    config: dict[str, Any]
    processor: dict[str, Any]
    written: str = "<image>"


_TINY: dict[str, _Tiny] = {
    "smolvlm": _Tiny(
        {
            "text_config": {"model_type": "llama", **TEXT, "head_dim": 16},
            "vision_config": {"model_type": "smolvlm_vision", **_TILES_TOWER},
            "scale_factor": 4, "image_token_id": _IMAGE, "pad_token_id": 0,
        },
        {"image_processor_type": "SmolVLMImageProcessor", **_TILES},
    ),
    "idefics3": _Tiny(
        {
            "text_config": {"model_type": "llama", **TEXT, "head_dim": 16},
            "vision_config": {"model_type": "idefics3_vision", **_TILES_TOWER},
            "scale_factor": 4, "image_token_id": _IMAGE, "pad_token_id": 0,
        },
        {"image_processor_type": "Idefics3ImageProcessor", **_TILES},
    ),
    "llava": _Tiny(
        {
            "text_config": {
                "model_type": "qwen2", **TEXT, "use_sliding_window": True, "sliding_window": 24,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            "vision_config": {
                "model_type": "clip_vision_model", **_TOWER, "image_size": 24, "patch_size": 4,
            },
            "image_token_index": _IMAGE, "image_token_id": _IMAGE, "image_seq_length": 36,
        },
        {
            "image_processor_type": "CLIPImageProcessor", **_SQUARES,
            "size": {"shortest_edge": 24}, "crop_size": {"height": 24, "width": 24},
        },
    ),
    "mistral3": _Tiny(
        {
            "text_config": {
                "model_type": "mistral", **TEXT, "head_dim": 16, "sliding_window": None,
            },
            "vision_config": {
                "model_type": "pixtral", **_TOWER, "head_dim": 16, "image_size": 64,
                "patch_size": 4,
            },
            "spatial_merge_size": 2, "image_token_index": _IMAGE, "image_token_id": _IMAGE,
        },
        {
            "image_processor_type": "PixtralImageProcessor", **_SQUARES,
            "size": {"longest_edge": 48}, "patch_size": {"height": 8, "width": 8},
        },
        "[IMG]",
    ),
    "internvl": _Tiny(
        {
            "text_config": {"model_type": "qwen2", **TEXT},
            "vision_config": {
                "model_type": "internvl_vision", **_TOWER, "image_size": [16, 16],
                "patch_size": [4, 4], "use_qk_norm": False,
            },
            "image_token_id": _IMAGE, "image_seq_length": 4, "downsample_ratio": 0.5,
        },
        {
            "image_processor_type": "GotOcr2ImageProcessor", **_SQUARES,
            "size": {"height": 16, "width": 16}, "crop_to_patches": True,
            "min_patches": 1, "max_patches": 6,
        },
        "<IMG_CONTEXT>",
    ),
    "qwen2_vl": _Tiny(
        {
            "text_config": {"model_type": "qwen2_vl_text", **TEXT, **_ROTARY},
            "vision_config": {
                "model_type": "qwen2_vl", **_QWEN_TOWER, "embed_dim": 32, "hidden_size": 64,
                "mlp_ratio": 2,
            },
            **_QWEN_MARKS,
        },
        _QWEN_IMAGES,
        "<|vision_start|><|image_pad|><|vision_end|>",
    ),
    "qwen2_5_vl": _Tiny(
        {
            "text_config": {"model_type": "qwen2_5_vl_text", **TEXT, **_ROTARY},
            "vision_config": {
                "model_type": "qwen2_5_vl", **_QWEN_TOWER, "hidden_size": 32,
                "intermediate_size": 48, "out_hidden_size": 64, "window_size": 16,
                "fullatt_block_indexes": [1],
            },
            **_QWEN_MARKS,
        },
        _QWEN_IMAGES,
        "<|vision_start|><|image_pad|><|vision_end|>",
    ),
    "qwen3_vl": _Tiny(
        {
            "text_config": {
                "model_type": "qwen3_vl_text", **TEXT, **_ROTARY, "head_dim": 16,
            },
            "vision_config": {
                "model_type": "qwen3_vl", **_QWEN_TOWER, "hidden_size": 32,
                "intermediate_size": 48, "out_hidden_size": 64, "num_position_embeddings": 64,
                "deepstack_visual_indexes": [0, 1],
            },
            **_QWEN_MARKS,
        },
        _QWEN_IMAGES,
        "<|vision_start|><|image_pad|><|vision_end|>",
    ),
}  # fmt: skip
SERVED = tuple(_TINY)


def save(kind: str, folder: Path, **changes: Any) -> Path:
    """Write a tiny model's folder: configuration, safetensors, processor, tokenizer, template."""
    tiny = _TINY[kind]
    config = AutoConfig.for_model(kind, **{**tiny.config, **changes})
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                parameter.add_(noise, alpha=0.2)
            elif "visual" in name:  # towers that are made narrow, whatever is configured
                parameter.copy_(noise * 0.3)
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(tiny.processor))
    _write_tokenizer(folder, tiny)
    return folder


def _write_tokenizer(folder: Path, tiny: _Tiny) -> None:
    """One token a byte, and the marks around images; a template that writes images in lists."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = RawTokenizer(models.BPE({letter: n for n, letter in enumerate(alphabet)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    used = {**_MARKS}
    for name in ("<image>", "<|image_pad|>", "[IMG]", "<IMG_CONTEXT>"):
        if name not in tiny.written:
            del used[name]
    fill = [f"<unused{n}>" for n in range(len(alphabet), min(used.values()))]
    ordered = [name for name, _ in sorted(used.items(), key=lambda item: item[1])]
    raw.add_special_tokens([*fill, *ordered])
    raw.save(str(folder / "tokenizer.json"))
    template = (
        "{% for message in messages %}{{ message['role'] }}: {% if message['content'] is string %}"
        "{{ message['content'] }}{% else %}{% for part in message['content'] %}"
        "{% if part['type'] == 'image' %}"
        + tiny.written
        + "{% else %}{{ part['text'] }}{% endif %}"
        "{% endfor %}{% endif %}{{ '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))


def picture(width: int, height: int, seed: int = 0, form: str = "PNG") -> bytes:
    """A file with an image of its own for each seed."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randint(0, 256, (height, width, 3), generator=generator, dtype=torch.uint8)
    file = io.BytesIO()
    Image.fromarray(noise.numpy()).save(file, form)
    return file.getvalue()


@dataclass(slots=True)
class Prompt:
    """Token ids with images among them."""

    ids: list[int] = field(default_factory=list)
    media: list[Media] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Seeing:
    """Whose tokens are right for prompts that begin with one that has images."""

    prompts: Prompts
    media: list[Media]
    tie_logits: float = TIE_LOGITS

    def greedy(self, prompt: Sequence[int], count: int) -> Expected:
        """The next `count` tokens."""
        return self.prompts.greedy(Prompt(list(prompt), self.media), count)


class Prompts:
    """Makes prompts for one folder, and has transformers answer them."""

    def __init__(self, folder: Path) -> None:
        vision = read_vision(folder, read_json(folder / "config.json"))
        assert vision is not None
        self.vision = vision
        self._preparer = Preparer(folder, vision)
        self._tokenizer = RawTokenizer.from_file(str(folder / "tokenizer.json"))
        self.model: Any = AutoModelForImageTextToText.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
        ).eval()
        self.model.generation_config = GenerationConfig(pad_token_id=0)
        self._known: dict[tuple[tuple[int, ...], bytes, int], Expected] = {}

    def ids(self, text: str) -> list[int]:
        """As the folder's tokenizer has it, marks included."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def text(self, ids: Sequence[int]) -> str:
        """Of an answer."""
        text: str = self._tokenizer.decode(list(ids))
        return text

    def of(self, *parts: Sequence[int] | bytes) -> Prompt:
        """Text as ids, images as files."""
        prompt = Prompt()
        for part in parts:
            if isinstance(part, bytes):
                self._add_image(prompt, part)
            else:
                prompt.ids += part
        return prompt

    def _add_image(self, prompt: Prompt, data: bytes) -> None:
        layout, _ = self._preparer.inputs(data, 1 << 30)
        text, runs = layout.text, list(layout.runs)
        placed: list[int] = []
        assert text.count("\0") == len(runs)
        for piece in text.split("\0"):
            prompt.ids += self.ids(piece)
            if runs:
                count = runs.pop(0)
                placed += (len(prompt.ids), count)
                prompt.ids += [_IMAGE] * count
        digest = data[-64:-48] + len(data).to_bytes(16, "little")
        prompt.media.append(Media(digest, data, placed, layout.grid, "images"))

    @torch.inference_mode()
    def greedy(self, prompt: Prompt, count: int) -> Expected:
        """The next `count` tokens of `generate`."""
        key = tuple(prompt.ids), b"".join(image.digest for image in prompt.media), count
        if key not in self._known:
            ids = torch.tensor([prompt.ids])
            answer: Any = self.model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=count,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
                **self._inputs(prompt, ids),
            )
            tops = [logits[0].float().topk(2) for logits in answer.logits]
            self._known[key] = Expected(
                answer.sequences[0, len(prompt.ids) :].tolist(),
                [(int(top.indices[0]), int(top.indices[1])) for top in tops],
                [float(top.values[0] - top.values[1]) for top in tops],
            )
        return self._known[key]

    def reference(self, prompt: Prompt) -> Seeing:
        """For `Tally.compare`."""
        return Seeing(self, prompt.media)

    def _inputs(self, prompt: Prompt, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """As the processor makes them of all images together."""
        if not prompt.media:
            return {}
        made = [self._preparer.inputs(image.data, 1 << 30)[1] for image in prompt.media]
        pixels = [one["pixel_values"] for one in made]
        inputs: dict[str, torch.Tensor] = {
            name: torch.cat([one[name] for one in made])
            for name in ("image_grid_thw", "image_sizes")
            if name in made[0]
        }
        if pixels[0].dim() == 5:  # tiles of one prompt, in one row
            inputs["pixel_values"] = torch.cat(pixels, dim=1)
            inputs["pixel_attention_mask"] = torch.cat(
                [one["pixel_attention_mask"] for one in made], dim=1
            )
        elif "image_sizes" in inputs:
            high, wide = (max(p.shape[axis] for p in pixels) for axis in (-2, -1))
            inputs["pixel_values"] = torch.cat(
                [
                    torch.nn.functional.pad(p, (0, wide - p.shape[-1], 0, high - p.shape[-2]))
                    for p in pixels
                ]
            )
        else:
            inputs["pixel_values"] = torch.cat(pixels)
        if self.vision.three_rows:
            inputs["mm_token_type_ids"] = (ids == _IMAGE).int()
        return inputs
