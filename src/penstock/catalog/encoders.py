"""What becomes of an encoder's rows: one vector of a text, or one score of a pair.

Reads what sentence-transformers writes beside a transformer: the modules of a folder, how rows are
pooled, projections behind that, prompts. Nothing is guessed: a module that is not known is refused
with its name, and a folder that does not say how rows are pooled says so by an empty `pooling`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock.catalog.weights import Tensor, read_header, read_json, read_json_list
from penstock.errors import ModelUnusable, shortened

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

EMBED, RERANK = "embed", "rerank"
# How rows become one: of them the settings know those that need no further word.
POOLINGS = ("cls", "mean", "max", "last", "mean_sqrt_len", "weighted_mean")
# As sentence-transformers says them: true or false each, or as names.
_BOOLEANS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weighted_mean",
    "pooling_mode_lasttoken": "last",
}
_NAMES = {
    "lasttoken": "last",
    "weightedmean": "weighted_mean",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
}
ACTIVATIONS = ("identity", "sigmoid", "tanh", "relu", "gelu", "silu")
_MODULES, _SETTINGS = "modules.json", "config_sentence_transformers.json"
_WEIGHTS = "model.safetensors"
_VECTOR = "sentence_embedding"  # what a module takes, as they call it


@dataclass(frozen=True, slots=True)
class Stage:
    """A module behind the pooling."""

    kind: str  # "dense", "layer_norm" or "normalize"
    folder: str = ""  # where its weights are
    inputs: int = 0
    outputs: int = 0
    activation: str = "identity"


@dataclass(frozen=True, slots=True)
class Encoder:
    """One model's way from rows to what is answered."""

    dimensions: int  # of a vector; 1: a score
    pooling: tuple[str, ...] = ()  # several are put side by side; none: nobody has said it
    stages: tuple[Stage, ...] = ()
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    pools_prompt: bool = True  # the prompt's rows count too
    usual_tokens: int | None = None  # how much of a longer text its author meant to be read
    cut_dimensions: int | None = None  # as its author would have it, without being asked
    activation: str = "identity"  # of a score

    @property
    def default_dimensions(self) -> int:
        """Of a vector when nobody asks for less."""
        return min(self.cut_dimensions or self.dimensions, self.dimensions)

    @property
    def normalised(self) -> bool:
        """Whether its vectors have length one."""
        return any(stage.kind == "normalize" for stage in self.stages)


def kind_of_encoder(architecture: str, config: Mapping[str, Any], path: Path) -> str | None:
    """`embed`, `rerank`, "other" for a classifier, or None where it is no encoder."""
    if architecture.endswith("ForSequenceClassification"):
        return RERANK if _labels(config) == 1 else "other"
    if (path / _MODULES).exists():
        return EMBED
    generates = architecture.endswith("LMHeadModel")
    return EMBED if architecture.endswith(("Model", "ForMaskedLM")) and not generates else None


def read_encoder(path: Path, kind: str, config: Mapping[str, Any], hidden_size: int) -> Encoder:
    """What the folder says of an encoder of a kind; ModelUnusable names what is not served."""
    if kind == RERANK:
        return Encoder(1, usual_tokens=_usual_tokens(path), activation=_score_activation(config))
    if not (path / _MODULES).exists():
        return Encoder(hidden_size, stages=(Stage("normalize"),), usual_tokens=_usual_tokens(path))
    names = list(_modules(path))
    kinds = [name for name, _ in names]
    if kinds[:1] != ["Transformer"] or names[0][1]:
        raise ModelUnusable(
            f"{path / _MODULES} does not begin with a Transformer in the folder itself; such a "
            "model is not served."
        )
    if kinds[1:2] != ["Pooling"]:
        raise ModelUnusable(
            f"{path / _MODULES} has {shortened(kinds[1]) if kinds[1:] else 'nothing'} where the "
            "Pooling is expected; such a model is not served."
        )
    pooled = read_json(path / names[1][1] / "config.json")
    pooling = _pooling(pooled, path / names[1][1])
    stages: list[Stage] = []
    width = hidden_size * len(pooling)
    for name, folder in names[2:]:
        for stage in _stage(path, name, folder, width):
            stages.append(stage)
            width = stage.outputs or width
    settings = _optional(path / _SETTINGS)
    return Encoder(
        dimensions=width,
        pooling=pooling,
        stages=tuple(stages),
        prompts=_prompts(settings),
        default_prompt=_text(settings, "default_prompt_name"),
        pools_prompt=pooled.get("include_prompt") is not False,
        usual_tokens=_usual_tokens(path),
        cut_dimensions=_count(settings, "truncate_dim"),
    )


def module_tensors(path: Path) -> dict[str, Tensor]:
    """The weights of the modules behind the transformer, by folder and name."""
    if not (path / _MODULES).exists():
        return {}
    found: dict[str, Tensor] = {}
    for _, folder in _modules(path):
        file = path / folder / _WEIGHTS
        if folder and file.exists():
            found |= {f"{folder}/{name}": tensor for name, tensor in read_header(file).items()}
    return found


def _labels(config: Mapping[str, Any]) -> int:
    names = config.get("id2label")
    if isinstance(names, dict) and names:
        return len(names)
    stated = config.get("num_labels")
    return stated if isinstance(stated, int) else 2  # as transformers has it


def _modules(path: Path) -> Iterator[tuple[str, str]]:
    """The last name of each module's class, and its folder."""
    try:
        listed = read_json_list(path / _MODULES)
        for entry in sorted(listed, key=lambda entry: entry["idx"]):
            folder = str(entry["path"])
            if folder in {".", ".."} or "/" in folder or "\\" in folder:
                raise ModelUnusable(f"{path / _MODULES} names the folder {shortened(folder)!r}.")
            yield str(entry["type"]).rpartition(".")[2], folder
    except (KeyError, TypeError) as error:
        raise ModelUnusable(f"{path / _MODULES} is no list of modules: {error}.") from error


def _pooling(config: Mapping[str, Any], folder: Path) -> tuple[str, ...]:
    said = config.get("pooling_mode")
    names = [said] if isinstance(said, str) else said
    if names is None:
        names = [name for field_name, name in _BOOLEANS.items() if config.get(field_name) is True]
    names = [_NAMES.get(str(name), str(name)) for name in names]
    if not names or (unknown := set(names).difference(POOLINGS)):
        what = f"the mode {shortened(min(unknown))!r}" if names else "no mode that is known"
        raise ModelUnusable(
            f"{folder / 'config.json'} has {what}; served are {', '.join(POOLINGS)}."
        )
    return tuple(names)


def _stage(path: Path, kind: str, folder: str, width: int) -> list[Stage]:
    if kind == "Dropout":  # of training
        return []
    if kind == "Normalize":
        return [Stage("normalize")]
    if kind not in {"Dense", "LayerNorm"}:
        raise ModelUnusable(
            f"{path / _MODULES} has a module {shortened(kind)!r}; served are Transformer, Pooling, "
            "Dense, LayerNorm and Normalize."
        )
    place = path / folder
    if not (place / _WEIGHTS).exists():
        raise ModelUnusable(
            f"{place} has no {_WEIGHTS}; pickled weights are never read, since they can run code: "
            "convert them to safetensors first."
        )
    if kind == "LayerNorm":
        return [Stage("layer_norm", folder, width, width)]
    config = read_json(place / "config.json")
    inputs, outputs = (_count(config, name) or 0 for name in ("in_features", "out_features"))
    if inputs != width or not outputs:
        raise ModelUnusable(
            f"{place / 'config.json'} takes {inputs} values to {outputs}; {width} come from what "
            "is before it."
        )
    activation = activation_named(str(config.get("activation_function") or "Tanh"))
    if activation is None:
        raise ModelUnusable(
            f"{place / 'config.json'}: the activation {config.get('activation_function')!r} is not "
            f"one of {', '.join(ACTIVATIONS)}."
        )
    if config.get("use_residual") or config.get("module_input_name", _VECTOR) != _VECTOR:
        raise ModelUnusable(
            f"{place / 'config.json'} describes a projection with a residual, or of single rows; "
            "projections of the vector alone are served."
        )
    return [Stage("dense", folder, inputs, outputs, activation)]


def activation_named(said: str) -> str | None:
    """The activation of a class path such as `torch.nn.modules.linear.Identity`."""
    name = said.rpartition(".")[2].lower()
    return name if name in ACTIVATIONS else None


def _score_activation(config: Mapping[str, Any]) -> str:
    """What a score goes through: as the files say, else what one label has by default."""
    newer = config.get("sentence_transformers")
    said = newer.get("activation_fn") if isinstance(newer, dict) else None
    said = said or config.get("sbert_ce_default_activation_function") or "Sigmoid"
    activation = activation_named(str(said))
    if activation is None:
        raise ModelUnusable(
            f"config.json: the activation {shortened(str(said))!r} of the score is not one of "
            f"{', '.join(ACTIVATIONS)}."
        )
    return activation


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _usual_tokens(path: Path) -> int | None:
    return _count(_optional(path / "sentence_bert_config.json"), "max_seq_length")


def _prompts(settings: Mapping[str, Any]) -> dict[str, str]:
    said = settings.get("prompts")
    if not isinstance(said, dict):
        return {}
    return {str(name): text for name, text in said.items() if isinstance(text, str)}


def _text(settings: Mapping[str, Any], name: str) -> str | None:
    value = settings.get(name)
    return value if isinstance(value, str) else None


def _count(settings: Mapping[str, Any], name: str) -> int | None:
    value = settings.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
