"""What `penstock top` draws."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from penstock.cli.top_view import _COLOURS, frame

GIB = 1 << 30


def domain(**more: Any) -> dict[str, Any]:
    return {
        "limit_bytes": 8 * GIB,
        "capacity_bytes": 10 * GIB,
        "external_bytes": 2 * GIB,
        "booked_bytes": 5 * GIB,
        "read_bytes": 4 * GIB,
        "free_bytes": 3 * GIB,
        "short": False,
        "purposes": {"weights": 4 * GIB, "kv": GIB},
        **more,
    }


def request(number: int) -> dict[str, Any]:
    return {
        "id": f"req-{number:04}", "model": "[bold]m", "key": "key 1", "state": "queued",
        "waits_for": "turn", "place": number, "expected_start_s": 3.0, "prompt_tokens": 10,
        "cached_tokens": 4, "completion_tokens": 2, "tokens_per_s": None, "kv_bytes": 1 << 20,
        "preemptions": 0, "age_s": 1.5,
    }  # fmt: skip


def drawn(states: dict[str, Any], width: int = 100, height: int = 40) -> list[str]:
    console = Console(width=width, height=height, highlight=False)
    with console.capture() as captured:
        console.print(frame(states, width, height))
    return captured.get().splitlines()


def test_the_map_is_the_capacity_to_scale() -> None:
    lines = drawn({"memory": {"domains": {"ram": domain()}}}, width=102)
    [bar] = [line for line in lines if line.startswith("█") and "weights" not in line]
    assert (bar.count("█"), bar.count("·")) == (70, 30)  # 4 + 1 booked, 2 of others, of 10
    assert any("5.0 GiB booked of 8.0 GiB, 4.0 GiB read" in line for line in lines)


def test_more_than_there_is_fills_the_map() -> None:
    lines = drawn({"memory": {"domains": {"ram": domain(external_bytes=9 * GIB, short=True)}}})
    [bar] = [line for line in lines if line.startswith("█") and "weights" not in line]
    assert bar.count("█") == 98
    assert any("SHORT" in line for line in lines)


def test_requests_give_way_where_the_terminal_is_small() -> None:
    rows = [request(number) for number in range(1, 51)]
    states = {"requests": {"total": 50, "waiting": 50, "requests": rows}}
    lines = drawn(states, height=20)
    assert len(lines) <= 20
    assert any("more" in line for line in lines)
    assert any("[bold]m" in line for line in lines)  # a name is no markup


def model(name: str = "m") -> dict[str, Any]:
    return {
        "name": name, "state": "ready", "pinned": False, "bytes": 5 << 30, "context": 8192,
        "running": 12, "waiting": 3, "tokens_per_s": 145.5, "cached_share": 0.87, "leases": 3,
        "idle_s": 0.0,
    }  # fmt: skip


@pytest.mark.parametrize("size", [(160, 45), (100, 30), (80, 24), (60, 16), (44, 15)])
def test_figures_are_whole_and_the_frame_fits(size: tuple[int, int]) -> None:
    width, height = size
    states = {
        "memory": {"domains": {"ram": domain(purposes=dict.fromkeys(_COLOURS, GIB))}},
        "models": {"models": [model(), model("a name that is longer than there is room for")]},
        "requests": {"total": 60, "waiting": 60, "requests": [request(n) for n in range(1, 61)]},
        "events": [{"at": 0.0, "event": "unload", "model": "m", "reason": "asked"}] * 5,
    }
    lines = drawn(states, width, height)
    assert len(lines) < height
    cut = [line for line in lines if "…" in line]
    assert all(line.startswith("a name") for line in cut), cut
    [head] = [line for line in lines if line.startswith("model") and "out" in line.split()]
    assert {"state", "in", "out"} <= set(head.split())
    assert ("request" in head.split()) == (width >= 100)
    assert any(line.startswith("and ") for line in lines)


def test_events_give_way_before_requests() -> None:
    rows = [request(number) for number in range(1, 6)]
    states = {
        "requests": {"total": 5, "waiting": 5, "requests": rows},
        "events": [{"event": f"number {number}"} for number in range(5)],
    }
    roomy, tight = drawn(states, height=40), drawn(states, height=13)
    assert sum(line.startswith("number") for line in roomy) == 5
    shown = [line for line in tight if line.startswith("number")]
    assert 0 < len(shown) < 5
    assert shown[-1].startswith("number 4")  # the latest stay
    assert sum(line.startswith("[bold]m") for line in tight) == 5
    assert len(tight) < 13


def test_a_limit_far_below_the_machine_fills_the_map() -> None:
    ram = domain(limit_bytes=4 * GIB, capacity_bytes=40 * GIB, purposes={"weights": 2 * GIB})
    lines = drawn({"memory": {"domains": {"ram": ram}}}, width=102)
    [bar] = [line for line in lines if line.startswith("█") and "weights" not in line]
    assert (bar.count("█"), bar.count("·")) == (50, 50)
    assert not any("█ others" in line for line in lines)


def test_nothing_is_known_yet() -> None:
    assert "No model is loaded." in drawn({})


def test_events_are_told_as_people_read_them() -> None:
    rows = [
        {"at": 0.0, "event": "load", "model": "m", "waited_s": 2.5, "kv_bytes": GIB, "pid": 7},
        {"event": "loaded", "model": "m", "phases": {"weights": 0.5}},
        {"event": "shed", "domain": "ram", "before_bytes": 3 << 20},
    ]
    lines = drawn({"events": rows})
    assert any(
        line[2:3] == ":" and "load  m  waited 2.5 s  kv 1.0 GiB  pid 7" in line for line in lines
    )
    assert "loaded  m  weights 0.5 s" in lines
    assert "shed  domain ram  before 3.0 MiB" in lines
