"""Every setting, where it came from, and nothing about what uses it.

A value is looked for in this order, the last one found wins: the default, `penstock.toml`, the
environment (`PENSTOCK_SECTION_KEY`), the command line. The result is one frozen `Config`. A key
that nobody knows is an error that names the nearest known one, so a typing error never runs
quietly with a default.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import tomllib
from collections.abc import Mapping  # noqa: TC003 - the settings' types are read at run time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from penstock.config.parsers import (
    Parser,
    parse_boolean,
    parse_choice,
    parse_device,
    parse_integer,
    parse_limit,
    parse_path,
    parse_paths,
    parse_seconds,
    parse_size,
    parse_text,
    parse_texts,
)
from penstock.errors import PenstockError

__all__ = [
    "CacheSettings",
    "Config",
    "ConfigError",
    "MemorySettings",
    "ModelSettings",
    "ModelsSettings",
    "ServerSettings",
    "load",
    "parse_limit",
    "parse_size",
]


class ConfigError(PenstockError):
    """A setting that cannot be used; the message names it and where it stands."""


@dataclass(frozen=True, slots=True)
class Knob:
    """How a setting is read, and what it is for."""

    parse: Parser
    about: str


# --- the tree ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """`[server]`: the HTTP side."""

    host: Annotated[str, Knob(parse_text, "address to listen on")] = "127.0.0.1"
    port: Annotated[int, Knob(parse_integer(0, 65535), "port to listen on; 0 takes a free one")] = (
        8000
    )
    api_keys: Annotated[tuple[str, ...], Knob(parse_texts, "keys that clients may use")] = ()
    no_auth: Annotated[bool, Knob(parse_boolean, "allow a non-loopback address without a key")] = (
        False
    )
    hosts: Annotated[
        tuple[str, ...], Knob(parse_texts, "further Host names accepted without a key")
    ] = ()
    cors_origins: Annotated[
        tuple[str, ...], Knob(parse_texts, "web origins that may call the API")
    ] = ()
    max_body: Annotated[int, Knob(parse_size, "largest request body")] = 32 << 20
    max_bodies: Annotated[int, Knob(parse_size, "bodies held at once, over all requests")] = (
        256 << 20
    )
    max_choices: Annotated[
        int, Knob(parse_integer(1), "most answers to one request (n x prompts)")
    ] = 1024
    max_tokens_policy: Annotated[
        str, Knob(parse_choice("cut", "refuse"), "a max_tokens beyond the room is cut or refused")
    ] = "cut"
    queue_requests: Annotated[
        int, Knob(parse_integer(1), "most requests that wait for one model")
    ] = 256
    queue_bytes: Annotated[
        int, Knob(parse_size, "most bytes of prompts that wait for one model")
    ] = 256 << 20
    queue_deadline_s: Annotated[
        float, Knob(parse_seconds, "longest wait for memory, a load or a turn")
    ] = 600.0
    hang_s: Annotated[
        float, Knob(parse_seconds, "a worker silent for so long, and 4 loads, is replaced")
    ] = 60.0
    stored_responses: Annotated[
        int, Knob(parse_integer(0), "most answers of /v1/responses that are kept")
    ] = 1000
    stored_bytes: Annotated[int, Knob(parse_size, "most bytes that they take on disk")] = 256 << 20
    keepalive_after_s: Annotated[
        float, Knob(parse_seconds, "silence after which a stream says it lives")
    ] = 10.0
    slow_client_s: Annotated[
        float, Knob(parse_seconds, "a client that takes nothing for so long is let go")
    ] = 300.0
    shutdown_grace_s: Annotated[
        float, Knob(parse_seconds, "time for running answers when stopped")
    ] = 5.0
    log_level: Annotated[
        str, Knob(parse_choice("debug", "info", "warning", "error"), "what is logged")
    ] = "info"
    log_file: Annotated[
        Path | None, Knob(parse_path, "JSON lines go here as well as to the terminal")
    ] = None


@dataclass(frozen=True, slots=True)
class MemorySettings:
    """`[memory]`: how much penstock may use."""

    limit: Annotated[str, Knob(parse_limit, "RAM: auto, a percentage or a size")] = "auto"
    gpu_limit: Annotated[
        str, Knob(parse_limit, "memory of each GPU: auto, a percentage or a size")
    ] = "auto"
    spare: Annotated[
        int | None,
        Knob(parse_size, "left to the machine beyond all limits; otherwise 256 MiB or 2 %"),
    ] = None


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """`[cache]`: KV kept beyond a request."""

    dir: Annotated[Path, Knob(parse_path, "where cached KV is kept")]
    size: Annotated[
        str,
        Knob(
            parse_limit,
            "disk for it, over all models: a size, a percentage of what is free, or auto for 10%; "
            "0 keeps none",
        ),
    ] = "auto"
    share: Annotated[
        bool, Knob(parse_boolean, "let requests with different API keys find each other's KV")
    ] = False


# The dialects of `penstock.text.tools`, which is above this in the layers.
TOOL_DIALECTS = (
    "harmony",
    "deepseek",
    "kimi",
    "minimax",
    "mistral",
    "gemma",
    "glm",
    "qwen_coder",
    "hermes",
    "pythonic",
    "llama_json",
)


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """How a model runs: `[models]` for all of them, `[models.NAME]` for one."""

    device: Annotated[str, Knob(parse_device, "auto, cpu, cuda or cuda:N")] = "auto"
    dtype: Annotated[
        str,
        Knob(
            parse_choice("auto", "float32", "bfloat16", "float16"),
            "number format of weights and KV",
        ),
    ] = "auto"
    max_context: Annotated[
        int | None, Knob(parse_integer(1), "longest sequence, below the model's own")
    ] = None
    kv_bytes: Annotated[
        int | None, Knob(parse_size, "memory for KV; otherwise what the limit leaves")
    ] = None
    kv_tokens: Annotated[
        int | None, Knob(parse_integer(1), "KV for so many tokens; otherwise what the limit leaves")
    ] = None
    reserve: Annotated[
        str,
        Knob(
            parse_choice("expected", "worst_case"),
            "KV a request must find before it starts: what it is thought to need, or all it may",
        ),
    ] = "expected"
    pinned: Annotated[bool, Knob(parse_boolean, "never unloaded for another model")] = False
    step_tokens: Annotated[
        int | None,
        Knob(parse_integer(1), "most tokens computed in one step; otherwise by the device"),
    ] = None
    step_sequences: Annotated[
        int | None, Knob(parse_integer(1), "most sequences in one step; otherwise by the device")
    ] = None
    step_target_s: Annotated[
        float | None, Knob(parse_seconds, "chunks shrink to keep a step near this")
    ] = 0.3
    threads: Annotated[
        int | None, Knob(parse_integer(1), "CPU threads; otherwise the machine's cores")
    ] = None
    trust_remote_code: Annotated[
        bool, Knob(parse_boolean, "run Python code that a model folder brings")
    ] = False
    tool_dialect: Annotated[
        str,
        Knob(parse_choice("auto", *TOOL_DIALECTS), "how the model writes calls of tools"),
    ] = "auto"


@dataclass(frozen=True, slots=True)
class ModelsSettings(ModelSettings):
    """`[models]`: which models there are, and how all of them run."""

    dirs: Annotated[tuple[Path, ...], Knob(parse_paths, "further folders with models")] = ()
    default: Annotated[
        str | None, Knob(parse_text, "loaded at start; answers requests that name no model")
    ] = None
    hf_cache: Annotated[
        Path | None,
        Knob(parse_path, "a Hugging Face cache to look into; otherwise its own default"),
    ] = None
    named: Mapping[str, ModelSettings] = field(default_factory=dict)

    def settings(self, name: str) -> ModelSettings:
        """What holds for the model `name`."""
        return self.named.get(name, self)


@dataclass(frozen=True, slots=True)
class Config:
    """Everything in force; `origins` says for each dotted key where its value came from."""

    home: Path
    server: ServerSettings
    memory: MemorySettings
    cache: CacheSettings
    models: ModelsSettings
    origins: Mapping[str, str]
    # Variables that begin like ours but name no section: shown by `doctor`, as likely mistakes.
    ignored_variables: tuple[str, ...] = ()

    @property
    def model_dirs(self) -> tuple[Path, ...]:
        """Where models are looked for; the first folder with a name wins."""
        return (*self.models.dirs, self.home / "models")

    def values(self) -> list[tuple[str, object, str]]:
        """(key, value, origin) of every setting, in order; keys are secrets and stay hidden."""
        rows: list[tuple[str, object, str]] = [("home", self.home, self.origins["home"])]
        for section in _SECTIONS:
            settings = getattr(self, section)
            rows += _rows(section, settings, self.origins)
        for name, settings in self.models.named.items():
            rows += _rows(f"models.{name}", settings, self.origins)
        return rows


_SECTIONS: dict[str, type[Any]] = {
    "server": ServerSettings,
    "memory": MemorySettings,
    "cache": CacheSettings,
    "models": ModelsSettings,
}
# Variables that are ours but no setting of a section.
_OWN_VARIABLES = {"PENSTOCK_HOME", "PENSTOCK_CONFIG"}


def _rows(prefix: str, settings: Any, origins: Mapping[str, str]) -> list[tuple[str, object, str]]:
    rows: list[tuple[str, object, str]] = []
    for name in _knobs(type(settings)):
        value = getattr(settings, name)
        if name == "api_keys":
            value = f"{len(value)} key(s)"
        rows.append((f"{prefix}.{name}", value, origins.get(f"{prefix}.{name}", "default")))
    return rows


def _knobs(section: type[Any]) -> dict[str, Knob]:
    hints = get_type_hints(section, include_extras=True)
    return {
        knob.name: hint.__metadata__[0]
        for knob in dataclasses.fields(section)
        if hasattr(hint := hints[knob.name], "__metadata__")
    }


# --- loading -----------------------------------------------------------------------------------


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
) -> Config:
    """The settings in force. `flags` maps dotted keys (`server.port`) to what was typed.

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
    values.default("cache", "dir", home / "cache")
    models = values.section("models")
    return Config(
        home=home,
        server=ServerSettings(**values.section("server")),
        memory=MemorySettings(**values.section("memory")),
        cache=CacheSettings(**values.section("cache")),
        models=ModelsSettings(**models, named=values.named_models(models)),
        origins={"home": home_origin, **values.origins},
        ignored_variables=ignored,
    )


class _Values:
    """The parsed values so far, and where each came from."""

    def __init__(self) -> None:
        self._values: dict[str, dict[str, Any]] = {}
        self.origins: dict[str, str] = {}

    def put(self, section: str, key: str, value: object, origin: str) -> None:
        """Parse and keep a value; a later one replaces it."""
        kind = _SECTIONS.get(section, ModelSettings)
        knobs = _knobs(kind)
        if key not in knobs:
            raise ConfigError(f"{origin}: {_unknown(f'{section}.{key}', section, knobs)}")
        try:
            parsed = knobs[key].parse(value)
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
        shared = {key: value for key, value in common.items() if key in _knobs(ModelSettings)}
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
        if section not in _SECTIONS or not isinstance(content, dict):
            raise ConfigError(f"{path}: {_unknown(f'[{section}]', '', _SECTIONS)}")
        for key, value in content.items():
            if section == "models" and isinstance(value, dict):
                for inner, inner_value in value.items():
                    values.put(f"models.{key}", inner, inner_value, str(path))
            else:
                values.put(section, key, value, str(path))


def _read_environment(environment: Mapping[str, str], values: _Values) -> tuple[str, ...]:
    ignored: list[str] = []
    for variable, value in sorted(environment.items()):
        if not variable.startswith("PENSTOCK_") or variable in _OWN_VARIABLES:
            continue
        section, _, key = variable.removeprefix("PENSTOCK_").lower().partition("_")
        if section in _SECTIONS and key:
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
