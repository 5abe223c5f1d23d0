"""Expert parallelism over NCCL: what `ExpertParallel` gives back, and how fast it moves rows beside a plain exchange.

Run one process a GPU: `python -m torch.distributed.run --nproc-per-node 2 benchmarks/cases/gpu_parallel.py`. Leave multicast
off (`NCCL_NVLS_ENABLE=0`) where GPUs are shared with others. Expert e multiplies its rows by 1 + e / 64, so sums are known to one
rounding of bfloat16.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from deepinfer_kernels_cuda.parallel import ExpertParallel
from torch import distributed

EXPERTS, TOP_K, WIDTH = 384, 6, 5120
UNEVEN = ((7, 0), (64, 64), (1, 300), (4096, 4096))
TIMED = (8, 64, 1024, 4096, 16384)


def inputs(rank: int, tokens: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows bfloat16 [t, d], expert ids [t, k] with some missing, weights float32 [t, k]."""
    generator = torch.Generator().manual_seed(100 * rank + tokens)
    x = torch.randn(tokens, WIDTH, generator=generator).bfloat16()
    ids = torch.rand(tokens, EXPERTS, generator=generator).topk(TOP_K).indices
    if tokens > 1:
        ids[0], ids[1, 0] = -1, -1
    return x.to(device), ids.to(device), torch.rand(tokens, TOP_K, generator=generator).to(device)


def experts(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, first: int) -> torch.Tensor:
    """The weighted sum of each row's experts; `first` is the id of expert 0 here."""
    factors = torch.where(ids >= 0, 1 + (ids + first).float() / 64, 0) * weights
    return (x.float() * factors.sum(-1, keepdim=True)).to(x.dtype)


def check(parallel: ExpertParallel, rank: int, tokens: int, device: torch.device) -> list[float]:
    """[relative error, whether three runs agree bit by bit, rows received]."""
    x, ids, weights = inputs(rank, tokens, device)
    found = []
    for _ in range(3):
        sent = parallel.dispatch(x, ids, weights)
        found.append(parallel.combine(experts(sent.x, sent.ids, sent.weights, parallel.first), sent.handle))
    same = all(torch.equal(found[0], other) for other in found[1:])
    want = experts(x, ids, weights, 0).float()
    error = float((found[0].float() - want).norm() / want.norm().clamp_min(1e-30)) if tokens else 0.0
    return [error, float(same), float(sent.x.shape[0])]


def median_us(call: Callable[[], Any], repeats: int = 10) -> float:
    """Median of device time, every rank beginning together."""
    call()
    torch.cuda.synchronize()
    distributed.barrier()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times)


def measure(parallel: ExpertParallel, rank: int, tokens: int, device: torch.device) -> str:
    """Dispatch and combine beside an `all_to_all_single` of the same rows."""
    x, ids, weights = inputs(rank, tokens, device)
    sent = parallel.dispatch(x, ids, weights)
    rows, other = sent.x.clone(), 1 - rank
    size = sent.handle.sent[other] * WIDTH * 2
    dispatch = median_us(lambda: parallel.dispatch(x, ids, weights))
    combine = median_us(lambda: parallel.combine(rows, sent.handle))
    gives, takes = [0, 0], [0, 0]
    gives[other], takes[other] = sent.handle.sent[other], sent.handle.received[other]
    source, target = x.new_zeros(gives[other], WIDTH), x.new_empty(takes[other], WIDTH)
    plain = median_us(lambda: distributed.all_to_all_single(target, source, takes, gives))
    return (
        f"{tokens} tokens a rank: dispatch {dispatch:.0f} us ({size / dispatch / 1e3:.0f} GB/s, {plain / dispatch:.2f} of it), "
        f"combine {combine:.0f} us ({size / combine / 1e3:.0f} GB/s, {plain / combine:.2f} of it), "
        f"plain exchange {plain:.0f} us ({size / plain / 1e3:.0f} GB/s)"
    )


def run() -> int:
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    distributed.init_process_group("nccl", device_id=device)
    parallel = ExpertParallel(EXPERTS)
    good = True
    for tokens in UNEVEN:
        mine = torch.tensor(check(parallel, rank, tokens[rank], device), device=device)
        both = [torch.empty_like(mine) for _ in range(2)]
        distributed.all_gather(both, mine)
        good &= all(float(one[0]) < 4e-3 and bool(one[1]) for one in both)
        if rank == 0:
            shown = ", ".join(
                f"error {one[0]:.1e}, same bits {bool(one[1])}, {int(one[2])} rows received" for one in both
            )
            sys.stdout.write(f"tokens {tokens}: {shown}\n")
    for tokens in TIMED:
        line = measure(parallel, rank, tokens, device)
        if rank == 0:
            sys.stdout.write(line + "\n")
    if rank == 0:
        sys.stdout.write(
            f"{torch.cuda.get_device_name()}, torch {torch.__version__}, NCCL {torch.cuda.nccl.version()}\n"
        )
    distributed.destroy_process_group()
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(run())
