"""Kernels against the package's own references, on a GPU or in Triton's interpreter (`TRITON_INTERPRET=1`)."""

from __future__ import annotations

import os

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import deepinfer_kernels_cuda as kernels  # noqa: E402
from deepinfer_kernels_cuda import llama  # noqa: E402
from deepinfer_kernels_cuda.errors import ArgumentError  # noqa: E402
from deepinfer_kernels_cuda.layouts import V4  # noqa: E402
from deepinfer_kernels_cuda.reference import attention, experts, records  # noqa: E402

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.skipif(
    not INTERPRET and DEVICE == "cpu", reason="no CUDA device, and TRITON_INTERPRET is not 1"
)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(20)


def rand(*shape: int):
    return torch.randn(*shape).to(DEVICE)


@pytest.mark.parametrize("heads", [1, 7, 22])
def test_sparse_mla_with_strided_paged_pools(heads) -> None:
    n, page, pages = 64, 4, 9
    # A pool that is a window of a bigger buffer, pages 7 rows apart; everything unused is NaN.
    flat = records.new_pool(pages * 7, "fp8", n, DEVICE)
    pool = flat.view(pages, 7, -1)[:, 2:6]
    slots = torch.randint(0, page * pages, (3, 11), device=DEVICE, dtype=torch.int32)
    rows = rand(page * pages, n)
    for s in slots.unique().tolist():
        pool[s // page, s % page] = records.encode_records(rows[s : s + 1], "fp8")[0]
    slots[0, 3:], slots[1] = -1, -1
    q, sink = rand(3, heads, n), rand(heads)
    out, lse = kernels.sparse_mla_decode(q, pool, slots, sink, scale=0.1, return_lse=True)
    want, want_lse = attention.sparse_mla_decode(q, pool.reshape(-1, pool.shape[-1]), slots, sink, scale=0.1)
    assert (out - want).abs().max() < 1e-5
    assert (out[1] == 0).all()
    assert torch.isposinf(lse[1]).all()
    keep = [0, 2]
    assert (lse[keep] - want_lse[keep]).abs().max() < 1e-5
    infinite = torch.full_like(sink, torch.inf)
    assert (kernels.sparse_mla_decode(q, pool, slots, infinite, scale=0.1)[0] == 0).all()
    assert torch.allclose(
        kernels.sparse_mla_decode(q, pool, slots, -infinite, scale=0.1),
        kernels.sparse_mla_decode(q, pool, slots, None, scale=0.1),
    )


def test_moe_drops_padding_and_keeps_every_token() -> None:
    def weights(rows: int, columns: int):
        codes = torch.randint(0, 256, (4, rows, columns // 2), dtype=torch.uint8, device=DEVICE)
        return kernels.mx_weights(
            codes, torch.randint(118, 124, (4, rows, columns // 32), dtype=torch.uint8, device=DEVICE), fp4=True
        )

    packed = kernels.PackedExperts(weights(64, 64), weights(64, 32))
    x, gates = rand(9, 64), torch.rand(9, 2).to(DEVICE)
    ids = torch.tensor(
        [[0, 1], [0, -1], [0, 2], [0, 1], [-1, -1], [0, 2], [1, 0], [0, 2], [2, 0]], device=DEVICE
    )  # 3 gets none
    want = experts.moe_experts(x, ids, gates, packed.gate_up, packed.down, limit=2.0)
    out = kernels.moe_experts(x, ids, gates, packed, limit=2.0)
    assert (out - want).abs().max() < 1e-4 * want.abs().max()
    assert (out[4] == 0).all()
    shared = rand(9, 64)
    assert (
        kernels.moe_experts(x, ids, gates, packed, limit=2.0, shared=shared) - want - shared
    ).abs().max() < 1e-3 * want.abs().max()
    assert kernels.moe_experts(x[:0], ids[:0], gates[:0], packed, limit=2.0).shape == (0, 64)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "d", "splits"), [(9, 3, 64, 1), (4, 4, 32, 1), (8, 2, 48, 3), (6, 2, 16, 5)]
)
def test_paged_gqa(heads, kv_heads, d, splits) -> None:
    block = 8
    counts, lens = [1, 5, 0, 1], [119, 71, 30, 3]
    starts = torch.tensor([0, 1, 6, 6, 7], dtype=torch.int32, device=DEVICE)
    keys, values, table = paged(lens, block, kv_heads, d)
    q = rand(7, heads, d)
    rows = torch.tensor([0, 1, 2, 3], dtype=torch.int32, device=DEVICE)
    arrived = llama.arrivals(DEVICE)
    out = kernels.paged_gqa(q, keys, values, table, rows, starts, torch.tensor(lens, dtype=torch.int32, device=DEVICE),
                            scale=d**-0.5, max_queries=5, cut=llama.Cut(16, 16, splits=splits, least=1, ahead=splits != 1),
                            arrived=arrived)  # fmt: skip
    row_of = torch.tensor([0, 1, 1, 1, 1, 1, 3])
    positions = torch.tensor([lens[0] - 1, *range(lens[1] - counts[1], lens[1]), lens[3] - 1])
    want = attention.paged_gqa(q, keys, values, table, row_of, positions, scale=d**-0.5)
    assert (out - want).abs().max() < 1e-5
    assert not arrived.any(), "counters are left as they were found"


@pytest.mark.parametrize(("heads", "kv_heads", "d", "splits"), [(9, 3, 64, 1), (4, 4, 32, 4), (8, 2, 48, 3)])
def test_rope_gqa(heads, kv_heads, d, splits) -> None:
    """One kernel against a rotation, an insert and attention in float64; a token that the cache has is not written."""
    block, lens = 8, [119, 64, 30, 1]
    keys, values, table = paged(lens, block, kv_heads, d)
    qkv = torch.cat([rand(4, (heads + 2 * kv_heads) * d), torch.full((4, 8), torch.nan, device=DEVICE)], 1)[:, :-8]
    angle = torch.rand(128, d // 2, dtype=torch.float64, device=DEVICE) * 7
    rope = torch.stack([angle.cos(), angle.sin()], 1).float()
    at = torch.tensor(lens, device=DEVICE) - 1
    slots = table[torch.arange(4, device=DEVICE), at // block].long() * block + at % block
    slots[2] = -1
    q, new_keys, new_values = qkv.double().view(4, -1, d).split([heads, kv_heads, kv_heads], 1)
    q, new_keys = (turned(x, angle[at]) for x in (q, new_keys))
    want_keys, want_values = keys.double(), values.double()
    for row in (0, 1, 3):
        want_keys.flatten(0, 1)[slots[row]], want_values.flatten(0, 1)[slots[row]] = new_keys[row], new_values[row]
    want = attention.paged_gqa(q, want_keys, want_values, table, torch.arange(4), at, scale=d**-0.5)
    rows, ends = torch.arange(5, dtype=torch.int32, device=DEVICE), (at + 1).int()
    arrived, before = llama.arrivals(DEVICE), qkv.clone()
    out = kernels.rope_gqa(qkv, rope, slots, keys, values, table, rows[:4], rows, ends, heads=heads, scale=d**-0.5,
                           cut=llama.Cut(16, 16, splits=splits, least=1), arrived=arrived)  # fmt: skip
    assert (out - want).abs().max() < 1e-5
    assert (keys - want_keys).abs().max() < 1e-5
    assert torch.equal(values, want_values.float())
    assert torch.equal(qkv, before)
    assert not arrived.any()


def turned(x, angle):
    low, high = x.chunk(2, -1)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)


def paged(lens, block, kv_heads, d):
    """Keys, values and table of sequences; what lies past an end is large: a kernel must not let it in."""
    columns = -(-max(lens) // block)
    keys = torch.full((len(lens) * columns, block, kv_heads, d), 1e4, device=DEVICE)
    values = keys.clone()
    table = torch.randperm(len(lens) * columns).view(len(lens), columns).to(DEVICE, torch.int32)
    for row, length in enumerate(lens):
        for position in range(length):
            at = table[row, position // block], position % block
            keys[at], values[at] = rand(kv_heads, d), rand(kv_heads, d)
    return keys, values, table


def test_sampling() -> None:
    logits = rand(5, 1000)
    logits[2, 10] = logits[2, 20] = 50.0
    greedy = kernels.sample(logits, torch.zeros(5, device=DEVICE), torch.zeros(5, dtype=torch.float64, device=DEVICE))
    assert torch.equal(greedy, torch.stack([(row == row.max()).nonzero()[0, 0] for row in logits]))
    assert greedy[2] == 10  # the lowest of two equal ones
    small = torch.log(torch.tensor([0.5, 0.25, 0.15, 0.1])).to(DEVICE)
    # The inverse distribution function has no tolerance: 0.5, 0.75 and 0.9 are where tokens change.
    numbers = torch.tensor([0.0, 0.49, 0.51, 0.74, 0.76, 0.89, 0.91, 0.999], dtype=torch.float64, device=DEVICE)
    drawn = kernels.sample(small.repeat(8, 1), torch.ones(8, device=DEVICE), numbers)
    assert drawn.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    two = torch.full((8,), 2, device=DEVICE)
    drawn = kernels.sample(small.repeat(8, 1), torch.ones(8, device=DEVICE), numbers, top_k=two)
    assert drawn.tolist() == [0, 0, 0, 1, 1, 1, 1, 1]  # two thirds to one
    shares = torch.full((8,), 0.6, device=DEVICE)
    assert torch.equal(drawn, kernels.sample(small.repeat(8, 1), torch.ones(8, device=DEVICE), numbers, top_p=shares))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16] if not INTERPRET else [torch.float32])
@pytest.mark.parametrize(("page", "extra"), [(4, 0), (64, 64), (1, 2)])
def test_planar_records(dtype, page, extra) -> None:
    rows, pages = 11, 5 if page > 1 else 40
    buffer = torch.full((pages, V4.page_bytes(page) + extra), 0xFF, dtype=torch.uint8, device=DEVICE)
    pool, want = buffer[:, : V4.page_bytes(page)], buffer.clone()
    slots = torch.randperm(page * pages)[:rows].to(DEVICE)
    slots[4] = -1
    values = (rand(rows, 512) * torch.logspace(-3, 2, rows, device=DEVICE)[:, None]).to(dtype)
    values[2] = 0
    values[:, 448:] = values[:, 448:].bfloat16().to(dtype)  # Triton's interpreter cuts where the hardware rounds
    kernels.v4_insert(pool, slots, values, page_size=page)
    records.v4_insert(want, slots, values, page)
    assert torch.equal(buffer, want)
    asked = torch.cat((slots, slots.new_tensor([-1, page * pages, 2**40]))).view(2, 7)
    got = kernels.v4_gather(pool, asked, torch.float32, page_size=page)
    assert torch.equal(got.view(-1, 512)[:rows], records.v4_gather(want, slots, page))
    assert (got.view(-1, 512)[[4, -3, -2, -1]] == 0).all()
    with pytest.raises(ArgumentError, match="65 rows need 37960"):
        kernels.v4_gather(torch.zeros(2, 37440, dtype=torch.uint8, device=DEVICE), slots, dtype, page_size=65)


def test_shapes_are_checked() -> None:
    pool = records.new_pool(8, "fp8", 64, DEVICE)
    slots = torch.zeros(2, 4, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ArgumentError, match=r"allowed: 1\.\.128"):
        kernels.sparse_mla_decode(rand(2, 129, 64), pool, slots, None, scale=1.0)
    with pytest.raises(ArgumentError, match="rows have 66 bytes"):
        kernels.sparse_mla_decode(rand(2, 4, 128), pool, slots, None, scale=1.0)
    with pytest.raises(ArgumentError, match="3 rows"):
        kernels.sparse_mla_decode(
            rand(2, 4, 64), pool, torch.zeros(3, 4, dtype=torch.int32, device=DEVICE), None, scale=1.0
        )


@pytest.mark.parametrize(
    ("live", "rows", "widths"), [(3, 4, (2, 130)), (5, 5, (1,)), (0, 2, (3, 1, 2)), (1, 8, (0, 5))]
)
def test_step_inputs_unpacks_one_copy(live, rows, widths) -> None:
    columns, scratch = [width + 3 for width in widths], 40
    header = torch.stack([torch.randperm(30)[:live] for _ in range(4)]) if live else torch.zeros(4, 0).long()
    header[1] += 1
    given = [torch.randint(1, 99, (live, width)) for width in widths]
    packed = torch.cat([torch.tensor([live, *widths]), *(part.flatten() for part in (header, *given))])
    starts = [0]
    for count in columns:
        starts.append(starts[-1] + rows * count + 1)
    layout = torch.tensor(list(zip(starts, columns, strict=False)))
    tables, flat = torch.full((starts[-1],), -7), torch.arange(1000, 1041)
    place = [t.to(DEVICE, torch.int32) for t in (packed, flat, tables, layout)]
    found = kernels.step_inputs(*place, rows=rows, scratch=scratch)
    pad = rows - live
    want = [
        torch.cat((row, torch.full((pad,), other))) for row, other in zip(header, (0, 1, scratch, scratch), strict=True)
    ]
    assert found.header.tolist() == [want[0].tolist(), want[1].tolist(), want[3].tolist()]
    assert found.token_ids.tolist() == (1000 + want[2]).tolist()
    assert found.positions.tolist() == (want[1] - 1).tolist()
    for start, count, width, table in zip(starts, columns, widths, given, strict=False):
        expected = torch.full((rows, count), -7)
        expected[:, :width] = 0
        expected[:live, :width] = table
        assert place[2][start : start + rows * count].view(rows, count).tolist() == expected.tolist()
        assert place[2][start + rows * count] == -7


RAGGED = ([1, 1, 0, 37, 2, 0, 129], [5], [0, 0, 1, 0], [1] * 70 + [300])
"""Tokens of each row, empty ones included."""


def ragged(counts: list[int]):
    """query_starts, seq_lens and the row and position of every token."""
    begins = [3 * row + row % 2 for row in range(len(counts))]
    starts = torch.tensor([0, *counts]).cumsum(0)
    lens = torch.tensor([begin + count for begin, count in zip(begins, counts, strict=True)])
    tokens = [(row, begins[row] + nth) for row, count in enumerate(counts) for nth in range(count)]
    return starts.to(DEVICE, torch.int32), lens.to(DEVICE, torch.int32), tokens


@pytest.mark.parametrize("counts", RAGGED)
@pytest.mark.parametrize(("first", "length"), [(0, 7), (2, 1), (1, 64)])
def test_pieces_are_the_rows_in_order(counts, first, length) -> None:
    first = min(first, len(counts) - 1)
    starts, lens, tokens = ragged(counts)
    before = sum(counts[:first])
    for room in (0, 9):
        found = kernels.cut_rows(starts, lens, first=first, length=length, tokens=len(tokens) - before + room)
        assert len(found.rows) == (len(tokens) - before + room) // length + len(counts) - first
        begins, sizes = found.starts.tolist(), found.starts.diff().tolist()
        assert (begins[0], begins[-1]) == (before, len(tokens))
        assert 0 <= min(sizes) <= max(sizes) <= length
        for begin, size, end, row in zip(begins, sizes, found.lengths.tolist(), found.rows.tolist(), strict=False):
            if size:
                assert tokens[begin : begin + size] == [(row, end - size + nth) for nth in range(size)]
        assert sum(size > 0 for size in sizes) == sum(-(-count // length) for count in counts[first:])


@pytest.mark.parametrize("counts", RAGGED)
def test_slots_of_ragged_rows(counts) -> None:
    starts, lens, tokens = ragged(counts)
    table = torch.randint(1, 99, (len(counts), 200))
    floors = torch.arange(len(counts)) * 2
    given = starts, lens, floors.to(DEVICE, torch.int32), table.to(DEVICE, torch.int32)
    want = [int(table[r, p // 4]) * 4 + p % 4 if p >= floors[r] else -1 for r, p in tokens]
    found = kernels.cache_slots(*given, block=4, tokens=len(tokens) + 3, max_queries=max(counts))
    assert found[: len(tokens)].tolist() == want
    if max(counts) > 1:
        assert found[len(tokens) :].tolist() == [-1] * 3


@pytest.mark.parametrize("counts", RAGGED)
def test_ragged_inputs_are_read_by_row(counts) -> None:
    (starts, lens, tokens), rows, capacity, widths = ragged(counts), len(counts), 600, (2, 0, 130)
    slots = torch.randperm(rows + 2)[:rows]
    scratch = (rows + 2) * capacity
    flat = torch.randperm(scratch + 1)
    given = [torch.randint(1, 99, (rows, width)) for width in widths]
    columns = [width + 3 for width in widths]
    begins = torch.tensor([0, *(rows * count + 1 for count in columns)]).cumsum(0).tolist()
    layout, tables = torch.tensor(list(zip(begins, columns, strict=False))), torch.full((begins[-1],), -7)
    packed = torch.cat([*(table.flatten() for table in given), torch.full((5,), 77)])
    place = [t.to(DEVICE, torch.int32) for t in (slots, flat, torch.tensor(widths), packed, layout, tables)]
    ids, positions = kernels.ragged_inputs(
        starts, lens, *place, tokens=len(tokens) + 4, capacity=capacity, scratch=scratch
    )
    assert positions.tolist() == [*(p for _, p in tokens), 0, 0, 0, 0]
    assert ids.tolist() == [*(int(flat[slots[r] * capacity + p]) for r, p in tokens), *[int(flat[scratch])] * 4]
    for begin, count, width, table in zip(begins, columns, widths, given, strict=False):
        expected = torch.full((rows, count), -7)
        expected[:, :width] = table
        assert place[-1][begin : begin + rows * count].view(rows, count).tolist() == expected.tolist()
        assert place[-1][begin + rows * count] == -7


@pytest.mark.parametrize(("fmt", "n", "heads"), [("mxfp4", 128, 5), ("fp8", 64, 2), ("nvfp4", 32, 33)])
def test_rope_round_is_a_record_written_and_read_back(fmt, n, heads) -> None:
    t, pairs = 3, 8
    x, table = rand(t, 2 * heads, n)[:, ::2], (rand(t, pairs), rand(t, pairs))
    x[0, 0], x[1, 1] = 0, 1e-30
    found = kernels.rope_round(x, table, fmt)
    turned = kernels.rope(x, table).flatten(0, 1)
    pool = records.new_pool(len(turned), fmt, n, DEVICE)
    places = torch.arange(len(turned), device=DEVICE)
    kernels.kv_insert(pool, places, turned, fmt)
    assert torch.equal(found.flatten(0, 1), kernels.kv_gather(pool, places, fmt, n, x.dtype))
    assert not torch.equal(found, x)


@pytest.mark.parametrize(("fmt", "n", "q", "t"), [("fp8", 64, 96, 5), ("nvfp4", 32, 64, 1), ("fp8", 64, 40, 300)])
def test_latent_insert_is_a_norm_and_an_insert(fmt, n, q, t) -> None:
    both, slots = rand(t, q + n), torch.randperm(t + 3, device=DEVICE)[:t]
    slots[t // 2] = -1
    q_weight, weight, table = rand(q), rand(n), (rand(t, 8), rand(t, 8))
    pools = [records.new_pool(t + 3, fmt, n, DEVICE) for _ in range(2)]
    options = {"norm_weight": weight, "eps": 1e-6, "table": table}
    latent = kernels.latent_insert(both, q_weight, pools[0], slots, fmt, **options)
    kernels.norm_rope_insert(pools[1], slots, both[:, q:], fmt, **options)
    assert torch.equal(pools[0], pools[1])
    assert (pools[0] != records.new_pool(t + 3, fmt, n, DEVICE)).any() == (t > 1)
    # The sum of squares may run in another order.
    assert (latent - kernels.rms_norm(both[:, :q], q_weight, 1e-6)).abs().max() < 1e-5


@pytest.mark.parametrize("pairs", [5, 3000, 20000])
def test_pairs_are_grouped_in_order(pairs) -> None:
    from deepinfer_kernels_cuda.experts import group_pairs

    experts = 3
    ids = torch.randint(-1, experts, (pairs, 1), device=DEVICE)
    order, offsets = group_pairs(ids, experts)
    want = [(ids.flatten() == expert).nonzero().flatten() for expert in range(experts)]
    assert offsets.tolist() == torch.tensor([0, *map(len, want)]).cumsum(0).tolist()
    assert order[: offsets[-1]].tolist() == torch.cat(want).tolist()


@pytest.mark.parametrize("tokens", [1, 3, 700])
def test_engram_rows_are_all_read(tokens) -> None:
    table, rows = rand(50, 32), torch.randint(0, 50, (tokens, 7), device=DEVICE)
    assert torch.equal(kernels.engram_gather(table, None, rows, table.dtype), table[rows].flatten(1))
