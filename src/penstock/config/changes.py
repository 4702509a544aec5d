"""What follows from settings that were read again: a pure comparison.

Each knob says when a change of it holds (`Holds`); this only looks. What needs a restart keeps its
old value in `Changes.config`, so that what is shown as in force is in force.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.config.knobs import Holds, knobs
from penstock.config.model_settings import ModelSettings

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from penstock.config.model_settings import ModelsSettings
    from penstock.config.settings import Config

Section = TypeVar("Section")

RELOAD_KEYS = tuple(k for k, knob in knobs(ModelSettings).items() if knob.holds is Holds.RELOAD)


@dataclass(frozen=True, slots=True)
class Changes:
    """The outcome of a comparison; keys are dotted, as in `penstock doctor`."""

    config: Config  # what is in force from now on
    applied: tuple[str, ...]  # hold at once, or from the next load of a model that is not loaded
    reload: Mapping[str, tuple[str, ...]]  # loaded models to be loaded anew, and the keys for it
    restart: tuple[str, ...]  # hold after a restart of the server


def compare(old: Config, new: Config, loaded: Iterable[str]) -> Changes:
    """What becomes of each difference, while the models `loaded` are."""
    changed: dict[str, Holds] = {}
    sections: dict[str, Any] = {}
    for section in ("server", "memory", "cache", "models"):
        before, after = getattr(old, section), getattr(new, section)
        different = _different(before, after)
        changed |= {f"{section}.{key}": holds for key, holds in different.items()}
        sections[section] = _in_force(before, after, different)
    changed |= _own_changes(old.models, new.models)
    reload = {
        name: keys
        for name in loaded
        if (keys := reload_keys(old.models.settings(name), new.models.settings(name)))
    }
    return Changes(
        config=dataclasses.replace(new, home=old.home, **sections),
        applied=tuple(
            key
            for key, holds in changed.items()
            if holds is Holds.NOW or (holds is Holds.RELOAD and not _waits(key, reload))
        ),
        reload=reload,
        restart=tuple(key for key, holds in changed.items() if holds is Holds.RESTART),
    )


def _waits(changed: str, reload: Mapping[str, tuple[str, ...]]) -> bool:
    """Whether a loaded model has yet to take it on."""
    section, _, key = changed.rpartition(".")
    named = section.removeprefix("models").removeprefix(".")
    return any(key in keys and named in ("", name) for name, keys in reload.items())


def _different(before: object, after: object) -> dict[str, Holds]:
    return {
        key: knob.holds
        for key, knob in knobs(type(before)).items()
        if getattr(before, key) != getattr(after, key)
    }


def _in_force(before: Section, after: Section, different: Mapping[str, Holds]) -> Section:
    kept = {key: getattr(before, key) for key, holds in different.items() if holds is Holds.RESTART}
    return dataclasses.replace(after, **kept)  # type: ignore[type-var]


def _own_changes(before: ModelsSettings, after: ModelsSettings) -> dict[str, Holds]:
    """Changes of `[models.NAME]` that do not only follow those of `[models]`."""
    changed: dict[str, Holds] = {}
    for name in {**before.named, **after.named}:
        old, new = before.settings(name), after.settings(name)
        for key, knob in knobs(ModelSettings).items():
            was, now = getattr(old, key), getattr(new, key)
            follows = was == getattr(before, key) and now == getattr(after, key)
            if was != now and not follows:
                changed[f"models.{name}.{key}"] = knob.holds
    return changed


def reload_keys(as_loaded: ModelSettings, now: ModelSettings) -> tuple[str, ...]:
    """The settings for which a model that was loaded by `as_loaded` must be loaded anew."""
    return tuple(key for key in RELOAD_KEYS if getattr(as_loaded, key) != getattr(now, key))
