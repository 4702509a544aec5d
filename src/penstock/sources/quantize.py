"""Makes a quantised model of one on disk: beside it, under a name of its own.

The work is done by `penstock.worker.convert` in a process of its own, some rows of a weight at a
time, and what it takes in memory is the same for every model (`memory.limits.QUANTIZE_BYTES`).
"""

from __future__ import annotations

import hashlib
import shutil
from typing import TYPE_CHECKING

from penstock import __version__, shapes
from penstock.catalog import read_card
from penstock.catalog.linear_formats import quantisation
from penstock.catalog.scan import file_marks
from penstock.catalog.weights import gguf_file, read_json
from penstock.errors import BadRequest, ModelUnusable, QuantizeFailed, shortened
from penstock.sources.conversion import convert
from penstock.sources.folder import wanted_files
from penstock.sources.origin import check_name, read_origin, write_origin
from penstock.sources.staging import Staging

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from penstock.catalog import Card
    from penstock.sources.staging import Progress

FORMATS = ("int8", "int4", "fp8")

_TEMPLATES = "additional_chat_templates"
# Written anew, as are the weights and their index.
_OWN_FILES = {"config.json", "penstock.json", "model.safetensors.index.json"}


def quantize(
    card: Card,
    wanted: str,
    name: str,
    home: Path,
    progress: Progress,
    began: Callable[[int], None] = lambda pid: None,
) -> Card:
    """Make the model `name` of `card`'s, in one of `FORMATS`, and return its card. If that was done
    before, the only progress is "present". `began` is told the process."""
    check(card, wanted, name)
    models = home / "models"
    origin = {
        "source": f"quantize:{wanted}:{card.name}", "files": _fingerprint(card), "penstock":
        __version__,
    }  # fmt: skip
    final = models / name
    if final.exists():
        found = read_origin(final)
        if found.get("source") != origin["source"]:
            raise QuantizeFailed(
                f"{final} exists and came from {found.get('source') or 'elsewhere'}, not from "
                f"{origin['source']}; remove it or give another name."
            )
        if found.get("files") == origin["files"] and (present := _usable(final, name)):
            progress("present", present.weight_bytes, present.weight_bytes)
            return present
    busy = QuantizeFailed(f"{name} is being made already; wait until that has ended.")
    try:
        models.mkdir(parents=True, exist_ok=True)
        with Staging(models, f"quantize {name}", busy) as staging:
            convert(
                f"quantize-{wanted}", card.path, staging, progress,
                failed=QuantizeFailed, began=began,
            )  # fmt: skip
            _copy_others(card.path, staging.model)
            write_origin(staging.model, origin)
            read_card(staging.model, name)  # nothing is published that could not be served
            return read_card(staging.publish(name), name)
    except OSError as error:
        raise QuantizeFailed(f"{name} could not be stored in {models}: {error}.") from error


def default_name(card: Card, wanted: str) -> str:
    """What a model in a format is called unless its user says so."""
    return f"{card.name}-{wanted}"


def check(card: Card, wanted: str, name: str) -> None:
    """Refuse a format that is not known, and models that cannot be quantised."""
    if wanted not in FORMATS:
        raise BadRequest(
            f"A model is quantised to one of {', '.join(FORMATS)}, not to {shortened(wanted)!r}.",
            param="to",
        )
    check_name(name, QuantizeFailed)
    if name == card.name:
        raise QuantizeFailed(f"{name} is the model itself; give another name.")
    config_path = card.path / "config.json"
    why = None
    if card.source.startswith(shapes.PREFIX):
        why = 'has random weights, not files; `dtype = "int8"` rounds plain weights at load'
    elif gguf_file(card.path) is not None:
        why = (
            "is a GGUF file, which is quantised already; `penstock pull FILE --convert float32` "
            "makes a plain model of it"
        )
    elif card.formats or quantisation(read_json(config_path)):
        why = f"is quantised already ({', '.join(card.formats) or 'by its configuration'})"
    elif card.kind != "generate":
        why = f"is of the kind {card.kind!r}; models that generate text are quantised"
    if why is not None:
        raise ModelUnusable(f"{card.name} {why}.", param="model")


def _fingerprint(card: Card) -> str:
    """A mark of the files that a model has now."""
    return hashlib.sha256(repr(file_marks(card.path)).encode()).hexdigest()


def _usable(folder: Path, name: str) -> Card | None:
    try:
        return read_card(folder, name)
    except ModelUnusable:  # damaged since: made again
        return None


def _copy_others(source: Path, target: Path) -> None:
    """All that belongs to a model beside its weights: tokenizer, templates, settings, licence."""
    names = [path.name for path in source.iterdir() if path.is_file()]
    files = [
        source / name
        for name in wanted_files(names)
        if not name.endswith(".safetensors") and name not in _OWN_FILES
    ]
    for path in (*files, *(source / _TEMPLATES).glob("*.jinja")):
        copy = target / path.relative_to(source)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, copy)
