"""`/admin/api/settings`: every setting, and changes of those that need no restart.

A change is an override over file, environment and flags, checked and put in force by the same
machinery as a file that was read again. It is kept until the server ends.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.config import ConfigError
from penstock.config.knobs import Holds, Knob, knobs
from penstock.config.model_settings import ModelSettings
from penstock.config.settings import SECTIONS
from penstock.errors import shortened
from penstock.server.admin.reconfigure import reread
from penstock.server.http.exchange import decode_json

if TYPE_CHECKING:
    from penstock.server.http.exchange import Exchange
    from penstock.server.protocols.services import Services

_MAX_OVERRIDES = 256
# Who may do what is decided where the server is started, and so is whose code it runs.
_FILE_ONLY = frozenset(
    {"api_keys", "admin_keys", "no_auth", "hosts", "cors_origins", "open_probes"}
    | {"trust_remote_code"}
)
# What `[models.NAME]` may have; `[models]` has it for all models.
_PER_MODEL = frozenset(knobs(ModelSettings))


class SettingsFields(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a change."""

    settings: dict[str, Any]  # by key: as in the file, or null


_decoder = msgspec.json.Decoder(SettingsFields)


async def show(exchange: Exchange, services: Services) -> None:
    """All of them."""
    rows = [
        {"key": key, "value": _plain(value), "origin": origin, **_description(key)}
        for key, value, origin in services.config.values()
    ]
    await exchange.send_json({"settings": rows})


async def change(exchange: Exchange, services: Services) -> None:
    """Put changes in force, all or none."""
    async with exchange.body() as body:
        fields = await decode_json(_decoder, body)
    overrides = dict(services.config.overrides)
    for key, value in fields.settings.items():
        _check(key)
        if value is None:
            overrides.pop(key, None)
        else:
            overrides[key] = value
    if len(overrides) > _MAX_OVERRIDES:
        raise ConfigError(
            f"{len(overrides)} settings would be changed, and at most {_MAX_OVERRIDES} may be; "
            "write them into penstock.toml."
        )
    changes = await reread(services, overrides)
    await exchange.send_json(
        {"applied": changes.applied, "reload": changes.reload, "restart": changes.restart}
    )


def _check(key: str) -> None:
    knob = _knob(key)
    if knob is not None and not _changeable(key, knob):
        holds = "it is set where the server is started"
        if knob.holds is Holds.RESTART:
            holds = "a change of it needs a restart of the server"
        raise ConfigError(f"{shortened(key)} cannot be changed here: {holds} (penstock.toml).")


def _knob(key: str) -> Knob | None:
    """What a key is; None: nothing that is known, which reading the settings says."""
    section, _, name = key.rpartition(".")
    kind = SECTIONS.get(section, ModelSettings if section.startswith("models.") else None)
    return None if kind is None else knobs(kind).get(name)


def _changeable(key: str, knob: Knob) -> bool:
    return knob.holds is not Holds.RESTART and key.rpartition(".")[2] not in _FILE_ONLY


def _description(key: str) -> dict[str, object]:
    knob = _knob(key)
    if knob is None:  # the home directory, which is no setting
        return {
            "about": "where models, KV and logs are",
            "holds": "restart",
            "changeable": False,
            "choices": (),
            "unit": None,
            "per_model": False,
        }
    return {
        "about": knob.about,
        "holds": knob.holds.value,
        "changeable": _changeable(key, knob),
        "choices": knob.choices,
        "unit": knob.unit,
        "per_model": key.startswith("models.") and key.rpartition(".")[2] in _PER_MODEL,
    }


def _plain(value: object) -> object:
    if isinstance(value, tuple):
        return [_plain(part) for part in value]
    return str(value) if isinstance(value, Path) else value
