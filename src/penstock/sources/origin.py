"""What a model that is stored here may be called, and the note of where it came from."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from penstock.catalog import ORIGIN_FILE

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from penstock.errors import PenstockError

_NAME = re.compile(r"[\w-][\w. -]*(/[\w-][\w. -]*)?")


def check_name(name: str, failed: type[PenstockError]) -> None:
    """A name is a folder below the models directory, one or two visible levels deep."""
    if not _NAME.fullmatch(name):
        raise failed(
            f"{name!r} cannot be a model's name; use NAME or ORG/NAME of letters, digits, spaces "
            "and . _ - that does not begin with a dot."
        )


def read_origin(folder: Path) -> dict[str, Any]:
    """The note of a model folder; empty if it has none."""
    try:
        value = json.loads((folder / ORIGIN_FILE).read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def write_origin(folder: Path, origin: Mapping[str, Any]) -> None:
    """Write it."""
    (folder / ORIGIN_FILE).write_text(json.dumps(origin, indent=1), "utf-8")
