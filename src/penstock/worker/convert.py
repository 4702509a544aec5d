"""Foreign files into a Hugging Face folder: `python -m penstock.worker.convert WHAT SRC DEST`.

`gguf-header` writes the tokenizer, chat template and configurations of a GGUF file, which stays
what it is; `gguf` de-quantises it to float32 safetensors as well; `tokenizer` makes the
`tokenizer.json` that a slow tokenizer lacks; `quantize-FORMAT` rounds the weights of a Hugging Face
folder.

A process of its own, because it imports torch and transformers and takes memory (`gguf` that of a
whole model), which the exit gives back. It speaks JSON lines on standard output, `{"phase", "done",
"total"}` or a last `{"error"}`, and exits when its standard input closes: it never outlives the
pull that started it. torch and transformers are imported where they are used, so that a file that
cannot be converted is refused before the seconds which that takes.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import ModelUnusable, PenstockError
from penstock.sources.quantize import FORMATS

if TYPE_CHECKING:
    from collections.abc import Callable

_ITEM_BYTES = 4  # everything is stored as float32
_RESERVE_BYTES = 512 << 20  # torch, transformers and one tensor in flight
_NICE = 10  # while models are served beside it
_TELL_S = 0.1


def main(arguments: list[str]) -> int:
    """Run one conversion; the sentence of a failure goes to the parent as its last line."""
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    what, source, target = arguments
    try:
        _CONVERSIONS[what](Path(source), Path(target))
    except PenstockError as error:
        _say(error=error.message)
        return 1
    except OSError as error:
        _say(error=f"{source} could not be converted: {error.strerror or error} ({target}).")
        return 1
    except Exception as error:  # noqa: BLE001 - the edge of this process
        _say(error=f"{source} cannot be converted: {type(error).__name__}: {error}")
        return 1
    return 0


def _exit_with_parent() -> None:
    while os.read(0, 4096):  # not sys.stdin: its lock would be held at the interpreter's exit
        pass
    os._exit(1)


def _say(**message: Any) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def describe_gguf(source: Path, target: Path) -> None:
    """Write what a model folder has beside the GGUF file `source`, from its header alone."""
    from penstock.catalog.gguf.checkpoint import read_facts, read_numbers
    from penstock.catalog.gguf.configuration import make_config, make_generation_config
    from penstock.worker import gguf_tokenizer

    _say(phase="header", done=0, total=1)
    facts = read_facts(source, vocabulary=True)
    config = make_config(facts, functools.partial(read_numbers, source))
    tokenizer = gguf_tokenizer.tokenizer_for(facts.metadata, source.parent)
    tokenizer.save(str(target / "tokenizer.json"))
    window = config["max_position_embeddings"]
    written = {
        "config.json": config,
        "generation_config.json": make_generation_config(config),
        "tokenizer_config.json": gguf_tokenizer.tokenizer_config(facts.metadata, window),
    }
    for name, content in written.items():
        text = json.dumps(content, ensure_ascii=False, indent=2)
        (target / name).write_text(text, "utf-8")
    _say(phase="header", done=1, total=1)


def convert_gguf(source: Path, target: Path) -> None:
    """Write the model in the GGUF file `source` to the folder `target` in float32."""
    import gguf

    from penstock.worker import gguf_tokenizer

    # transformers parses the file anew at each of its steps and builds the table of names for each
    # module. This process converts one file and ends, so both can be kept: half the time.
    gguf.GGUFReader = functools.cache(gguf.GGUFReader)
    gguf.get_tensor_name_map = functools.cache(gguf.get_tensor_name_map)
    try:
        reader = gguf.GGUFReader(str(source))  # as transformers spells it
    except (ValueError, IndexError, OSError) as error:
        raise ModelUnusable(f"{source} is not a readable GGUF file: {error}.") from error
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    _check_complete(source, reader.tensors)
    _check_rotary(source, metadata, reader.tensors)
    tokenizer = gguf_tokenizer.build_tokenizer(metadata)
    parameters = sum(int(tensor.n_elements) for tensor in reader.tensors)
    need_bytes = parameters * _ITEM_BYTES
    _check_room(source, target, need_bytes)

    model = _load(source, need_bytes)
    if model.num_parameters() != parameters:
        raise ModelUnusable(
            f"{source} holds {parameters} weights but {type(model).__name__} takes "
            f"{model.num_parameters()}; this GGUF layout is not understood."
        )
    end_ids = gguf_tokenizer.end_token_ids(metadata)
    _save(model, target, metadata.get("tokenizer.ggml.bos_token_id"), end_ids, need_bytes)
    tokenizer.save(str(target / "tokenizer.json"))
    config = gguf_tokenizer.tokenizer_config(metadata, model.config.max_position_embeddings)
    text = json.dumps(config, ensure_ascii=False, indent=2)
    (target / "tokenizer_config.json").write_text(text, "utf-8")


def _check_complete(source: Path, tensors: list[Any]) -> None:
    size_bytes = source.stat().st_size
    end = max((int(tensor.data_offset) + int(tensor.n_bytes) for tensor in tensors), default=0)
    if not end or end > size_bytes:
        raise ModelUnusable(
            f"{source} is {size_bytes} bytes but its tensors reach to {end}; it is truncated."
        )


def _check_rotary(source: Path, metadata: dict[str, Any], tensors: list[Any]) -> None:
    """Refuse scaled rotary embeddings: transformers' reader drops them without a word."""
    architecture = metadata.get("general.architecture")
    scaling = metadata.get(f"{architecture}.rope.scaling.type", "none")
    factors = [tensor.name for tensor in tensors if tensor.name.startswith("rope_f")]
    if scaling != "none" or factors:
        raise ModelUnusable(
            f"{source} scales its rotary embedding ({factors[0] if factors else scaling}), which "
            "cannot be carried over from GGUF; use the model's safetensors version."
        )


def _check_room(source: Path, target: Path, need_bytes: int) -> None:
    free_bytes = shutil.disk_usage(target).free
    if free_bytes < need_bytes + _RESERVE_BYTES:
        raise PenstockError(
            f"{source.name} becomes {need_bytes} bytes of float32 weights, but {target} has "
            f"{free_bytes} bytes free; make room or point PENSTOCK_HOME to a larger disk."
        )
    available_bytes = _available_memory()
    if available_bytes is not None and available_bytes < need_bytes + _RESERVE_BYTES:
        raise PenstockError(
            f"Converting {source.name} needs {need_bytes + _RESERVE_BYTES} bytes of memory, but "
            f"{available_bytes} are available; unload models or convert it on a larger machine."
        )


def _available_memory() -> int | None:
    """What the kernel says can still be used, or None where it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text("ascii").splitlines()
    except OSError:
        return None
    kib = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    return None if kib is None else int(kib) * 1024


def _load(source: Path, need_bytes: int) -> Any:
    """The model with its weights in float32, by transformers' own reading of GGUF names."""
    _say(phase="de-quantise", done=0, total=need_bytes)
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = AutoConfig.from_pretrained(source.parent, gguf_file=source.name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    state = load_gguf_checkpoint(str(source), return_tensors=True, model_to_load=model)["tensors"]
    lost = model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    bare = [name for name, tensor in model.named_parameters() if tensor.is_meta]
    if lost.unexpected_keys or bare:
        raise ModelUnusable(
            f"{source} does not fill {type(model).__name__}: {[*lost.unexpected_keys, *bare][0]} "
            "has no counterpart; this GGUF layout is not understood."
        )
    _say(phase="de-quantise", done=need_bytes, total=need_bytes)
    return model


def _save(
    model: Any, target: Path, begin_id: int | None, end_ids: list[int], need_bytes: int
) -> None:
    from transformers import GenerationConfig

    _say(phase="write", done=0, total=need_bytes)
    model.config.bos_token_id = begin_id
    model.config.eos_token_id = end_ids[0] if len(end_ids) == 1 else end_ids
    # The name is that of a file in a temporary folder.
    model.config._name_or_path = ""
    model.generation_config = GenerationConfig(
        bos_token_id=begin_id, eos_token_id=model.config.eos_token_id
    )
    model.save_pretrained(target, max_shard_size="4GB")
    _say(phase="write", done=need_bytes, total=need_bytes)


def convert_tokenizer(source: Path, target: Path) -> None:
    """Write `tokenizer.json` to the folder `target` for the slow tokenizer in `source`."""
    from transformers import AutoTokenizer

    _say(phase="tokenizer", done=0, total=1)
    tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ModelUnusable(
            f"The tokenizer in {source} ({type(tokenizer).__name__}) has no fast form, so it "
            "cannot be served."
        )
    backend.save(str(target / "tokenizer.json"))
    _say(phase="tokenizer", done=1, total=1)


def quantize_folder(wanted: str, source: Path, target: Path) -> None:
    """Write the weights of the model folder `source` in the format `wanted`, with a configuration
    that says so, to the folder `target`."""
    os.nice(_NICE)
    from penstock.worker.models.build import config_of
    from penstock.worker.quantize.making import quantize

    told_at = 0.0

    def report(done: int, total: int) -> None:
        nonlocal told_at
        if (now := time.monotonic()) - told_at >= _TELL_S or done == total:
            told_at = now
            _say(phase="quantise", done=done, total=total)

    quantize(source, target, config_of(str(source), str(source)), wanted, report)


_CONVERSIONS: dict[str, Callable[[Path, Path], None]] = {
    "gguf-header": describe_gguf,
    "gguf": convert_gguf,
    "tokenizer": convert_tokenizer,
    **{f"quantize-{wanted}": functools.partial(quantize_folder, wanted) for wanted in FORMATS},
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
