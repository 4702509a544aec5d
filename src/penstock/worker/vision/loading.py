"""What a load makes of a model's images: a way in, an encoder, or a reason why there is none."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.catalog.vision import read_vision
from penstock.catalog.weights import read_json
from penstock.errors import ModelUnusable
from penstock.worker.models.kinds import sees
from penstock.worker.vision.none import NoImages
from penstock.worker.vision.stage import ImageStage

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

    from penstock.wire import LoadSpec, Ready
    from penstock.worker.backends.base import Backend
    from penstock.worker.models.kernels.interface import Kernels
    from penstock.worker.profiling.context import ProfileContext
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


def open_eyes(spec: LoadSpec, context: ProfileContext, sight: Sight) -> None:
    """Let the executor take images, if the profile has found that there is memory for them."""
    if sight.encoder is not None and context.images.pixels:
        relieve = context.meter.drop_caches
        context.executor.images = ImageStage(sight.encoder, spec.image_bytes, relieve)
        return
    if sight.encoder is not None:
        sight.why = (
            f"the {spec.memory_bytes} bytes that memory.limit leaves for it are too few to encode "
            "even small images beside its text, or an earlier load found that it would not be exact"
        )
    if sight.why:
        context.executor.images = NoImages(sight.why)


def check_eyes(context: ProfileContext, sight: Sight, ready: Ready) -> None:
    """Take no images where they would not be computed exactly; text is served all the same."""
    if sight.encoder is None or not isinstance(context.executor.images, ImageStage):
        return
    from penstock.worker.vision.verify import why_not_exact

    form = context.memory.format
    why = why_not_exact(sight.encoder, context.executor, context.kv, ready.context, form)
    if why:
        sight.why = ready.no_images = f"it would not be exact: {why}"
        context.executor.images = NoImages(sight.why)
        context.images.give_up()
        ready.image_pixels = ready.image_file_bytes = 0
