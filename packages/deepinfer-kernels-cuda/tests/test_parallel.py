"""Expert parallelism with two and three gloo ranks equals one rank that owns everything."""

from __future__ import annotations

import socket

import pytest

torch = pytest.importorskip("torch")

import torch.multiprocessing as mp  # noqa: E402
from deepinfer_kernels_cuda.errors import ArgumentError  # noqa: E402
from deepinfer_kernels_cuda.parallel import ExpertParallel  # noqa: E402

EXPERTS, TOP_K, WIDTH = 6, 2, 8


def inputs(rank: int):
    """Tokens of one rank: uneven counts, rank 1 has none, some ids are -1, expert 5 is never used."""
    generator = torch.Generator().manual_seed(rank)
    tokens = (7, 0, 4)[rank]
    x = torch.randn(tokens, WIDTH, generator=generator)
    ids = torch.rand(tokens, EXPERTS - 1, generator=generator).topk(TOP_K).indices
    if tokens:
        ids[0] = -1
        ids[1, 0] = -1
    return x, ids, torch.rand(tokens, TOP_K, generator=generator)


def apply_experts(x, ids, weights, first: int):
    """Expert e multiplies by a fixed matrix of its own."""
    out = torch.zeros_like(x)
    for column in range(ids.shape[1]):
        for row in range(ids.shape[0]):
            if ids[row, column] >= 0:
                generator = torch.Generator().manual_seed(100 + first + int(ids[row, column]))
                matrix = torch.randn(WIDTH, WIDTH, generator=generator)
                out[row] += weights[row, column] * (x[row] @ matrix)
    return out


def worker(rank: int, size: int, port: int) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    try:
        parallel = ExpertParallel(EXPERTS)
        x, ids, weights = inputs(rank)
        for most in (None, None, 7, 9, None):  # again: nothing is left over from an exchange before
            got = parallel.dispatch(x, ids, weights, most=most)
            assert ((got.ids >= -1) & (got.ids < parallel.local)).all()
            if most is None:
                assert (got.ids >= 0).any(-1).all(), "a row arrived at a rank that owns none of its experts"
            else:
                assert len(got.x) == size * most
            y = parallel.combine(apply_experts(got.x, got.ids, got.weights, parallel.first), got.handle)
            want = apply_experts(x, ids, weights, 0)
            assert torch.allclose(y, want, atol=1e-5), (rank, (y - want).abs().max())
            if x.shape[0]:
                assert (y[0] == 0).all()
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_agree_with_one(size) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.start_processes(worker, args=(size, port), nprocs=size, start_method="fork")


def test_experts_must_divide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 4)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group=None: 0)
    with pytest.raises(ArgumentError, match="6 experts do not divide among 4 ranks"):
        ExpertParallel(6)
