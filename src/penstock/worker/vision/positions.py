"""Positions of models that see where in an image a token is: three rows, for time, height, width.

    text      0 1 2 .  .  .  .  .  . 5 6      an image of 2 x 3 tokens behind three of text
    time      0 1 2 3  3  3  3  3  3 6 7
    height    0 1 2 3  3  3  4  4  4 6 7      text goes on behind the longer side
    width     0 1 2 3  4  5  3  4  5 6 7

A function of the prompt alone, so that a chunk of it, a found prefix and a decode agree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.wire import Media


def three_rows(tokens: int, media: Sequence[Media]) -> tuple[NDArray[np.int64], int]:
    """Of a prompt of so many tokens, [3, tokens]; and what the position of a token behind it is
    beyond its number."""
    rows = np.empty((3, tokens), np.int64)
    done = at = 0
    for image in media:
        first, count = image.runs[0], image.runs[1]
        rows[:, done:first] = np.arange(at, at + first - done)
        at += first - done
        height, width = image.grid
        own = slice(first, first + count)
        rows[0, own] = at
        rows[1, own] = at + np.repeat(np.arange(height), width)
        rows[2, own] = at + np.tile(np.arange(width), height)
        at += max(height, width)
        done = first + count
    rows[:, done:] = np.arange(at, at + tokens - done)
    return rows, at + tokens - done - tokens
