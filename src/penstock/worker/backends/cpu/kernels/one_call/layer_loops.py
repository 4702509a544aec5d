"""Decoder layers of a step of single rows in one call. Compiled by Numba.

All threads run through all layers. The work of a layer is five stages, each cut into pieces that
threads claim; a stage begins when the last one's pieces are done. So a thread that finds no core
delays no more than the piece that it has in hand, and one that never comes delays nobody.

What is known of a call is a record of integers: sizes and addresses. What is known of a layer is a
row of a table, with three integers for each linear weight: address, kind and bytes of an output.
All scratch is handed in.
"""

from __future__ import annotations

from functools import cache

import numba
import numpy as np
from numba import carray

from penstock.worker.backends.cpu.kernels.access import (
    APART,
    await_all,
    call,
    claim,
    finish,
    floats_at,
    integers_at,
    matrix_at,
    pointer,
    words_at,
)
from penstock.worker.backends.cpu.kernels.gguf_loops import add_up_blocks
from penstock.worker.backends.cpu.kernels.loops import OPTIONS, norm_row
from penstock.worker.backends.cpu.kernels.one_call.attending import attend
from penstock.worker.backends.cpu.kernels.one_call.span_products import ONE_BY_ONE, TILE
from penstock.worker.backends.cpu.kernels.vectors import (
    added,
    divided,
    exponential,
    less,
    load_floats,
    splat,
    store_floats,
    times,
)

STAGES = 5
# Columns of the table. The head norms may be 0: there are none; and a bias, too.
(HEADS, KV_HEADS, HEAD_DIM, INNER, WINDOW, GROUP, KEYS, VALUES, BLOCK_STRIDE, BLOCK_TOKENS,
 NORM, MLP_NORM, QUERY_NORM, KEY_NORM, BIASES) = range(15)  # fmt: skip
WEIGHTS = BIASES + 3
COLUMNS = WEIGHTS + 7 * 3
QUERY, KEY, VALUE, OUT, GATE, UP, DOWN = (WEIGHTS + 3 * number for number in range(7))
# The record of a call.
(LAYERS, TABLE, NUMBERS, COUNTERS, X, ROWS, HIDDEN, PACKED_WIDTH, HEADS_WIDTH, INNER_WIDTH, COS,
 SIN, ANGLES_WIDTH, CONTEXTS, GROUPS, GROUP_COUNT, ROOM, BLOCKS, MEMORY, HEAD, THREADS, FUNCTION,
 ) = range(22)  # fmt: skip
SHARED = FUNCTION + 1  # packed queries, keys and values; answers; gates; ups; their products; sums
OWN = SHARED + 6  # of each thread: normed rows, sums of blocks, weights, heads
CALL = OWN + 4
_LANES = 16
_BYTES = 4  # of a number


@numba.njit(**OPTIONS)
def _multiply(weight, span, count, inputs, out, column):  # type: ignore[no-untyped-def]
    """Outputs of a span for `count` rows, from a column on; there is room for whole tiles of rows.

    `inputs`: the rows, the sums of their blocks, memory for a tile of weights, and where the
    function is.
    """
    rows, block_sums, memory, function = inputs
    call(
        function,
        (
            *weight, span[0], span[1], count, rows.ctypes.data, rows.shape[1],
            block_sums.ctypes.data, block_sums.shape[1], memory.ctypes.data,
            out.ctypes.data, out.shape[1], column,
        ),
    )  # fmt: skip


@numba.njit(**OPTIONS)
def _add_up(rows, count, block_sums):  # type: ignore[no-untyped-def]
    for m in range(count):
        add_up_blocks(rows[m], block_sums[m])


@numba.njit(**OPTIONS)
def _turn(vector, cos, sin, answer):  # type: ignore[no-untyped-def]
    half = vector.shape[0] // 2
    for i in range(half):
        answer[i] = vector[i] * cos[i] - vector[i + half] * sin[i]
    for i in range(half):
        answer[i + half] = vector[i + half] * cos[i + half] + vector[i] * sin[i + half]


@numba.njit(**OPTIONS)
def _placed(vector, norm, epsilon, angles, normed, answer):  # type: ignore[no-untyped-def]
    """A head of queries or keys, normed if there is a norm for heads, and rotated."""
    if norm:
        norm_row(vector, floats_at(norm, vector.shape[0]), epsilon, normed)
        _turn(normed, angles[0], angles[1], answer)
    else:
        _turn(vector, angles[0], angles[1], answer)


@numba.njit(**OPTIONS)
def _gate(gates, ups, span, answer):  # type: ignore[no-untyped-def]
    """silu(gate) x up."""
    one, none = splat(np.float32(1.0)), splat(np.float32(0.0))
    even = span[1] - (span[1] - span[0]) % _LANES
    for i in range(span[0], even, _LANES):
        gate = load_floats(gates, i)
        share = added(one, exponential(less(none, gate)))
        store_floats(answer, i, times(divided(gate, share), load_floats(ups, i)))
    for i in range(even, span[1]):
        answer[i] = gates[i] / (np.float32(1.0) + np.exp(-gates[i])) * ups[i]


@numba.njit(**OPTIONS)
def _span(piece, pieces, outputs):  # type: ignore[no-untyped-def]
    """A piece's outputs: whole tiles, but for the last."""
    tiles = (outputs + TILE - 1) // TILE
    return tiles * piece // pieces * TILE, min(tiles * (piece + 1) // pieces * TILE, outputs)


@numba.njit(**OPTIONS)
def _weight(layer, column):  # type: ignore[no-untyped-def]
    return layer[column], layer[column + 1], layer[column + 2]


@numba.njit(**OPTIONS)
def _pieces(outputs, threads):  # type: ignore[no-untyped-def]
    """More than threads, so that one that is slow gets fewer."""
    return 1 if threads == 1 else max(1, min(4 * threads, outputs // 16))


@numba.njit(**OPTIONS)
def _project(layer, epsilon, x, shared, own, counters, threads):  # type: ignore[no-untyped-def]
    """Queries, keys and values of normed rows."""
    count, packed = x.shape[0], shared[0]
    normed, block_sums = own[0], own[1]
    inputs = normed, block_sums, own[2], own[4]
    queries, others = layer[HEADS] * layer[HEAD_DIM], layer[KV_HEADS] * layer[HEAD_DIM]
    outputs = queries + 2 * others
    pieces, ready = _pieces(outputs, threads), False
    while True:
        piece = claim(counters)
        if piece >= pieces:
            break
        if not ready:
            weight = floats_at(layer[NORM], x.shape[1])
            for m in range(count):
                norm_row(x[m], weight, epsilon, normed[m])
            _add_up(normed, min(count, ONE_BY_ONE), block_sums)
            ready = True
        begin, end = _span(piece, pieces, outputs)
        for part in range(3):
            first = 0 if part == 0 else queries + (part - 1) * others
            size = queries if part == 0 else others
            span = max(begin - first, 0), min(end - first, size)
            if span[0] < span[1]:
                projection = _weight(layer, QUERY + 3 * part)
                _multiply(projection, span, count, inputs, packed, first)
                if layer[BIASES + part]:
                    bias = floats_at(layer[BIASES + part], size)
                    for m in range(count):
                        for i in range(span[0], span[1]):
                            packed[m, first + i] += bias[i]
        finish(counters)
    await_all(counters, pieces)


@numba.njit(**OPTIONS)
def _see(layer, numbers, count, angles, held, shared, own, counters):  # type: ignore[no-untyped-def]
    """Rotate, write keys and values, attend: a piece is a row's key head and the queries for it."""
    heads, kv_heads, width = layer[HEADS], layer[KV_HEADS], layer[HEAD_DIM]
    scale, epsilon = numbers[0], numbers[1]
    packed, seen, query = shared[0], shared[1], own[3][0, :width]
    normed, scratch = own[3][1, :width], (own[3][2], own[3][3])
    contexts, groups = held
    stride, tokens, token = layer[BLOCK_STRIDE], layer[BLOCK_TOKENS], kv_heads * width
    table_address, table_width = groups[layer[GROUP], 0], groups[layer[GROUP], 1]
    members, pieces = heads // kv_heads, count * kv_heads
    while True:
        piece = claim(counters)
        if piece >= pieces:
            break
        row, kv_head = piece // kv_heads, piece % kv_heads
        table = words_at(table_address + row * table_width * _BYTES, table_width)
        turns, context = (angles[0][row], angles[1][row]), np.int64(contexts[row])
        own_block, own_slot = (context - 1) // tokens, (context - 1) % tokens
        place = np.int64(table[own_block]) * stride + own_slot * token + kv_head * width
        first = (heads + kv_head) * width
        key = floats_at(layer[KEYS] + place * _BYTES, width)
        vector = packed[row, first : first + width]
        _placed(vector, layer[KEY_NORM], epsilon, turns, normed, key)
        first += kv_heads * width
        value = floats_at(layer[VALUES] + place * _BYTES, width)
        for i in range(width):
            value[i] = packed[row, first + i]
        window = layer[WINDOW]
        start = max(0, context - window) if window > 0 else 0
        head_at = kv_head * width * _BYTES
        for head in range(kv_head * members, (kv_head + 1) * members):
            vector = packed[row, head * width : (head + 1) * width]
            _placed(vector, layer[QUERY_NORM], epsilon, turns, normed, query)
            attend(
                query,
                (start, context, scale),
                layer[KEYS] + head_at,
                layer[VALUES] + head_at,
                table,
                (width, stride, token, tokens),
                scratch,
                seen[row, head * width : (head + 1) * width],
            )
        finish(counters)
    await_all(counters, pieces)


@numba.njit(**OPTIONS)
def _add(weight, rows, x, out, own, counters, threads):  # type: ignore[no-untyped-def]
    """A product of rows, added to what came in."""
    count, outputs = x.shape[0], x.shape[1]
    block_sums = own[1]
    inputs = rows, block_sums, own[2], own[4]
    pieces, ready = _pieces(outputs, threads), False
    while True:
        piece = claim(counters)
        if piece >= pieces:
            break
        if not ready:
            _add_up(rows, min(count, ONE_BY_ONE), block_sums)
            ready = True
        span = _span(piece, pieces, outputs)
        _multiply(weight, span, count, inputs, out, 0)
        for m in range(count):
            for i in range(span[0], span[1]):
                x[m, i] += out[m, i]
        finish(counters)
    await_all(counters, pieces)


@numba.njit(**OPTIONS)
def _widen(layer, epsilon, x, shared, own, counters, threads):  # type: ignore[no-untyped-def]
    """silu(gate) x up of normed rows."""
    count, inner = x.shape[0], layer[INNER]
    gates, ups, answer = shared[2], shared[3], shared[4]
    normed, block_sums = own[0], own[1]
    inputs = normed, block_sums, own[2], own[4]
    pieces, ready = _pieces(inner, threads), False
    while True:
        piece = claim(counters)
        if piece >= pieces:
            break
        if not ready:
            weight = floats_at(layer[MLP_NORM], x.shape[1])
            for m in range(count):
                norm_row(x[m], weight, epsilon, normed[m])
            _add_up(normed, min(count, ONE_BY_ONE), block_sums)
            ready = True
        span = _span(piece, pieces, inner)
        _multiply(_weight(layer, GATE), span, count, inputs, gates, 0)
        _multiply(_weight(layer, UP), span, count, inputs, ups, 0)
        for m in range(count):
            _gate(gates[m], ups[m], span, answer[m])
        finish(counters)
    await_all(counters, pieces)


@numba.njit(**OPTIONS)
def _layer(layer, numbers, x, angles, held, shared, own, counters, threads):  # type: ignore[no-untyped-def]
    epsilon = numbers[1]
    _project(layer, epsilon, x, shared, own, counters[0], threads)
    _see(layer, numbers, x.shape[0], angles, held, shared, own, counters[1])
    _add(_weight(layer, OUT), shared[1], x, shared[5], own, counters[2], threads)
    _widen(layer, epsilon, x, shared, own, counters[3], threads)
    _add(_weight(layer, DOWN), shared[4], x, shared[5], own, counters[4], threads)


def _run(record_address, part):  # type: ignore[no-untyped-def]
    """What one thread does of a call."""
    record = carray(pointer(record_address), (CALL,), np.int64)
    count, hidden, heads_width = record[ROWS], record[HIDDEN], record[HEADS_WIDTH]
    packed_width, inner, width = record[PACKED_WIDTH], record[INNER_WIDTH], record[ANGLES_WIDTH]
    blocks, memory, head, room = record[BLOCKS], record[MEMORY], record[HEAD], record[ROOM]
    count_layers = record[LAYERS]
    layers = integers_at(record[TABLE], count_layers, COLUMNS)
    numbers = matrix_at(record[NUMBERS], count_layers, 2)
    counters = integers_at(record[COUNTERS], count_layers * STAGES, 2 * APART)
    x = matrix_at(record[X], count, hidden)
    angles = matrix_at(record[COS], count, width), matrix_at(record[SIN], count, width)
    held = words_at(record[CONTEXTS], count), integers_at(record[GROUPS], record[GROUP_COUNT], 2)
    shared = (
        matrix_at(record[SHARED], room, packed_width),
        matrix_at(record[SHARED + 1], room, heads_width),
        matrix_at(record[SHARED + 2], room, inner),
        matrix_at(record[SHARED + 3], room, inner),
        matrix_at(record[SHARED + 4], room, inner),
        matrix_at(record[SHARED + 5], room, hidden),
    )
    own = (
        matrix_at(record[OWN] + part * room * hidden * _BYTES, room, hidden),
        matrix_at(record[OWN + 1] + part * ONE_BY_ONE * blocks * _BYTES, ONE_BY_ONE, blocks),
        floats_at(record[OWN + 2] + part * memory * _BYTES, memory),
        matrix_at(record[OWN + 3] + part * 4 * head * _BYTES, 4, head),
        record[FUNCTION],
    )
    for index in range(count_layers):
        own_counters = counters[index * STAGES : (index + 1) * STAGES]
        _layer(
            layers[index], numbers[index], x, angles, held, shared, own, own_counters,
            record[THREADS],
        )  # fmt: skip


@cache
def function() -> int:
    """The address of what one thread does of a call: two int64, where the record is and which
    thread it is."""
    found: int = numba.cfunc(numba.void(numba.int64, numba.int64), cache=True, error_model="numpy")(
        _run
    ).address
    return found
