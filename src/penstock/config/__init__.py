"""Every setting, where it came from, and nothing about what uses it.

A value is looked for in this order, the last one found wins: the default, `penstock.toml`, the
environment (`PENSTOCK_SECTION_KEY`), the command line. The result is one frozen `Config`. A key
that nobody knows is an error that names the nearest known one, so a typing error never runs
quietly with a default. A running server may read them again; what then holds at once, and what
after a reload or a restart, is `changes`'.
"""

from penstock.config.changes import RELOAD_KEYS, Changes, compare, reload_keys
from penstock.config.knobs import ConfigError
from penstock.config.loading import load
from penstock.config.model_settings import JSON_STYLES, TOOL_DIALECTS, ModelSettings, ModelsSettings
from penstock.config.parsers import parse_limit, parse_size
from penstock.config.settings import CacheSettings, Config, MemorySettings, ServerSettings

__all__ = [
    "JSON_STYLES",
    "RELOAD_KEYS",
    "TOOL_DIALECTS",
    "CacheSettings",
    "Changes",
    "Config",
    "ConfigError",
    "MemorySettings",
    "ModelSettings",
    "ModelsSettings",
    "ServerSettings",
    "compare",
    "load",
    "parse_limit",
    "parse_size",
    "reload_keys",
]
