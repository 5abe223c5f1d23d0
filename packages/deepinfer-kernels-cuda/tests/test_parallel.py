"""Expert parallelism of several ranks equals one rank with everything: gloo here, direct writes on a GPU, NCCL on two."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

import torch.multiprocessing as mp  # noqa: E402
from deepinfer_kernels_cuda import peers  # noqa: E402
from deepinfer_kernels_cuda.errors import ArgumentError, UnsupportedDeviceError  # noqa: E402
from deepinfer_kernels_cuda.parallel import ExpertParallel, check_tokens  # noqa: E402
from deepinfer_kernels_cuda.peers import PeerParallel  # noqa: E402

EXPERTS, TOP_K, WIDTH = 6, 2, 8


def inputs(rank: int, kind: int, device):
    """Tokens of one rank: uneven counts, of kind 0 rank 1 has none, some ids are -1, expert 5 is never used."""
    generator = torch.Generator().manual_seed(10 * kind + rank)
    tokens = ((7, 0, 4), (1, 6, 0), (0, 0, 0))[kind][rank]
    x = torch.randn(tokens, WIDTH, generator=generator)
    ids = torch.rand(tokens, EXPERTS - 1, generator=generator).topk(TOP_K).indices
    if tokens:
        ids[0] = -1
        ids[1:2, 0] = -1
    return x.to(device), ids.to(device), torch.rand(tokens, TOP_K, generator=generator).to(device)


def apply_experts(x, ids, weights, first: int):
    """Expert e multiplies by a fixed matrix of its own."""
    out = torch.zeros(x.shape)
    x, ids, weights = x.cpu(), ids.cpu(), weights.cpu()
    for row, column in (ids >= 0).nonzero().tolist():
        generator = torch.Generator().manual_seed(100 + first + int(ids[row, column]))
        out[row] += weights[row, column] * (x[row] @ torch.randn(WIDTH, WIDTH, generator=generator))
    return out


def worker(rank: int, kind: str, size: int, port: int) -> None:
    device = torch.device("cpu") if kind == "gloo" else torch.device("cuda", rank % torch.cuda.device_count())
    if kind != "gloo":
        torch.cuda.set_device(device)
    backend = "gloo" if kind == "gloo" or torch.cuda.device_count() < size else "nccl"
    torch.distributed.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    if kind == "peers":
        parallel = PeerParallel(EXPERTS, max_tokens=9, hidden=WIDTH, top_k=TOP_K, device=device, dtype=torch.float32)
        assert peers.peer_reason(device) is None
    else:
        parallel = ExpertParallel(EXPERTS)
        if kind == "gloo":
            assert "is no CUDA device" in str(peers.peer_reason(device))
            with pytest.raises(UnsupportedDeviceError, match="rank 0: cpu is no CUDA device"):
                PeerParallel(EXPERTS, max_tokens=9, hidden=WIDTH, top_k=TOP_K, device=device)
    # Again and again: nothing is left over from an exchange before.
    for case, most in ((0, None), (1, None), (0, 7), (2, None), (1, 9), (2, 9), (0, 9), (0, None), (2, 0)):
        x, ids, weights = inputs(rank, case, device)
        got = parallel.dispatch(x, ids, weights, most=most)
        assert ((got.ids >= -1) & (got.ids < parallel.local)).all()
        if most is None:
            assert (got.ids >= 0).any(-1).all(), "a row arrived at a rank that owns none of its experts"
        else:
            assert len(got.x) == size * most
        y = parallel.combine(apply_experts(got.x, got.ids, got.weights, parallel.first).to(device), got.handle)
        want = apply_experts(x, ids, weights, 0)
        assert torch.allclose(y.cpu(), want, atol=1e-5), (rank, case, most)
        assert (y[:1] == 0).all()
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(("kind", "size"), [("gloo", 2), ("gloo", 3), ("nccl", 2), ("peers", 2)])
def test_ranks_agree_with_one(kind, size) -> None:
    needed = {"gloo": 0, "nccl": size, "peers": 1}[kind]
    if torch.cuda.device_count() < needed:
        pytest.skip(f"{torch.cuda.device_count()} GPUs; {needed} are needed")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    if kind == "gloo":
        mp.start_processes(worker, args=(kind, size, port), nprocs=size, start_method="fork")
    else:
        run_processes(kind, size, port)


def run_processes(kind: str, size: int, port: int) -> None:
    """As programs of their own, which CUDA wants."""
    environment = os.environ | {
        "NCCL_NVLS_ENABLE": "0",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",  # one GPU will do
    }
    commands = [[sys.executable, __file__, str(rank), kind, str(size), str(port)] for rank in range(size)]
    ranks = [subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) for command in commands]
    try:
        errors = [rank.communicate(timeout=120)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * size, "\n".join(errors)[-4000:]


def test_experts_must_divide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 4)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group=None: 0)
    with pytest.raises(ArgumentError, match="6 experts do not divide among 4 ranks"):
        ExpertParallel(6)


def test_more_tokens_than_promised_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group=None: 0)
    x, ids, weights = torch.zeros(5, 8), torch.zeros(5, 2, dtype=torch.int64), torch.zeros(5, 2)
    with pytest.raises(ArgumentError, match="x has 5 tokens; allowed: up to most, 4"):
        ExpertParallel(6).dispatch(x, ids, weights, most=4)
    with pytest.raises(ArgumentError, match=r"ids has dtype torch\.int32; allowed: torch\.int64"):
        ExpertParallel(6).dispatch(x, ids.int(), weights)
    with pytest.raises(ArgumentError, match=r"x \(5, 8\), ids \(5, 2\), weights \(5, 1\); allowed"):
        ExpertParallel(6).dispatch(x, ids, weights[:, :1])
    with pytest.raises(ArgumentError, match="tensors live on several devices"):
        ExpertParallel(6).dispatch(x, ids.to("meta"), weights)


def test_a_graph_holds_the_padded_form_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with torch._subclasses.FakeTensorMode():
        x, ids = torch.empty(5, 8, device="cuda"), torch.empty(5, 2, dtype=torch.int64, device="cuda")
        weights = torch.empty(5, 2, device="cuda")
        check_tokens(x, ids, weights, 5)
        with pytest.raises(ArgumentError, match="which no CUDA graph can hold; give most"):
            check_tokens(x, ids, weights, None)


if __name__ == "__main__":
    worker(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
