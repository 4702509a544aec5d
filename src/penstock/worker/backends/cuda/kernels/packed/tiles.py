"""How products with packed weights are shared out among programs."""

from __future__ import annotations

from dataclasses import dataclass

_PLACES = 2 * 132  # programs that an H200 runs at a time, two to a multiprocessor
_MOST_CUTS = 8
_LEAST_PIECES = 4  # for each cut, halved
_CUT_OUTPUTS = 64  # of a program, as cuts are reckoned
_TWO_CUTS, _MORE_CUTS = 3, 2  # how full of programs the places may get by cutting
_FOUR_BIT_CODES = 4  # in a word


@dataclass(frozen=True, slots=True)
class Tile:
    """Of one program: outputs, warps, pieces under way; whether weights are scaled, or sums."""

    outputs: int
    warps: int
    stages: int
    scaled_first: bool = False


# The best of a sweep over the products of an 8B model, by padded rows up to so many.
_EIGHT_BITS = (
    (8, Tile(16, 1, 4)),
    (16, Tile(64, 2, 3)),
    (32, Tile(128, 4, 3)),
    (128, Tile(64, 4, 3)),
)
_FOUR_BITS = (
    (8, Tile(32, 2, 6)),
    (32, Tile(128, 4, 3)),
    (64, Tile(128, 8, 3)),
    (128, Tile(64, 4, 3)),
)
_WITH_MINS = (
    (8, Tile(32, 2, 6)),
    (16, Tile(64, 2, 3)),
    (32, Tile(64, 4, 3)),
    (128, Tile(64, 4, 3, scaled_first=True)),
)
MOST_ROWS = _EIGHT_BITS[-1][0]  # that are multiplied with codes


def padded_rows(rows: int) -> int:
    """What the matrix units take for so many."""
    return max(8, 1 << (rows - 1).bit_length())


def choose_tile(rows: int, codes_of_word: int, mins: bool) -> Tile:
    """For padded rows: by the bits of codes, and whether groups have mins."""
    tiles = _WITH_MINS if mins else _FOUR_BITS if codes_of_word == _FOUR_BIT_CODES else _EIGHT_BITS
    return next((tile for most, tile in tiles if rows <= most), tiles[-1][1])


def choose_cuts(outputs: int, pieces: int) -> int:
    """Into how many parts a weight's inputs are cut: the same for any number of rows."""
    programs = -(-outputs // _CUT_OUTPUTS)
    cuts = 1
    while cuts < _MOST_CUTS and pieces >= _LEAST_PIECES * cuts:
        most = _TWO_CUTS if cuts == 1 else _MORE_CUTS
        if 2 * programs * cuts > most * _PLACES:
            break
        cuts *= 2
    return cuts
