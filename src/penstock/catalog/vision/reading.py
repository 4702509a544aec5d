"""Which models take images, read from their folders: one row for each type that is served."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.catalog.vision.layouts import Crops, Cut, Fixed, Layout, Lines, Patches, Tiles
from penstock.catalog.weights import read_json
from penstock.errors import ModelUnusable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

_TOKEN_FIELDS = ("image_token_id", "image_token_index")


@dataclass(frozen=True, slots=True)
class Vision:
    """What images are to one model."""

    model_type: str
    token_id: int  # stands for a row of an image
    cut: Cut
    processor: str  # transformers' class that prepares pixels, without the backend's name
    levels: int = 1  # rows of a token: one more for each early layer that has some added
    three_rows: bool = False  # positions have a row each for time, height and width

    def layout(self, width: int, height: int, token: str) -> Layout:
        """Of an image of this size, upright; `token` is the image token's text."""
        return self.cut.layout(width, height, token)


@dataclass(frozen=True, slots=True)
class _Folder:
    """What the files of one model say."""

    path: Path
    config: Mapping[str, Any]
    vision: Mapping[str, Any]
    settings: Mapping[str, Any]  # of the image processor
    processor: Mapping[str, Any]  # of what is around it

    def number(self, place: Mapping[str, Any], name: str, default: int | None = None) -> int:
        value = place.get(name, default)
        if isinstance(value, dict):  # of a square
            value = value.get("height", next(iter(value.values()), None))
        if isinstance(value, list) and value:
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise ModelUnusable(
                f"{self.path}: {name} is {value!r} where a positive number says how images are cut."
            )
        return value

    def side(self, name: str, edge: str, default: int) -> int:
        """An edge of a size."""
        size = self.settings.get(name)
        if isinstance(size, int):
            return self.number(self.settings, name)
        return self.number(size if isinstance(size, dict) else {}, edge, default)


def _tiles(folder: _Folder) -> Cut:
    patches = folder.number(folder.vision, "image_size", 224) // folder.number(
        folder.vision, "patch_size", 32
    )
    each = int(patches**2 / folder.number(folder.config, "scale_factor", 2) ** 2)
    return Tiles(
        tile=folder.side("max_image_size", "longest_edge", 364),
        tokens=each,
        longest=folder.side("size", "longest_edge", 4 * 364),
        splits=folder.settings.get("do_image_splitting", True) is not False,
    )


def _patches(folder: _Folder) -> Cut:
    settings = folder.settings
    patch = folder.number(settings, "patch_size", 14)
    least, most = (
        folder.number(settings, f"{name}_pixels")
        if settings.get(f"{name}_pixels") is not None
        else folder.side("size", edge, default)
        for name, edge, default in (
            ("min", "shortest_edge", 56 * 56),
            ("max", "longest_edge", 28 * 28 * 1280),
        )
    )
    return Patches(patch * folder.number(settings, "merge_size", 2), least, most)


def _fixed(folder: _Folder) -> Cut:
    vision = folder.vision
    tower = vision.get("model_type", "clip_vision_model")
    image = folder.number(vision, "image_size", 336)
    tokens = (image // folder.number(vision, "patch_size", 14)) ** 2
    whole = folder.config.get("vision_feature_select_strategy", "default") == "full"
    begins = tower == "clip_vision_model"  # with a row of no patch
    return Fixed(tokens + begins - (not whole))


def _lines(folder: _Folder) -> Cut:
    patch = folder.number(folder.vision, "patch_size", 16)
    merged = folder.number(folder.config, "spatial_merge_size", 2)
    return Lines(patch * merged, folder.side("size", "longest_edge", 1024))


def _crops(folder: _Folder) -> Cut:
    settings = folder.settings
    image = folder.number(folder.vision, "image_size", 448)
    patch = folder.number(folder.vision, "patch_size", 14)
    ratio = folder.config.get("downsample_ratio", 0.5)
    if not isinstance(ratio, float | int) or not 0 < ratio <= 1:
        raise ModelUnusable(f"{folder.path}: downsample_ratio is {ratio!r}, not a share.")
    return Crops(
        tile=(folder.side("size", "height", 384), folder.side("size", "width", 384)),
        tokens=int((image // patch) ** 2 * ratio**2),
        least=folder.number(settings, "min_patches", 1),
        most=folder.number(settings, "max_patches", 12),
        crops=settings.get("crop_to_patches", False) is True,
    )


@dataclass(frozen=True, slots=True)
class _Type:
    """One type of model."""

    cut: Callable[[_Folder], Cut]
    processors: tuple[str, ...]  # that cut so; the first is meant where the folder names none
    three_rows: bool = False
    deep: bool = False  # rows are added behind early layers


_QWEN = ("Qwen2VLImageProcessor",)
_TYPES: dict[str, _Type] = {
    "smolvlm": _Type(_tiles, ("SmolVLMImageProcessor", "Idefics3ImageProcessor")),
    "idefics3": _Type(_tiles, ("Idefics3ImageProcessor",)),
    "llava": _Type(_fixed, ("CLIPImageProcessor", "LlavaImageProcessor", "SiglipImageProcessor")),
    "mistral3": _Type(_lines, ("PixtralImageProcessor",)),
    "internvl": _Type(_crops, ("GotOcr2ImageProcessor",)),
    "qwen2_vl": _Type(_patches, _QWEN, three_rows=True),
    "qwen2_5_vl": _Type(_patches, _QWEN, three_rows=True),
    "qwen3_vl": _Type(_patches, _QWEN, three_rows=True, deep=True),
}
TYPES = tuple(_TYPES)


def read_vision(path: Path, config: Mapping[str, Any]) -> Vision | None:
    """What images are to the model of a folder; None: it takes none, or none that are served."""
    model_type = config.get("model_type")
    known = _TYPES.get(model_type) if isinstance(model_type, str) else None
    settings, processor = _settings(path)
    vision = config.get("vision_config")
    token = next((config[name] for name in _TOKEN_FIELDS if config.get(name) is not None), None)
    if known is None or settings is None or not isinstance(token, int):
        return None
    named = str(settings.get("image_processor_type") or known.processors[0])
    named = named.removesuffix("Fast").removesuffix("Pil")
    if named not in known.processors:
        return None
    folder = _Folder(path, config, vision if isinstance(vision, dict) else {}, settings, processor)
    indexes = folder.vision.get("deepstack_visual_indexes", [8, 16, 24]) if known.deep else []
    return Vision(
        model_type=str(model_type),
        token_id=token,
        cut=known.cut(folder),
        processor=named,
        levels=1 + len(indexes),
        three_rows=known.three_rows,
    )


def _settings(path: Path) -> tuple[Mapping[str, Any] | None, Mapping[str, Any]]:
    """Of the image processor, None if there is none, and of what is around it."""
    around = path / "processor_config.json"
    alone = path / "preprocessor_config.json"
    processor = read_json(around) if around.exists() else {}
    nested = processor.get("image_processor")
    if isinstance(nested, dict):
        return nested, processor
    return (read_json(alone) if alone.exists() else None), processor
