"""Products with packed weights on a GPU, in the shapes of an 8B model.

    python -m benchmarks.gpu_packed [--sweep] [--prefill] [--codings fp8-block,int4] [--rows 1,16]

Time of one product by graphs of many, each with a weight of its own, so that none is in the cache;
bytes of codes and scales over that time; and the time of the same product with bfloat16 weights.
`--sweep` tries tiles and cuts and prints the best few for each shape and number of rows.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import itertools
import json
import multiprocessing
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from penstock.worker.backends.cuda.kernels import triton_layer
from penstock.worker.backends.cuda.kernels.packed.tiled import (
    Coding,
    Planes,
    TiledWeight,
    Workspace,
)
from penstock.worker.backends.cuda.kernels.packed.tiles import Tile, choose_tile, padded_rows
from penstock.worker.backends.cuda.kernels.packed.triton_one_row_packed import (
    RowTile,
    multiply_row,
    row_tile,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

# Outputs and inputs, and what a layer does before and after: norm, gate, residual.
SHAPES: dict[str, tuple[int, int, str]] = {
    "qkv": (6144, 4096, "norm"),
    "out": (4096, 4096, "added"),
    "gate_up": (24576, 4096, "norm gated"),
    "down": (4096, 12288, "added"),
}
ROWS = (1, 16, 32, 64, 128)
EARLY_ROWS = 32
ROW = -1
SPREAD_BYTES = 320 << 20  # of the weights in a graph: several times the cache
_MOST_COPIES = 40
_PROCESSES = 14


def codings() -> dict[str, tuple[Coding, int, int, int]]:
    """By name: the coding, and the bits that its planes of scales, zeros and more have here."""
    bf16, f16, f32, exponents = 0x3C003C00, 0x10001000, 0x3C000000, 0x78787878
    return {
        "fp8-block": (Coding(2, 0, 128, 128, block=128), f32, 0, 0),
        "int4": (Coding(0, 1, 128, 128), bf16, 0, 0),
        "awq": (Coding(0, 2, 128, 128, zeros=8), f16, 0x08080808, 0),
        "q4_k": (Coding(0, 2, 32, 128, zeros=6), f16, 0x12345678, 0x01230123),
        "mxfp4": (Coding(1, 3, 32, 128), exponents, 0, 0),
        "int8": (Coding(3, 0, 0, 128, whole=True), 0, 0, f32),
    }


@dataclass(frozen=True)
class Call:
    """One way of computing one product."""

    coding: str
    shape: str
    rows: int
    tile: tuple[int, int, int, bool]  # of a row: outputs, vectors, warps
    cuts: int  # 0: the weight's own; -1: `multiply_row`
    what: str  # norm, gated, added

    @property
    def label(self) -> str:
        """For people."""
        if self.cuts == ROW:
            return f"row {'x'.join(map(str, self.tile[:3]))}"
        return f"{'x'.join(map(str, self.tile[:3]))}{'F' if self.tile[3] else ''}/{self.cuts}"


class Bank:
    """Weights made of parts of common memory."""

    def __init__(self) -> None:
        self.device = torch.device("cuda:0")
        self.workspace = Workspace(self.device, 4096, 32 << 20)
        self.scratch = torch.empty(8 << 20, dtype=torch.bfloat16, device=self.device)
        self._codes = torch.randint(
            -(1 << 15), 1 << 15, (400 << 20,), dtype=torch.int16, device=self.device
        )
        self._planes: dict[int, torch.Tensor] = {}

    def weights(self, coding: str, shape: tuple[int, int]) -> tuple[list[TiledWeight], int]:
        """As many as are needed to fill the cache several times, and the bytes of one."""
        kind, scale_bits, zero_bits, more_bits = codings()[coding]
        outputs, inputs = shape
        words = inputs // kind.codes_of_word
        count = max(3, min(_MOST_COPIES, SPREAD_BYTES // (2 * outputs * words)))
        width = {0: 32, 1: 16, 2: 16}.get(kind.scale, 8)
        groups = inputs // kind.group * width // 32 if kind.group else 0
        if kind.zeros == 6:
            groups = inputs // 256
        planes = [
            (scale_bits, groups, outputs // kind.block),
            (zero_bits, inputs // 128 if kind.zeros == 6 else inputs // 512, outputs),
            (more_bits, inputs // 256 if kind.zeros == 6 else 1, outputs),
        ]
        made, size = [], 0
        for index in range(count):
            begin = index * outputs * words
            own = self._codes[begin : begin + outputs * words].view(outputs, words)
            tensors = [
                self._constant(bits, rows, columns, index) if bits else None
                for bits, rows, columns in planes
            ]
            size = sum(t.nbytes for t in (own, *tensors) if t is not None)
            made.append(TiledWeight(kind, Planes(own, *tensors), self.scratch, self.workspace))
        return made, size

    def _constant(self, bits: int, rows: int, columns: int, index: int) -> torch.Tensor:
        if bits not in self._planes:
            filled = torch.empty(40 << 20, dtype=torch.int32, device=self.device).fill_(bits)
            self._planes[bits] = filled
        begin = index * rows * columns
        return self._planes[bits][begin : begin + rows * columns].view(rows, columns)


def candidates(rows: int, sweep: bool, coding: str) -> Iterator[tuple[Tile, int]]:
    """Tiles and cuts that are worth a try."""
    if not sweep:
        kind = codings()[coding][0]
        yield choose_tile(padded_rows(rows), kind.codes_of_word, kind.zeros > 0), 0
        return
    firsts: tuple[bool, ...] = (False,)
    if rows <= 8:
        sizes, stages = [(16, 1), (32, 1), (32, 2)], (4, 6)
    elif rows <= 32:
        # One warp or two multiply by the units that take a warp's registers.
        sizes, stages = [(32, 1), (32, 2), (64, 2), (64, 4), (128, 4)], (3, 5)
    else:
        sizes, stages = [(32, 2), (64, 2), (64, 4), (128, 8)], (3, 4)
        firsts = (False, True)
    for (outputs, warps), stage, first in itertools.product(sizes, stages, firsts):
        if fits(coding, rows, outputs, warps, stage, first):
            for cuts in (1, 2, 4, 8):
                yield Tile(outputs, warps, stage, first), cuts


def row_candidates(sweep: bool, coding: str, shape: str) -> Iterator[tuple[int, int, int, bool]]:
    """Tiles of one row: outputs, vectors, warps."""
    outputs, inputs, what = SHAPES[shape]
    vectors = inputs // (32 if codings()[coding][0].codes_of_word == 4 else 16)
    small_groups = coding in ("q4_k", "mxfp4")
    for count, size in itertools.product((2, 4, 8, 16), (32, 64, 128, 256, 512)):
        for warps in (1, 2, 4, 8):
            each = size // (32 * warps) if size >= 32 * warps else 0
            registers = each * count * (12 if small_groups else 7) * (1 + ("gated" in what))
            if each in (1, 2) and size <= vectors and registers <= 112:
                programs = outputs // count // (2 if "gated" in what else 1)
                if sweep and programs >= 256:
                    yield count, size, warps, False
    if not sweep:
        yield 0, 0, 0, False


def fits(coding: str, rows: int, outputs: int, warps: int, stages: int, first: bool) -> bool:
    """Whether accumulators fit registers, and tiles shared memory."""
    sums = rows * outputs // (32 * warps)  # registers of a thread
    scaled = coding == "int8" or first
    limit = 160 if scaled else 64 if coding in ("q4_k", "awq") else 80
    codes = outputs * (128 if coding in ("fp8-block", "int8") else 64)
    return sums <= limit and stages * (codes + 256 * max(rows, 8)) <= 200 << 10


def runs(
    call: Call, weights: list[TiledWeight], x: torch.Tensor, out: torch.Tensor | None = None
) -> list[Callable[[], Any]]:
    """The product with each weight."""
    gated = "gated" in call.what
    if out is None:
        outputs = weights[0].shape[0] // (2 if gated else 1)
        out = torch.zeros(call.rows, outputs, dtype=x.dtype, device=x.device)
    norm = (torch.ones(x.shape[1], dtype=x.dtype, device=x.device), 1e-6)
    rows = x[: call.rows]
    how: dict[str, Any] = {
        "norm": norm if "norm" in call.what else None,
        "gated": gated,
        "added": "added" in call.what,
        "early": call.rows <= EARLY_ROWS,
    }
    if call.cuts == ROW:
        tile = RowTile(*call.tile[:3]) if call.tile[0] else row_tile(weights[0])
        return [functools.partial(multiply_row, rows, w, out, **how, tile=tile) for w in weights]
    how["choice"] = (Tile(*call.tile), call.cuts or weights[0].cuts)
    return [functools.partial(w.few_rows, rows, out, **how) for w in weights]


def microseconds(calls: Sequence[Callable[[], Any]], replays: int = 3) -> float:
    """Of one of the calls, captured one after the other."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    timer: Any = torch.cuda.Event
    begin, end = timer(enable_timing=True), timer(enable_timing=True)
    begin.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) * 1000 / replays / len(calls)


def plain_microseconds(shape: str, rows: int) -> float:
    """The same with bfloat16 weights: our own product for one row, the library's for more."""
    outputs, inputs, what = SHAPES[shape]
    count = max(2, SPREAD_BYTES // (2 * outputs * inputs))
    weights = [
        torch.randn(outputs, inputs, dtype=torch.bfloat16, device="cuda:0") for _ in range(count)
    ]
    x = torch.randn(rows, inputs, dtype=torch.bfloat16, device="cuda:0")
    norm = torch.ones(inputs, dtype=torch.bfloat16, device="cuda:0")
    gated = "gated" in what
    out = torch.zeros(rows, outputs, dtype=torch.bfloat16, device="cuda:0")
    if rows == 1:
        how: dict[str, Any] = {
            "norm": norm if "norm" in what else None,
            "epsilon": 1e-6,
            "gated": gated,
            "residual": out if "added" in what else None,
            "early": True,
        }
        calls = [functools.partial(triton_layer.one_row, x, w, **how) for w in weights]
    elif "added" in what:
        calls = [functools.partial(out.addmm_, x, w.t()) for w in weights]
    else:
        calls = [functools.partial(torch.mm, x, w.t(), out=out) for w in weights]
    return microseconds(calls)


def prefill(bank: Bank, names: list[str]) -> None:
    """Many rows: de-quantised tiles and the library's product, by the size of the tile."""
    for name, (shape, (outputs, inputs, _)) in itertools.product(names, SHAPES.items()):
        weights, _ = bank.weights(name, (outputs, inputs))
        plain = torch.randn(outputs, inputs, dtype=torch.bfloat16, device="cuda:0")
        for rows in (128, 256, 512, 2048, 8192):
            x = torch.randn(rows, inputs, dtype=torch.bfloat16, device="cuda:0")
            print(f"tiles {name} {shape} {rows} rows:", *_by_tiles(weights[0], plain, x))
        alone = microseconds([functools.partial(w.dequantise, 0, outputs, plain) for w in weights])
        print(f"dequantise {name} {shape}: {alone:.1f} us, {plain.nbytes / alone / 1e6:.2f} TB/s")


def _by_tiles(weight: TiledWeight, plain: torch.Tensor, x: torch.Tensor) -> Iterator[str]:
    out = torch.zeros(len(x), len(plain), dtype=torch.bfloat16, device="cuda:0")
    theirs = microseconds([functools.partial(torch.mm, x, plain.t(), out=out)])
    yield f"bf16 {theirs:.1f} us;"
    for size in (8, 32, 128):
        weight.scratch = torch.empty(size << 20, dtype=torch.bfloat16, device="cuda:0")
        ours = microseconds([functools.partial(weight.by_tiles, x, out)])
        yield f"{2 * size} MiB {ours:.1f} ({theirs / ours:.2f});"


def calls_of(names: list[str], rows: list[int], sweep: bool) -> list[Call]:
    """Everything that is to be measured."""
    found = []
    for name, (shape, (outputs, inputs, what)), count in itertools.product(
        names, SHAPES.items(), rows
    ):
        kinds = [what if count == 1 else "added" if what == "added" else ""]
        if "gated" in what and 1 < count <= 32:
            kinds.append("gated")
        if count == 1:
            tiles = row_candidates(sweep, name, shape)
            found += [Call(name, shape, 1, tile, ROW, what) for tile in tiles]
        for kind, (tile, cuts) in itertools.product(kinds, candidates(count, sweep, name)):
            programs = -(-outputs // tile.outputs) // (2 if "gated" in kind else 1) * max(cuts, 1)
            if "gated" in kind and tile.outputs * max(count, 8) // (32 * tile.warps) > 40:
                continue
            enough = 100 <= programs <= 132 * 64 // tile.warps
            if not sweep or (enough and inputs // 128 >= 2 * cuts):
                layout = (tile.outputs, tile.warps, tile.stages, tile.scaled_first)
                found.append(Call(name, shape, count, layout, cuts, kind))
    return found


def compile_all(calls: list[Call]) -> None:
    """Every kernel, in processes of their own: what they leave is found on disk."""
    kinds: dict[Any, Call] = {}
    for call in calls:
        inputs = SHAPES[call.shape][1] if call.cuts == ROW else 0
        kinds[call.coding, max(8, call.rows), call.tile, call.what, inputs] = call
    shares = [list(kinds.values())[index::_PROCESSES] for index in range(_PROCESSES)]
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(_PROCESSES, mp_context=context) as pool:
        failed = [text for texts in pool.map(compile_some, shares) for text in texts]
    print(f"{len(kinds)} kernels; {len(failed)} failed", *failed[:8], sep="\n  ")


def compile_some(calls: list[Call]) -> list[str]:
    """Run each on a small weight, or, of one row, on one of its size: inputs are compiled in."""
    device, failed = torch.device("cuda:0"), []
    x = torch.ones(256, 12288, dtype=torch.bfloat16, device=device)
    workspace = Workspace(device, 4096, 1 << 20)
    for call in calls:
        kind, *bits = codings()[call.coding]
        inputs = SHAPES[call.shape][1] if call.cuts == ROW else 4096
        codes = torch.zeros(512, inputs // kind.codes_of_word, dtype=torch.int16, device=device)
        planes = [
            torch.zeros(384, 512, dtype=torch.int32, device=device) if one else None for one in bits
        ]
        weight = TiledWeight(kind, Planes(codes, *planes), x.view(-1), workspace)
        cuts = call.cuts if call.cuts == ROW else 1
        small = Call(call.coding, "", call.rows, call.tile, cuts, call.what)
        try:
            runs(small, [weight], x[:, :inputs])[0]()
            torch.cuda.synchronize()
        except Exception as error:  # noqa: BLE001 - which of them, and go on
            failed.append(f"{call}: {str(error)[:200]}")
    return failed


def check(bank: Bank, found: dict[Call, tuple[float, int]]) -> None:
    """Errors of the best of each product against that of the de-quantised numbers in float32."""
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    worst: dict[str, float] = {}
    for call in best_calls(found):
        outputs, inputs = 768, SHAPES[call.shape][1]
        weight = bank.weights(call.coding, (outputs, inputs))[0][1]
        numbers = torch.empty(outputs, inputs, dtype=torch.float32, device="cuda:0")
        weight.dequantise(0, outputs, numbers)
        x = torch.randn(call.rows, inputs, device="cuda:0").to(torch.bfloat16)
        rows = x.float()
        if "norm" in call.what:
            rows = torch.nn.functional.rms_norm(rows, (inputs,), eps=1e-6)
        wanted = rows @ numbers.t()
        if "gated" in call.what:
            gate, up = wanted.chunk(2, dim=1)
            wanted = torch.nn.functional.silu(gate) * up
        out = torch.empty_like(wanted, dtype=torch.bfloat16)
        (run,) = runs(call, [weight], x, out)
        for _ in range(2):  # the second finds the workspace as the first has left it
            out.zero_()
            run()
        error = float((out.float() - wanted).norm() / wanted.norm())
        worst[call.coding] = max(worst.get(call.coding, 0.0), error)
        if not error < 0.01:
            print(f"WRONG {call}: {error:.3g}")
    print("worst error of the best:", {name: f"{error:.2e}" for name, error in worst.items()})


def groups_of(found: dict[Call, tuple[float, int]]) -> Iterator[tuple[Any, list[Call]]]:
    """What was measured of each product, the fastest first."""
    groups = itertools.groupby(found, key=lambda c: (c.coding, c.shape, c.rows, c.what))
    for key, group in groups:
        yield key, sorted(group, key=lambda c: found[c][0])


def best_calls(found: dict[Call, tuple[float, int]]) -> list[Call]:
    """The fastest of each product, of one row those of both kernels."""
    best = []
    for _, ordered in groups_of(found):
        best.append(ordered[0])
        best += [call for call in ordered if call.cuts == ROW][:1]
    return best


def main() -> None:
    """Compile, check, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--prefill", action="store_true")
    parser.add_argument("--codings", default="fp8-block,int4,q4_k")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument(
        "--limit", type=float, default=240.0, help="seconds; then what is left out is said"
    )
    options = parser.parse_args()
    names, rows = options.codings.split(","), [int(text) for text in options.rows.split(",")]
    begun = time.monotonic()
    calls = calls_of(names, rows, options.sweep)
    compile_all(calls)
    print(f"compiled after {time.monotonic() - begun:.0f} s; {len(calls)} to measure", flush=True)
    bank = Bank()
    plain = {(shape, count): plain_microseconds(shape, count) for shape in SHAPES for count in rows}
    torch.cuda.empty_cache()
    print("bf16 us:", {f"{shape} {count}": round(us, 1) for (shape, count), us in plain.items()})
    if options.prefill:
        prefill(bank, names)
        print(f"tiles after {time.monotonic() - begun:.0f} s", flush=True)
    found = measure(bank, calls, begun + options.limit)
    show(found, plain)
    check(bank, found)
    if folder := os.environ.get("OUT"):
        text = json.dumps([{**asdict(call), "us": us} for call, (us, _) in found.items()])
        (Path(folder) / "gpu_packed.json").write_text(text)
    print(f"done after {time.monotonic() - begun:.0f} s", flush=True)


def measure(bank: Bank, calls: list[Call], until: float) -> dict[Call, tuple[float, int]]:
    """Microseconds of each, and the bytes of its weight."""
    found: dict[Call, tuple[float, int]] = {}
    x = {
        inputs: torch.randn(256, inputs, device="cuda:0").to(torch.bfloat16)
        for inputs in (4096, 12288)
    }
    key: tuple[str, str] | None = None
    weights: list[TiledWeight] = []
    size = 0
    for call in calls:
        if time.monotonic() > until:
            print(f"time is over: {len(calls) - len(found)} not measured")
            break
        outputs, inputs, _ = SHAPES[call.shape]
        if key != (call.coding, call.shape):
            key = (call.coding, call.shape)
            weights, size = bank.weights(call.coding, (outputs, inputs))
        try:
            found[call] = (microseconds(runs(call, weights, x[inputs])), size)
        except Exception as error:  # noqa: BLE001 - one that does not run is no candidate
            print(f"{call}: {str(error)[:160]}")
    return found


def show(found: dict[Call, tuple[float, int]], plain: dict[tuple[str, int], float]) -> None:
    """The best of each product, and sums over a layer."""
    layers: dict[tuple[str, int], list[float]] = {}
    for (coding, shape, rows, what), ordered in groups_of(found):
        us, size = found[ordered[0]]
        theirs = plain[shape, rows]
        shown = ordered[: 8 if rows == 1 else 5]
        if rows == 1:
            shown += [call for call in ordered[8:] if call.cuts != ROW][:1]
        best = "; ".join(f"{found[call][0]:.1f} {call.label}" for call in shown)
        print(
            f"{coding:9} {shape:7} {rows:3} {what:10} {us:6.1f} us {size / us / 1e6:.2f} TB/s "
            f"{theirs / us:.2f} x bf16 {theirs:.1f} | {best}"
        )
        if rows == 1 or what != "gated":
            sums = layers.setdefault((coding, rows), [0.0, 0.0])
            sums[0] += us
            sums[1] += theirs
    for (coding, rows), (ours, theirs) in layers.items():
        ratio = f"{theirs / ours:.2f} x"
        print(f"layer {coding:9} {rows:3} rows: {ours:6.1f} us, bf16 {theirs:6.1f}, {ratio}")


if __name__ == "__main__":
    main()
