"""Conversion with the real libraries: GGUF weights and tokenizers, slow tokenizers, the hub.

The references are written here from the formats' own rules, not taken from the code under test.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest
import regex
import torch
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from penstock import shapes
from penstock.catalog import Catalog, read_card
from penstock.catalog.geometry import DEFAULTS
from penstock.catalog.kv_formats import KvLayers
from penstock.errors import PullFailed
from penstock.sources import pull
from penstock.testing.fake_hub import FakeHub, playing_hub
from penstock.testing.model_folders import TENSORS, write_safetensors

if TYPE_CHECKING:
    from collections.abc import Iterator

HIDDEN, INNER, HEADS, KV_HEADS, LAYERS = 64, 96, 4, 2, 2
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ t", "h e", "Ġt he", "l l", "he ll", "hell o", "1 2", "Ġ 1", "Ã ©", "Ġ Ġ", "ð Ł"]
AWKWARD = [
    "",
    "hello the hello",
    "12345 and 3.14159, x12",
    "½ ² ٣ Ⅷ",
    "Café déjà vu, naïve Größe",
    "Привет, мир! 你好\uff0c世界。 こんにちは 안녕하세요 שלום مرحبا नमस्ते",
    "def f(x):\n    return x**2  # squared\n\n\n\tif (a!=b): pass",
    "🙂👨‍👩‍👧‍👦🏳️‍🌈 e\u0301 \ufb01",
    "   leading,  double   and trailing   ",
    "\n\n\r\n\t \u00a0\u2003x\n",
    "I'll don't we've IT'S he's'd",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<|im_end",
    "a\u0000b\u007f\ufffd",
    "https://example.org/a?b=c&d=%20#e __init__ C++ a/b\\c",
]


def ignore(phase: str, done: int, total: int) -> None:
    """No progress wanted."""


# ---- a second reader of byte-level BPE vocabularies, straight from the definition --------------

GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class ReferenceBPE:
    """Special tokens cut out, text split by patterns in turn, then the best-ranked merge first."""

    def __init__(
        self, vocabulary: dict[str, int], merges: list[str], specials: list[str], *splits: str
    ) -> None:
        self._ids = vocabulary
        self._ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
        self._specials = regex.compile("(" + "|".join(map(regex.escape, specials)) + ")")
        self._splits = [regex.compile(split) for split in splits]
        self._letters = shapes.byte_letters()

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for number, part in enumerate(self._specials.split(text)):
            ids += [self._ids[part]] if number % 2 else self._encode_plain(part)
        return ids

    def _encode_plain(self, text: str) -> list[int]:
        pieces = [text]
        for split in self._splits:
            pieces = [cut for piece in pieces for cut in _cut(split, piece)]
        letters = ("".join(self._letters[byte] for byte in piece.encode()) for piece in pieces)
        return [
            self._ids[part] for word in letters for part in self._merge(word) if part in self._ids
        ]

    def _merge(self, word: str) -> list[str]:
        parts = list(word)
        while len(parts) > 1:
            pairs = list(pairwise(parts))
            best = min(pairs, key=lambda pair: self._ranks.get(pair, len(self._ranks)))
            if best not in self._ranks:
                break
            at = pairs.index(best)
            parts[at : at + 2] = ["".join(best)]
        return parts


def _cut(split: Any, text: str) -> list[str]:
    """`text` in order, matches and what lies between them each on their own."""
    pieces, end = [], 0
    for match in split.finditer(text):
        pieces += [text[end : match.start()], match.group()]
        end = match.end()
    return [piece for piece in [*pieces, text[end:]] if piece]


# ---- a tiny GGUF file -----------------------------------------------------------------------


def vocabulary() -> list[str]:
    return [*SPECIALS, *shapes.byte_letters(), *(merge.replace(" ", "") for merge in MERGES)]


@lru_cache
def gguf_tensors() -> dict[str, tuple[np.ndarray[Any, Any], Any]]:
    """GGUF tensors by name with their quantisation, from a fixed seed."""
    random = np.random.default_rng(7)
    q4, q8, f32 = (gguf.GGMLQuantizationType[name] for name in ("Q4_1", "Q8_0", "F32"))
    sizes = {"token_embd": (q8, (len(vocabulary()), HIDDEN)), "output_norm": (f32, (HIDDEN,))}
    kv = KV_HEADS * HIDDEN // HEADS
    for layer in range(LAYERS):
        sizes |= {
            f"blk.{layer}.attn_norm": (f32, (HIDDEN,)),
            f"blk.{layer}.attn_q": (q4, (HIDDEN, HIDDEN)),
            f"blk.{layer}.attn_k": (q4, (kv, HIDDEN)),
            f"blk.{layer}.attn_v": (q8, (kv, HIDDEN)),
            f"blk.{layer}.attn_output": (q4, (HIDDEN, HIDDEN)),
            f"blk.{layer}.ffn_norm": (f32, (HIDDEN,)),
            f"blk.{layer}.ffn_gate": (q4, (INNER, HIDDEN)),
            f"blk.{layer}.ffn_up": (q4, (INNER, HIDDEN)),
            f"blk.{layer}.ffn_down": (q4, (HIDDEN, INNER)),
        }
    tensors = {}
    for name, (kind, shape) in sizes.items():
        values = random.standard_normal(shape).astype(np.float32)
        data = values if kind == f32 else gguf.quants.quantize(values, kind)
        tensors[f"{name}.weight"] = (data, kind)
    return tensors


def write_gguf(
    path: Path, *, pre: str = "smollm", scaling: str | None = None, architecture: str = "llama"
) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(vocabulary()))
    if scaling is not None:
        writer.add_string("llama.rope.scaling.type", scaling)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(vocabulary())
    writer.add_token_types([3] * len(SPECIALS) + [1] * (len(vocabulary()) - len(SPECIALS)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    for name, (data, kind) in gguf_tensors().items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def expected_weight(name: str) -> np.ndarray[Any, Any]:
    """De-quantised; the rows of Q and K back from GGUF's interleaved rotary order to halves."""
    weights: np.ndarray[Any, Any] = gguf.quants.dequantize(*gguf_tensors()[name])
    heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name.split(".")[-2])
    if heads is None:
        return weights
    half = weights.shape[0] // heads // 2
    return weights.reshape(heads, half, 2, -1).swapaxes(1, 2).reshape(weights.shape)


HF_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def hf_name(name: str) -> str:
    if name.startswith("blk."):
        _, layer, part, _ = name.split(".")
        return f"model.layers.{layer}.{HF_NAMES[part]}.weight"
    return {"token_embd.weight": "model.embed_tokens.weight"}.get(name, "model.norm.weight")


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("gguf")
    path = write_gguf(root / "Tiny-Q4_1.gguf")
    return pull(str(path), root / "home", ignore, convert="float32").path


def test_gguf_weights_are_dequantised_exactly(converted: Path) -> None:
    stored = load_file(converted / "model.safetensors")
    assert {hf_name(name) for name in gguf_tensors()} == set(stored)
    for name in gguf_tensors():
        np.testing.assert_array_equal(stored[hf_name(name)], expected_weight(name), err_msg=name)


def test_a_converted_folder_is_an_ordinary_one(converted: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    card = read_card(converted)
    assert (card.name, card.dtype, card.context) == ("Tiny", "float32", 256)
    assert (card.eos_token_ids, card.kind) == ((2,), "generate")
    config = json.loads((converted / "config.json").read_text())
    assert "quantization_config" not in config
    assert str(converted.parent) not in json.dumps(config)
    model = AutoModelForCausalLM.from_pretrained(converted)
    assert model.num_parameters() == card.parameters
    with torch.no_grad():
        assert torch.isfinite(model(torch.tensor([[1, 40, 50]])).logits).all()
    ours = Tokenizer.from_file(str(converted / "tokenizer.json"))
    theirs = AutoTokenizer.from_pretrained(converted)
    assert [theirs(text)["input_ids"] for text in AWKWARD] == [ours.encode(t).ids for t in AWKWARD]
    assert theirs.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"


def test_gguf_tokens_equal_a_second_reader(converted: Path) -> None:
    ids = {token: index for index, token in enumerate(vocabulary())}
    reference = ReferenceBPE(ids, MERGES, SPECIALS, r"\p{N}", GPT2_SPLIT)
    tokenizer = Tokenizer.from_file(str(converted / "tokenizer.json"))
    for text in AWKWARD:
        encoded = tokenizer.encode(text).ids
        assert encoded == reference.encode(text), text
        assert tokenizer.decode(encoded, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pre": "default"}, "pre-tokenizer 'default', which is not one of"),
        ({"scaling": "yarn"}, r"scales its rotary embedding \(yarn\)"),
    ],
)
def test_what_conversion_would_get_wrong_is_refused(
    tmp_path: Path, change: dict[str, str], message: str
) -> None:
    path = write_gguf(tmp_path / "model.gguf", **change)
    with pytest.raises(PullFailed, match=message):
        pull(str(path), tmp_path / "home", ignore, convert="float32")


@pytest.mark.parametrize("convert", ["none", "float32"])
@pytest.mark.parametrize("kept", [0.0, 0.05, 0.9])
def test_a_truncated_gguf_is_refused(tmp_path: Path, kept: float, convert: str) -> None:
    path = write_gguf(tmp_path / "model.gguf")
    os.truncate(path, int(path.stat().st_size * kept))
    sentence = r"model.gguf is (not a (readable|usable) GGUF|\d+ bytes but)"
    with pytest.raises(PullFailed, match=sentence):
        pull(str(path), tmp_path / "home", ignore, convert=convert)
    assert Catalog([tmp_path / "home" / "models"]).scan() == {}


# ---- a GGUF file that stays what it is --------------------------------------------------------


def test_a_gguf_file_stays_what_it_is(tmp_path: Path, converted: Path) -> None:
    path = write_gguf(tmp_path / "Tiny-Q4_1.gguf")
    card = pull(str(path), tmp_path / "home", ignore)
    assert (card.name, card.formats) == ("Tiny-Q4_1", ("q4_1", "q8_0"))
    names = {file.name for file in card.path.iterdir()}
    assert names == {
        "Tiny-Q4_1.gguf", "config.json", "generation_config.json", "penstock.json",
        "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    assert (card.path / "Tiny-Q4_1.gguf").samefile(path)
    as_numbers = read_card(converted)
    for fact in ("parameters", "context", "layers", "kv_layers", "eos_token_ids", "vocab_size"):
        assert getattr(card, fact) == getattr(as_numbers, fact), fact
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (card.path / name).read_text() == (converted / name).read_text()
    again: list[str] = []
    pull(str(path), tmp_path / "home", lambda phase, *_: again.append(phase))
    assert again == ["present"]


def test_another_conversion_takes_the_place_of_what_is_there(tmp_path: Path) -> None:
    path, home = write_gguf(tmp_path / "tiny.gguf"), tmp_path / "home"
    assert pull(str(path), home, ignore).formats == ("q4_1", "q8_0")
    assert pull(str(path), home, ignore, convert="float32").formats == ()
    # What is there is good, unless another form is asked for.
    assert pull(str(path), home, ignore).formats == ()
    assert pull(str(path), home, ignore, convert="none").formats == ("q4_1", "q8_0")
    with pytest.raises(PullFailed, match="--convert int3 is not one of none, float32"):
        pull(str(path), home, ignore, convert="int3")


def test_a_tokenizer_that_lies_beside_is_used_if_it_is_the_models(
    tmp_path: Path, converted: Path
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    path = write_gguf(source / "odd.gguf", pre="default")
    with pytest.raises(PullFailed, match=r"'default', which .* tokenizer\.json beside the GGUF"):
        pull(str(path), tmp_path / "home", ignore)
    text = (converted / "tokenizer.json").read_text()
    (source / "tokenizer.json").write_text(text)
    card = pull(str(path), tmp_path / "home", ignore)
    ours = Tokenizer.from_file(str(card.path / "tokenizer.json"))
    assert ours.encode("hello the").ids == Tokenizer.from_str(text).encode("hello the").ids
    other = text.replace('"hello"', '"hallo"').replace('"hell", "o"', '"hall", "o"')
    (source / "tokenizer.json").write_text(other)
    with pytest.raises(PullFailed, match=r"tokenizer\.json is (of another model|not a tokenizer)"):
        pull(str(path), tmp_path / "home", ignore, name="other")


def test_a_folder_with_several_quantisations_lists_each(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    path = write_gguf(source / "m-Q4_1.gguf")
    assert pull(str(source), tmp_path / "one", ignore).formats == ("q4_1", "q8_0")
    os.link(path, source / "m-Q5_1.gguf")
    with pytest.raises(PullFailed, match=r"2 GGUF models: choose one of .*/m-Q4_1\.gguf, .*Q5_1"):
        pull(str(source), tmp_path / "home", ignore)


def test_architectures_that_are_not_known_are_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", architecture="mamba")
    with pytest.raises(PullFailed, match="of the architecture mamba; GGUF files are served of"):
        pull(str(path), tmp_path / "home", ignore)


_KILLED_PULL = """
import os, signal, sys
from itertools import pairwise
from pathlib import Path
from penstock.sources import pull
def progress(phase, done, total):
    if phase == sys.argv[3]:
        os.kill(os.getpid(), signal.SIGKILL)
pull(sys.argv[1], Path(sys.argv[2]), progress, convert=sys.argv[4])
"""


@pytest.mark.parametrize(
    ("phase", "convert"),
    [("de-quantise", "float32"), ("write", "float32"), ("header", "none"), ("import", "none")],
)
def test_a_pull_killed_while_converting_is_done_again(
    tmp_path: Path, phase: str, convert: str
) -> None:
    path, home = write_gguf(tmp_path / "model.gguf"), tmp_path / "home"
    command = [sys.executable, "-c", _KILLED_PULL, str(path), str(home), phase, convert]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    catalog = Catalog([home / "models"])
    assert (catalog.scan(), catalog.problems) == ({}, {})
    card = pull(str(path), home, ignore, convert=convert)
    assert catalog.scan() == {"model": card}
    assert [entry.suffix for entry in (home / "models" / ".pull").iterdir()] == [".lock"]


def test_a_slow_tokenizer_is_converted(tmp_path: Path) -> None:
    """GPT-2's own files, which have no tokenizer.json."""
    folder = shapes_folder(tmp_path / "slow")
    (folder / "tokenizer.json").unlink()
    ids = {token: index for index, token in enumerate(vocabulary())}
    (folder / "vocab.json").write_text(json.dumps(ids))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(MERGES) + "\n")
    settings = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    card = pull(str(folder), tmp_path / "home", ignore)
    tokenizer = Tokenizer.from_file(str(card.path / "tokenizer.json"))
    reference = ReferenceBPE(ids, MERGES, ["<|endoftext|>"], GPT2_SPLIT)
    text = "hello the 12 Größe"
    assert tokenizer.encode(text).ids == reference.encode(text)


def shapes_folder(path: Path) -> Path:
    """A whole tiny model with weights of zeros."""
    path.mkdir()
    shapes.write_folder("tiny-llama", path)
    (path / "penstock.json").unlink()
    write_safetensors(path / "model.safetensors", TENSORS)
    return path


# ---- shapes and defaults against transformers -------------------------------------------------


@pytest.mark.parametrize("shape", sorted(shapes.SHAPES))
def test_shapes_count_what_transformers_builds(tmp_path: Path, shape: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    shapes.write_folder(shape, tmp_path)
    card = read_card(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert type(model).__name__ == card.architecture
    assert card.parameters == sum(parameter.numel() for parameter in model.parameters())
    text, stated = config.get_text_config(), shapes.SHAPES[shape]
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    own = stated.get("head_dim") or stated["hidden_size"] // stated["num_attention_heads"]
    assert head_dim == own


@pytest.mark.parametrize("model_type", sorted(DEFAULTS))
def test_defaults_are_those_of_transformers(model_type: str) -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model(model_type)
    assert {name: getattr(config, name) for name in DEFAULTS[model_type]} == DEFAULTS[model_type]


# ---- the starter model --------------------------------------------------------------------


@pytest.fixture(scope="module")
def starter() -> Path:
    home = Path(os.environ.get("PENSTOCK_HOME", "~/.penstock")).expanduser()
    return pull("smollm2", home, ignore, convert="float32").path


def test_the_starter_is_what_it_should_be(starter: Path) -> None:
    card = read_card(starter)
    assert (card.name, card.architecture) == ("SmolLM2-135M-Instruct", "LlamaForCausalLM")
    assert (card.parameters, card.weight_bytes) == (134515008, 538060032)
    assert (card.context, card.vocab_size, card.eos_token_ids) == (8192, 49152, (2,))
    assert card.kv_layers == (KvLayers(None, 30 * 3 * 64 * 2, 30 * 3 * 2),)


def test_the_starters_tokens_equal_a_second_reader_and_the_record(starter: Path) -> None:
    stored = json.loads((starter / "tokenizer.json").read_text("utf-8"))
    specials = [token["content"] for token in stored["added_tokens"]]
    merges = [" ".join(pair) for pair in stored["model"]["merges"]]
    reference = ReferenceBPE(stored["model"]["vocab"], merges, specials, r"\p{N}", GPT2_SPLIT)
    tokenizer = Tokenizer.from_file(str(starter / "tokenizer.json"))
    for text in AWKWARD:
        assert tokenizer.encode(text).ids == reference.encode(text), text
    for text, ids in zip(AWKWARD, STARTER_IDS, strict=True):
        assert tokenizer.encode(text).ids == [int(token) for token in ids.split()], text


# The ids of AWKWARD, as the second reader gave them from the vocabulary in the GGUF file.
STARTER_IDS = [
    "",
    "28120 260 33662",
    "33 34 35 36 37 284 216 35 30 33 36 33 37 41 28 1792 33 34",
    "16738 216 19133 216 164 113 216 173 223 117",
    "51 1939 2756 32564 90 16739 386 101 28 15486 46494 9171 7466 34878 85",
    "155 249 46879 16464 32547 28 41337 7872 9175 17 216 18645 250 48392 138 12831 7906 240 "
    "178 239 230 19076 46673 237 10391 237 41152 7365 111 7365 124 18601 239 226 182 223 "
    "239 33085 242 183 222 133 183 244 238 12960 119 31838 23970 162 247 36395 20602 44626 "
    "31462 10805 12335 118 35090 38770 16525 26293 30581",
    "1604 275 24 104 727 472 1003 1792 828 34 216 907 27402 16506 197 342 365 81 42732 82 727 1301",
    "10813 38887 10813 235 118 321 231 10813 235 119 321 231 10813 235 117 321 231 10813 "
    "235 116 10813 233 128 31752 321 231 10813 230 226 297 151 219 40367",
    "256 2899 28 216 5561 256 284 35079 333",
    "1116 15290 3351 250 321 221 104 198",
    "57 3060 1326 982 392 3543 9627 23 67 384 506 6737",
    "1 4093 198 6004 2 198 1 520 9531 198 44 108 306 79 486",
    "81 190 82 217 24211",
    "4687 1742 7434 30 2295 31 81 47 82 45 83 22 84 23446 34 32 19 85 2758 2563 890 340 "
    "11444 253 31 82 76 83",
]


# ---- the hub, played by a local server ---------------------------------------------------------


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[str]:
    folder = shapes_folder(tmp_path / "repository")
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    files |= {"README.md": b"#", "pytorch_model.bin": b"x", "code.py": b"raise"}
    with playing_hub(files) as url:
        yield url


_HUB_PULL = """
import os, signal, sys
from itertools import pairwise
from pathlib import Path
from penstock.sources import pull
def progress(phase, done, total):
    if sys.argv[2] == "kill" and done > total // 4:
        os.kill(os.getpid(), signal.SIGKILL)
print(pull(sys.argv[3], Path(sys.argv[1]), progress).path)
"""


def run_hub_pull(
    hub: str, home: Path, how: str, spec: str = "hf:org/name"
) -> subprocess.CompletedProcess[str]:
    """In a process of its own: the hub's library reads its endpoint when it is imported."""
    environment = {**os.environ, "HF_ENDPOINT": hub}
    environment |= {"HF_HOME": str(home / "hf"), "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-c", _HUB_PULL, str(home), how, spec]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_a_repository_comes_from_the_hub(tmp_path: Path, hub: str) -> None:
    done = run_hub_pull(hub, tmp_path / "home", "whole")
    assert done.returncode == 0, done.stderr
    card = Catalog([tmp_path / "home" / "models"]).find("org/name")
    assert done.stdout.strip() == str(card.path)
    assert json.loads((card.path / "penstock.json").read_text())["commit"] == "c" * 40
    names = {path.name for path in card.path.iterdir()}
    assert names == (FakeHub.files.keys() - {"README.md", "pytorch_model.bin", "code.py"}) | {
        "penstock.json"
    }


def test_one_gguf_file_of_several_comes_from_the_hub(tmp_path: Path, hub: str) -> None:
    file = write_gguf(tmp_path / "m.gguf").read_bytes()
    FakeHub.files = {"m-Q4_1.gguf": file, "Q8_0/m-Q8_0.gguf": file, "README.md": b"#"}
    home = tmp_path / "home"
    done = run_hub_pull(hub, home, "whole")
    assert "2 GGUF models: choose one of hf:org/name:Q4_1, hf:org/name:Q8_0." in done.stderr
    done = run_hub_pull(hub, home, "whole", "hf:org/name:q8_0")
    assert done.returncode == 0, done.stderr
    card = Catalog([home / "models"]).find("org/name-q8_0")
    assert (card.path / "m-Q8_0.gguf").read_bytes() == file
    assert not (card.path / "m-Q4_1.gguf").exists()
    assert card.formats == ("q4_1", "q8_0")


def test_a_killed_download_goes_on_where_it_was(tmp_path: Path, hub: str) -> None:
    big = {"model.embed_tokens.weight": ("F32", (1 << 20, 8))}
    write_safetensors(tmp_path / "big.safetensors", big)
    FakeHub.files["model.safetensors"] = (tmp_path / "big.safetensors").read_bytes()
    FakeHub.stalls.clear()
    home = tmp_path / "home"
    assert run_hub_pull(hub, home, "kill").returncode == -signal.SIGKILL
    assert Catalog([home / "models"]).scan() == {}
    FakeHub.stalls.set()
    done = run_hub_pull(hub, home, "whole")
    assert done.returncode == 0, done.stderr
    assert FakeHub.starts[0] == 0
    assert FakeHub.starts[1] > 0
    stored = Catalog([home / "models"]).find("org/name").path / "model.safetensors"
    assert stored.read_bytes() == FakeHub.files["model.safetensors"]
