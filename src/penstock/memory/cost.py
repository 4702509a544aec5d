"""What a step and a sequence cost in bytes: an upper envelope over what was measured at load.

Frozen numbers without torch, made in a worker and sent to the server, which asks them before it
lets a request in. A step has two parts, one after the other: its layers, whose memory grows with
what goes through them, and its logits, made when that is free again. It costs what the larger of
them does. Each has an envelope of its own, the lowest concave one on or above its measurements; and
no step costs more than a larger one was measured to.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


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


Plane = tuple[float, ...]  # bytes of any step; of a token, a sequence, a context's token, a row

_LAYERS = (0, 1, 2, 3)  # what their memory grows with, of that
_LOGITS = (0, 4)
# A step whose layers' envelope is that near to what it took: what is missing is theirs, too.
_NEARLY = 0.85


class GroupCost(msgspec.Struct, frozen=True, array_like=True):
    """Blocks of layers that share a cache shape and a window."""

    block_bytes: int
    window: int | None = None  # tokens that a row sees; None: all

    def blocks(self, tokens: int, block_tokens: int) -> int:
        """The most blocks that a sequence of so many tokens holds, a long chunk's own aside.

        A row sees up to `window` tokens, which may begin and end within a block; one block more is
        for the rounding of a chunk.
        """
        whole = -(-tokens // block_tokens)
        if self.window is None:
            return whole
        return min(whole, (self.window - 2) // block_tokens + 3)


class KvCost(msgspec.Struct, frozen=True):
    """What a sequence keeps, in bytes: KV per token, for windowed layers up to a cap, in whole
    blocks; and the state of recurrent layers, which is the same for any length.

    Blocks of a chunk that is being computed come on top of a windowed group's cap. They are there
    once, however many sequences run: `chunk_bytes` are kept free for them.
    """

    groups: tuple[GroupCost, ...]
    block_tokens: int
    chunk_tokens: int = 0  # of windowed groups, kept free beside all sequences
    state_bytes: int = 0  # of each sequence, whatever its length

    @property
    def token_bytes(self) -> int:
        """Of a token in all layers, before any window is full."""
        return sum(group.block_bytes for group in self.groups) // self.block_tokens

    @property
    def chunk_bytes(self) -> int:
        """Kept free for the chunk that is being computed."""
        blocks = -(-self.chunk_tokens // self.block_tokens)
        return blocks * sum(g.block_bytes for g in self.groups if g.window is not None)

    def figures(self, tokens: int) -> dict[str, object]:
        """As it is published: its parts, and what a token of a sequence of so many takes."""
        tokens = max(1, -(-tokens // self.block_tokens)) * self.block_tokens
        return {
            "kv_bytes_per_token": (self.sequence(tokens) - self.state_bytes) // tokens,
            "kv_fixed_bytes": self.chunk_bytes,
            "state_bytes_per_sequence": self.state_bytes,
            "kv_groups": [
                {
                    "bytes_per_token": group.block_bytes // self.block_tokens,
                    "window": group.window,
                    "cap_bytes": group.window
                    and group.blocks(MAX_TOKENS, self.block_tokens) * group.block_bytes,
                }
                for group in self.groups
            ],
        }

    def sequence(self, tokens: int) -> int:
        """The most bytes that a sequence of so many tokens holds."""
        return self.state_bytes + sum(
            group.blocks(tokens, self.block_tokens) * group.block_bytes for group in self.groups
        )

    def tokens_within(self, size_bytes: int) -> int:
        """The longest sequence, in whole blocks, that so many bytes hold."""
        if not self.groups and not self.state_bytes:
            return MAX_TOKENS  # nothing is kept
        if size_bytes <= 0 or size_bytes < self.state_bytes:
            return 0
        if not self.groups:
            return MAX_TOKENS
        if all(group.window is None for group in self.groups):
            each = max(1, sum(group.block_bytes for group in self.groups))
            return (size_bytes - self.state_bytes) // each * self.block_tokens
        low, high = 0, MAX_TOKENS // self.block_tokens
        while low < high:
            middle = (low + high + 1) // 2
            if self.sequence(middle * self.block_tokens) <= size_bytes:
                low = middle
            else:
                high = middle - 1
        return low * self.block_tokens

    def future_peak(self, sequences: Iterable[tuple[int, int]]) -> int:
        """The most bytes held at once by sequences of (tokens now, tokens to come), decoded
        together.

        What is held only rises until somebody ends, so the peak is at one of the ends: when the one
        with r to come ends, everyone with at least r to come has grown by r, and the rest is gone.

            held |        /|      sorted by what is to come, longest first, the peak at the i-th end
                 |  /|  /  |  /|  is the sum over the first i of (tokens now + r_i), in whole blocks
                 |/  |/    |/  |

        Sequences are counted by what they have in their last block, so that the sum needs no second
        loop over them. Windowed groups are counted with what each sequence comes to at most, and
        states as they are.
        """
        size = self.block_tokens
        full = sum(group.block_bytes for group in self.groups if group.window is None)
        windowed = [group for group in self.groups if group.window is not None]
        peak = whole = capped = 0
        in_last_block = [0] * size
        for count, (now, remaining) in enumerate(sorted(sequences, key=lambda s: -s[1]), 1):
            whole += now // size
            in_last_block[now % size] += 1
            blocks, rest = divmod(remaining, size)
            begun = sum(n * -(-(has + rest) // size) for has, n in enumerate(in_last_block))
            capped += self.state_bytes
            capped += sum(g.blocks(now + remaining, size) * g.block_bytes for g in windowed)
            peak = max(peak, (whole + count * blocks + begun) * full + capped)
        return peak


MAX_TOKENS = 1 << 40  # for searches: longer than any sequence
# Tokens of a chunk for which windowed groups always have room beside the running sequences.
MAX_CHUNK_TOKENS = 1024


class CostModel(msgspec.Struct, frozen=True):
    """All figures in bytes, none negative."""

    plane: Plane  # above all that was measured, for what is beyond it
    layers: tuple[Plane, ...]  # the lowest of these
    logits: tuple[Plane, ...]
    measured: tuple[Measured, ...]  # made monotonic: a larger step never costs less
    kv: KvCost
    floor: int = 0  # of any step

    def step(self, tokens: int, sequences: int, context: int, logit_rows: int) -> int:
        """Bytes that a step of this shape takes at most, KV aside."""
        shape = (1, tokens, sequences, context, logit_rows)
        size = max(_lowest(self.layers, shape), _lowest(self.logits, shape))
        least, most = 0, None
        for point in self.measured:
            t, s, c, r = point.tokens, point.sequences, point.context, point.logit_rows
            if t <= tokens and s <= sequences and c <= context and r <= logit_rows:
                least = max(least, point.bytes)
            if t >= tokens and s >= sequences and c >= context and r >= logit_rows:
                most = point.bytes if most is None else min(most, point.bytes)
        # Beyond the largest of all, the parts' own envelopes need not grow.
        size = max(size, _height(self.plane, shape)) if most is None else min(size, most)
        return max(least, size, self.floor)

    def sequence(self, tokens: int) -> int:
        """Bytes of KV that a sequence of that many tokens holds at most."""
        return self.kv.sequence(tokens)

    def raised(self, factor: float) -> CostModel:
        """Every step takes that many times as much."""

        def plane(of: Plane) -> Plane:
            return tuple(factor * each for each in of)

        return msgspec.structs.replace(
            self,
            plane=plane(self.plane),
            layers=tuple(map(plane, self.layers)),
            logits=tuple(map(plane, self.logits)),
            measured=tuple(
                msgspec.structs.replace(point, bytes=math.ceil(factor * point.bytes))
                for point in self.measured
            ),
        )


def fit(points: Iterable[Measured], kv: KvCost, *, floor: int = 0, row_bytes: int = 0) -> CostModel:
    """The model that lies as low above the points as its parts allow.

    Of every token `row_bytes` are there beside the logits, as the layers left it. No step is said
    to take less than `floor`, nor more for it than the largest that was measured.
    """
    known = _monotonic(list(points))
    if not known:
        raise ValueError("a cost model needs at least one measured step")
    plain = [point for point in known if point.logit_rows <= 1] or known
    layers = _envelope(_as_many_tokens(plain), _LAYERS, {})
    nearly = [p for p in known if p in plain or _lowest(layers, _row(p)) >= _NEARLY * p.bytes]
    layers = _envelope(_as_many_tokens(nearly), _LAYERS, {})
    rest = [point for point in known if _lowest(layers, _row(point)) < point.bytes]
    # Few logits cost no more than the whole of the least step.
    least = min(known, key=lambda point: point.bytes)
    every = _as_many_tokens(known)
    rows = [_row(point) for point in every]
    summed = [sum(each) for each in zip(*rows, strict=True)]
    return CostModel(
        plane=_lowest_plane(rows, [p.bytes for p in every], summed),
        layers=layers,
        logits=_envelope([least, *rest], _LOGITS, {1: row_bytes}) if rest else (),
        measured=tuple(known),
        kv=kv,
        floor=min(floor, max(point.bytes for point in known)),
    )


def _as_many_tokens(points: list[Measured]) -> list[Measured]:
    """The points, and those with least context for their tokens once more without any.

    The tokens of one chunk see each other, those of many short ones do not. A plane that takes what
    a long chunk needs for the price of its context would lie far below as many short ones.
    """
    return points + [
        msgspec.structs.replace(point, context=0)
        for point in points
        if not any(p.tokens >= point.tokens and p.context < point.context for p in points)
    ]


def _row(point: Measured) -> tuple[int, ...]:
    return 1, *point.shape


def _height(plane: Plane, shape: Sequence[int]) -> int:
    # Floats may fall a hair below a measurement that the plane touches.
    return int(sum(each * size for each, size in zip(plane, shape, strict=True))) + 1


def _lowest(planes: Sequence[Plane], shape: Sequence[int]) -> int:
    return min((_height(plane, shape) for plane in planes), default=0)


def _envelope(
    points: list[Measured], used: Sequence[int], given: Mapping[int, float]
) -> tuple[Plane, ...]:
    """Of all planes on or above the points those that are lowest at one of them.

    They have the `given` coefficients, and choose those that are `used`.
    """
    rows = [[_row(point)[i] for i in used] for point in points]
    known = [sum(each * _row(point)[i] for i, each in given.items()) for point in points]
    heights = [max(0, point.bytes - int(size)) for point, size in zip(points, known, strict=True)]
    planes = set()
    for row in rows:
        found = {**given, **dict(zip(used, _lowest_plane(rows, heights, row), strict=True))}
        planes.add(tuple(math.ceil(1000 * found.get(i, 0.0)) / 1000 for i in range(5)))
    return tuple(sorted(planes))


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


def _lowest_plane(
    rows: Sequence[Sequence[int]], heights: list[int], target: Sequence[int]
) -> Plane:
    """Coefficients c >= 0 with rows . c >= heights and the least target . c.

    Solved through its dual, maximise heights . u under columns . u <= target and u >= 0, for which
    u = 0 is a start: the simplex method with Bland's rule, which always ends. The answer is what
    the slack variables cost in the end. Columns and heights are scaled to about one first.
    """
    width, count = len(rows[0]), len(rows)
    scales = [float(max(row[i] for row in rows) or 1) for i in range(width)]
    top = float(max(heights) or 1)
    table = []
    for i in range(width):
        column = [row[i] / scales[i] for row in rows]
        slack = [float(i == j) for j in range(width)]
        table.append([*column, *slack, target[i] / scales[i]])
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
    return tuple(max(0.0, goal[count + i]) * top / scales[i] for i in range(width))
