"""Positions of three rows are those of transformers' `get_rope_index`."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel

from penstock.wire import Media
from penstock.worker.vision.positions import three_rows


def prompt(source: random.Random, images: int) -> tuple[int, list[Media]]:
    length, media = source.randint(0, 5), []
    for _ in range(images):
        grid = source.randint(1, 6), source.randint(1, 6)
        count = grid[0] * grid[1]
        media.append(Media(b"", b"", [length, count], grid))
        length += count + source.randint(1, 9)
    return length, media


def test_positions_are_those_of_transformers() -> None:
    tower = {"spatial_merge_size": 2, "tokens_per_second": 2}
    config = AutoConfig.for_model("qwen2_5_vl", vision_config=tower)
    model: Any = Qwen2_5_VLModel.__new__(Qwen2_5_VLModel)
    torch.nn.Module.__init__(model)
    model.config = config
    source = random.Random(0)
    for images in range(5):
        length, media = prompt(source, images)
        length = max(length, 1)
        types = torch.zeros(1, length, dtype=torch.int)
        for image in media:
            types[0, image.runs[0] : image.runs[0] + image.runs[1]] = 1
        grids = torch.tensor([[1, 2 * m.grid[0], 2 * m.grid[1]] for m in media]).view(-1, 3)
        ids = torch.zeros(1, length, dtype=torch.long)
        theirs, deltas = model.get_rope_index(ids, types, image_grid_thw=grids)
        ours, behind = three_rows(length, media)
        assert np.array_equal(ours, theirs[:, 0].numpy())
        assert behind == int(deltas[0])


def test_of_text_alone_all_rows_are_the_same() -> None:
    rows, behind = three_rows(7, [])
    assert behind == 0 and np.array_equal(rows, np.tile(np.arange(7), (3, 1)))
