"""From the file, the environment and the command line to one frozen `Config`."""

from __future__ import annotations

import difflib
import os
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.config.knobs import ConfigError, knobs
from penstock.config.model_settings import ModelSettings, ModelsSettings
from penstock.config.parsers import parse_table
from penstock.config.settings import (
    SECTIONS,
    CacheSettings,
    Config,
    MemorySettings,
    ServerSettings,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

# Variables that are ours but no setting of a section.
_OWN_VARIABLES = {"PENSTOCK_HOME", "PENSTOCK_CONFIG"}
# Settings that had another name once.
_RENAMED = {"kv_least_tokens": "kv_min_tokens", "kv_least_bytes": "kv_min_bytes"}
OVERRIDE = "admin API"  # the origin of what an operator sets
# Flags that are not called after their setting.
_FLAGS = {
    "server.api_keys": "api-key",
    "memory.limit": "memory",
    "memory.gpu_limit": "memory",
    "models.dirs": "models",
    "models.default": "model",
}


def load(
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, object] | None = None,
    overrides: Mapping[str, object] | None = None,
) -> Config:
    """The settings in force. `flags` maps dotted keys (`server.port`) to what was typed, and
    `overrides`, which win, to what an operator of the running server has set.

    Without `file` the variable PENSTOCK_CONFIG is used, else `penstock.toml` in the present
    folder, else the one in the home directory, if there is one.
    """
    environment = os.environ if environment is None else environment
    home, home_origin = _home(environment)
    values = _Values()
    if (found := _find_file(file, environment, home)) is not None:
        _read_file(found, values)
    ignored = _read_environment(environment, values)
    for key, value in (flags or {}).items():
        section, _, knob = key.partition(".")
        flag = _FLAGS.get(key, knob.replace("_", "-"))
        values.put(section, knob, value, f"flag --{flag}")
    for key, value in (overrides or {}).items():
        section, _, knob = key.rpartition(".")
        if section not in SECTIONS and not section.startswith("models."):
            raise ConfigError(f"{OVERRIDE}: {_unknown(f'[{section}]', '', SECTIONS)}")
        values.put(section, knob, value, OVERRIDE)
    values.default("cache", "dir", home / "cache")
    models = values.section("models")
    named = values.named_models(models)
    _check_names(named)
    return Config(
        home=home,
        server=ServerSettings(**values.section("server")),
        memory=MemorySettings(**values.section("memory")),
        cache=CacheSettings(**values.section("cache")),
        models=ModelsSettings(**models, named=named),
        origins={"home": home_origin, **values.origins},
        read_again=lambda: load(file, environment, flags, overrides),
        read_with=lambda changed: load(file, environment, flags, changed),
        overrides=dict(overrides or {}),
        ignored_variables=ignored,
    )


class _Values:
    """The parsed values so far, and where each came from."""

    def __init__(self) -> None:
        self._values: dict[str, dict[str, Any]] = {}
        self.origins: dict[str, str] = {}

    def put(self, section: str, key: str, value: object, origin: str) -> None:
        """Parse and keep a value; a later one replaces it."""
        known = knobs(SECTIONS.get(section, ModelSettings))
        if (renamed := _RENAMED.get(key)) is not None:
            raise ConfigError(f"{origin}: {section}.{key} is called {section}.{renamed} now.")
        if key not in known:
            raise ConfigError(f"{origin}: {_unknown(f'{section}.{key}', section, known)}")
        try:
            parsed = known[key].parse(value)
        except ValueError as error:
            shown = "" if key == "api_keys" else f" is {value!r}, but"
            raise ConfigError(f"{origin}: {section}.{key}{shown or ':'} {error}.") from None
        self._values.setdefault(section, {})[key] = parsed
        self.origins[f"{section}.{key}"] = origin

    def default(self, section: str, key: str, value: Any) -> None:
        """A default that depends on the machine."""
        self._values.setdefault(section, {}).setdefault(key, value)

    def section(self, section: str) -> dict[str, Any]:
        return self._values.get(section, {})

    def named_models(self, common: dict[str, Any]) -> dict[str, ModelSettings]:
        """Each `[models.NAME]` on top of what `[models]` says for all."""
        shared = {key: value for key, value in common.items() if key in knobs(ModelSettings)}
        return {
            section.removeprefix("models."): ModelSettings(**{**shared, **own})
            for section, own in self._values.items()
            if section.startswith("models.")
        }


def _home(environment: Mapping[str, str]) -> tuple[Path, str]:
    if value := environment.get("PENSTOCK_HOME"):
        return Path(value).expanduser().absolute(), "environment PENSTOCK_HOME"
    return Path("~/.penstock").expanduser(), "default"


def _find_file(given: Path | None, environment: Mapping[str, str], home: Path) -> Path | None:
    if given is None and (value := environment.get("PENSTOCK_CONFIG")):
        given = Path(value).expanduser()
    if given is not None:
        if not given.is_file():
            raise ConfigError(f"The configuration file {given} does not exist.")
        return given
    for candidate in (Path("penstock.toml"), home / "penstock.toml"):
        if candidate.is_file():
            return candidate
    return None


def _read_file(path: Path, values: _Values) -> None:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"The configuration file {path} cannot be read: {error}.") from None
    for section, content in document.items():
        if section not in SECTIONS or not isinstance(content, dict):
            raise ConfigError(f"{path}: {_unknown(f'[{section}]', '', SECTIONS)}")
        for key, value in content.items():
            if section == "models" and isinstance(value, dict) and not _is_table(key):
                for inner, inner_value in value.items():
                    values.put(f"models.{key}", inner, inner_value, str(path))
            else:
                values.put(section, key, value, str(path))


def _is_table(key: str) -> bool:
    """Whether a table in `[models]` is a setting for all models rather than a model's own."""
    knob = knobs(ModelsSettings).get(key)
    return knob is not None and knob.parse is parse_table


def _check_names(named: Mapping[str, ModelSettings]) -> None:
    """A name leads to one model."""
    owners: dict[str, str] = {}
    for name, model in named.items():
        for alias in model.alias:
            if alias in named:
                raise ConfigError(
                    f"models.{name}.alias has {alias!r}, which is the name of another model."
                    if alias != name
                    else f"models.{name}.alias has the model's own name."
                )
            if (other := owners.setdefault(alias, name)) != name:
                raise ConfigError(
                    f"The alias {alias!r} is given to two models: {other!r} and {name!r}."
                )


def _read_environment(environment: Mapping[str, str], values: _Values) -> tuple[str, ...]:
    ignored: list[str] = []
    for variable, value in sorted(environment.items()):
        if not variable.startswith("PENSTOCK_") or variable in _OWN_VARIABLES:
            continue
        section, _, key = variable.removeprefix("PENSTOCK_").lower().partition("_")
        if section in SECTIONS and key:
            values.put(section, key, value, f"environment {variable}")
        else:
            # Not an error: a cluster sets such variables for a service that is called penstock.
            ignored.append(variable)
    return tuple(ignored)


def _unknown(shown: str, section: str, known: Mapping[str, Any]) -> str:
    key = shown.rpartition(".")[2].strip("[]")
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
    prefix = f"{section}." if section else ""
    hint = f" Did you mean {prefix}{near[0]}?" if near else ""
    return f"there is no setting {shown}.{hint}"
