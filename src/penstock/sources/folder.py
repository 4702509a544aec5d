"""Model folders in Hugging Face layout: which of their files matter, and bringing them in."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from penstock.sources.staging import require_disk

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.sources.staging import Progress

_SUFFIXES = (".safetensors", ".json", ".jinja", ".model", ".tiktoken", ".txt")
_WEIGHTS = (".safetensors", ".gguf")
# Of sentence-transformers: 1_Pooling/config.json, 2_Dense/model.safetensors.
_MODULE_FILE = re.compile(r"\d+_\w+/(config\.json|model\.safetensors)")
# Weights in another layout, beside the ones that are served.
_OTHER_WEIGHTS = re.compile(r"(consolidated|adapter_model|optimizer|training).*\.safetensors")


def wanted_files(names: Iterable[str]) -> list[str]:
    """Of the files of a model repository, those that serving needs: no code, no pickles, and GGUF
    files only if there are no safetensors."""
    every = list(names)
    safetensors = any("/" not in name and name.endswith(".safetensors") for name in every)
    suffixes = _SUFFIXES if safetensors else (*_SUFFIXES, ".gguf")
    return sorted(
        name
        for name in every
        if _MODULE_FILE.fullmatch(name)
        or (
            "/" not in name
            and not name.startswith(".")
            and (name.endswith(suffixes) or name.upper().startswith("LICENSE"))
            and not _OTHER_WEIGHTS.fullmatch(name)
        )
    )


def import_folder(source: Path, target: Path, progress: Progress) -> None:
    """Bring the wanted files of `source` into `target`: weights by hard link where possible.

    Small files are copied, since an editor may change those in place.
    """
    names = (path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file())
    wanted = wanted_files(names)
    files = [(source / name).resolve() for name in wanted]
    total = sum(path.stat().st_size for path in files)
    if files and not _can_link(files[0], target):
        require_disk(target, total, f"Copying {source}")
    done = 0
    progress("import", 0, total)
    for name, path in zip(wanted, files, strict=True):
        destination = target / PurePosixPath(name)
        destination.parent.mkdir(exist_ok=True)
        if path.suffix not in _WEIGHTS or not _link(path, destination):
            shutil.copyfile(path, destination)
        done += path.stat().st_size
        progress("import", done, total)


def bring_weights(files: list[Path], target: Path, progress: Progress) -> None:
    """Weight files into `target`, by hard link where possible."""
    total = sum(path.stat().st_size for path in files)
    if not _can_link(files[0], target):
        require_disk(target, total, f"Copying {files[0].name}")
    done = 0
    progress("import", 0, total)
    for path in files:
        if not _link(path, target / path.name):
            shutil.copyfile(path, target / path.name)
        done += path.stat().st_size
        progress("import", done, total)


def _can_link(path: Path, target: Path) -> bool:
    return path.stat().st_dev == target.stat().st_dev


def _link(path: Path, destination: Path) -> bool:
    try:
        os.link(path, destination)
    except OSError:  # another disk, or a file system without links
        return False
    return True
