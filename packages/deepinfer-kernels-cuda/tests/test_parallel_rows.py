"""Rows between ranks, all played by one process: kernels in Triton's interpreter, or on a GPU, write to the buffers of peers."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from deepinfer_kernels_cuda.capability import interpreting  # noqa: E402
from deepinfer_kernels_cuda.parallel_rows import Segments, Target, number_rows, send_rows, sum_rows  # noqa: E402
from deepinfer_kernels_cuda.peers import return_rows  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.skipif(
    DEVICE.type == "cpu" and not interpreting(), reason="a GPU or TRITON_INTERPRET=1 (test_interpreter.py runs these)"
)
LOCAL, TOP_K, CAPACITY = 3, 3, 40


class Ranks:
    """Buffers of all ranks at equal places of their memories, with tokens of uneven numbers."""

    def __init__(self, tokens: list[int], width: int) -> None:
        self.size, rows = len(tokens), len(tokens) * CAPACITY
        generator = torch.Generator().manual_seed(sum(tokens) + width)
        experts = self.size * LOCAL
        self.x = [torch.randn(t, width, generator=generator).bfloat16().to(DEVICE) for t in tokens]
        self.ids = [torch.rand(t, experts, generator=generator).topk(TOP_K).indices.to(DEVICE) for t in tokens]
        for ids in self.ids:
            ids[:1] = -1
            ids[1:2, 0] = -1
        self.weights = [torch.rand(t, TOP_K, generator=generator).to(DEVICE) for t in tokens]
        parts = [(self.size * self.size, 4), (rows * TOP_K, 8), (rows * TOP_K, 4), (rows * width, 2), (rows * width, 2)]
        sizes = [-(-count * size // 16) * 16 for count, size in parts]
        self.memory = torch.full((self.size, sum(sizes)), 119, dtype=torch.uint8, device=DEVICE)
        cut = [[each[: c * s] for each, (c, s) in zip(one.split(sizes), parts, strict=True)] for one in self.memory]
        self.counts = [one[0].view(torch.int32).view(self.size, self.size) for one in cut]
        self.targets = []
        self.back = [one[4].view(torch.bfloat16).view(rows, width) for one in cut]
        for rank, one in enumerate(cut):
            delta = [(other - rank) * self.memory.stride(0) for other in range(self.size)]
            views = one[3].view(torch.bfloat16), one[1].view(torch.int64), one[2].view(torch.float32)
            x, ids, weights = (view.view(rows, -1) for view in views)
            self.targets.append(Target(x, ids, weights, torch.tensor(delta, device=DEVICE)))

    def expected(self, rank: int) -> list[tuple[int, int, list[int]]]:
        """(source, token, local ids) of every row that a rank gets, in order."""
        rows = []
        for source, ids in enumerate(self.ids):
            for token, chosen in enumerate(ids.tolist()):
                here = [e - rank * LOCAL if e >= 0 and e // LOCAL == rank else -1 for e in chosen]
                if max(here) >= 0:
                    rows.append((source, token, here))
        return rows

    def summed(self, rank: int) -> torch.Tensor:
        """What a token of a rank gets back where rank r's experts multiply rows by r + 1."""
        owner = torch.where(self.ids[rank] >= 0, self.ids[rank] // LOCAL, -1)
        factors = torch.stack([(owner == r).any(-1).double() * (r + 1) for r in range(self.size)])
        return self.x[rank].double() * factors.sum(0)[:, None]


@pytest.mark.parametrize("most", [None, 40])
@pytest.mark.parametrize(("tokens", "width"), [([9, 0], 24), ([5, 40, 1], 1056), ([1], 8), ([0, 0], 8)])
def test_rows_go_to_peers_and_back(tokens, width, most) -> None:
    ranks = Ranks(tokens, width)
    places = []
    for rank, (ids, target) in enumerate(zip(ranks.ids, ranks.targets, strict=True)):
        empty = torch.empty(len(ids), ranks.size, dtype=torch.int32, device=DEVICE)
        places.append(empty if most else number_rows(ids, LOCAL, ranks.size, ranks.counts[rank][rank], target.delta))
    for rank, target in enumerate(ranks.targets):
        segments = Segments(first=rank * most) if most else Segments(counts=ranks.counts[rank])
        send_rows(
            ranks.x[rank], ranks.ids[rank], ranks.weights[rank], places[rank], target, segments, me=rank, local=LOCAL,
            to=range(ranks.size), padded=most,
        )  # fmt: skip
    for rank, target in enumerate(ranks.targets):
        want = ranks.expected(rank)
        rows = [source * most + token for source, token, _ in want] if most else list(range(len(want)))
        assert [target.ids[row].tolist() for row in rows] == [ids for *_, ids in want]
        assert all(torch.equal(target.x[row], ranks.x[s][t]) for row, (s, t, _) in zip(rows, want, strict=True))
        assert all(
            torch.equal(target.weights[row], ranks.weights[s][t]) for row, (s, t, _) in zip(rows, want, strict=True)
        )
        if most:
            assert int((target.ids[: ranks.size * most] >= 0).any(-1).sum()) == len(want)
        y = target.x[: ranks.size * most if most else len(want)] * (rank + 1)
        return_rows(
            y, target.ids, ranks.counts[rank], ranks.back[rank], target.delta, me=rank, capacity=CAPACITY, most=most
        )
    for rank, target in enumerate(ranks.targets):
        counts = torch.tensor([sum(s < rank for s, *_ in ranks.expected(rank))])
        here = rank * most if most else int(counts)
        y = target.x * (rank + 1)
        got = sum_rows(y, ranks.back[rank], places[rank], Segments(apart=CAPACITY), me=rank, here=here)
        want = ranks.summed(rank)
        # Each row is rounded to bfloat16 when multiplied by 3, and the sum once more.
        assert torch.allclose(got.double(), want, rtol=2**-7, atol=0)
        assert (got[want[:, 0] == 0] == 0).all() if len(want) else True


@pytest.mark.parametrize("top_k", [1, 3, 8])
@pytest.mark.parametrize("tokens", [0, 1, 37, 2100])
def test_places_count_the_tokens_before(tokens, top_k) -> None:
    ids = torch.randint(-1, 9, (tokens, top_k), device=DEVICE)
    counts = torch.full((3,), -7, dtype=torch.int32, device=DEVICE)
    places = number_rows(ids, 3, 3, counts)
    for rank in range(3):
        goes = ((ids >= 3 * rank) & (ids < 3 * rank + 3)).any(-1)
        assert counts[rank] == goes.sum()
        assert places[goes, rank].tolist() == list(range(int(goes.sum())))
        assert (places[~goes, rank] == -1).all()


@pytest.mark.parametrize("me", [0, 1, 2])
def test_own_rows_and_others_lie_apart(me) -> None:
    """As over NCCL: others' rows packed one rank behind the other, own ones in the middle of y."""
    ranks = Ranks([11, 6, 4], 24)
    x, ids, weights = ranks.x[me], ranks.ids[me], ranks.weights[me]
    counts = torch.empty(3, dtype=torch.int32, device=DEVICE)
    places = number_rows(ids, LOCAL, 3, counts)
    others, own = torch.zeros(40, 24, device=DEVICE).bfloat16(), torch.zeros(44, 24, device=DEVICE).bfloat16()
    told, factors = torch.zeros(40, TOP_K, dtype=torch.int64, device=DEVICE), torch.zeros(40, TOP_K, device=DEVICE)
    whole = Target(others, told, factors)
    send_rows(
        x, ids, weights, places, whole, Segments(counts=counts), me=me, local=LOCAL, to=range(3), without=me
    )  # fmt: skip
    middle = Target(own[4:], told, factors)
    send_rows(x, ids, weights, places, middle, Segments(), me=me, local=LOCAL, to=range(me, me + 1))
    for rank in range(3):
        goes = places[:, rank] >= 0
        begin = sum(int(counts[r]) for r in range(rank) if r != me)
        found = own[4 : 4 + int(counts[me])] if rank == me else others[begin : begin + int(counts[rank])]
        assert torch.equal(found, x[goes])
    got = sum_rows(own, others, places, Segments(counts=counts), me=me, here=4)
    times = (places >= 0).sum(1)
    # One rounding to bfloat16, which the interpreter cuts off.
    assert torch.allclose(got.double(), x.double() * times[:, None], rtol=2**-7, atol=0)
