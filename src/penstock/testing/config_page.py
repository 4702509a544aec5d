"""docs/configuration.md: every setting with its default, from the settings themselves.

`python -m penstock.testing.config_page` writes the page; a test compares it.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.config.knobs import Knob, knobs
from penstock.config.model_settings import ModelSettings
from penstock.config.parsers import parse_boolean, parse_size
from penstock.config.settings import SECTIONS

if TYPE_CHECKING:
    from collections.abc import Mapping

PAGE = Path(__file__).resolve().parents[3] / "docs" / "configuration.md"
_HEAD = """# Configuration

Written by `python -m penstock.testing.config_page` from the settings' own definitions.

Settings come from `penstock.toml` (in the present folder, else in the home directory, or as
`--config` or `PENSTOCK_CONFIG` says), from the environment, and from flags of `penstock serve`;
the later wins. A variable is called `PENSTOCK_SECTION_KEY`, as in `PENSTOCK_CACHE_DIR`. A key
that does not exist is an error. `penstock doctor` prints every value in force and where it came
from; `GET /admin/api/settings` does so for a running server, and `PATCH` changes what needs no
restart ([admin-api.md](admin-api.md)).

A size is bytes or a number with a unit (`512MiB`, `2GB`). A duration is seconds or has a unit
(`90s`, `10m`, `2h`). The home directory is `~/.penstock`, or `PENSTOCK_HOME`.

When a change applies while the server runs (SIGHUP or `POST /admin/api/reload`): **now**; after
the model is loaded again (**reload**, which an idle model is by itself); after a **restart** of
the server.
"""
_WORDS = {
    "server": "The HTTP side.",
    "memory": "How much may be used.",
    "cache": "KV kept beyond a request.",
    "models": "Which models there are, and how all of them run.",
}
_MIB = 1 << 20


def render() -> str:
    """The page as it should be."""
    lines = [_HEAD]
    for name, section in SECTIONS.items():
        own = {key: knob for key, knob in knobs(section).items() if not _is_models(name, key)}
        lines += [f"## `[{name}]`\n", f"{_WORDS[name]}\n", *_table(section, own)]
    lines += [
        "## `[models]` and `[models.NAME]`\n",
        "For all models, or for one; what is not set for one is as for all. `alias` is for one.\n",
        *_table(ModelSettings, knobs(ModelSettings)),
    ]
    return "\n".join(lines)


def _is_models(section: str, key: str) -> bool:
    """Whether it is listed with the settings of single models."""
    return section == "models" and key in knobs(ModelSettings)


def _table(section: type[Any], keys: Mapping[str, Knob]) -> list[str]:
    fields = {field.name: field for field in dataclasses.fields(section)}
    rows = ["| key | default | applies | what |", "|---|---|---|---|"]
    for key, knob in keys.items():
        default = _shown(key, knob, fields[key])
        about = knob.about.replace("|", "\\|") + _words(knob)
        rows.append(f"| `{key}` | {default} | {knob.holds.value} | {about} |")
    return [*rows, ""]


def _words(knob: Knob) -> str:
    """The words that may be written, where the setting's own do not have them all."""
    if knob.parse is parse_boolean or all(word in knob.about for word in knob.choices):
        return ""
    return f" ({', '.join(knob.choices)})"


def _shown(key: str, knob: Knob, field: dataclasses.Field[Any]) -> str:
    """A default as it would be written."""
    if field.default_factory is not dataclasses.MISSING:
        return ""
    value = field.default
    if value is dataclasses.MISSING:
        return "`HOME/cache`" if key == "dir" else ""
    if value is None or value == ():
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if knob.parse is parse_size:
        size = f"{value // _MIB}MiB" if value % _MIB == 0 else f"{value // 1024}KiB"
        return f'`"{size}"`'
    if isinstance(value, str):
        return f'`"{value}"`'
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


if __name__ == "__main__":
    PAGE.write_text(render(), "utf-8")
