"""How much of steady decode the device idles: from kernel intervals, from the stream's own clock, and where the gaps are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch

Interval = tuple[int, int, str]
"""(start, end, name) of something that ran on the device, ns."""


def kernel_intervals(profiler: Any) -> list[Interval]:
    """Everything that ran on the device, ascending."""
    found = []
    for event in profiler.profiler.kineto_results.events():
        if event.device_type() == torch.autograd.DeviceType.CUDA and event.duration_ns() > 0:
            found.append((event.start_ns(), event.start_ns() + event.duration_ns(), event.name()))
    return sorted(found)


def idle_share(intervals: list[Interval]) -> float:
    """Share of the time from the first start to the last end in which nothing ran."""
    idle = sum(gap for gap, _, _ in gaps(intervals))
    return idle / (max(end for _, end, _ in intervals) - intervals[0][0])


def gaps(intervals: list[Interval]) -> Iterator[tuple[int, str, str]]:
    """(ns, what ended before, what began after) of each time in which nothing ran."""
    reached, last = intervals[0][0], ""
    for start, end, name in intervals:
        if start > reached:
            yield start - reached, last, name
        if end > reached:
            reached, last = end, name


def by_kernel(intervals: list[Interval], steps: int, top: int = 14) -> Iterator[str]:
    """Lines: time a step by kernel, the longest first."""
    totals: dict[str, list[float]] = defaultdict(lambda: [0, 0])
    for start, end, name in intervals:
        totals[short(name)][0] += (end - start) / 1e3 / steps
        totals[short(name)][1] += 1 / steps
    for name, (us, calls) in sorted(totals.items(), key=lambda item: -item[1][0])[:top]:
        yield f"    {us:9.1f} us a step  {calls:6.1f} calls  {name}"


def by_gap(intervals: list[Interval], steps: int, top: int = 12) -> Iterator[str]:
    """Lines: idle time a step by the kernels around it, the longest first."""
    totals: dict[str, list[float]] = defaultdict(lambda: [0, 0])
    for gap, before, after in gaps(intervals):
        entry = totals[f"{short(before)} -> {short(after)}"]
        entry[0] += gap / 1e3 / steps
        entry[1] += 1 / steps
    for name, (us, calls) in sorted(totals.items(), key=lambda item: -item[1][0])[:top]:
        yield f"    {us:9.2f} us a step idle  {calls:6.1f} gaps  {name}"


def short(name: str) -> str:
    """A kernel's name without arguments."""
    return name.removeprefix("void ").replace("(anonymous namespace)::", "").split("<")[0].split("(")[0][-60:]


def stream_ms(engine: Any, steps: int) -> float:
    """Milliseconds of a step on the device's own clock: nothing is profiled, and the device is not made to wait for a beginning.

    Every call of `step` enqueues one step before it takes the results of the one before.
    """
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    engine.step()
    for mark in marks:
        engine.step()
        mark.record()
    torch.cuda.synchronize()
    return marks[0].elapsed_time(marks[-1]) / steps


def graph_ms(engine: Any, replays: int) -> float:
    """Milliseconds of the last decode step's graph alone, replayed back to back; 0 if steps are not captured.

    The sequences are of no use afterwards: end them.
    """
    graphs = engine._parts.runner._graphs
    if graphs is None or graphs.decodes.latest is None:
        return 0.0
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graphs.decodes.latest.graph.replay()
    begin.record()
    for _ in range(replays):
        graphs.decodes.latest.graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / replays


def steady(engine: Any, steps: int, profiled: int) -> tuple[dict[str, Any], list[Interval]]:
    """Figures of steady decode, which must be going on, and what ran in the `profiled` steps among them.

    `idle_profiled` is the share without a kernel under the profiler, which delays every launch. `idle` sets the time with
    kernels against steps on the device's own clock before and after: that share is what counts. `idle_outside` is the share of
    the steps after, whose sequences are about as long, that their graph alone, replayed back to back, does not take.
    """
    from torch.profiler import ProfilerActivity, profile

    before = stream_ms(engine, steps)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(profiled):
            engine.step()
        torch.cuda.synchronize()
    after = stream_ms(engine, steps)
    alone = graph_ms(engine, steps)
    intervals = kernel_intervals(profiler)
    share = idle_share(intervals)
    span = (max(end for _, end, _ in intervals) - intervals[0][0]) / 1e6 / profiled
    wall, busy = (before + after) / 2, span * (1 - share)
    return {
        "idle_profiled": round(share, 4),
        "busy_ms": round(busy, 4),
        "step_ms": round(wall, 4),
        "before_after_ms": [round(before, 4), round(after, 4)],
        "graph_ms": round(alone, 4),
        "idle": round(max(0.0, 1 - busy / wall), 4),
        "idle_outside": round(max(0.0, 1 - alone / after), 4) if alone else None,
    }, intervals
