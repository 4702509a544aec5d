"""The files in `deploy/` agree with the server that they start."""

from __future__ import annotations

import configparser
import re
from pathlib import Path
from typing import Any

import pytest

from penstock import cli, config
from penstock.config import ServerSettings, parse_size
from penstock.memory.limits import RAM_SPARE, resolve_limit
from penstock.server import run, wiring

SETTINGS = ServerSettings()
DEPLOY = Path(__file__).parents[2] / "deploy"
# What a stop may take: the grace, and what `run` gives workers and itself.
STOP_S = SETTINGS.shutdown_grace_s + run._LAST_WORDS_S + run._END_S


def unit() -> configparser.SectionProxy:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(DEPLOY / "systemd" / "penstock.service")
    return parser["Service"]


def test_the_unit_s_limit_is_above_ours() -> None:
    size = parse_size(unit()["MemoryMax"].replace("G", "GiB"))
    limit = resolve_limit("auto", size, RAM_SPARE)
    assert size - max(1 << 30, size * 8 // 100) == limit < size
    assert unit()["OOMPolicy"] == "continue"


def test_a_stop_has_the_time_that_it_may_take() -> None:
    assert float(unit()["TimeoutStopSec"]) > STOP_S
    compose = (DEPLOY / "container" / "compose.yaml").read_text("utf-8")
    [grace] = re.findall(r"stop_grace_period: (\d+)s", compose)
    assert float(grace) > STOP_S


def test_files_suffice_for_the_connections() -> None:
    assert int(unit()["LimitNOFILE"]) >= SETTINGS.max_connections + wiring._OTHER_FILES


@pytest.mark.parametrize("file", ["systemd/penstock.service", "container/Containerfile"])
def test_the_command_exists(file: str) -> None:
    text = (DEPLOY / file).read_text("utf-8")
    command: list[str] = re.findall(r"penstock (serve.*)", text)
    words = command[0].split() if command else ["serve", "--host", "0.0.0.0"]
    assert cli.build_parser().parse_args(words).run == "serve:serve"


def test_the_compose_file_names_settings_that_exist() -> None:
    yaml: Any = pytest.importorskip("yaml")
    document = yaml.safe_load((DEPLOY / "container" / "compose.yaml").read_text("utf-8"))
    assert set(document["services"]) == {"cpu", "cuda"}
    for service in document["services"].values():
        environment = dict.fromkeys(service["environment"], "cpu")
        loaded = config.load(environment={"PENSTOCK_HOME": "/nowhere", **environment})
        assert not loaded.ignored_variables
        assert service["mem_limit"] == service["memswap_limit"]


def test_the_proxy_holds_nothing_back() -> None:
    text = (DEPLOY / "proxy" / "nginx.conf").read_text("utf-8")
    directives = dict(re.findall(r"^\s*([a-z_]+) +([^;{]+);", text, re.MULTILINE))
    assert directives["proxy_buffering"] == "off"
    assert parse_size(directives["client_max_body_size"].replace("m", "MiB")) >= SETTINGS.max_body
    assert int(directives["proxy_read_timeout"].rstrip("s")) > SETTINGS.queue_deadline_s
