"""`penstock top`: memory, models and requests of a running server, live in the terminal.

One thread reads the server's stream and keeps the latest of each kind; the terminal is drawn from
that, by its size at the time.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console
from rich.live import Live

from penstock.cli.remote import connect, require_success
from penstock.cli.terminal import print_json
from penstock.cli.top_view import frame
from penstock.errors import PenstockError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    import httpx
    from rich.console import RenderableType

_KINDS = "memory,models,requests,event"
_DRAW_S = 0.5
_AGAIN_S = 1.0
_EVENTS_KEPT = 50


def top(options: argparse.Namespace) -> int:
    """Until `q`; one frame where it is asked for, or nobody could press a key."""
    if options.once or options.json or not (sys.stdout.isatty() and sys.stdin.isatty()):
        return _once(options)
    watch = _Watch(options)
    reader = threading.Thread(target=watch.run, daemon=True, name="stream")
    with connect(options) as client:
        require_success(client.get("/admin/api/memory"))  # a refusal is said plainly
    reader.start()
    for name in ("COLUMNS", "LINES"):  # where they are exported they do not follow the terminal
        os.environ.pop(name, None)
    console = Console()
    with (
        _keys(),
        Live(
            get_renderable=lambda: watch.drawn(console),
            console=console,
            screen=True,
            auto_refresh=False,
        ) as live,
    ):
        drawn: object = None
        while not _pressed(b"q", _DRAW_S):
            if (now := (watch.changes, console.size)) != drawn:
                live.refresh()
                drawn = now
    return 0


def _once(options: argparse.Namespace) -> int:
    with connect(options) as client:
        states = {kind: _ask(client, kind) for kind in ("memory", "models", "requests", "events")}
    rows = states["requests"]
    waiting = sum(row["place"] is not None for row in rows)
    states["requests"] = {"total": len(rows), "waiting": waiting, "requests": rows}
    states["models"] = {"models": states["models"]}
    if options.json:
        print_json(states)
        return 0
    # Into a pipe a table is as wide as it needs to be.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
    console.print(frame(states, console.width, sys.maxsize))
    return 0


def _ask(client: httpx.Client, kind: str) -> Any:
    response = client.get(f"/admin/api/{kind}")
    require_success(response)
    return response.json()


class _Watch:
    """The latest of each kind, as the stream brings it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._states: dict[str, Any] = {}
        self._events: deque[dict[str, Any]] = deque(maxlen=_EVENTS_KEPT)
        self._last_id: str | None = None
        self._note = "connecting"
        self.changes = 0  # of what is drawn

    def run(self) -> None:
        """Read for ever; a server that is gone may come back."""
        while True:
            try:
                with connect(self._options) as client:
                    self._read(client)
                self._note = "the server has ended the stream"
            except PenstockError as error:
                self._note = error.message
            self.changes += 1
            time.sleep(_AGAIN_S)

    def _read(self, client: httpx.Client) -> None:
        headers = {} if self._last_id is None else {"last-event-id": self._last_id}
        path = f"/admin/api/stream?kinds={_KINDS}"
        with client.stream("GET", path, headers=headers) as response:
            require_success(response)
            self._note, kind = "", ""
            for line in response.iter_lines():
                name, _, value = line.partition(": ")
                if name == "id":
                    self._last_id = value
                elif name == "event":
                    kind = value
                elif name == "data":
                    row = msgspec.json.decode(value)
                    if kind == "event":
                        self._events.append(row)
                    else:
                        self._states[kind] = row
                    self.changes += 1

    def drawn(self, console: Console) -> RenderableType:
        """A frame of what is known now, for the terminal's size now."""
        states = {**self._states, "events": list(self._events)}
        return frame(states, console.width, console.height, self._note, "q quits")


@contextlib.contextmanager
def _keys() -> Iterator[None]:
    """Keys come as they are pressed, and are not shown."""
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _pressed(key: bytes, wait_s: float) -> bool:
    """Whether it was pressed, or the terminal has gone, within that time."""
    terminal = sys.stdin.fileno()
    if not select.select([terminal], [], [], wait_s)[0]:
        return False
    pressed = os.read(terminal, 1024)  # all at once: what a text file buffers, select does not see
    return not pressed or key in pressed
