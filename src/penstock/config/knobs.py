"""What a setting is: how it is read, what it is for, and when a change of it holds."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, get_type_hints

from penstock.config.parsers import (
    Choice,
    parse_boolean,
    parse_duration,
    parse_limit,
    parse_seconds,
    parse_size,
)
from penstock.errors import PenstockError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.config.parsers import Parser

_UNITS: Mapping[Parser, str] = {
    parse_size: "bytes",
    parse_limit: "bytes",  # if it is neither auto nor a percentage
    parse_seconds: "s",
    parse_duration: "s",
}


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

    @property
    def choices(self) -> tuple[str, ...]:
        """The only values that there are; empty where there are others."""
        if self.parse is parse_boolean:
            return ("true", "false")
        return self.parse.words if isinstance(self.parse, Choice) else ()

    @property
    def unit(self) -> str | None:
        """What its number counts, where that is bytes or seconds."""
        return _UNITS.get(self.parse)


def knobs(section: type[Any]) -> Mapping[str, Knob]:
    """What can be set in a section, by name."""
    hints = get_type_hints(section, include_extras=True)
    return {
        knob.name: hint.__metadata__[0]
        for knob in dataclasses.fields(section)
        if hasattr(hint := hints[knob.name], "__metadata__")
    }
