"""Logs: readable lines on a terminal, JSON lines elsewhere and in the log file.

A record may carry `extra={"fields": {...}}`, which both forms show. Prompts and keys are never
given to a logger.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from logging.handlers import RotatingFileHandler
from typing import TYPE_CHECKING

import msgspec

from penstock.config.private import make_folder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_FILE_BYTES = 32 << 20
_FILES_KEPT = 5
_HTTP_LOGGER = "uvicorn.error"  # of the protocol, which logs what any client can cause
HTTP_RECORDS = 10  # of one statement of it
HTTP_PERIOD_S = 60.0


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


class RateLimit(logging.Filter):
    """Lets each statement of a logger through a few times a period; the first record of the next
    one says how many were left out."""

    def __init__(
        self, records: int, period_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self._records = records
        self._period_s = period_s
        self._clock = clock
        # By place in the source, since a message may hold what a client sent: begin and count.
        self._periods: dict[tuple[str, int], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether it is logged."""
        statement, now = (record.pathname, record.lineno), self._clock()
        began, count = self._periods.get(statement, (-math.inf, 0))
        if now - began >= self._period_s:
            if count > self._records:
                record.__dict__["fields"] = {"left_out": count - self._records}
            began, count = now, 0
        self._periods[statement] = (began, count + 1)
        return count < self._records


def configure(level: str, file: Path | None) -> None:
    """Send every logger of this process to the terminal and, if given, to `file`."""
    console = logging.StreamHandler(sys.stderr)
    console.setFormatter(Readable() if sys.stderr.isatty() else JsonLines())
    handlers: list[logging.Handler] = [console]
    trouble: OSError | None = None
    if file is not None:
        try:
            make_folder(file.parent)
            lines = RotatingFileHandler(file, maxBytes=_FILE_BYTES, backupCount=_FILES_KEPT)
            lines.setFormatter(JsonLines())
            handlers.append(lines)
        except OSError as error:  # a disk that is full or read-only is no reason not to serve
            trouble = error
    root = logging.getLogger()
    root.handlers = handlers
    root.setLevel(logging.WARNING)
    logging.getLogger("penstock").setLevel(level.upper())
    logging.getLogger(_HTTP_LOGGER).filters = [RateLimit(HTTP_RECORDS, HTTP_PERIOD_S)]
    logging.raiseExceptions = False  # nor is one that fills up later
    if trouble is not None:
        logging.getLogger(__name__).error(
            "the log goes to the terminal only: %s cannot be written: %s (server.log_file)",
            file,
            trouble.strerror,
        )
