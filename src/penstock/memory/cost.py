"""What a step and a sequence cost in bytes: an upper envelope over what was measured at load.

Frozen numbers without torch, made in a worker and sent to the server, which asks them before it
lets a request in. A plane over four quantities lies on or above every measurement; between
measurements a step costs at most what a larger one was measured to cost, which is how a sum of
terms stays close where the truth is a maximum (logits come after the layers' memory is free).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class Measured(msgspec.Struct, frozen=True, array_like=True):
    """One step's shape and the bytes it took beyond what was held before it."""

    tokens: int  # rows of the forward
    sequences: int
    context: int  # tokens seen, summed over the sequences
    logit_rows: int
    bytes: int

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Without the bytes."""
        return self.tokens, self.sequences, self.context, self.logit_rows


class CostModel(msgspec.Struct, frozen=True):
    """All figures in bytes, none negative."""

    base: int
    per_token: float
    per_sequence: float
    per_context: float
    per_logit_row: float
    measured: tuple[Measured, ...]  # made monotonic: a larger step never costs less
    kv_bytes_per_token: int
    block_tokens: int
    floor: int = 0  # of any step

    def step(self, tokens: int, sequences: int, context: int, logit_rows: int) -> int:
        """Bytes that a step of this shape takes at most, KV aside."""
        plane = (
            self.base
            + self.per_token * tokens
            + self.per_sequence * sequences
            + self.per_context * context
            + self.per_logit_row * logit_rows
        )
        # Floats may fall a hair below a measurement that the plane touches.
        least, most = 0, int(plane) + 1
        for point in self.measured:
            t, s, c, r = point.tokens, point.sequences, point.context, point.logit_rows
            if t <= tokens and s <= sequences and c <= context and r <= logit_rows:
                least = max(least, point.bytes)
            if t >= tokens and s >= sequences and c >= context and r >= logit_rows:
                most = min(most, point.bytes)
        return max(least, most, self.floor)

    def sequence(self, tokens: int) -> int:
        """Bytes of KV of a sequence of that many tokens: whole blocks."""
        blocks = -(-tokens // self.block_tokens)
        return blocks * self.block_tokens * self.kv_bytes_per_token


def fit(
    points: Iterable[Measured], kv_bytes_per_token: int, block_tokens: int, floor: int = 0
) -> CostModel:
    """The lowest plane on or above every point (least sum of distances), and the points.

    No step is said to take less than `floor`, nor more for it than the largest that was measured.
    """
    known = _monotonic(list(points))
    if not known:
        raise ValueError("a cost model needs at least one measured step")
    coefficients = _lowest_plane([(1, *p.shape) for p in known], [p.bytes for p in known])
    return CostModel(
        base=int(coefficients[0]) + 1,
        per_token=coefficients[1],
        per_sequence=coefficients[2],
        per_context=coefficients[3],
        per_logit_row=coefficients[4],
        measured=tuple(known),
        kv_bytes_per_token=kv_bytes_per_token,
        block_tokens=block_tokens,
        floor=min(floor, max(point.bytes for point in known)),
    )


def _monotonic(points: list[Measured]) -> list[Measured]:
    """One point a shape, none below one of a smaller shape: measurements are a little noisy."""
    return [
        msgspec.structs.replace(
            point,
            bytes=max(p.bytes for p in points if _within(p.shape, shape)),
        )
        for shape, point in sorted({p.shape: p for p in points}.items())
    ]


def _within(inner: Sequence[int], outer: Sequence[int]) -> bool:
    return all(a <= b for a, b in zip(inner, outer, strict=True))


def _lowest_plane(rows: list[tuple[int, ...]], heights: list[int]) -> list[float]:
    """Coefficients c >= 0 with rows . c >= heights and the least sum of rows . c.

    Solved through its dual, maximise heights . u under columns . u <= column sums and u >= 0, for
    which u = 0 is a start: the simplex method with Bland's rule, which always ends. The answer is
    what the slack variables cost in the end. Columns and heights are scaled to about one first.
    """
    width, count = len(rows[0]), len(rows)
    scales = [float(max(row[i] for row in rows) or 1) for i in range(width)]
    top = float(max(heights) or 1)
    table = []
    for i in range(width):
        column = [row[i] / scales[i] for row in rows]
        slack = [float(i == j) for j in range(width)]
        table.append([*column, *slack, sum(column)])
    goal = [*(-height / top for height in heights), *[0.0] * (width + 1)]
    basis = [count + i for i in range(width)]
    while True:
        entering = next((j for j in range(count + width) if goal[j] < -1e-12), None)
        if entering is None:
            break
        ratios = [
            (table[i][-1] / table[i][entering], basis[i], i)
            for i in range(width)
            if table[i][entering] > 1e-12
        ]
        leaving = min(ratios)[2]  # bounded: every point has a one in the first row
        pivot = table[leaving][entering]
        table[leaving] = [value / pivot for value in table[leaving]]
        for row in (*(table[i] for i in range(width) if i != leaving), goal):
            factor = row[entering]
            for j, value in enumerate(table[leaving]):
                row[j] -= factor * value
        basis[leaving] = entering
    return [max(0.0, goal[count + i]) * top / scales[i] for i in range(width)]
