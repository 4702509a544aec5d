"""Which models there are: the model folders, an existing Hugging Face cache, and `random:` shapes.

A folder's name is its path below the models directory, one or two levels deep (`model` or
`org/model`); hidden folders, such as a pull in progress, are never models.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from penstock import shapes
from penstock.catalog.card import Card, read_card
from penstock.errors import ModelUnusable, UnknownModel, shortened

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_MODEL_FILES = {".json", ".safetensors", ".gguf", ".jinja", ".model", ".txt", ".py"}
_TEMPLATES = "additional_chat_templates"
_MODULES = "[0-9]*_*/*"  # of sentence-transformers
_CACHE_PREFIX = "models--"
Marks = tuple[tuple[str, int, int, int], ...]
_LOOSE = "{path} is a GGUF file; `penstock pull {path}` makes a model folder of it."


def huggingface_cache(environment: Mapping[str, str] = os.environ) -> Path:
    """Where the Hugging Face libraries keep their downloads, by their own variables."""
    if cache := environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE"):
        return Path(cache).expanduser()
    default_home = Path(environment.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    home = environment.get("HF_HOME") or default_home
    return Path(home).expanduser() / "hub"


class Catalog:
    """The models in some directories and a Hugging Face cache, found anew at each call; a folder is
    read again when its files have changed."""

    def __init__(self, model_dirs: Sequence[Path], hf_cache: Path | None = None) -> None:
        self._model_dirs = [Path(folder) for folder in model_dirs]
        self._hf_cache = hf_cache
        # Folders that look like models but cannot be used: the sentence, by name. Set by `scan`.
        self.problems: dict[str, str] = {}
        self.names: frozenset[str] = frozenset()  # of the folders that were seen last
        self._read: dict[Path, tuple[Marks, Card | str]] = {}  # the card, or what is wrong

    def scan(self) -> dict[str, Card]:
        """Every usable model by name; the unusable are left in `problems`."""
        cards: dict[str, Card] = {}
        problems: dict[str, str] = {}
        folders = self._folders()
        for name, path in folders.items():
            try:
                cards[name] = self._card(path, name)
            except ModelUnusable as error:
                problems[name] = error.message
        for path in self._loose_files():
            problems[path.name] = _LOOSE.format(path=path)
        self.problems = problems
        present = set(folders.values())
        for path in [path for path in self._read if path not in present]:
            self._read.pop(path, None)
        return cards

    def find(self, name: str) -> Card:
        """The model called `name`: UnknownModel lists the known, ModelUnusable says what is wrong.
        Nothing is written: whoever may use a model may ask for any name."""
        folders = self._folders()
        if name in folders:
            return self._card(folders[name], name)
        if name.startswith(shapes.PREFIX):
            shapes.shape_config(name)
            raise UnknownModel(
                f"{name} has not been made here. It is when `--model` or a section of the settings "
                "names it, or an operator loads it (`penstock load`) or pulls it (`penstock pull`)."
            )
        for path in self._loose_files():
            if name in (path.name, path.stem):
                raise ModelUnusable(_LOOSE.format(path=path))
        known = (
            ", ".join(sorted(folders)) or "none yet: `penstock pull smollm2` fetches a first one"
        )
        raise UnknownModel(f"There is no model {shortened(name)!r}. Known models: {known}.")

    def make(self, name: str) -> Card:
        """As `find`, for whom the machine obeys: a `random:SHAPE` that is not there yet is made. It
        is a few small files."""
        if name.startswith(shapes.PREFIX) and name not in self._folders():
            return read_card(self._make_shape(name), name)
        return self.find(name)

    def _card(self, path: Path, name: str) -> Card:
        marks = file_marks(path)
        known = self._read.get(path)
        if known is None or known[0] != marks:
            try:
                known = marks, read_card(path, name)
            except ModelUnusable as error:
                known = marks, error.message
            if marks:  # otherwise the folder is being replaced
                self._read[path] = known
        card = known[1]
        if isinstance(card, str):
            raise ModelUnusable(card)
        return card

    def _folders(self) -> dict[str, Path]:
        """Model folders by name; an earlier directory wins over a later one and over the cache."""
        found: dict[str, Path] = {}
        for models in self._model_dirs:
            for path in model_folders(models):
                found.setdefault(path.relative_to(models).as_posix(), path)
        if self._hf_cache is not None:
            for name, path in _cached_snapshots(self._hf_cache):
                found.setdefault(name, path)
        self.names = frozenset(found)
        return dict(sorted(found.items()))

    def _loose_files(self) -> list[Path]:
        return sorted(path for models in self._model_dirs for path in models.glob("*.gguf"))

    def _make_shape(self, name: str) -> Path:
        shapes.shape_config(name)  # an unknown shape is refused before anything is written
        if not self._model_dirs:
            raise ModelUnusable(f"{name} needs a models directory to be written to.")
        models = self._model_dirs[0]
        try:
            return make_shape_folder(name, models)
        except OSError as error:
            raise ModelUnusable(
                f"{name} cannot be written to {models}: {error.strerror}."
            ) from error


def make_shape_folder(name: str, models: Path) -> Path:
    """Write `random:SHAPE` under `models`, whole or not at all, and return its folder."""
    final = models / name
    models.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=".shape-", dir=models))
    try:
        shapes.write_folder(name, staging)
        staging.rename(final)
    except OSError:
        if not final.is_dir():  # else another process made the same folder first, which is as good
            raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return final


def file_marks(folder: Path) -> Marks:
    """Name, size, number and time of change of each file that a load reads: other marks, other
    files."""
    marks: list[tuple[str, int, int, int]] = []
    try:
        templates, modules = (folder / _TEMPLATES).glob("*.jinja"), folder.glob(_MODULES)
        for path in (*folder.iterdir(), *templates, *modules):
            if path.suffix not in _MODEL_FILES:
                continue
            found = path.stat()
            # Not the time of modification, which a copy may have from what it was copied from.
            name = str(path.relative_to(folder))
            marks.append((name, found.st_size, found.st_ino, found.st_ctime_ns))
    except OSError:  # it is being replaced
        return ()
    return tuple(sorted(marks))


def model_folders(models: Path) -> Iterator[Path]:
    """Folders with a config.json, one or two levels below `models`."""
    for path in _subfolders(models):
        if (path / "config.json").exists():
            yield path
        else:
            yield from (sub for sub in _subfolders(path) if (sub / "config.json").exists())


def _subfolders(folder: Path) -> list[Path]:
    try:
        return sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    except OSError:  # absent or forbidden: nothing to find there
        return []


def _cached_snapshots(cache: Path) -> Iterator[tuple[str, Path]]:
    """(`org/name`, snapshot folder) of each model in a Hugging Face cache that has a config."""
    for repository in _subfolders(cache):
        if not repository.name.startswith(_CACHE_PREFIX):
            continue
        name = repository.name.removeprefix(_CACHE_PREFIX).replace("--", "/", 1)
        snapshot = _current_snapshot(repository)
        if snapshot is not None and (snapshot / "config.json").exists():
            yield name, snapshot


def _current_snapshot(repository: Path) -> Path | None:
    """The snapshot that `main` points to, else the newest."""
    try:
        revision = (repository / "refs" / "main").read_text("utf-8").strip()
    except (OSError, ValueError):
        revision = ""
    snapshots = repository / "snapshots"
    if revision and (snapshots / revision).is_dir():
        return snapshots / revision
    folders = _subfolders(snapshots)
    return max(folders, key=lambda path: path.stat().st_mtime, default=None)
