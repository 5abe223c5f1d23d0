"""Direct writes between ranks that are processes: kernels in Triton's interpreter, symmetric memory played by shared memory."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
from deepinfer_kernels_cuda import peers  # noqa: E402
from deepinfer_kernels_cuda.capability import interpreting  # noqa: E402
from deepinfer_kernels_cuda.errors import ArgumentError  # noqa: E402
from torch.distributed import _symmetric_memory  # noqa: E402

pytestmark = pytest.mark.skipif(
    not interpreting(), reason="TRITON_INTERPRET=1 (test_interpreter.py runs these); GPUs: test_parallel.py"
)
EXPERTS, TOP_K, WIDTH, MOST = 6, 2, 8, 9
CPU = torch.device("cpu")


def share(memory: torch.Tensor, rank: int) -> None:
    """Row r of the memory is a block of rank r, in which its tensor begins somewhere else than that of another rank."""

    def empty(size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return memory[rank, 512 * rank : 512 * rank + size]

    def rendezvous(tensor: torch.Tensor, group: dist.ProcessGroup) -> SimpleNamespace:
        return SimpleNamespace(buffer_ptrs=[one.data_ptr() for one in memory], barrier=lambda channel: dist.barrier())

    patch = pytest.MonkeyPatch()
    patch.setattr(_symmetric_memory, "empty", empty)
    patch.setattr(_symmetric_memory, "rendezvous", rendezvous)
    patch.setattr(peers, "peer_reason", lambda device, group=None: None)


def tokens_of(rank: int, turn: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Uneven numbers of tokens, 0 among them; every other turn x and ids are views with odd strides."""
    generator = torch.Generator().manual_seed(10 * turn + rank)
    tokens = (7, 0, 9, 4)[(turn + rank) % 4]
    x = torch.randn(tokens, WIDTH + 3, generator=generator).bfloat16()[:, 3 : 3 + WIDTH]
    ids = torch.rand(tokens, EXPERTS, generator=generator).topk(TOP_K).indices
    ids[:1] = -1
    weights = torch.rand(TOP_K, tokens, generator=generator).t()
    return (x if turn % 2 else x.contiguous()), ids, weights


def worker(rank: int, memory: torch.Tensor, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=len(memory))
    share(memory, rank)
    parallel = peers.PeerParallel(EXPERTS, max_tokens=MOST, hidden=WIDTH, top_k=TOP_K, device=CPU)
    for turn in range(8):
        x, ids, weights = tokens_of(rank, turn)
        most = (None, MOST, MOST, None)[turn % 4]
        if turn in (2, 5):  # one whose combine never comes
            parallel.dispatch(*tokens_of(rank, turn + 1), most=most)
        sent = parallel.dispatch(x, ids, weights, most=most)
        # Experts of rank r return r + 1 times their weight times x; 0 for absent rows, whose x is anything.
        factor = torch.where(sent.ids >= 0, sent.weights, 0).sum(-1, keepdim=True) * (rank + 1)
        y = torch.where(factor > 0, sent.x.float() * factor, 0).bfloat16()
        for _ in range(2):
            got = parallel.combine(y, sent.handle)
            want = x.double() * torch.where(ids >= 0, weights * (ids // parallel.local + 1), 0).sum(-1, keepdim=True)
            # Two weights below 1, times 2 at most: parts are below 4 |x| in all, rounded to bfloat16 (2**-9), and so is their
            # sum, which the interpreter cuts off (2**-8): 6 * 2**-8 |x|, and a little for the product of both.
            assert ((got.double() - want).abs() <= 7 * 2**-8 * x.double().abs()).all(), (rank, turn)
            assert (got[:1] == 0).all()
        if turn == 3:
            echo = parallel.combine(sent.x, sent.handle)  # rows as they lie in the shared memory
            ranks = torch.stack([(torch.where(ids >= 0, ids // parallel.local, -1) == r).any(-1) for r in (0, 1)]).sum(
                0
            )
            assert torch.allclose(echo.double(), x.double() * ranks[:, None], rtol=2**-7, atol=0)
            assert refused(parallel, sent) == [
                "handle of dispatch 4; the last was 5", f"y has shape (3, 8); allowed: ({len(sent.x)}, 8)",
                "x lies in the memory that peers write; clone it", "ids lies in the memory that peers write; clone it",
                "y has dtype torch.float32; allowed: torch.bfloat16", "x has 9 channels; allowed: 8",
                "ids has 3 columns; allowed: 2", "10 tokens; allowed: up to max_tokens, 9",
            ]  # fmt: skip
    dist.destroy_process_group()


def refused(parallel: peers.PeerParallel, sent) -> list[str]:
    """What is said of wrong arguments; no rank gets as far as an exchange."""
    x, ids, weights = torch.zeros(2, WIDTH).bfloat16(), torch.zeros(2, TOP_K).long(), torch.zeros(2, TOP_K)
    old = peers.PeerHandle(sent.handle.places, sent.handle.received, None, 4)
    calls = [
        lambda: parallel.combine(sent.x, old),
        lambda: parallel.combine(torch.zeros(3, WIDTH).bfloat16(), sent.handle),
        lambda: parallel.dispatch(parallel._x[:2], ids, weights),
        lambda: parallel.dispatch(x, parallel._ids[:2], weights),
        lambda: parallel.combine(sent.x.float(), sent.handle),
        lambda: parallel.dispatch(torch.zeros(2, WIDTH + 1).bfloat16(), ids, weights),
        lambda: parallel.dispatch(x, torch.zeros(2, 3).long(), torch.zeros(2, 3)),
        lambda: parallel.dispatch(x, ids, weights, most=10),
    ]
    said = []
    for call in calls:
        with pytest.raises(ArgumentError) as failure:
            call()
        said.append(str(failure.value))
    return said


def test_processes_write_into_the_memory_of_each_other(tmp_path) -> None:
    memory = torch.full((2, 8192), 119, dtype=torch.uint8).share_memory_()
    mp.start_processes(worker, args=(memory, str(tmp_path / "store")), nprocs=2, start_method="fork")
