"""Expert parallelism between two GPUs: what it gives back, and how fast it moves rows beside a plain exchange.

Run one process a GPU: `python -m torch.distributed.run --nproc-per-node 2 benchmarks/cases/gpu_parallel.py check time stages`;
`nccl` or `peers` beside these words takes one provider alone. Leave multicast off (`NCCL_NVLS_ENABLE=0
TORCH_SYMM_MEM_DISABLE_MULTICAST=1`) where GPUs are shared with others. On one card: `kernels`, `check nccl` as one process, and
with `TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1` `check peers` as two. Expert e multiplies its rows by 1 + e / 64: every sum is
known to the bit.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from deepinfer_kernels_cuda.errors import UnsupportedDeviceError
from deepinfer_kernels_cuda.parallel import ExpertParallel
from deepinfer_kernels_cuda.parallel_rows import Segments, Target, number_rows, send_rows, sum_rows
from deepinfer_kernels_cuda.peers import PeerParallel, return_rows
from gpu_bench import time_cold, time_copy, time_warm
from torch import distributed

EXPERTS, TOP_K, WIDTH, MOST = 384, 6, 5120, 16384
CHECKED = ((7, 0), (0, 0), (1, 1), (64, 64), (1, 300), (2500, 1), (4096, 4096), (16384, 16384), (0, 16384))
SMALL, LARGE = (1, 8, 64, 256), (1024, 4096, 16384)
WORDS = ("check", "time", "stages", "kernels", "nccl", "peers")
GRAPH_CALLS = 10
BUSY = 2_000_000  # cycles: about a millisecond


@dataclass(frozen=True)
class Case:
    """One rank's tokens: x bfloat16 [t, d], ids int64 [t, k] with some missing, weights float32 [t, k]."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor


def say(text: str) -> None:
    if distributed.get_rank() == 0:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


def case(rank: int, tokens: int, device: torch.device, kind: str = "spread") -> Case:
    """Tokens of any rank, the same wherever they are made. kind: `spread`, `one` (all experts of rank 1) or `none`."""
    generator = torch.Generator(device).manual_seed(100 * rank + tokens)
    x = torch.randn(tokens, WIDTH, generator=generator, device=device).bfloat16()
    ids = torch.rand(tokens, EXPERTS, generator=generator, device=device).topk(TOP_K).indices
    weights = torch.rand(tokens, TOP_K, generator=generator, device=device)
    if kind != "spread":
        ids = ids % (EXPERTS // 2) + EXPERTS // 2 if kind == "one" else torch.full_like(ids, -1)
    elif tokens > 1:
        ids[0], ids[1, 0] = -1, -1
    return Case(x, ids, weights)


def experts(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, first: int) -> torch.Tensor:
    """The weighted sum of each row's experts; `first` is the id of expert 0 here."""
    factor = torch.zeros(len(x), 1, device=x.device)
    for column in range(ids.shape[1]):
        here = ids[:, column : column + 1]
        factor += torch.where(here >= 0, 1 + (here + first).float() / 64, 0) * weights[:, column : column + 1]
    return torch.where(factor != 0, x.float() * factor, 0).to(x.dtype)


def owned(ids: torch.Tensor, rank: int, local: int) -> torch.Tensor:
    """Local ids of a rank, -1 elsewhere."""
    return torch.where((ids >= rank * local) & (ids < (rank + 1) * local), ids - rank * local, -1)


def wrong(parallel: Any, tokens: tuple[int, ...], kind: str, most: int | None, device: torch.device) -> str:
    """What differs from what every rank can work out for itself, bit by bit, in three runs; empty where nothing does."""
    cases = [case(rank, count, device, kind) for rank, count in enumerate(tokens)]
    me, local = parallel.rank, parallel.local
    mine, found = cases[me], []
    rows = [owned(one.ids, me, local) for one in cases]
    goes = [(ids >= 0).any(-1) for ids in rows]
    for run in range(3):
        sent = parallel.dispatch(mine.x, mine.ids, mine.weights, most=most)
        if most is None:
            want = [
                torch.cat([getattr(one, part)[g] for one, g in zip(cases, goes, strict=True)])
                for part in ("x", "weights")
            ]
            equal = torch.equal(sent.x, want[0]) and torch.equal(sent.weights, want[1])
            equal &= torch.equal(sent.ids, torch.cat([ids[g] for ids, g in zip(rows, goes, strict=True)]))
        else:
            equal = len(sent.x) == len(tokens) * most
            for rank, (one, ids) in enumerate(zip(cases, rows, strict=True)):
                part = slice(rank * most, rank * most + len(ids))
                there = goes[rank]
                equal &= torch.equal(sent.ids[part], ids) and torch.equal(sent.x[part][there], one.x[there])
                equal &= torch.equal(sent.weights[part][there], one.weights[there])
                equal &= bool((sent.ids[part.stop : (rank + 1) * most] == -1).all())
        if not equal:
            found.append(f"rows of run {run}")
        back = parallel.combine(experts(sent.x, sent.ids, sent.weights, parallel.first), sent.handle)
        parts = [experts(mine.x, owned(mine.ids, r, local), mine.weights, r * local) for r in range(parallel.size)]
        want = torch.stack(parts).float().sum(0).bfloat16()
        if not torch.equal(back, want):
            found.append(f"sums of run {run}")
    return ", ".join(found)


def wrong_graph(parallel: Any, device: torch.device) -> str:
    """Whether a captured step with other tokens gives what the same step gives uncaptured."""
    now, later = case(parallel.rank, 64, device), case(parallel.rank + 7, 64, device)

    def step() -> torch.Tensor:
        sent = parallel.dispatch(now.x, now.ids, now.weights, most=64)
        return parallel.combine(experts(sent.x, sent.ids, sent.weights, parallel.first), sent.handle)

    graph, out = captured(step, 1)
    for old, new in zip((now.x, now.ids, now.weights), (later.x, later.ids, later.weights), strict=True):
        old.copy_(new)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    kept = out.clone()
    return "" if torch.equal(kept, step()) else "graph"


def captured(call: Callable[[], Any], calls: int) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of several calls, and what the last gave."""
    call()
    torch.cuda.synchronize()
    distributed.barrier()
    graph, out = torch.cuda.CUDAGraph(), None
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(calls):
            out = call()
    return graph, out


def agreed(what: str, failures: list[str]) -> bool:
    """Whether no rank failed; says so."""
    all_of: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(all_of, failures)
    say(f"{what}: {all_of if any(all_of) else 'equal to the bit'}")
    return not any(all_of)


def check(providers: dict[str, Any], device: torch.device) -> bool:
    """Every provider, count and kind, on all ranks."""
    good = True
    for name, parallel in providers.items():
        failures = []
        kinds = [(tokens, "spread") for tokens in CHECKED] + [((300, 4096), "one"), ((64, 5), "none")]
        for tokens, kind in kinds:
            for most in (None, max(*tokens, 1)):
                words = wrong(parallel, tokens[: parallel.size], kind, most, device)
                failures += [f"{tokens} {kind} most {most}: {words}"] if words else []
        good &= agreed(f"check {name}: {2 * len(kinds)} cases, three runs each", failures)
        words = wrong_graph(parallel, device)
        good &= agreed(f"check {name}: a graph with other tokens", [words] if words else [])
    return good


def timed(call: Callable[[], Any], ahead: bool) -> tuple[float, Any]:
    """Microseconds between events around a call, and what it gave. All ranks begin together, on an idle device; with `ahead`
    on one that is busy for a millisecond, in which the host goes on."""
    torch.cuda.synchronize()
    distributed.barrier()
    torch.cuda.synchronize()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    if ahead:
        torch.cuda._sleep(BUSY)
    begin.record()
    out = call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e3, out


def median_us(call: Callable[[], Any], repeats: int = 9, *, ahead: bool = False) -> float:
    """Median over repeats, the slowest rank's."""
    call()
    return slowest(statistics.median(timed(call, ahead)[0] for _ in range(repeats)))


def graph_us(call: Callable[[], Any]) -> float:
    """Mean time of a call in a graph of several, the slowest rank's."""
    graph, _ = captured(call, GRAPH_CALLS)
    return median_us(graph.replay) / GRAPH_CALLS


def slowest(value: float) -> float:
    """The largest over ranks."""
    both = torch.tensor([value], device="cuda", dtype=torch.float64)
    distributed.all_reduce(both, op=distributed.ReduceOp.MAX)
    return float(both)


def plain(rows: list[int], device: torch.device) -> Callable[[], Any]:
    """`all_to_all_single` of the rows that travel to the other rank and come from it, and of nothing else."""
    rank = distributed.get_rank()
    gives, takes = [0, 0], [0, 0]
    gives[1 - rank], takes[1 - rank] = rows
    source = torch.randn(rows[0], WIDTH, device=device).bfloat16()
    target = torch.empty(rows[1], WIDTH, device=device, dtype=torch.bfloat16)
    return lambda: distributed.all_to_all_single(target, source, takes, gives)


def traffic(tokens: int, device: torch.device) -> list[int]:
    """Rows that go to the other rank, and come from it."""
    rank = distributed.get_rank()
    counts = [int((owned(case(r, tokens, device).ids, 1 - r, EXPERTS // 2) >= 0).any(-1).sum()) for r in (0, 1)]
    return [counts[rank], counts[1 - rank]]


def time_large(
    name: str, parallel: Any, tokens: int, base: dict[bool, float], device: torch.device, most: int | None
) -> None:
    """A dispatch and its combine launched from the host, in turn as a layer has them, beside a plain exchange timed alike."""
    one = case(parallel.rank, tokens, device)
    y = parallel.dispatch(one.x, one.ids, one.weights, most=most).x.clone()
    words = []
    for ahead in (False, True):
        times: dict[str, list[float]] = {"dispatch": [], "combine": []}
        for _ in range(9):
            us, sent = timed(lambda: parallel.dispatch(one.x, one.ids, one.weights, most=most), ahead)
            times["dispatch"].append(us)
            times["combine"].append(timed(functools.partial(parallel.combine, y, sent.handle), ahead)[0])
        both = {what: slowest(statistics.median(all_of)) for what, all_of in times.items()}
        words += [f"{what} {us:.0f} us {base[ahead] / us:.2f}" for what, us in both.items()]
    form = "rows that exist" if most is None else "padded"
    say(f"{tokens} {name}, {form}: {words[0]}, {words[1]}; behind other work {words[2]}, {words[3]}")


def time_small(name: str, parallel: Any, tokens: int, base: float, device: torch.device) -> None:
    """A padded dispatch and its combine in a graph."""
    one = case(parallel.rank, tokens, device)
    y = parallel.dispatch(one.x, one.ids, one.weights, most=tokens).x.clone()

    def both() -> torch.Tensor:
        return parallel.combine(y, parallel.dispatch(one.x, one.ids, one.weights, most=tokens).handle)

    dispatch = graph_us(lambda: parallel.dispatch(one.x, one.ids, one.weights, most=tokens))
    pair = graph_us(both)
    say(f"{tokens} {name}, graph: dispatch {dispatch:.1f} us, with its combine {pair:.1f} us {2 * base / pair:.2f}")


def time(providers: dict[str, Any], device: torch.device) -> None:
    """Every provider beside a plain exchange of the same rows; ratios are of its rate."""
    for tokens in LARGE:
        rows = traffic(tokens, device)
        size, call = rows[0] * WIDTH * 2, plain(rows, device)
        base = {ahead: median_us(call, ahead=ahead) for ahead in (False, True)}
        rates = [f"{us:.0f} us {size / us / 1e3:.0f} GB/s" for us in base.values()]
        say(f"{tokens} tokens a rank, {size / 1e6:.0f} MB: plain exchange {rates[0]}, behind other work {rates[1]}")
        for name, parallel in providers.items():
            for most in (None, tokens):
                time_large(name, parallel, tokens, base, device, most)
        again = [median_us(call, ahead=ahead) for ahead in (False, True)]
        say(f"{tokens} plain exchange again {again[0]:.0f} and {again[1]:.0f} us")
    for tokens in SMALL:
        call = plain(traffic(tokens, device), device)
        base = graph_us(call)
        say(
            f"{tokens} tokens a rank: plain exchange {base:.1f} us in a graph, {median_us(call):.1f} launched from the host"
        )
        for name, parallel in providers.items():
            time_small(name, parallel, tokens, base, device)


def stages(providers: dict[str, Any], tokens: int, device: torch.device) -> None:
    """When each kernel of one dispatch and its combine begins and how long it takes, microseconds."""
    one = case(distributed.get_rank(), tokens, device)
    for name, parallel in providers.items():
        for _ in range(3):
            sent = parallel.dispatch(one.x, one.ids, one.weights)
            parallel.combine(sent.x.clone(), sent.handle)
        rows = sent.x.clone()
        torch.cuda.synchronize()
        distributed.barrier()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            sent = parallel.dispatch(one.x, one.ids, one.weights)
            torch.cuda.synchronize()
            distributed.barrier()
            parallel.combine(rows, sent.handle)
            torch.cuda.synchronize()
        events = sorted(profile.events() or [], key=lambda event: event.time_range.start)
        events = [event for event in events if event.device_type == torch.autograd.DeviceType.CUDA]
        begin = events[0].time_range.start
        say(f"stages of {name} at {tokens}: begin, time, kernel")
        for event in events:
            say(f"  {event.time_range.start - begin:8.0f} {event.time_range.elapsed_us():8.1f} {event.name[:60]}")


def kernels(device: torch.device) -> None:
    """Each kernel on one card, where the other rank's memory is its own, beside a copy of as many bytes; rank 0 of two."""
    local, row = EXPERTS // 2, WIDTH * 2
    for tokens in (64, 1024, 16384):
        one = case(0, tokens, device)
        counts = torch.empty(2, dtype=torch.int32, device=device)
        places = number_rows(one.ids, local, 2, counts)
        away, mine = int(counts[1]), int(counts[0])
        both = torch.tensor([[mine, away], [mine, away]], dtype=torch.int32, device=device)
        x = torch.randn(2 * tokens, WIDTH, device=device).bfloat16()
        ids = torch.zeros(2 * tokens, TOP_K, dtype=torch.int64, device=device)
        there, back = (
            Target(torch.empty_like(x), ids, torch.zeros(2 * tokens, TOP_K, device=device)),
            torch.empty_like(x),
        )
        delta = torch.zeros(2, dtype=torch.int64, device=device)
        peers = Target(there.x, there.ids, there.weights, delta)

        def send(target: Target, segments: Segments, **more: Any) -> None:
            to: dict[str, Any] = {"me": 0, "local": local, "to": range(2)} | more
            send_rows(one.x, one.ids, one.weights, places, target, segments, **to)

        calls = {
            "number": (lambda: number_rows(one.ids, local, 2, counts), tokens * 56),
            "pack for the other": (lambda: send(there, Segments(counts=counts), without=0), 2 * away * row),
            "write to both": (lambda: send(peers, Segments(counts=both)), (tokens + away + mine) * row),
            "write to both, padded": (lambda: send(peers, Segments(), padded=tokens), (tokens + away + mine) * row),
            "return": (
                lambda: return_rows(x[: 2 * mine], ids, both, back, delta, me=0, capacity=tokens, most=None),
                2 * mine * row,
            ),
            "sum": (
                lambda: sum_rows(x, back, places, Segments(counts=counts), me=0, here=0), (tokens + away + mine) * row
            ),
        }  # fmt: skip
        for name, (call, size) in calls.items():
            cold, warm, (copy_cold, copy_warm) = time_cold(call), time_warm(call), time_copy(size)
            say(
                f"{tokens} {name}: cold {cold:.1f} us {size / cold / 1e3:.0f} GB/s, copy {copy_cold / cold:.2f}; warm "
                f"{warm:.1f} us {size / warm / 1e3:.0f} GB/s, copy {copy_warm / warm:.2f}"
            )


def run(argv: list[str]) -> int:
    """Do what is asked in one of the processes; 1 if rows or sums are not what they must be."""
    parser = argparse.ArgumentParser(
        prog="deepinfer bench gpu-parallel", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "words",
        nargs="*",
        help=f"what to do (default check, time, stages) and for whom (default both), of {', '.join(WORDS)}",
    )
    words = parser.parse_args(argv).words
    if unknown := set(words) - set(WORDS):
        parser.error(f"unknown words: {', '.join(sorted(unknown))}")
    if "RANK" not in os.environ:
        start = "python -m torch.distributed.run --nproc-per-node GPUS benchmarks/cases/gpu_parallel.py"
        print(f"cannot run: it needs a process for each GPU; start {start}", file=sys.stderr)
        return 2
    words = words if set(words) & set(WORDS[:4]) else [*words, *WORDS[:3]]
    rank = int(os.environ["RANK"])
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    if int(os.environ["WORLD_SIZE"]) > torch.cuda.device_count():
        distributed.init_process_group("gloo")  # several ranks on one card: `check peers`
    else:
        distributed.init_process_group("nccl", device_id=device)
    names = [name for name in ("nccl", "peers") if name in words] or ["nccl", "peers"]
    providers: dict[str, Any] = {"nccl": ExpertParallel(EXPERTS)} if "nccl" in names else {}
    if "peers" in names:
        try:
            providers["peers"] = PeerParallel(EXPERTS, max_tokens=MOST, hidden=WIDTH, top_k=TOP_K, device=device)
        except UnsupportedDeviceError as reason:
            say(f"peers: {reason}")
    for tokens in (64, 16384) if "stages" in words else ():
        stages(providers, tokens, device)
    good = check(providers, device) if "check" in words else True
    if "kernels" in words:
        kernels(device)
    if "time" in words:
        time(providers, device)
    say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, NCCL {torch.cuda.nccl.version()}")
    distributed.destroy_process_group()
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(run(sys.argv[1:]))
