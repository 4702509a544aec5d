"""Who gives memory up."""

from __future__ import annotations

from penstock.memory.domains import RAM, Domain
from penstock.memory.eviction import ModelUsage, choose_drained, choose_shed, choose_victims


def _usage(
    name: str,
    *,
    used: int = 0,
    idle: bool = True,
    pinned: bool = False,
    used_at: float = 0.0,
    served: bool = True,
) -> ModelUsage:
    return ModelUsage(name, RAM, 100, 1000, used, 100, idle, pinned, used_at, served)


def test_unused_kv_is_asked_of_the_longest_idle_first() -> None:
    old, new = _usage("old", used_at=1), _usage("new", used_at=2)
    busy = _usage("busy", idle=False, used=700)
    assert choose_shed([new, busy, old], 500, keep_bytes=0) == (("old", 500),)
    assert choose_shed([new, busy, old], 2000, keep_bytes=0) == (
        ("old", 900),
        ("new", 900),
        ("busy", 200),
    )
    assert choose_shed([old], 2000, keep_bytes=800) == (("old", 200),)
    assert choose_shed([_usage("tight", used=1000)], 10, keep_bytes=0) == ()


def test_victims_are_idle_unpinned_and_enough() -> None:
    models = [
        _usage("pinned", pinned=True),
        _usage("busy", idle=False),
        _usage("new", used_at=2),
        _usage("old", used_at=1),
    ]
    assert choose_victims(models, RAM, 1100) == ("old",)
    assert choose_victims(models, RAM, 1101) == ("old", "new")
    assert choose_victims(models, RAM, 2201) == ()
    assert choose_victims(models, Domain.gpu(0), 1) == ()


def test_busy_models_are_drained_when_they_suffice_with_the_idle_ones() -> None:
    models = [
        _usage("pinned", idle=False, pinned=True),
        _usage("new", idle=False, used_at=2),
        _usage("old", idle=False, used_at=1),
        _usage("idle", used_at=3),
        _usage("just loaded", idle=False, served=False),
    ]
    assert choose_drained(models, RAM, 2200) == ("old",)
    assert choose_drained(models, RAM, 2201) == ("old", "new")
    assert choose_drained(models, RAM, 3301) == ()
