"""The tree of settings: what there is to set, how each is read, and when a change of it holds.

Nothing here looks at files, variables or flags (`loading` does), nor knows what uses a setting.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping  # noqa: TC003 - the settings' types are read at run time
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path  # noqa: TC003
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from penstock.config.parsers import (
    Parser,
    parse_boolean,
    parse_choice,
    parse_device,
    parse_duration,
    parse_integer,
    parse_limit,
    parse_names,
    parse_number,
    parse_path,
    parse_paths,
    parse_seconds,
    parse_size,
    parse_table,
    parse_text,
    parse_texts,
)
from penstock.errors import PenstockError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class ConfigError(PenstockError):
    """A setting that cannot be used; the message names it and where it stands."""

    status = 400
    code = "invalid_config"
    anthropic = (400, "invalid_request_error")


class Holds(Enum):
    """When a setting that was changed in a running server's file holds."""

    NOW = "now"
    RELOAD = "reload"  # once the model is loaded anew
    RESTART = "restart"  # of the server


NOW, RELOAD, RESTART = Holds.NOW, Holds.RELOAD, Holds.RESTART


@dataclass(frozen=True, slots=True)
class Knob:
    """How a setting is read, what it is for, and when a change of it holds."""

    parse: Parser
    about: str
    holds: Holds


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """`[server]`: the HTTP side."""

    host: Annotated[str, Knob(parse_text, "address to listen on", RESTART)] = "127.0.0.1"
    port: Annotated[
        int, Knob(parse_integer(0, 65535), "port to listen on; 0 takes a free one", RESTART)
    ] = 8000
    api_keys: Annotated[tuple[str, ...], Knob(parse_texts, "keys that clients may use", NOW)] = ()
    no_auth: Annotated[
        bool, Knob(parse_boolean, "allow a non-loopback address without a key", NOW)
    ] = False
    hosts: Annotated[
        tuple[str, ...], Knob(parse_texts, "further Host names accepted without a key", NOW)
    ] = ()
    cors_origins: Annotated[
        tuple[str, ...], Knob(parse_texts, "web origins that may call the API", RESTART)
    ] = ()
    max_body: Annotated[int, Knob(parse_size, "largest request body", NOW)] = 32 << 20
    max_bodies: Annotated[
        int, Knob(parse_size, "bodies held at once, over all requests", RESTART)
    ] = 256 << 20
    max_choices: Annotated[
        int, Knob(parse_integer(1), "most answers to one request (n x prompts)", NOW)
    ] = 1024
    max_tokens_policy: Annotated[
        str,
        Knob(parse_choice("cut", "refuse"), "a max_tokens beyond the room is cut or refused", NOW),
    ] = "cut"
    queue_requests: Annotated[
        int, Knob(parse_integer(1), "most requests that wait for one model", RESTART)
    ] = 256
    queue_bytes: Annotated[
        int, Knob(parse_size, "most bytes of prompts that wait for one model", RESTART)
    ] = 256 << 20
    queue_deadline_s: Annotated[
        float, Knob(parse_seconds, "longest wait for memory, a load or a turn", RESTART)
    ] = 600.0
    hang_s: Annotated[
        float, Knob(parse_seconds, "a worker silent for so long, and 4 loads, is replaced", RESTART)
    ] = 60.0
    stored_responses: Annotated[
        int, Knob(parse_integer(0), "most answers of /v1/responses that are kept", RESTART)
    ] = 1000
    stored_bytes: Annotated[int, Knob(parse_size, "most bytes that they take on disk", RESTART)] = (
        256 << 20
    )
    keepalive_after_s: Annotated[
        float, Knob(parse_number(0.1, 86400), "silence after which a stream says it lives", NOW)
    ] = 10.0
    slow_client_s: Annotated[
        float, Knob(parse_seconds, "a client that takes nothing for so long is let go", NOW)
    ] = 300.0
    shutdown_grace_s: Annotated[
        float, Knob(parse_seconds, "time for running answers when stopped", RESTART)
    ] = 5.0
    log_level: Annotated[
        str, Knob(parse_choice("debug", "info", "warning", "error"), "what is logged", RESTART)
    ] = "info"
    log_file: Annotated[
        Path | None, Knob(parse_path, "JSON lines go here as well as to the terminal", RESTART)
    ] = None


@dataclass(frozen=True, slots=True)
class MemorySettings:
    """`[memory]`: how much penstock may use."""

    limit: Annotated[str, Knob(parse_limit, "RAM: auto, a percentage or a size", RESTART)] = "auto"
    gpu_limit: Annotated[
        str, Knob(parse_limit, "memory of each GPU: auto, a percentage or a size", RESTART)
    ] = "auto"
    spare: Annotated[
        int | None,
        Knob(
            parse_size, "left to the machine beyond all limits; otherwise 256 MiB or 2 %", RESTART
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """`[cache]`: KV kept beyond a request."""

    dir: Annotated[Path, Knob(parse_path, "where cached KV is kept", RESTART)]
    size: Annotated[
        str,
        Knob(
            parse_limit,
            "disk for it, over all models: a size, a percentage of what is free, or auto for 10%; "
            "0 keeps none",
            RESTART,
        ),
    ] = "auto"
    ram: Annotated[
        str,
        Knob(
            parse_limit,
            "RAM for KV of models on a GPU, over all of them: a size, a percentage of "
            "memory.limit, or auto for 25%; 0 keeps none",
            RESTART,
        ),
    ] = "auto"
    share: Annotated[
        bool, Knob(parse_boolean, "let requests with different API keys find each other's KV", NOW)
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

    device: Annotated[str, Knob(parse_device, "auto, cpu, cuda or cuda:N", RELOAD)] = "auto"
    dtype: Annotated[
        str,
        Knob(
            parse_choice("auto", "float32", "bfloat16", "float16"),
            "number format of weights and KV",
            RELOAD,
        ),
    ] = "auto"
    max_context: Annotated[
        int | None, Knob(parse_integer(1), "longest sequence, below the model's own", RELOAD)
    ] = None
    kv_bytes: Annotated[
        int | None, Knob(parse_size, "memory for KV; otherwise what the limit leaves", RELOAD)
    ] = None
    kv_tokens: Annotated[
        int | None,
        Knob(parse_integer(1), "KV for so many tokens; otherwise what the limit leaves", RELOAD),
    ] = None
    reserve: Annotated[
        str,
        Knob(
            parse_choice("expected", "worst_case"),
            "KV a request must find before it starts: what it is thought to need, or all it may",
            RELOAD,
        ),
    ] = "expected"
    pinned: Annotated[bool, Knob(parse_boolean, "never unloaded for another model", NOW)] = False
    step_tokens: Annotated[
        int | None,
        Knob(parse_integer(1), "most tokens computed in one step; otherwise by the device", RELOAD),
    ] = None
    step_sequences: Annotated[
        int | None,
        Knob(parse_integer(1), "most sequences in one step; otherwise by the device", RELOAD),
    ] = None
    step_target_s: Annotated[
        float | None, Knob(parse_seconds, "chunks shrink to keep a step near this", RELOAD)
    ] = 0.3
    threads: Annotated[
        int | None, Knob(parse_integer(1), "CPU threads; otherwise the machine's cores", RELOAD)
    ] = None
    trust_remote_code: Annotated[
        bool, Knob(parse_boolean, "run Python code that a model folder brings", RELOAD)
    ] = False
    alias: Annotated[
        tuple[str, ...], Knob(parse_names, "further names that the model answers to", NOW)
    ] = ()
    ttl: Annotated[
        float | None,
        Knob(parse_duration, "unloaded after so long without a request; 0 is never", NOW),
    ] = None
    kv_least_tokens: Annotated[
        int | None, Knob(parse_integer(1), "KV that it keeps whatever others need", NOW)
    ] = None
    kv_least_bytes: Annotated[
        int | None, Knob(parse_size, "the same in bytes; the larger holds", NOW)
    ] = None
    temperature: Annotated[
        float | None, Knob(parse_number(0, 2), "of requests that name none", NOW)
    ] = None
    top_p: Annotated[float | None, Knob(parse_number(0, 1), "likewise", NOW)] = None
    top_k: Annotated[int | None, Knob(parse_integer(-1), "likewise", NOW)] = None
    min_p: Annotated[float | None, Knob(parse_number(0, 1), "likewise", NOW)] = None
    repetition_penalty: Annotated[float | None, Knob(parse_number(0.01, 100), "likewise", NOW)] = (
        None
    )
    presence_penalty: Annotated[float | None, Knob(parse_number(-2, 2), "likewise", NOW)] = None
    frequency_penalty: Annotated[float | None, Knob(parse_number(-2, 2), "likewise", NOW)] = None
    max_tokens: Annotated[int | None, Knob(parse_integer(1), "likewise", NOW)] = None
    priority: Annotated[
        int | None, Knob(parse_integer(-(2**31), 2**31 - 1), "likewise; lower goes first", NOW)
    ] = None
    template_arguments: Annotated[
        Mapping[str, Any], Knob(parse_table, "what the chat template is told", NOW)
    ] = field(default_factory=dict)
    tool_dialect: Annotated[
        str,
        Knob(parse_choice("auto", *TOOL_DIALECTS), "how the model writes calls of tools", NOW),
    ] = "auto"


@dataclass(frozen=True, slots=True)
class ModelsSettings(ModelSettings):
    """`[models]`: which models there are, and how all of them run."""

    alias: tuple[str, ...] = ()  # a name is one model's: `[models.NAME]` alone has the knob
    dirs: Annotated[
        tuple[Path, ...], Knob(parse_paths, "further folders with models", RESTART)
    ] = ()
    default: Annotated[
        str | None, Knob(parse_text, "loaded at start; answers requests that name no model", NOW)
    ] = None
    hf_cache: Annotated[
        Path | None,
        Knob(parse_path, "a Hugging Face cache to look into; otherwise its own default", RESTART),
    ] = None
    named: Mapping[str, ModelSettings] = field(default_factory=dict)

    def settings(self, name: str) -> ModelSettings:
        """What holds for the model `name`."""
        return self.named.get(name, self)

    def canonical(self, name: str) -> str:
        """The name of the model that answers to `name`, which may be an alias."""
        return next((own for own, model in self.named.items() if name in model.alias), name)

    def hidden(self, names: Iterable[str]) -> dict[str, str]:
        """Models among `names` that nobody can ask for, since another has their name for an alias:
        the sentence that says so, by name."""
        return {
            name: f"the name {name!r} is an alias of {owner!r} (models.{owner}.alias)"
            for name in names
            if (owner := self.canonical(name)) != name
        }


@dataclass(frozen=True, slots=True)
class Config:
    """Everything in force; `origins` says for each dotted key where its value came from."""

    home: Path
    server: ServerSettings
    memory: MemorySettings
    cache: CacheSettings
    models: ModelsSettings
    origins: Mapping[str, str]
    # Reads everything again, as it was read for this one; raises `ConfigError`.
    read_again: Callable[[], Config]
    # Variables that begin like ours but name no section: shown by `doctor`, as likely mistakes.
    ignored_variables: tuple[str, ...] = ()

    @property
    def model_dirs(self) -> tuple[Path, ...]:
        """Where models are looked for; the first folder with a name wins."""
        return (*self.models.dirs, self.home / "models")

    def values(self) -> list[tuple[str, object, str]]:
        """(key, value, origin) of every setting, in order; keys are secrets and stay hidden."""
        rows: list[tuple[str, object, str]] = [("home", self.home, self.origins["home"])]
        for section in SECTIONS:
            settings = getattr(self, section)
            rows += _rows(section, settings, self.origins)
        for name, settings in self.models.named.items():
            rows += _rows(f"models.{name}", settings, self.origins)
        return rows


SECTIONS: dict[str, type[Any]] = {
    "server": ServerSettings,
    "memory": MemorySettings,
    "cache": CacheSettings,
    "models": ModelsSettings,
}


def _rows(prefix: str, settings: Any, origins: Mapping[str, str]) -> list[tuple[str, object, str]]:
    rows: list[tuple[str, object, str]] = []
    for name in knobs(type(settings)):
        value = getattr(settings, name)
        if name == "api_keys":
            value = f"{len(value)} key(s)"
        rows.append((f"{prefix}.{name}", value, origins.get(f"{prefix}.{name}", "default")))
    return rows


def knobs(section: type[Any]) -> Mapping[str, Knob]:
    """What can be set in a section, by name."""
    hints = get_type_hints(section, include_extras=True)
    return {
        knob.name: hint.__metadata__[0]
        for knob in dataclasses.fields(section)
        if hasattr(hint := hints[knob.name], "__metadata__")
    }
