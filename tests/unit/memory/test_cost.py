"""The envelope: never below what was measured, close above it, the same after a trip by wire."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.memory.cost import MAX_TOKENS, CostModel, GroupCost, KvCost, Measured, fit

MIB = 1 << 20
KV = KvCost((GroupCost(16 * 1024),), 16)
Shape = tuple[int, int, int, int]

sizes: st.SearchStrategy[Shape] = st.tuples(
    st.integers(1, 8192), st.integers(1, 256), st.integers(1, 1 << 20), st.integers(0, 512)
)


def point(shape: Shape, cost: int) -> Measured:
    return Measured(*shape, cost)


points = st.lists(
    st.builds(point, sizes, st.integers(0, 1 << 40)),
    min_size=1,
    max_size=40,
)


def truth(tokens: int, sequences: int, context: int, logit_rows: int) -> int:
    """A machine in which logits are computed when the layers' memory is free again."""
    layers = 3 * MIB + 40_000 * tokens + 2_000 * sequences + 90 * context
    return max(layers, 2 * MIB + 4_000 * tokens + 900_000 * logit_rows)


def measure(shapes: list[Shape]) -> list[Measured]:
    return [Measured(*shape, truth(*shape)) for shape in shapes]


GRID = [
    (tokens, sequences, context, rows)
    for tokens in (1, 256, 512)
    for sequences in (1, 64)
    for context in (64, 16_384)
    for rows in (1, 64)
]


@given(points)
def test_never_below_a_measured_point_whatever_was_measured(measured: list[Measured]) -> None:
    cost = fit(measured, KV)
    assert all(min(plane) >= 0.0 for plane in (cost.plane, *cost.layers, *cost.logits))
    for known in measured:
        assert cost.step(*known.shape) >= known.bytes


@given(points, sizes, sizes)
def test_a_larger_step_never_costs_less(measured: list[Measured], one: Shape, more: Shape) -> None:
    cost = fit(measured, KV)
    larger = (one[0] + more[0], one[1] + more[1], one[2] + more[2], one[3] + more[3])
    assert cost.step(*larger) >= cost.step(*one)


@given(
    st.tuples(st.integers(1, 512), st.integers(1, 64), st.integers(64, 16_384), st.integers(1, 64))
)
def test_true_between_the_measured_points_and_close_at_the_top(
    shape: Shape,
) -> None:
    cost = fit(measure(GRID), KV, row_bytes=4_000)
    assert cost.step(*shape) >= truth(*shape)
    largest = max(p.bytes for p in cost.measured)
    if truth(*shape) > 0.8 * largest:
        assert cost.step(*shape) <= 1.25 * truth(*shape)


def test_layers_and_logits_are_not_added_up() -> None:
    """A chunk beside half of the logits costs what the chunk does, and hardly more."""
    cost = fit(measure(GRID), KV, row_bytes=4_000)
    shape = (512, 32, 16_384, 16)
    assert truth(*shape) == truth(512, 32, 16_384, 0)  # its layers are the larger part
    assert truth(*shape) <= cost.step(*shape) <= 1.02 * truth(*shape)


def test_many_short_prompts_cost_what_one_long_one_does() -> None:
    """No chunk sees less than itself, so a context is never measured alone."""
    shapes = [(16, 1, 16, 1), (16, 1, 8192, 1), (4096, 1, 4096, 1), (4096, 64, 8192, 64)]
    cost = fit(measure(shapes), KV)
    assert cost.step(4096, 8, 512, 8) >= truth(4096, 1, 512, 8)


def test_beyond_all_that_was_measured_it_grows_on() -> None:
    cost = fit(measure(GRID), KV, row_bytes=4_000)
    assert cost.step(512, 64, 32_768, 64) >= cost.step(512, 64, 16_384, 64) + 90 * 16_000


def test_a_plane_is_found_exactly() -> None:
    def plane(t: int, s: int, c: int, r: int) -> int:
        return 1000 + 300 * t + 70 * s + 5 * c + 9000 * r

    cost = fit([Measured(*shape, plane(*shape)) for shape in GRID], KV)
    assert cost.plane[1] == pytest.approx(300, rel=1e-6)
    assert cost.plane[4] == pytest.approx(9000, rel=1e-6)
    assert cost.step(1000, 100, 40_000, 300) == pytest.approx(
        plane(1000, 100, 40_000, 300), rel=1e-3
    )


def test_one_point_is_enough_and_none_is_not() -> None:
    assert fit([Measured(512, 1, 512, 1, 7 * MIB)], KV).step(512, 1, 512, 1) >= 7 * MIB
    with pytest.raises(ValueError, match="at least one"):
        fit([], KV)


def test_a_floor_lifts_small_steps_and_never_the_largest() -> None:
    points = [Measured(1, 1, 1, 1, 2 * MIB), Measured(512, 1, 512, 1, 30 * MIB)]
    assert fit(points, KV, floor=24 * MIB).step(1, 1, 1, 1) == 24 * MIB
    assert fit(points, KV, floor=64 * MIB).step(512, 1, 512, 1) == fit(points, KV).step(
        512, 1, 512, 1
    )


def test_points_of_one_shape_keep_the_largest() -> None:
    shape = (8, 1, 8, 1)
    cost = fit([Measured(*shape, 5), Measured(*shape, 9), Measured(*shape, 7)], KV)
    assert [p.bytes for p in cost.measured] == [9]


def test_a_sequence_takes_whole_blocks() -> None:
    cost = fit([Measured(1, 1, 1, 1, 1)], KvCost((GroupCost(1600),), 16))
    assert [cost.sequence(n) for n in (0, 1, 16, 17)] == [0, 1600, 1600, 3200]


def test_the_same_after_a_trip_by_wire() -> None:
    cost = fit(measure(GRID), KV, row_bytes=4_000)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(cost), type=CostModel) == cost


batches = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 60)), max_size=8)


@given(batches, st.integers(1, 16))
def test_the_future_peak_is_that_of_a_simulation(
    batch: list[tuple[int, int]], block_tokens: int
) -> None:
    peak = 0
    for step in range(max((remaining for _, remaining in batch), default=0) + 1):
        alive = [now for now, remaining in batch if remaining >= step]
        peak = max(peak, sum(-(-(now + step) // block_tokens) for now in alive))
    assert KvCost((GroupCost(7),), block_tokens).future_peak(batch) == 7 * peak


@given(batches, st.integers(1, 16), st.integers(1, 40))
def test_windows_bound_the_future_peak(
    batch: list[tuple[int, int]], block_tokens: int, window: int
) -> None:
    full = KvCost((GroupCost(7), GroupCost(5)), block_tokens)
    cost = KvCost((GroupCost(7), GroupCost(5, window)), block_tokens)
    now = sum(cost.sequence(tokens) for tokens, _ in batch)
    assert now <= cost.future_peak(batch)
    ends = [(tokens + remaining, 0) for tokens, remaining in batch]
    assert cost.future_peak(batch) <= max(full.future_peak(batch), full.future_peak(ends))


def test_a_sequence_costs_up_to_a_cap_per_window() -> None:
    cost = KvCost((GroupCost(16 * 10), GroupCost(16 * 100, 64)), 16, chunk_tokens=32)
    assert cost.token_bytes == 110
    assert cost.sequence(48) == 48 * 110
    assert cost.sequence(16_000) == 16_000 * 10 + (64 // 16 + 2) * 16 * 100
    assert cost.chunk_bytes == 32 * 100
    assert cost.tokens_within(cost.sequence(16_000)) == 16_000
    assert cost.tokens_within(cost.sequence(16_000) - 1) == 16_000 - 16
    assert cost.tokens_within(cost.sequence(32)) == 32
    assert cost.tokens_within(0) == 0


def test_a_state_costs_a_sequence_the_same_at_any_length() -> None:
    plain = KvCost((GroupCost(16 * 10), GroupCost(16 * 100, 64)), 16)
    cost = KvCost(plain.groups, 16, state_bytes=5000)
    for tokens in (1, 16, 17, 1000, 100_000):
        assert cost.sequence(tokens) == plain.sequence(tokens) + 5000
        assert cost.tokens_within(cost.sequence(tokens)) >= tokens
    assert cost.tokens_within(5000) == cost.tokens_within(4999) == 0
    together = [(40, 30), (90, 5), (16, 100)]
    most = max(
        plain.future_peak(together[:count]) + 5000 * count for count in range(1, len(together) + 1)
    )
    assert plain.future_peak(together) < cost.future_peak(together) <= most
    figures = cost.figures(160)
    assert figures["state_bytes_per_sequence"] == 5000
    assert figures["kv_bytes_per_token"] == plain.figures(160)["kv_bytes_per_token"]


def test_without_attention_only_the_state_counts() -> None:
    cost = KvCost((), 16, state_bytes=5000)
    assert cost.sequence(1) == cost.sequence(1_000_000) == 5000
    assert (cost.tokens_within(4999), cost.tokens_within(5000)) == (0, MAX_TOKENS)


def test_what_is_published_of_kv_is_right_beyond_a_window() -> None:
    cost = KvCost((GroupCost(16 * 10), GroupCost(16 * 100, 64)), 16, chunk_tokens=32)
    assert cost.figures(48)["kv_bytes_per_token"] == 110
    assert cost.figures(16_000)["kv_bytes_per_token"] == 10 + 6 * 16 * 100 // 16_000
    assert cost.figures(0) == {
        "kv_bytes_per_token": 110,
        "kv_fixed_bytes": 32 * 100,
        "state_bytes_per_sequence": 0,
        "kv_groups": [
            {"bytes_per_token": 10, "window": None, "cap_bytes": None},
            {"bytes_per_token": 100, "window": 64, "cap_bytes": 6 * 16 * 100},
        ],
    }


def test_raised_every_step_takes_that_many_times_as_much() -> None:
    points = [
        Measured(1, 1, 1, 1, 1000),
        Measured(64, 1, 64, 1, 9000),
        Measured(64, 8, 500, 8, 9900),
    ]
    cost = fit(points, KV)
    raised = cost.raised(1.5)
    for shape in [point.shape for point in points] + [(30, 2, 100, 3), (200, 9, 900, 20)]:
        assert raised.step(*shape) == pytest.approx(1.5 * cost.step(*shape), abs=2)
    assert raised.kv == cost.kv
