"""`penstock ps`, `load`, `unload` and `pin`: the models in a running server's memory."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import msgspec

from penstock.cli.remote import RemoteError, connect, require_success
from penstock.cli.terminal import phases, print_json, print_line, print_table, size

if TYPE_CHECKING:
    import argparse

    import httpx

    from penstock.cli.terminal import Phases

_COLUMNS = (
    *("name", "state", "memory", "kv", "context", "idle", "ttl", "pinned", "drafts", "progress"),
)


def ps(options: argparse.Namespace) -> int:
    """The models of a running server; those that were unloaded are left out."""
    with connect(options) as client:
        response = client.get("/admin/api/models")
        require_success(response)
        rows: list[dict[str, Any]] = response.json()
    rows = [row for row in rows if row["state"] != "absent" or row["pinned"]]
    if options.json:
        print_json(rows)
    elif not rows:
        print_line("No model is loaded.")
    else:
        print_table(_COLUMNS, [_shown(row) for row in rows])
    return 0


def _shown(row: dict[str, Any]) -> tuple[object, ...]:
    used = f"{row['leases']} in use" if row["leases"] else f"{row['idle_s']:.0f} s"
    if row["state"] != "ready":
        used = ""
    return (
        row["name"],
        row["state"],
        size(row["bytes"]),
        row.get("kv_dtype", ""),
        row["context"],
        used,
        f"{row['ttl_s']:.0f} s" if row["ttl_s"] else "never",
        "yes" if row["pinned"] else "no",
        _drafts(row),
        _progress(row),
    )


def _drafts(row: dict[str, Any]) -> str:
    """How many guessed tokens were right, by who guessed."""
    drafts: dict[str, dict[str, int]] = row.get("drafts") or {}
    return ", ".join(
        f"{name} {each['accepted']} of {each['verified']}" for name, each in drafts.items()
    )


def _progress(row: dict[str, Any]) -> str:
    """How far a load has come, or why it failed."""
    if progress := row.get("progress"):
        done, total = progress["done_bytes"], progress["total_bytes"]
        return str(progress["phase"]) + (f" {100 * done // total}%" if total else "")
    return str(row.get("reason", ""))


def load(options: argparse.Namespace) -> int:
    """Have a model loaded; the bar goes to the terminal, the outcome to the output."""
    try:
        with connect(options) as client, phases() as shown:
            row = _follow(client, options.model, shown)
    except KeyboardInterrupt:
        sys.stderr.write(
            f"penstock: The load of {options.model} is called off, unless a request waits for it.\n"
        )
        raise
    if options.json:
        print_json(row)
    else:
        print_line(
            f"{row['name']} is ready on {row['device']}: {size(row['bytes'])}, "
            f"context {row['context']} tokens."
        )
    return 0


def _follow(client: httpx.Client, model: str, shown: Phases) -> dict[str, Any]:
    """The model's row, once the server says that it is ready."""
    with client.stream("POST", _path(model, "load"), json={"stream": True}) as response:
        require_success(response)
        for line in response.iter_lines():
            if not line.startswith("data: "):
                continue
            told: dict[str, Any] = msgspec.json.decode(line.removeprefix("data: "))
            if error := told.get("error"):
                raise RemoteError(f"The server answered: {error['message']}")
            if "phase" not in told:
                return told
            shown(told["phase"], told["done_bytes"], told["total_bytes"])
    raise RemoteError("The server ended the answer before the model was ready.")


def unload(options: argparse.Namespace) -> int:
    """End a model's process."""
    answer = _ask(options, "unload", {"now": options.now})
    done = "is unloaded" if answer["unloaded"] else "was not loaded"
    _say(options, answer, f"{answer['name']} {done}.")
    return 0


def pin(options: argparse.Namespace) -> int:
    """Keep a model in memory, or no longer."""
    answer = _ask(options, "pin", {"pinned": not options.off})
    kept = "stays in memory once it is loaded" if answer["pinned"] else "may be unloaded"
    _say(options, answer, f"{answer['name']} {kept}; a restart of the server forgets this.")
    return 0


def _ask(options: argparse.Namespace, act: str, body: dict[str, object]) -> dict[str, Any]:
    with connect(options) as client:
        response = client.post(_path(options.model, act), json=body)
        require_success(response)
        answer: dict[str, Any] = response.json()
    return answer


def _say(options: argparse.Namespace, answer: dict[str, Any], sentence: str) -> None:
    if options.json:
        print_json(answer)
    else:
        print_line(sentence)


def _path(model: str, act: str) -> str:
    return f"/admin/api/models/{quote(model)}/{act}"
