# Launches kernels with arguments that no type checker knows.
# pyrefly: ignore-errors
"""SmolLM2's dense products at decode: `dense_linear` in many tilings against cuBLAS with kernels around it.

Every tiling is compiled and compared with float64 in a process of its own, then timed in a CUDA graph that walks 100 MB of
weights. At the end whole layers without attention: one kernel a product against separate ops, with the best tilings found.
`--best FILE` keeps those as JSON, beside what an earlier run kept there.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from deepinfer_kernels_cuda.dense import Tiles, Weighed, dense_linear, weighed_like
from deepinfer_kernels_cuda.llama_rows import llama_norm, silu_mul
from gpu_bench import time_warm

EPS = 1e-5
ROWS = (8, 64, 256, 1000)
SHARED = 227 * 1024


class Way(NamedTuple):
    """A tiling; `linked` products take weighed rows, or leave them."""

    tiles: Tiles
    linked: bool


@dataclass(frozen=True)
class Shape:
    """A product: `outputs` rows of weight, twice as many with SwiGLU."""

    name: str
    inputs: int
    outputs: int
    norm: bool = False
    swiglu: bool = False


SHAPES = (
    Shape("qkv", 576, 960, norm=True),
    Shape("o", 576, 576),
    Shape("gate_up", 576, 1536, norm=True, swiglu=True),
    Shape("down", 1536, 576),
)
FEW = (
    Tiles(16, 16, 128), Tiles(16, 32, 128), Tiles(16, 64, 128, stages=3), Tiles(32, 32, 64), Tiles(32, 32, 128, stages=3),
    Tiles(64, 16, 64), Tiles(64, 32, 64), Tiles(64, 32, 128, stages=3),
)  # fmt: skip
SOME = (
    Tiles(64, 32, 64), Tiles(64, 32, 64, stages=6), Tiles(64, 32, 128, stages=3), Tiles(64, 64, 64),
    Tiles(64, 64, 128, stages=3), Tiles(32, 32, 128, stages=3), Tiles(32, 64, 64), Tiles(128, 32, 64), Tiles(128, 64, 64, 8),
)  # fmt: skip
MANY = (
    Tiles(64, 64, 64), Tiles(64, 64, 64, stages=6), Tiles(64, 64, 128, stages=3), Tiles(128, 64, 64), Tiles(128, 64, 64, 8),
    Tiles(128, 64, 128, 8, stages=3), Tiles(64, 128, 64), Tiles(64, 128, 64, 8), Tiles(128, 128, 64, 8),
    Tiles(128, 128, 64, 8, stages=3), Tiles(128, 32, 64), Tiles(256, 64, 64, 8, stages=3), Tiles(64, 32, 128, stages=3),
)  # fmt: skip


def candidates(shape: Shape, rows: int) -> list[Way]:
    base = FEW if rows <= 64 else SOME if rows <= 256 else MANY
    found = [Way(tiles, True) for tiles in base] + [Way(tiles, False) for tiles in base[:5]]
    if shape.norm:
        found.append(Way(replace(base[0], norm=1), False))
    return [way for way in found if shared(shape, way.tiles) <= SHARED]


def shared(shape: Shape, t: Tiles) -> int:
    width = t.rows + t.outputs * (2 if shape.swiglu else 1)
    return (width * t.stages + (t.rows if shape.norm else 0)) * t.inputs * 2


def tensors(shape: Shape, rows: int, copies: int = 1) -> tuple[Any, ...]:
    torch.manual_seed(rows)
    x = torch.randn(rows, shape.inputs, device="cuda").bfloat16()
    n = shape.outputs * (2 if shape.swiglu else 1)
    weights = (torch.randn(copies, n, shape.inputs, device="cuda") * shape.inputs**-0.5).bfloat16()
    gain = (torch.rand(shape.inputs, device="cuda") + 0.5).bfloat16() if shape.norm else None
    residual = None if shape.norm else torch.randn(rows, shape.outputs, device="cuda").bfloat16()
    return x, weights, gain, residual


def wanted(shape: Shape, x: Any, weight: Any, gain: Any, residual: Any) -> torch.Tensor:
    """The product in float64."""
    y = x.double()
    if shape.norm:
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + EPS) * gain.double()
    y = y @ weight.double().t()
    if shape.swiglu:
        gate, up = y.chunk(2, -1)
        y = torch.nn.functional.silu(gate) * up
    return y if residual is None else y + residual.double()


def separate(shape: Shape, x: Any, weight: Any, gain: Any, residual: Any) -> torch.Tensor:
    if residual is not None:
        return residual.addmm_(x, weight.t())
    y = torch.nn.functional.linear(llama_norm(x, gain, EPS), weight)
    return silu_mul(y) if shape.swiglu else y


def ready(shape: Shape, way: Way, x: Any, gain: Any) -> Any:
    """x as the product takes it."""
    if not (way.linked and shape.norm):
        return x
    return Weighed((x.float() * gain.float()).bfloat16(), x.float().square().view(len(x), -1, 64).sum(-1))


def fused(shape: Shape, way: Way, x: Any, weight: Any, gain: Any, residual: Any) -> torch.Tensor:
    """`gain` of a product with a residual is the next norm's, or None."""
    tiles = way.tiles
    if shape.norm:
        gain = None if isinstance(x, Weighed) else gain
        return dense_linear(x, weight, norm_weight=gain, eps=EPS, swiglu=shape.swiglu, tiles=tiles)
    if gain is None:
        return dense_linear(x, weight, residual=residual, out=residual, tiles=tiles)
    left = weighed_like(residual, tiles)
    dense_linear(x, weight, residual=residual, out=residual, weighed=left, next_weight=gain, tiles=tiles)
    return left


def error(found: torch.Tensor, want: torch.Tensor) -> tuple[float, float]:
    """Root mean square of the difference and its largest element, both in parts of the result's root mean square."""
    difference, size = found.double() - want, want.square().mean().sqrt()
    return float(difference.square().mean().sqrt() / size), float(difference.abs().max() / size)


def after(shape: Shape, way: Way, gain: Any) -> Any:
    """The weight of the norm after a product that is to leave weighed rows."""
    if shape.norm or not way.linked:
        return gain
    return torch.full((shape.outputs,), 1.25, dtype=torch.bfloat16, device="cuda")


def check(shape: Shape, way: Way) -> tuple[float, float] | str:
    """Compile, and compare at all row counts; the worst errors, or what failed."""
    worst = (0.0, 0.0)
    try:
        for rows in (*ROWS, 1, 77):
            x, weights, gain, residual = tensors(shape, rows)
            want = wanted(shape, x, weights[0], gain, residual)
            result = fused(shape, way, ready(shape, way, x, gain), weights[0], after(shape, way, gain), residual)
            if isinstance(result, Weighed):
                assert torch.equal(result.rows, (residual.float() * 1.25).bfloat16()), "weighed rows"
                assert torch.allclose(result.squares.sum(-1), residual.float().square().sum(-1), rtol=1e-4), "squares"
            found = error(residual if residual is not None else result, want)
            worst = max(worst[0], found[0]), max(worst[1], found[1])
    except Exception as failure:
        return f"{type(failure).__name__}: {str(failure)[:100]}"
    return worst


def name_of(way: Way) -> str:
    t = way.tiles
    return f"{t.rows}x{t.outputs}x{t.inputs}/w{t.warps}s{t.stages}{'+' if way.linked else f'n{t.norm}'}"


def sweep(shape: Shape, rows: int, right: dict[tuple[Shape, Way], bool]) -> Tiles | None:
    """Time every right way; print the best; return the tiles of the best linked one."""
    size = shape.inputs * shape.outputs * (4 if shape.swiglu else 2)
    copies = max(24, 10**8 // size)
    x, weights, gain, residual = tensors(shape, rows, copies)

    def each(fn: Callable[..., Any], x: Any, gain: Any) -> float:
        return time_warm(lambda: [fn(x, w, gain, residual) for w in weights], 1) / copies

    before = each(functools.partial(separate, shape), x, gain)
    timed = {
        way: each(functools.partial(fused, shape, way), ready(shape, way, x, gain), after(shape, way, gain))
        for way in candidates(shape, rows)
        if right.get((shape, way))
    }
    order = sorted(timed, key=timed.__getitem__)
    alone = [way for way in order if not way.linked]
    line = f"{shape.name:8s} {rows:5d} rows: separate {before:6.2f} us |"
    line += "".join(f" {name_of(way)} {timed[way]:.2f}" for way in order[:5])
    line += "".join(f" | alone {name_of(way)} {timed[way]:.2f}" for way in alone[:1])
    print(line, flush=True)
    return next((way.tiles for way in order if way.linked), None)


def layers(rows: int, best: dict[tuple[str, int], Tiles], count: int = 30) -> None:
    """Whole layers, attention left out (the queries go on): microseconds a layer, and how far results are from float32's."""
    drawn = {s.name: tensors(s, rows, count) for s in SHAPES}
    start = torch.randn(rows, 576, device="cuda").bfloat16()
    hidden = start.clone()

    def walk(product: Callable[..., Any]) -> torch.Tensor:
        hidden.copy_(start)
        for i in range(count):
            y = hidden
            for s in SHAPES:
                _, weights, gain, _ = drawn[s.name]
                residual = None if s.norm else hidden
                y = product(
                    s, y[:, : s.inputs] if s.name == "o" else hidden if s.norm else y, weights[i], gain, residual
                )
        return hidden

    def linked() -> None:
        hidden.copy_(start)
        y = llama_norm(hidden, drawn["qkv"][2], EPS)
        for i in range(count):
            for s in SHAPES:
                x = y[:, : s.inputs] if s.name == "o" else y
                gain = drawn["gate_up" if s.name == "o" else "qkv"][2]
                if s.name == "qkv" and i == 0:
                    gain = None  # the first product takes rows that are normalised
                y = fused(s, Way(best[s.name, rows], True), x, drawn[s.name][1][i], gain, None if s.norm else hidden)

    want = walk(
        lambda s, x, w, g, r: r.copy_(wanted(s, x, w, g, r)) if r is not None else wanted(s, x, w, g, r).bfloat16()
    )
    want = want.double().clone()
    for name, launch in (("separate", lambda: walk(separate)), ("one kernel", linked)):
        us = time_warm(launch, 1) / count
        torch.cuda.synchronize()
        close = error(hidden, want)
        print(
            f"layer    {rows:5d} rows, {name}: {us:.2f} us a layer; error {close[0]:.2e} rms, {close[1]:.2e} most",
            flush=True,
        )


def load(file: Path | None) -> dict[tuple[str, int], Tiles]:
    """Best tilings that an earlier run kept."""
    if file is None or not file.exists():
        return {}
    return {(name, rows): Tiles(**tiles) for name, _, _, rows, tiles in json.loads(file.read_text())}


def run(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--best", type=Path)
    parser.add_argument("--shapes", nargs="*", default=[s.name for s in SHAPES])
    parser.add_argument("--rows", nargs="*", type=int, default=ROWS)
    parser.add_argument("--workers", type=int, default=16)
    asked = parser.parse_args(argv)
    if not torch.cuda.is_available():
        sys.stderr.write("no CUDA device\n")
        return 2
    shapes = [s for s in SHAPES if s.name in asked.shapes]
    work = sorted({(s, way) for s in shapes for rows in asked.rows for way in candidates(s, rows)}, key=repr)
    with ProcessPoolExecutor(asked.workers, multiprocessing.get_context("spawn")) as pool:
        found = dict(zip(work, pool.map(check, *zip(*work, strict=True)), strict=True))
    right = {}
    for (shape, way), errors in found.items():
        # Rounding the result alone is 1.7e-3 (2^-9 / sqrt 3 a value); SwiGLU rounds its halves too.
        right[shape, way] = not isinstance(errors, str) and errors[0] < 6e-3 and errors[1] < 0.2
        if not right[shape, way]:
            print(f"WRONG {shape.name} {name_of(way)}: {errors}", flush=True)
    worst = max((e for e in found.values() if not isinstance(e, str)), default=None)
    print(f"{sum(right.values())} of {len(right)} tilings right; worst errors {worst}", flush=True)
    best = load(asked.best)
    for shape in shapes:
        for rows in asked.rows:
            tiles = sweep(shape, rows, right)
            if tiles is not None:
                best[shape.name, rows] = tiles
    if asked.best is not None:
        sizes = {s.name: (s.outputs, s.inputs) for s in SHAPES}
        kept = [[name, *sizes[name], rows, asdict(tiles)] for (name, rows), tiles in best.items()]
        asked.best.write_text(json.dumps(kept))
    for rows in asked.rows:
        if all((s.name, rows) in best for s in SHAPES):
            layers(rows, best)
    return 0 if all(right.values()) else 1


if __name__ == "__main__":
    raise SystemExit(run(sys.argv[1:]))
