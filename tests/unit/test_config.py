"""Settings: what wins over what, what is refused, and where each value came from."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from penstock import config
from penstock.config import ConfigError, ModelSettings, parse_limit, parse_size
from penstock.config.knobs import Holds, knobs

if TYPE_CHECKING:
    from collections.abc import Mapping


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No penstock.toml of the present folder or the user's home takes part."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))


def load(
    text: str = "",
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, object] | None = None,
) -> config.Config:
    file = Path("given.toml")
    file.write_text(text, "utf-8")
    return config.load(file, environment or {}, flags)


def test_later_wins_and_says_so() -> None:
    text = "[server]\nport = 1\nhost = 'a'\nlog_level = 'debug'\n"
    environment = {"PENSTOCK_SERVER_PORT": "2", "PENSTOCK_SERVER_HOST": "b"}
    settings = load(text, environment, {"server.port": "3"})
    assert (settings.server.port, settings.server.host) == (3, "b")
    origins = {key: origin for key, _, origin in settings.values()}
    assert origins["server.port"] == "flag --port"
    assert load(flags={"memory.limit": "2GiB"}).origins["memory.limit"] == "flag --memory"
    assert origins["server.host"] == "environment PENSTOCK_SERVER_HOST"
    assert origins["server.log_level"] == "given.toml"
    assert origins["server.max_body"] == "default"


def test_the_origin_of_what_a_model_has_as_all_is_that_of_all() -> None:
    text = "[models]\nttl = 60\n[models.'a.b']\ntemperature = 1\n"
    origins = {key: origin for key, _, origin in load(text).values()}
    assert origins["models.a.b.ttl"] == origins["models.ttl"] == "given.toml"
    assert origins["models.a.b.temperature"] == "given.toml"
    assert origins["models.a.b.dtype"] == "default"


def test_settings_say_what_may_be_written() -> None:
    server, model = knobs(config.ServerSettings), knobs(config.ModelSettings)
    assert server["dashboard"].choices == ("full", "read-only", "off")
    assert server["client_pulls"].choices == ("true", "false")
    assert server["port"].choices == ()
    units = [server[key].unit for key in ("max_body", "body_s", "port")]
    assert [*units, model["ttl"].unit] == ["bytes", "s", None, "s"]


def test_a_models_own_settings_stand_on_those_for_all() -> None:
    settings = load(
        "[models]\ndtype = 'float32'\nthreads = 3\n"
        "[models.'org/big']\nthreads = 8\nkv_bytes = '2GiB'\n"
    ).models
    assert settings.settings("org/big").threads == 8
    assert settings.settings("org/big").kv_bytes == 2 << 30
    assert settings.settings("org/big").dtype == "float32"
    assert settings.settings("other").threads == 3


def test_home_and_what_lies_in_it() -> None:
    settings = load(environment={"PENSTOCK_HOME": "/somewhere", "PENSTOCK_MODELS_DIRS": "/a,/b"})
    assert settings.cache.dir == Path("/somewhere/cache")
    assert settings.model_dirs == (Path("/a"), Path("/b"), Path("/somewhere/models"))
    assert load(environment={"PENSTOCK_CACHE_DIR": "/fast"}).cache.dir == Path("/fast")


@pytest.mark.parametrize(
    ("text", "environment", "says"),
    [
        ("[server]\nprot = 1", {}, "server.port"),
        ("[sever]\nport = 1", {}, "server"),
        ("[models.x]\ndtyp = 'float32'", {}, "models.x.dtype"),
        ("[models.x]\ndirs = ['a']", {}, "there is no setting models.x.dirs"),
        ("port = 1", {}, "there is no setting"),
        ("", {"PENSTOCK_SERVER_PROT": "1"}, "server.port"),
        ("", {"PENSTOCK_MEMORY_LIMITS": "1"}, "memory.limit"),
        ("[server]\nport = 'x'", {}, "whole number"),
        ("[server]\nport = true", {}, "whole number"),
        ("[server]\nport = 70000", {}, "65535"),
        ("[server]\nno_auth = 'maybe'", {}, "true or false"),
        ("[server]\nslow_client_s = -1", {}, "not negative"),
        # A stream would say nothing but that it lives.
        ("[server]\nkeepalive_after_s = 0", {}, "at least 0.1"),
        ("[server]\nkeepalive_after_s = 'nan'", {}, "at least 0.1"),
        ("[server]\nmax_body = '5 parsecs'", {}, "unit"),
        ("[server]\napi_keys = [1]", {}, "list of texts"),
        ("[memory]\nlimit = '120%'", {}, "100%"),
        ("[memory]\nlimit = 'lots'", {}, "8GiB"),
        ("[models]\ndevice = 'tpu'", {}, "cuda"),
        ("[models]\ndtype = 'int3'", {}, "float32"),
        ("[server", {}, "cannot be read"),
        ("[models]\nttl = 'soon'", {}, "30m"),
        ("[models]\ntemperature = 3", {}, "at most 2"),
        ("[models]\nalias = ['a']", {}, "there is no setting models.alias"),
        ("[models.a]\nalias = ['']", {}, "not empty"),
        ("[models.a]\ntemplate_arguments = 'x'", {}, "table"),
        ("[models.a]\nalias = ['x']\n[models.b]\nalias = ['x']", {}, "'a' and 'b'"),
        ("[models.a]\nalias = ['b']\n[models.b]\nttl = 1", {}, "models.a.alias has 'b'"),
    ],
)
def test_refusals_name_the_setting(text: str, environment: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(text, environment)
    assert says in refused.value.message


def test_a_wrong_key_is_not_repeated() -> None:
    with pytest.raises(ConfigError) as refused:
        load("[server]\napi_keys = {secret = 'hunter2'}")
    assert "hunter2" not in refused.value.message


def test_a_missing_file_is_an_error_only_if_named() -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml"):
        config.load(Path("absent.toml"), {})
    with pytest.raises(ConfigError, match="absent"):
        config.load(environment={"PENSTOCK_CONFIG": "absent"})
    assert config.load(environment={}).server.port == 8000
    Path("penstock.toml").write_text("[server]\nport = 5\n", "utf-8")
    assert config.load(environment={}).server.port == 5


def test_variables_of_no_section_are_shown_not_used() -> None:
    settings = load(environment={"PENSTOCK_SERVICE_HOST": "10.0.0.1", "PENSTOCK_PORT": "tcp://x"})
    assert settings.ignored_variables == ("PENSTOCK_PORT", "PENSTOCK_SERVICE_HOST")


def test_keys_are_never_shown() -> None:
    settings = load(flags={"server.api_keys": ["hunter2"]})
    assert settings.server.api_keys == ("hunter2",)
    assert "hunter2" not in str(settings.values())


def test_nothing_can_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        load().server.port = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "size"),
    [(5, 5), ("5", 5), ("1KiB", 1024), ("1kb", 1000), ("1.5g", 3 << 29), ("2 TiB", 2 << 40)],
)
def test_sizes(text: object, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["-1", -1, "x", "1 lb", "", "1e9", True, None])
def test_what_is_no_size(text: object) -> None:
    with pytest.raises(ValueError, match="size"):
        parse_size(text)


@pytest.mark.parametrize(("text", "limit"), [("auto", "auto"), ("60%", "60%"), ("1KiB", "1024")])
def test_limits(text: str, limit: str) -> None:
    assert parse_limit(text) == limit


def test_aliases_lead_to_one_model() -> None:
    models = load("[models.'org/big']\nalias = ['gpt', 'big']\n[models.small]\nttl = 5").models
    assert [models.canonical(name) for name in ("gpt", "big", "org/big", "other")] == [
        "org/big", "org/big", "org/big", "other",
    ]  # fmt: skip
    # A folder that has the name of an alias cannot be asked for.
    assert set(models.hidden(["gpt", "small", "org/big"])) == {"gpt"}


def test_a_table_for_all_models_is_no_model() -> None:
    text = "[models.template_arguments]\nenable_thinking = false\n[models.x]\nttl = '2m'"
    models = load(text).models
    assert list(models.named) == ["x"]
    assert models.settings("x").template_arguments == {"enable_thinking": False}
    assert models.settings("x").ttl == 120
    environment = {"PENSTOCK_MODELS_TEMPLATE_ARGUMENTS": '{"a": [1]}', "PENSTOCK_MODELS_TTL": "1h"}
    models = load(environment=environment).models
    assert (models.template_arguments, models.ttl) == ({"a": [1]}, 3600)


def test_what_becomes_of_a_change() -> None:
    old = load(
        "[server]\nport = 1\nmax_choices = 5\n[models]\ndtype = 'float32'\nttl = 1\n"
        "[models.a]\nthreads = 1\n[models.gone]\npinned = true\n"
    )
    new = load(
        "[server]\nport = 2\nmax_choices = 6\n[models]\ndtype = 'bfloat16'\nttl = 2\n"
        "[models.a]\nthreads = 2\nalias = ['x']\n"
        "[models.b]\ndtype = 'float32'\ntemperature = 0.5\n"
    )
    changes = config.compare(old, new, ["a", "b", "c"])
    assert set(changes.applied) == {
        "server.max_choices", "models.ttl", "models.a.alias", "models.b.temperature",
        "models.gone.pinned",
    }  # fmt: skip
    # `b` keeps by its own setting what it had by that for all.
    assert changes.reload == {"a": ("dtype", "threads"), "c": ("dtype",)}
    assert "models.a.threads" in config.compare(old, new, ["b"]).applied  # from its next load
    assert changes.restart == ("server.port",)
    # What is shown as in force is in force.
    assert (changes.config.server.port, changes.config.server.max_choices) == (1, 6)
    assert changes.config.models.settings("a").alias == ("x",)
    same = config.compare(old, old, ["a"])
    assert not (same.applied or same.reload or same.restart)


def test_settings_are_read_again_as_they_were_read() -> None:
    old = load("[models]\nttl = 1", {"PENSTOCK_SERVER_PORT": "7"}, {"models.threads": 2})
    Path("given.toml").write_text("[models]\nttl = 9\n[server]\nport = 1", "utf-8")
    new = old.read_again()
    assert (new.models.ttl, new.models.threads, new.server.port) == (9, 2, 7)
    Path("given.toml").write_text("[models", "utf-8")
    with pytest.raises(ConfigError, match="cannot be read"):
        new.read_again()


def test_the_page_on_models_has_every_key() -> None:
    page = Path(__file__).parents[2] / "docs" / "models.md"
    told: dict[str, str] = {}
    for line in page.read_text("utf-8").splitlines():
        if line.startswith("| `") and line.count(" | ") == 3:
            keys, *_, holds = line.strip("| ").split(" | ")
            told |= {key.strip("` "): holds.strip() for key in keys.split(",")}
    words = {Holds.NOW: "at once", Holds.RELOAD: "after a reload"}
    assert told == {key: words[knob.holds] for key, knob in knobs(ModelSettings).items()}


def test_the_old_name_of_a_setting_is_refused_with_the_new_one() -> None:
    with pytest.raises(ConfigError, match=r"models\.m\.kv_min_tokens now"):
        load("[models.m]\nkv_least_tokens = 100\n")
