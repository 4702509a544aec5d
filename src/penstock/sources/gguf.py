"""Which GGUF file of several is meant, and what a model made of one is called."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from penstock.catalog.gguf.header import models_among
from penstock.errors import ModelUnusable, PullFailed

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["choose", "model_name", "models_among", "payload_of"]

_SPLIT = re.compile(r"-\d{5}-of-\d{5}$")
_QUANTISATION = re.compile(r"[.-]((UD-)?(I?Q\d\w*|F16|F32|BF16|FP16|MXFP4\w*))$", re.IGNORECASE)


def model_name(path: Path, conversion: str) -> str:
    """The model's name from a GGUF file's: without the quantisation that a conversion undoes."""
    stem = _SPLIT.sub("", path.stem)
    return (_QUANTISATION.sub("", stem) or stem) if conversion != "none" else stem


def payload_of(payload: Path) -> Path:
    """What a model is made of: of a folder that has nothing but GGUF files, the one model there."""
    if not payload.is_dir() or (payload / "config.json").exists():
        return payload
    models = models_among([path.name for path in payload.glob("*.gguf")])
    return payload / choose(models, None, f"{payload}/") if models else payload


def choose(models: Mapping[str, list[str]], quantisation: str | None, prefix: str) -> str:
    """The one that is wanted of several; a refusal lists each, as it is chosen behind `prefix`."""
    wanted = [
        name
        for name in models
        if quantisation is None or quantisation.lower() in (name.lower(), _label(name).lower())
    ]
    if len(wanted) == 1:
        return wanted[0]
    of_a_folder = prefix.endswith("/")
    known = sorted(name if of_a_folder else _label(name) for name in models)
    if quantisation is None:
        raise PullFailed(
            f"There are {len(models)} GGUF models: choose one of "
            f"{', '.join(f'{prefix}{name}' for name in known)}."
        )
    raise ModelUnusable(
        f"There is no single GGUF model {quantisation}; those there are {', '.join(known)}."
    )


def _label(name: str) -> str:
    """The quantisation in a file's name, or all of the name."""
    stem = _SPLIT.sub("", name.rpartition("/")[2].removesuffix(".gguf"))
    found = _QUANTISATION.search(stem)
    return found[1] if found else name
