"""What `penstock top` draws: from the objects of the admin API to lines of a terminal.

Pure: it asks nobody and knows no keys. Where a terminal is small, events give way first, then
requests; columns that do not fit are left out, the least important first.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from penstock.cli.terminal import size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from rich.console import RenderableType

_COLOURS = {
    "weights": "blue",
    "kv": "green",
    "step": "yellow",
    "process": "magenta",
    "requests": "cyan",
    "loading": "bright_blue",
    "tier": "bright_green",
    "queue": "bright_cyan",
    "graphs": "bright_yellow",
    "grammars": "bright_magenta",
    "exiting": "red",
}
_OTHERS = "bright_black"
_SMALL = 0.5  # share of the capacity below which a limit fills the map, so that its parts are seen
_BLOCK = "█"
_FREE = "·"
_EVENTS = 5

States = dict[str, Any]  # the latest object of each kind, by kind


def frame(
    states: States, width: int, height: int, note: str = "", hint: str = ""
) -> RenderableType:
    """Everything, as far as there is room."""
    parts: list[RenderableType] = [_heading(states, note, hint)]
    maps = [
        _domain(name, state, width)
        for name, state in states.get("memory", {}).get("domains", {}).items()
    ]
    whole: list[RenderableType] = [line for lines in maps for line in lines]
    if 3 * _lines(whole, width) <= height:
        parts += whole
    else:  # without what the colours are
        parts += [line for lines in maps for line in lines[:-1]]
    models = _models(states.get("models", {}).get("models", []), width)
    parts += [Text(), models, Text()]
    rows = states.get("requests", {}).get("requests", [])
    left = height - _lines(parts, width) - 1  # where the last line is written terminals scroll
    wanted = len(rows) + 1  # with its head
    events = list(states.get("events", []))[-_EVENTS:]
    events = events[len(events) - max(min(left - wanted - 1, len(events)), 0) :]
    parts.append(_requests(rows, max(left - (len(events) + 1 if events else 0), 3), width))
    if events:
        parts += [Text(), *(_event(row) for row in events)]
    return Group(*parts)


def _lines(parts: Sequence[RenderableType], width: int) -> int:
    """How many lines they take; what is too wide is wrapped."""
    console = Console(width=width, height=1000, highlight=False)
    return len(console.render_lines(Group(*parts), pad=False))


def _heading(states: States, note: str, hint: str) -> Text:
    requests = states.get("requests", {})
    words = f"{requests.get('total', 0)} requests, {requests.get('waiting', 0)} of them wait"
    heading = Text("penstock top", style="bold")
    heading.append(f"   {words}   {hint}".rstrip(), style="not bold")
    if note:
        heading.append(f"   {note}", style="bold red")
    return heading


def _domain(name: str, state: Mapping[str, Any], width: int) -> list[Text]:
    """A line of numbers, the map, and what its colours are."""
    read = state.get("read_bytes")
    numbers = Text(f"{name}  ", style="bold")
    numbers.append(
        f"{size(state['booked_bytes'])} booked of {size(state['limit_bytes'])}"
        + ("" if read is None else f", {size(read)} read")
        + f", others {size(state['external_bytes'])} of {size(state['capacity_bytes'])}"
        + f", {size(state['free_bytes'])} free",
        style="not bold",
    )
    if state["short"]:
        numbers.append("  SHORT: nothing new starts here", style="bold red")
    purposes = dict(sorted(state["purposes"].items(), key=lambda item: -item[1]))
    legend = Text()
    for purpose, booked in purposes.items():
        legend.append(f"{_BLOCK} ", style=_COLOURS.get(purpose, "white"))
        legend.append(f"{purpose} {size(booked)}  ")
    if _shows_others(state):
        legend.append(f"{_BLOCK} ", style=_OTHERS)
        legend.append(f"others {size(state['external_bytes'])}")
    else:
        legend.append("of the limit", style="dim")
    return [numbers, _map(state, purposes, max(width - 2, 10)), legend]


def _shows_others(state: Mapping[str, Any]) -> bool:
    """Whether the map is of the capacity; otherwise it is of a limit that is far below."""
    return bool(state["limit_bytes"] >= _SMALL * state["capacity_bytes"])


def _map(state: Mapping[str, Any], purposes: Mapping[str, int], width: int) -> Text:
    """The capacity, or the limit, as a bar: what is booked, by purpose, then what others use."""
    parts = [(_COLOURS.get(purpose, "white"), booked) for purpose, booked in purposes.items()]
    whole = max(state["limit_bytes"], 1)
    if _shows_others(state):
        whole = max(state["capacity_bytes"], 1)
        parts.append((_OTHERS, state["external_bytes"]))
    line, drawn, total = Text(), 0, 0
    for colour, amount in parts:
        total += amount
        # By the sum so far, so that roundings do not add up.
        end = min(round(total * width / whole), width)
        line.append(_BLOCK * (end - drawn), style=colour)
        drawn = max(drawn, end)
    line.append(_FREE * (width - drawn), style="dim")
    return line


def _models(rows: Sequence[Mapping[str, Any]], width: int) -> RenderableType:
    shown = [row for row in rows if row["state"] != "absent" or row["pinned"]]
    if not shown:
        return Text("No model is loaded.", style="dim")
    return _table(_MODEL_COLUMNS, shown, width)


def _requests(rows: Sequence[Mapping[str, Any]], most: int, width: int) -> RenderableType:
    """At most so many lines."""
    if not rows:
        return Text("No request is in hand.", style="dim")
    if len(rows) < most:
        return _table(_REQUEST_COLUMNS, rows, width)
    shown = max(most - 2, 1)
    rest = Text(f"and {len(rows) - shown} more", style="dim")
    return Group(_table(_REQUEST_COLUMNS, rows[:shown], width), rest)


def _state(row: Mapping[str, Any]) -> str:
    progress = row.get("progress")
    if not progress:
        return str(row["state"])
    done, total = progress["done_bytes"], progress["total_bytes"]
    return f"{progress['phase']} {100 * done // total}%" if total else str(progress["phase"])


def _idle(row: Mapping[str, Any]) -> str:
    return f"{row['leases']} in use" if row["leases"] else f"{row['idle_s']:.0f} s"


# A column: its title, what is shown of a row, and its rank: those with the highest are left out
# first. The first column may be cut off.
_Column = tuple[str, "Callable[[Mapping[str, Any]], object]", int]
_MODEL_COLUMNS: tuple[_Column, ...] = (
    ("model", lambda row: row["name"], 0),
    ("state", _state, 0),
    ("memory", lambda row: size(row["bytes"]), 1),
    ("context", lambda row: row["context"], 4),
    ("run", lambda row: row.get("running"), 2),
    ("wait", lambda row: row.get("waiting"), 3),
    ("tok/s", lambda row: row.get("tokens_per_s"), 1),
    ("cached", lambda row: _percent(row.get("cached_share")), 5),
    ("idle", _idle, 3),
)
_REQUEST_COLUMNS: tuple[_Column, ...] = (
    ("model", lambda row: row["model"], 0),
    ("request", lambda row: str(row["id"])[-12:], 8),
    ("key", lambda row: row["key"], 7),
    ("state", lambda row: f"for {row['waits_for']}" if row["waits_for"] else row["state"], 0),
    ("place", lambda row: row["place"], 3),
    ("starts in", lambda row: _seconds(row["expected_start_s"]), 6),
    ("in", lambda row: row["prompt_tokens"], 1),
    ("cached", lambda row: row["cached_tokens"], 5),
    ("out", lambda row: row["completion_tokens"], 1),
    ("tok/s", lambda row: row["tokens_per_s"], 2),
    ("KV", lambda row: size(row["kv_bytes"]), 4),
    ("put back", lambda row: row["preemptions"] or None, 7),
    ("age", lambda row: _seconds(row["age_s"]), 3),
)
_LEAST_NAME = 12  # cells that the first column keeps before a further one is left out


def _seconds(count: float | None) -> str | None:
    return None if count is None else f"{count:.0f} s"


def _event(row: Mapping[str, Any]) -> Text:
    known = {"at", "event", "model"}
    words = "  ".join(_field(key, value) for key, value in _flat(row) if key not in known)
    if "model" in row:
        words = f"{row['model']}  {words}"
    line = Text(no_wrap=True, overflow="ellipsis")
    if "at" in row:
        line.append(time.strftime("%H:%M:%S  ", time.localtime(row["at"])), style="dim")
    line.append(f"{row['event']}  ", style="bold")
    line.append(words, style="not bold dim")
    return line


def _flat(row: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Fields of objects inside a row are fields of it; phases are seconds by name."""
    for key, value in row.items():
        if isinstance(value, dict):
            for name, inner in _flat(value):
                yield (f"{name}_s" if key == "phases" else f"{key} {name}"), inner
        else:
            yield key, value


def _field(key: str, value: object) -> str:
    """A field of an event as the page shows it: its unit stands with the value."""
    name = key.removesuffix("_bytes").removesuffix("_s").replace("_", " ")
    if isinstance(value, (int, float)) and key.endswith("bytes"):
        return f"{name} {size(int(value))}"
    unit = " s" if isinstance(value, float) and key.endswith("_s") else ""
    return f"{name} {value:g}{unit}" if isinstance(value, float) else f"{name} {value}"


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{100 * share:.0f}%"


def _table(
    columns: Sequence[_Column], rows: Sequence[Mapping[str, Any]], width: int
) -> RenderableType:
    """As text: a model's name may look like markup."""
    made = [(title, rank, [_cell(show(row)) for row in rows]) for title, show, rank in columns]
    widths = [max(map(cell_len, (title, *cells))) for title, _, cells in made]
    kept = list(range(len(made)))
    while len(kept) > 1:
        needed = sum(widths[at] + 2 for at in kept[1:]) + min(widths[0], _LEAST_NAME)
        if needed <= width:
            break
        kept.remove(max(kept[1:], key=lambda at: (made[at][1], at)))
    table = Table(box=None, pad_edge=False, header_style="bold", expand=False)
    for at in kept:
        least = None if at == kept[0] else widths[at]
        table.add_column(made[at][0], no_wrap=True, overflow="ellipsis", min_width=least)
    for number in range(len(rows)):
        table.add_row(*(Text(made[at][2][number]) for at in kept))
    return table


def _cell(value: object) -> str:
    return "" if value is None else str(value)
