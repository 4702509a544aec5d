"""Settings of models: of all of them, and of each."""

from __future__ import annotations

from collections.abc import Mapping  # noqa: TC003 - the settings' types are read at run time
from dataclasses import dataclass, field
from pathlib import Path  # noqa: TC003
from typing import TYPE_CHECKING, Annotated, Any

from penstock.config.knobs import NOW, RELOAD, RESTART, Knob
from penstock.config.parsers import (
    parse_boolean,
    parse_choice,
    parse_device,
    parse_duration,
    parse_integer,
    parse_names,
    parse_number,
    parse_path,
    parse_paths,
    parse_seconds,
    parse_size,
    parse_table,
    parse_text,
)
from penstock.sampling import BY_NAME, INT64

if TYPE_CHECKING:
    from collections.abc import Iterable


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
# Those of `penstock.catalog.encoders`.
POOLINGS = ("cls", "mean", "max", "last", "mean_sqrt_len", "weighted_mean")
# Those of `penstock.text.grammars.json_form`.
JSON_STYLES = ("compact", "indented", "free")


def _sampling_knob(name: str) -> Knob:
    parameter = BY_NAME[name]
    high = None if parameter.high >= INT64 else int(parameter.high)
    number = parse_number(parameter.low, parameter.high)
    parse = parse_integer(int(parameter.low), high) if parameter.whole else number
    return Knob(parse, "for requests that do not set it", NOW)


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """How a model runs: `[models]` for all of them, `[models.NAME]` for one."""

    device: Annotated[str, Knob(parse_device, "auto, cpu, cuda or cuda:N", RELOAD)] = "auto"
    dtype: Annotated[
        str,
        Knob(
            parse_choice("auto", "float32", "bfloat16", "float16", "int8"),
            "number format of weights; int8: layers' weights are rounded to it at load",
            RELOAD,
        ),
    ] = "auto"
    kv_dtype: Annotated[
        str,
        Knob(
            parse_choice("auto", "int8"),
            "number format of KV; auto: that of the weights, int8: 8 bits and a scale per head",
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
            "KV that must be free before a request starts: for its expected or its longest answer",
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
    speculation: Annotated[
        str,
        Knob(
            parse_choice("auto", "off"),
            "guess several tokens and verify them in one step, where that is quicker",
            RELOAD,
        ),
    ] = "auto"
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
    keep_alive: Annotated[
        str,
        Knob(
            parse_choice("auto", "on", "off"),
            "let Ollama's clients shorten ttl by keep_alive; auto: where no API key is needed",
            NOW,
        ),
    ] = "auto"
    kv_min_tokens: Annotated[
        int | None, Knob(parse_integer(1), "KV that it keeps whatever others need", NOW)
    ] = None
    kv_min_bytes: Annotated[
        int | None, Knob(parse_size, "the same in bytes; the larger applies", NOW)
    ] = None
    temperature: Annotated[float | None, _sampling_knob("temperature")] = None
    top_p: Annotated[float | None, _sampling_knob("top_p")] = None
    top_k: Annotated[int | None, _sampling_knob("top_k")] = None
    min_p: Annotated[float | None, _sampling_knob("min_p")] = None
    repetition_penalty: Annotated[float | None, _sampling_knob("repetition_penalty")] = None
    presence_penalty: Annotated[float | None, _sampling_knob("presence_penalty")] = None
    frequency_penalty: Annotated[float | None, _sampling_knob("frequency_penalty")] = None
    max_tokens: Annotated[
        int | None, Knob(parse_integer(1), "for requests that do not set it", NOW)
    ] = None
    priority: Annotated[
        int | None,
        Knob(
            parse_integer(-(2**31), 2**31 - 1),
            "for requests that do not set it; lower goes first",
            NOW,
        ),
    ] = None
    template_arguments: Annotated[
        Mapping[str, Any], Knob(parse_table, "variables for the chat template", NOW)
    ] = field(default_factory=dict)
    tool_dialect: Annotated[
        str,
        Knob(parse_choice("auto", *TOOL_DIALECTS), "how the model writes calls of tools", NOW),
    ] = "auto"
    pooling: Annotated[
        str,
        Knob(
            parse_choice("auto", *POOLINGS),
            "how the rows of a text become its vector; auto: as an embedder's folder says",
            RELOAD,
        ),
    ] = "auto"
    image_pixels: Annotated[
        int,
        Knob(
            parse_integer(0),
            "most pixels of an image; less where memory is short, and 0 takes no images",
            RELOAD,
        ),
    ] = 50_000_000
    image_bytes: Annotated[
        int, Knob(parse_size, "memory for images' rows in the model, of all requests", RELOAD)
    ] = 128 << 20
    image_file_bytes: Annotated[
        int,
        Knob(parse_size, "files of images that are on their way into the model at once", RELOAD),
    ] = 24 << 20
    json_style: Annotated[
        str,
        Knob(parse_choice(*JSON_STYLES), "layout of JSON in structured output and tool calls", NOW),
    ] = "compact"


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
