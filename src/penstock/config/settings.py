"""The tree of settings: what there is to set, how each is read, and when a change of it holds.

Nothing here looks at files, variables or flags (`loading` does), nor knows what uses a setting.
"""

from __future__ import annotations

from collections.abc import Mapping  # noqa: TC003 - the settings' types are read at run time
from dataclasses import dataclass, field
from pathlib import Path  # noqa: TC003
from typing import TYPE_CHECKING, Annotated, Any

from penstock.config.knobs import NOW, RESTART, Knob, knobs
from penstock.config.model_settings import ModelsSettings
from penstock.config.parsers import (
    parse_boolean,
    parse_choice,
    parse_integer,
    parse_limit,
    parse_number,
    parse_path,
    parse_seconds,
    parse_size,
    parse_text,
    parse_texts,
)

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """`[server]`: the HTTP side."""

    host: Annotated[str, Knob(parse_text, "address to listen on", RESTART)] = "127.0.0.1"
    port: Annotated[
        int, Knob(parse_integer(0, 65535), "port to listen on; 0 takes a free one", RESTART)
    ] = 8000
    api_keys: Annotated[tuple[str, ...], Knob(parse_texts, "keys that clients may use", NOW)] = ()
    admin_keys: Annotated[
        tuple[str, ...],
        Knob(parse_texts, "keys for /admin; without one only this machine may use it", NOW),
    ] = ()
    no_auth: Annotated[
        bool, Knob(parse_boolean, "allow a non-loopback address without a key", NOW)
    ] = False
    hosts: Annotated[
        tuple[str, ...], Knob(parse_texts, "further Host names accepted without a key", NOW)
    ] = ()
    cors_origins: Annotated[
        tuple[str, ...],
        Knob(parse_texts, "web origins that may call the API, but never /admin; * is any", NOW),
    ] = ()
    dashboard: Annotated[
        str,
        Knob(
            parse_choice("full", "read-only", "off"),
            "the page at /: everything, nothing that changes the server, or none",
            NOW,
        ),
    ] = "full"
    open_probes: Annotated[
        bool, Knob(parse_boolean, "answer /ready and /metrics without a key", NOW)
    ] = False
    max_connections: Annotated[
        int,
        Knob(
            parse_integer(1), "most connections; beyond it idle and slow ones are closed", RESTART
        ),
    ] = 1024
    max_connections_per_address: Annotated[
        int | None,
        Knob(
            parse_integer(1),
            "most connections of one other machine; otherwise half of all",
            RESTART,
        ),
    ] = None
    client_pulls: Annotated[
        bool, Knob(parse_boolean, "let clients have models fetched by /api/pull", NOW)
    ] = False
    max_body: Annotated[int, Knob(parse_size, "largest request body", NOW)] = 32 << 20
    max_bodies: Annotated[
        int, Knob(parse_size, "bodies held at once, over all requests", RESTART)
    ] = 256 << 20
    body_s: Annotated[float, Knob(parse_seconds, "longest time for a whole body", NOW)] = 600.0
    body_rate: Annotated[
        int, Knob(parse_size, "least bytes a second of a body, after body_grace_s", NOW)
    ] = 16 << 10
    body_grace_s: Annotated[float, Knob(parse_seconds, "time before body_rate applies", NOW)] = 10.0
    max_choices: Annotated[
        int, Knob(parse_integer(1), "most answers to one request (n x prompts)", NOW)
    ] = 1024
    max_images: Annotated[int, Knob(parse_integer(1), "most images of a request", NOW)] = 32
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
        float, Knob(parse_seconds, "longest wait for memory, a load or a slot", RESTART)
    ] = 600.0
    grammar_timeout_s: Annotated[
        float,
        Knob(parse_number(0.1, 60), "processor time to compile a grammar, or for a mask", RESTART),
    ] = 2.0
    hang_s: Annotated[
        float,
        Knob(
            parse_seconds,
            "silence of a busy worker until it is replaced; at least 4 loads and 4 longest steps",
            RESTART,
        ),
    ] = 60.0
    stored_responses: Annotated[
        int, Knob(parse_integer(0), "most answers of /v1/responses that are kept", RESTART)
    ] = 1000
    stored_bytes: Annotated[
        int, Knob(parse_size, "most bytes of stored answers on disk", RESTART)
    ] = 256 << 20
    keepalive_after_s: Annotated[
        float,
        Knob(parse_number(0.1, 86400), "silence after which a stream sends a keep-alive", NOW),
    ] = 10.0
    slow_client_s: Annotated[
        float, Knob(parse_seconds, "a client that reads nothing for so long is disconnected", NOW)
    ] = 300.0
    answer_rate: Annotated[
        int, Knob(parse_size, "least bytes a second that a client reads, after slow_client_s", NOW)
    ] = 16 << 10
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
    grammars: Annotated[
        str,
        Knob(
            parse_limit,
            "RAM for the grammars of one model: a size, a percentage of "
            "memory.limit, or auto for a 16th of it, at least 64 and at most 256 MiB",
            RESTART,
        ),
    ] = "auto"


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
    # The same with these overrides instead of those there are.
    read_with: Callable[[Mapping[str, object]], Config]
    overrides: Mapping[str, object] = field(default_factory=dict)  # set by an operator since
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
            # What is not set for one model is as for all.
            inherited = {
                key.replace("models.", f"models.{name}.", 1): origin
                for key, origin in self.origins.items()
                if key.startswith("models.") and key.count(".") == 1
            }
            rows += _rows(f"models.{name}", settings, inherited | dict(self.origins))
        return rows


SECTIONS: dict[str, type[Any]] = {
    "server": ServerSettings,
    "memory": MemorySettings,
    "cache": CacheSettings,
    "models": ModelsSettings,
}


SECRETS = frozenset({"api_keys", "admin_keys"})


def _rows(prefix: str, settings: Any, origins: Mapping[str, str]) -> list[tuple[str, object, str]]:
    rows: list[tuple[str, object, str]] = []
    for name in knobs(type(settings)):
        value = getattr(settings, name)
        if name in SECRETS:
            value = f"{len(value)} key(s)"
        rows.append((f"{prefix}.{name}", value, origins.get(f"{prefix}.{name}", "default")))
    return rows
