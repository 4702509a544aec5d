"""What a load makes of a model's images: a way in, an encoder, or a reason why there is none."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.catalog.vision import read_vision
from penstock.catalog.weights import read_json
from penstock.errors import ModelUnusable
from penstock.worker.models.kinds import sees

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

    from penstock.wire import LoadSpec
    from penstock.worker.backends.base import Backend
    from penstock.worker.models.kernels.interface import Kernels
    from penstock.worker.vision.door import VisionDoor
    from penstock.worker.vision.encoder import ImageEncoder


@dataclass(slots=True)
class Sight:
    """How a loaded model sees."""

    door: VisionDoor | None = None  # None: it has no encoder
    encoder: ImageEncoder | None = None
    why: str = ""  # it takes no images, though it has an encoder


def open_sight(spec: LoadSpec, config: PretrainedConfig, model: PreTrainedModel) -> Sight:
    """Take a model that sees apart; its text goes through ours from now on."""
    if not sees(config):
        return Sight()
    if not spec.device.startswith("cpu"):
        raise ModelUnusable(
            f"{spec.name}: models of the type {config.model_type} are served on a CPU only so far; "
            f'set models.{spec.name}.device = "cpu".'
        )
    from penstock.worker.vision.door import VisionDoor

    folder = Path(spec.path)
    vision = read_vision(folder, read_json(folder / "config.json"))
    door = VisionDoor(model, vision)
    if vision is None:
        return Sight(door, why="its folder has no image processor of a kind that is served")
    if not spec.image_pixels:
        return Sight(door, why="images are switched off (models.image_pixels is 0)")
    try:
        from penstock.worker.vision.encoder import ImageEncoder
        from penstock.worker.vision.prepare import Preparer
    except ImportError as error:
        return Sight(door, why=f"images are decoded by pillow, which is not installed ({error})")
    try:
        preparer = Preparer(folder, vision)
    except ModelUnusable as error:
        return Sight(door, why=error.message.rstrip("."))
    return Sight(door, ImageEncoder(door, vision, preparer, spec.image_pixels))


def prepared(backend: Backend, sight: Sight, model: PreTrainedModel, dtype: torch.dtype) -> Kernels:
    """Kernels for a model's text; its encoder keeps the code it has."""
    if sight.door is None:
        return backend.prepare(model, dtype)
    with sight.door.text_part() as part:
        return backend.prepare(part, dtype)
