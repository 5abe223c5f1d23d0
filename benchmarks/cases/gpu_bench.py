"""Timing on a CUDA device: medians of device time, with and without the L2 cache flushed, against measured ceilings."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch


@dataclass
class Floor:
    """Microseconds of a call that no kernel with as much to do is under, timed as ops are."""

    cold: float
    warm: float


@dataclass
class Ceilings:
    """What this card did in this run: device-to-device copy (bytes read + written), a bf16 8192^3 product, and the least that a
    call takes: a kernel that does nothing, and one that looks up 64 rows by their numbers (load, load, store).
    """

    copy_gbs: float
    bf16_tflops: float
    nothing_us: Floor
    chain_us: Floor


@dataclass
class Result:
    """One line of the results file; times in microseconds, `share` of the binding ceiling with a cold L2.

    `copy_us_*`: a plain copy that moves as many bytes, timed alike; ops bound by memory only.
    """

    op: str
    shape: str
    kernel: str
    us_cold: float
    us_warm: float
    gbs: float
    tflops: float
    bound: str
    ceiling_us: float
    share: float
    copy_us_cold: float | None = None
    copy_us_warm: float | None = None
    error: float | None = None
    extra: dict[str, Any] = field(default_factory=dict)


_FLUSH: list[torch.Tensor] = []


def _flush(*, clean: bool) -> None:
    if not _FLUSH:
        _FLUSH.append(torch.empty(64 * 2**20, dtype=torch.int32, device="cuda"))  # 256 MB, over four times the L2
    _FLUSH[0].sum() if clean else _FLUSH[0].zero_()


def time_cold(fn: Callable[[], Any], repeats: int = 15, *, clean: bool = False) -> float:
    """Median device microseconds of one call with the L2 flushed before it (calls queue behind the flush).

    A flush that writes leaves lines that are written back during the call; a `clean` one reads.
    """
    fn()
    torch.cuda.synchronize()
    pairs = []
    for _ in range(repeats):
        torch.cuda._sleep(400_000)  # about 0.2 ms, in which the host queues what follows
        _flush(clean=clean)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        fn()
        end.record()
        pairs.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(b.elapsed_time(e) for b, e in pairs) * 1e3


def time_warm(fn: Callable[[], Any], calls: int = 10, repeats: int = 7) -> float:
    """Median device microseconds a call, calls back to back inside a CUDA graph."""
    fn()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        fn()  # per-stream workspaces are made outside the capture
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(calls):
                fn()
        times = []
        for _ in range(repeats):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times)


_COPIES: dict[int, tuple[float, float]] = {}


def time_copy(nbytes: float) -> tuple[float, float]:
    """Cold and warm microseconds of a plain copy that reads and writes `nbytes` together: the driver's or an elementwise kernel.

    A launch, the way to full speed and, cold, the lines that the flush left dirty cost it what they cost an op.
    """
    size = max(1, round(nbytes / 8))  # int32 numbers read, and as many written
    if size not in _COPIES:
        source = torch.randint(0, 1 << 30, (size,), dtype=torch.int32, device="cuda")
        target = torch.empty_like(source)
        ways = (lambda: target.copy_(source), lambda: torch.bitwise_not(source, out=target))
        _COPIES[size] = min(map(time_cold, ways)), min(map(time_warm, ways))
    return _COPIES[size]


def measure_ceilings() -> Ceilings:
    """Copy 2 GB and multiply 8192^3 on random data."""
    a = torch.randn(2**29, device="cuda")
    b = torch.empty_like(a)
    copy = statistics.median(_timed(lambda: b.copy_(a)) for _ in range(9))
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    y = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for _ in range(3):
        x @ y
    product = statistics.median(_timed(lambda: x @ y) for _ in range(9))
    return Ceilings(2 * 2**31 / copy / 1e3, 2 * 8192**3 / product / 1e6, *measure_floors())


def measure_floors() -> tuple[Floor, Floor]:
    """Of a kernel that does nothing, and of one that looks up 64 rows of 512 bytes."""
    slots = torch.randperm(2**20, device="cuda")[:64]
    rows, out = torch.zeros(2**20, 128, device="cuda"), torch.empty(64, 128, device="cuda")
    calls = (lambda: torch.cuda._sleep(0), lambda: torch.index_select(rows, 0, slots, out=out))
    nothing, chain = (Floor(round(time_cold(call), 2), round(time_warm(call), 2)) for call in calls)
    return nothing, chain


def _timed(fn: Callable[[], Any]) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    fn()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e3


class Recorder:
    """Collects results, prints a table line for each, and writes JSON lines into the folder `OUT`, see README.md."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ceilings = measure_ceilings()
        self.results: list[Result] = []
        self.failed = 0
        nothing, chain = self.ceilings.nothing_us, self.ceilings.chain_us
        print(f"copy {self.ceilings.copy_gbs:.0f} GB/s, bf16 {self.ceilings.bf16_tflops:.0f} TFLOP/s", flush=True)
        print(f"empty kernel: cold {nothing.cold:.2f} warm {nothing.warm:.2f} us", flush=True)
        print(f"64 rows looked up: cold {chain.cold:.2f} warm {chain.warm:.2f} us", flush=True)

    def record(
        self,
        op: str,
        shape: str,
        kernel: str,
        fn: Callable[[], Any],
        *,
        nbytes: float,
        flops: float = 0.0,
        error: float | None = None,
        warm: bool = True,
        **extra: Any,
    ) -> Result | None:
        """Time `fn`; a failure is printed and recorded as a failure, and does not stop the run."""
        try:
            cold = time_cold(fn)
            hot = time_warm(fn) if warm else float("nan")
            memory_us, matrix_us = nbytes / self.ceilings.copy_gbs / 1e3, flops / self.ceilings.bf16_tflops / 1e6
            copy = time_copy(nbytes) if memory_us >= matrix_us else None
        except Exception as failure:
            self.failed += 1
            print(
                f"{op:22s} {shape:34s} {kernel:22s} FAILED {type(failure).__name__}: {str(failure)[:300]}", flush=True
            )
            return None
        ceiling = max(memory_us, matrix_us)
        result = Result(
            op, shape, kernel, round(cold, 2), round(hot, 2), round(nbytes / cold / 1e3, 1),
            round(flops / cold / 1e6, 1), "memory" if memory_us >= matrix_us else "matrix", round(ceiling, 2),
            round(ceiling / cold, 3), *(round(us, 2) if us is not None else None for us in copy or (None, None)), error, extra,
        )  # fmt: skip
        self.results.append(result)
        accuracy = "" if error is None else f" err {error:.1e}"
        beside = f", of a copy of as many bytes {copy[0] / cold:5.1%} warm {copy[1] / hot:5.1%}" if copy else ""
        print(
            f"{op:22s} {shape:34s} {kernel:22s} cold {cold:8.1f} warm {hot:8.1f} us  ceiling {ceiling:7.1f} us "
            f"({result.bound}) share {result.share:5.1%} warm {ceiling / hot:5.1%}{beside}{accuracy}",
            flush=True,
        )
        return result

    def save(self) -> None:
        """Write `<name>.jsonl` into the folder that the variable `OUT` names: one header line, then one line a result."""
        path = Path(os.environ.get("OUT", ".")) / f"{self.name}.jsonl"
        lines = (self.header(), *map(asdict, self.results))
        path.write_text("\n".join(map(json.dumps, lines)) + "\n")
        print(f"results: {path}", flush=True)

    def header(self) -> dict[str, Any]:
        """Date, device, versions and ceilings of this run."""
        import triton

        return {
            "date": datetime.date.today().isoformat(),
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "cuda": torch.version.cuda,
            "ceilings": asdict(self.ceilings),
            "note": "us_cold: L2 flushed before each call; us_warm: back to back in a CUDA graph; share: ceiling_us / us_cold; "
            "copy_us: a plain copy of as many bytes",
        }


def record_case(name: str, measure: Callable[..., None], argv: list[str], **switches: str) -> int:
    """Run a case that consists of recorded lines: `--json` prints them as one object, else they are saved.

    Args:
        name: of the case, without `gpu-`.
        measure: gets the `Recorder`, and each switch as a bool.
        argv: the case's arguments.
        switches: help by name of options without a value.

    Returns:
        The exit status: 1 if a line failed.
    """
    parser = argparse.ArgumentParser(prog=f"deepinfer bench gpu-{name}")
    parser.add_argument("--json", action="store_true", help="print one JSON object; the table goes to standard error")
    for switch, text in switches.items():
        parser.add_argument(f"--{switch}", action="store_true", help=text)
    asked = parser.parse_args(argv)
    torch.manual_seed(0)
    with contextlib.redirect_stdout(sys.stderr) if asked.json else contextlib.nullcontext():
        recorder = Recorder(name)
        measure(recorder, **{switch: getattr(asked, switch) for switch in switches})
    if asked.json:
        print(json.dumps({**recorder.header(), "results": [asdict(result) for result in recorder.results]}))
    else:
        recorder.save()
    return 1 if recorder.failed else 0


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """||out - reference|| / ||reference||; NaN stays NaN."""
    out, reference = out.double(), reference.double()
    return float((out - reference).norm() / reference.norm().clamp_min(1e-300))
