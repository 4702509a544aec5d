"""How many tokens an image of a size comes to, and what else stands around them in the prompt.

Arithmetic alone, the same as the model's own processor does, so that a request is counted before
anything is decoded. One class for each way to cut an image; tests compare them with transformers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

MAX_RATIO = 200  # of the longer side to the shorter; beyond it processors give up


class UnfitImage(ValueError):  # noqa: N818 - what it is
    """An image of this size is not taken, in a sentence."""


@dataclass(frozen=True, slots=True)
class Layout:
    """One image in a prompt."""

    # What is written for it. Each image token in it stands for a run of them.
    text: str
    runs: tuple[int, ...]
    grid: tuple[int, int] = (0, 0)  # rows and columns of its tokens, where positions have them

    @property
    def tokens(self) -> int:
        """Image tokens in all."""
        return sum(self.runs)


class Cut(Protocol):
    """One way to cut images."""

    def layout(self, width: int, height: int, token: str) -> Layout:
        """Of an image of this size, whose image token is written so; `UnfitImage`: it has none."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """Every image is made to one size (LLaVA)."""

    tokens: int

    def layout(self, width: int, height: int, token: str) -> Layout:
        return Layout(token, (self.tokens,))


@dataclass(frozen=True, slots=True)
class Patches:
    """An image keeps its shape, within a least and a most number of pixels (Qwen)."""

    side: int  # pixels of a token
    min_pixels: int
    max_pixels: int

    def layout(self, width: int, height: int, token: str) -> Layout:
        _check_ratio(width, height)
        side = self.side
        rows, columns = round(height / side) * side, round(width / side) * side
        if rows * columns > self.max_pixels:
            scale = math.sqrt(height * width / self.max_pixels)
            rows = max(side, math.floor(height / scale / side) * side)
            columns = max(side, math.floor(width / scale / side) * side)
        elif rows * columns < self.min_pixels:
            scale = math.sqrt(self.min_pixels / (height * width))
            rows = math.ceil(height * scale / side) * side
            columns = math.ceil(width * scale / side) * side
        grid = rows // side, columns // side
        return Layout(token, (grid[0] * grid[1],), grid)


@dataclass(frozen=True, slots=True)
class Tiles:
    """An image is resized, cut into square tiles, and shown whole as well (Idefics 3, SmolVLM)."""

    tile: int  # pixels of its side
    tokens: int  # of each
    longest: int  # side of the image that is cut
    splits: bool = True
    most: int = 4096  # pixels of a side, whatever is configured

    def layout(self, width: int, height: int, token: str) -> Layout:
        _check_ratio(width, height)
        around, whole = "<fake_token_around_image>", f"<global-img>{token}"
        rows, columns = self._grid(width, height) if self.splits else (0, 0)
        if not rows:
            return Layout(f"{around}{whole}{around}", (self.tokens,))
        lines = [
            "".join(f"{around}<row_{row}_col_{col}>{token}" for col in range(1, columns + 1))
            for row in range(1, rows + 1)
        ]
        text = "".join(f"{line}\n" for line in lines) + f"\n{around}{whole}{around}"
        return Layout(text, (self.tokens,) * (rows * columns + 1))

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns; none of an image that is no larger than a tile."""
        width, height = self._shrunk(*self._resized(width, height))
        ratio, tile = width / height, self.tile
        if width >= height:
            width = math.ceil(width / tile) * tile
            height = math.ceil(int(width / ratio) / tile) * tile
        else:
            height = math.ceil(height / tile) * tile
            width = math.ceil(int(height * ratio) / tile) * tile
        if width <= tile and height <= tile:
            return 0, 0
        return height // tile, width // tile

    def _resized(self, width: int, height: int) -> tuple[int, int]:
        ratio = width / height
        if width >= height:
            width = self.longest
            height = int(width / ratio)
            height += height % 2
        else:
            height = self.longest
            width = int(height * ratio)
            width += width % 2
        return max(width, 1), max(height, 1)

    def _shrunk(self, width: int, height: int) -> tuple[int, int]:
        ratio = width / height
        if width >= height and width > self.most:
            width, height = self.most, int(self.most / ratio)
        elif height > width and height > self.most:
            width, height = int(self.most * ratio), self.most
        return max(width, 1), max(height, 1)


@dataclass(frozen=True, slots=True)
class Lines:
    """An image keeps its shape, and each row of its tokens ends with another token (Mistral 3)."""

    side: int  # pixels of a token
    longest: int

    def layout(self, width: int, height: int, token: str) -> Layout:
        _check_ratio(width, height)
        ratio = max(height / self.longest, width / self.longest)
        if ratio > 1:
            width, height = math.floor(width / ratio), math.floor(height / ratio)
        if not width or not height:
            raise UnfitImage(f"The image is so narrow that {self.longest} pixels leave none of it.")
        rows, columns = ((size - 1) // self.side + 1 for size in (height, width))
        text = f"{token}[IMG_BREAK]" * (rows - 1) + f"{token}[IMG_END]"
        return Layout(text, (columns,) * rows)


@dataclass(frozen=True, slots=True)
class Crops:
    """An image is made to fit the nearest of some grids of tiles, and shown whole as well
    (InternVL)."""

    tile: tuple[int, int]  # height and width
    tokens: int  # of each
    least: int
    most: int
    crops: bool = True

    def layout(self, width: int, height: int, token: str) -> Layout:
        _check_ratio(width, height)
        tiles = self._tiles(width, height) if self.crops and self.most > 1 else 1
        tokens = self.tokens * (tiles + (tiles > 1))
        return Layout(f"<img>{token}</img>", (tokens,))

    def _tiles(self, width: int, height: int) -> int:
        best, nearest = (1, 1), math.inf
        sizes = range(1, self.most + 1)
        grids = [(c, r) for c in sizes for r in sizes if self.least <= c * r <= self.most]
        for columns, rows in sorted(grids, key=lambda grid: grid[0] * grid[1]):
            apart = abs(width / height - columns / rows)
            if apart < nearest:
                best, nearest = (columns, rows), apart
            elif apart == nearest:
                area = self.tile[0] * self.tile[1] * columns * rows
                if width * height > 0.5 * area:
                    best = columns, rows
        return best[0] * best[1]


def _check_ratio(width: int, height: int) -> None:
    if max(width, height) > MAX_RATIO * min(width, height):
        raise UnfitImage(
            f"The image is {width} x {height} pixels; one side may be at most {MAX_RATIO} times "
            "the other."
        )
