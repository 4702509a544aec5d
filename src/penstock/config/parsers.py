"""From what was written to a value: for TOML values and for the text of flags and variables.

Each raises ValueError with half a sentence that says what would have been right.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Parser = Callable[[object], Any]

_UNITS = {
    "": 1,
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", start=1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", start=1)},
    **{letter: 1024**power for power, letter in enumerate("kmgt", start=1)},
}


def parse_size(value: object) -> int:
    """Bytes from a number or a text such as `512MiB`, `8 GB`, `1.5g`."""
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(value))
        unit = _UNITS.get(match[2].lower()) if match else None
        if match is None or unit is None:
            raise ValueError("a size is bytes, or a number with a unit such as 512MiB or 8GB")
        size = int(float(match[1]) * unit)
    if size < 0:
        raise ValueError("a size is not negative")
    return size


def parse_limit(value: object) -> str:
    """A memory limit, checked but kept as text: `auto`, a percentage such as `60%`, or a size."""
    text = str(value).strip()
    if text == "auto":
        return text
    if text.endswith("%"):
        try:
            share = float(text[:-1])
        except ValueError:
            share = 0.0
        if not 0 < share <= 100:
            raise ValueError("a percentage lies above 0% and up to 100%")
        return text
    try:
        return str(parse_size(value))
    except ValueError:
        raise ValueError(
            "a limit is auto, a percentage such as 60%, or a size such as 8GiB"
        ) from None


def parse_text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("a text is expected")
    return value


def parse_integer(low: int, high: int | None = None) -> Parser:
    def parse(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise ValueError("a whole number is expected")
        try:
            number = int(value)
        except ValueError:
            raise ValueError("a whole number is expected") from None
        if number < low or (high is not None and number > high):
            raise ValueError(
                f"it must be at least {low}" + (f" and at most {high}" if high is not None else "")
            )
        return number

    return parse


def parse_seconds(value: object) -> float:
    try:
        number = float(str(value))
    except ValueError:
        raise ValueError("a number of seconds is expected") from None
    if not 0 <= number < float("inf"):
        raise ValueError("a number of seconds is not negative and not infinite")
    return number


_DURATIONS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}


def parse_duration(value: object) -> float:
    """Seconds from a number or a text such as `90s`, `30m`, `2h`."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", str(value))
    unit = _DURATIONS.get(match[2]) if match else None
    if match is None or unit is None:
        raise ValueError("a time is seconds, or a number with a unit such as 90s, 30m or 2h")
    return float(match[1]) * unit


def parse_number(low: float, high: float) -> Parser:
    def parse(value: object) -> float:
        try:
            number = float(str(value))
        except ValueError:
            raise ValueError("a number is expected") from None
        if not low <= number <= high:
            raise ValueError(f"it must be at least {low} and at most {high}")
        return number

    return parse


def parse_boolean(value: object) -> bool:
    if isinstance(value, bool):
        return value
    word = str(value).strip().lower()
    if word in {"1", "true", "yes", "on"}:
        return True
    if word in {"0", "false", "no", "off"}:
        return False
    raise ValueError("true or false is expected")


def parse_texts(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    if isinstance(value, list | tuple) and all(isinstance(part, str) for part in value):
        return tuple(value)
    raise ValueError("a list of texts is expected")


def parse_names(value: object) -> tuple[str, ...]:
    names = parse_texts(value)
    if not all(name.strip() for name in names):
        raise ValueError("a name is not empty")
    return tuple(dict.fromkeys(names))


def parse_table(value: object) -> dict[str, Any]:
    """A TOML table, or the text of a JSON object."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            value = None
    if not isinstance(value, dict):
        raise ValueError("a table is expected, or the text of a JSON object")
    return value


def parse_path(value: object) -> Path:
    return (
        Path(parse_text(str(value) if isinstance(value, Path) else value)).expanduser().absolute()
    )


def parse_paths(value: object) -> tuple[Path, ...]:
    if isinstance(value, Path):
        return (parse_path(value),)
    return tuple(parse_path(part) for part in parse_texts(value))


@dataclass(frozen=True, slots=True)
class Choice:
    """One of several words."""

    words: tuple[str, ...]

    def __call__(self, value: object) -> str:
        if value not in self.words:
            raise ValueError(f"it must be one of {', '.join(self.words)}")
        return str(value)


def parse_choice(*words: str) -> Parser:
    return Choice(words)


def parse_device(value: object) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"auto|cpu|cuda(:\d+)?", value):
        raise ValueError("it must be auto, cpu, cuda or cuda:N")
    return value
