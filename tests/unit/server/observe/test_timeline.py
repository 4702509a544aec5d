"""Memory over time: a fixed resolution, peaks kept, a bounded ring."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from penstock.server.observe.timeline import STEP_S, Figures, Timeline


def figures(booked: int, read: int | None = 0, free: int = 10) -> dict[str, Figures]:
    return {
        "ram": {
            "limit_bytes": 100,
            "capacity_bytes": 200,
            "booked_bytes": booked,
            "read_bytes": read,
            "external_bytes": 0,
            "free_bytes": free,
            "short": False,
        }
    }


def test_a_point_has_the_peaks_of_its_step() -> None:
    timeline = Timeline()
    sizes = [10, 90, 20, 20, 20, 30]
    points = [
        timeline.note(float(second), figures(size, None if second == 0 else size, 100 - size))
        for second, size in enumerate(sizes)
    ]
    assert points[:STEP_S] == [None] * STEP_S
    [point] = timeline.points()
    assert points[STEP_S] is point
    domains: Any = point["domains"]
    state = domains["ram"]
    assert (state["booked_bytes"], state["read_bytes"], state["free_bytes"]) == (90, 90, 10)


def test_points_come_at_a_fixed_pace_and_the_oldest_go() -> None:
    timeline = Timeline()
    for second in range(2 * 3600):
        timeline.note(float(second), figures(second))
    times = [float(str(point["at"])) for point in timeline.points()]
    assert len(times) == 15 * 60 // STEP_S
    assert {later - earlier for earlier, later in pairwise(times)} == {float(STEP_S)}
    assert times[-1] == 2 * 3600 - 5 + 0.0
