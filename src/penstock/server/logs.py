"""Logs: readable lines on a terminal, JSON lines elsewhere and in the log file.

A record may carry `extra={"fields": {...}}`, which both forms show. Prompts and keys are never
given to a logger.
"""

from __future__ import annotations

import logging
import sys
from logging.handlers import RotatingFileHandler
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from pathlib import Path

_FILE_BYTES = 32 << 20
_FILES_KEPT = 5


class JsonLines(logging.Formatter):
    """One JSON object per record."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line."""
        content: dict[str, object] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S") + f".{int(record.msecs):03d}",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            content["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(content, enc_hook=str).decode()


class Readable(logging.Formatter):
    """One line for a person, with the fields behind it."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as a line; a traceback follows below it."""
        fields: dict[str, object] = getattr(record, "fields", {})
        shown = " ".join(f"{name}={value}" for name, value in fields.items() if value is not None)
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        line = (
            f"{self.formatTime(record, '%H:%M:%S')} {level}{record.getMessage()} {shown}".rstrip()
        )
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def configure(level: str, file: Path | None) -> None:
    """Send every logger of this process to the terminal and, if given, to `file`."""
    console = logging.StreamHandler(sys.stderr)
    console.setFormatter(Readable() if sys.stderr.isatty() else JsonLines())
    handlers: list[logging.Handler] = [console]
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = RotatingFileHandler(file, maxBytes=_FILE_BYTES, backupCount=_FILES_KEPT)
        lines.setFormatter(JsonLines())
        handlers.append(lines)
    root = logging.getLogger()
    root.handlers = handlers
    root.setLevel(logging.WARNING)
    logging.getLogger("penstock").setLevel(level.upper())
