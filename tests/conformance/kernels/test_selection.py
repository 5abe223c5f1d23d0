"""The indexer's scores and what is selected by them, against the portable ops."""

from __future__ import annotations

import pytest
from kernel_kit import (
    DEVICE,
    DTYPES,
    INTERPRET,
    MARKS,
    assert_near,
    kernels,
    poisoned_pool,
    portable,
    rand,
    torch,
)

pytestmark = MARKS


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("t", "heads", "n", "size"),
    [(3, 4, 128, 8), (2, 7, 64, 16), (5, 32, 128, 64)]
    + ([] if INTERPRET else [(4, 32, 128, 256), (66, 31, 128, 128), (3, 9, 128, 4), (2, 32, 128, 32)]),
)
def test_indexer_logits(t, heads, n, size, dtype) -> None:
    q = portable.round_to_record(rand(t, heads, n, dtype=dtype), "mxfp4")
    weights = rand(t, heads, dtype=dtype)
    entries = 5 * size
    flat = poisoned_pool(9 * size, "mxfp4", n, 8 * size)
    table = torch.stack([torch.randperm(8)[:5] for _ in range(2)]).to(DEVICE, torch.int32)
    rows = torch.randint(0, 2, (t,), device=DEVICE)
    visible = torch.randint(0, entries + 1, (t,), device=DEVICE, dtype=torch.int32)
    visible[0] = entries
    keys = portable.kv_gather(
        flat.view(-1, flat.shape[-1]),
        (table.long()[..., None] * size + torch.arange(size, device=DEVICE)).flatten(1),
        "mxfp4",
        n,
        dtype,
    )
    want = portable.indexer_logits(q[:, None], weights[:, None], keys[rows], visible[:, None])[:, 0]
    out = kernels.indexer_logits(q, weights, flat.view(9, size, -1), table, rows, visible, max_entries=entries)
    assert torch.equal(out.isinf(), want.isinf())
    finite = ~want.isinf()
    assert_near(out[finite], want[finite], dtype)
    if not INTERPRET and n == 128 and dtype == torch.bfloat16:
        # Exact products, rounded alike: the two kernels differ where the order of a sum decides a rounding, a few in 10^5.
        other = kernels.indexer_logits(
            q, weights, flat.view(9, size, -1), table, rows, visible, max_entries=entries, kernel="portable"
        )
        assert (other != out).float().mean() < 1e-3


@pytest.mark.parametrize(("low", "high"), [(118, 131), (60, 200), (150, 171)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_indexer_scales(low, high, dtype) -> None:
    """Groups that vanish beside others of their key, keys over 2^33, and a key whose scale is NaN, which spoils no other."""
    pool = torch.randint(0, 256, (3, 64, 68), dtype=torch.uint8)
    pool[..., 64:] = torch.randint(low, high, (3, 64, 4), dtype=torch.uint8)
    pool[1, 7, 65] = 255
    table, entries = torch.tensor([[2, 0, 1]], dtype=torch.int32), 180
    q, weights = torch.randn(2, 5, 128).to(dtype), torch.randn(2, 5).to(dtype)
    value = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = torch.stack((pool[..., :64] & 15, pool[..., :64] >> 4), -1).view(3, 64, 4, 32).long()
    keys = torch.where(codes > 7, -1.0, 1.0) * value[codes & 7] * torch.exp2(pool[..., 64:].double() - 127)[..., None]
    keys = keys.view(3, 64, 128)[table[0].long()].reshape(192, 128)[:entries]
    terms = (q.double() @ keys.T).to(dtype).double().relu() * weights.double()[..., None]  # [t, heads, entries]
    out = kernels.indexer_logits(
        q.to(DEVICE), weights.to(DEVICE), pool.to(DEVICE), table.to(DEVICE), torch.zeros(2, dtype=torch.int32, device=DEVICE),
        torch.full((2,), entries, dtype=torch.int32, device=DEVICE), max_entries=entries,
    ).cpu()  # fmt: skip
    nan = torch.arange(entries) == 128 + 7
    # A product on the edge of two roundings may take either, and so may their sum: of each, half a unit in the last place.
    error = (out.double() - terms.sum(1)).abs()[:, ~nan]
    assert (error <= terms.abs().sum(1)[:, ~nan] * (1e-5 if dtype == torch.float32 else 2**-7)).all()


@pytest.mark.parametrize(
    ("rows", "n", "k"),
    [(3, 50, 7), (2, 5, 8), (4, 700, 512), (1, 3000, 40)]
    + ([] if INTERPRET else [(64, 65536, 512), (3, 16384, 2048), (2, 300001, 512), (3, 100000, 4096)]),
)
def test_topk_lowest_index(rows, n, k) -> None:
    scores = torch.randint(0, 6, (rows, n)).to(DEVICE, torch.float32) - 2  # many ties, zeros and negatives
    scores[0] = torch.randn(n, device=DEVICE)
    scores[-1, n // 2 :] = -torch.inf
    scores[-1, 0], scores[-1, 1] = -0.0, 0.0
    want = portable.topk_lowest_index(scores, k)
    assert torch.equal(kernels.topk_lowest_index(scores, k).long(), want.long())
    poisoned = scores.clone()
    lengths = torch.full((rows,), n // 2, dtype=torch.int32, device=DEVICE)
    poisoned[:, n // 2 :] = torch.nan
    want = portable.topk_lowest_index(scores[:, : n // 2], k)
    assert torch.equal(kernels.topk_lowest_index(poisoned, k, lengths).long(), want.long())
    if not INTERPRET:
        for each in (scores, scores.bfloat16(), torch.randn(rows, n, device=DEVICE), torch.ones_like(scores)):
            want = portable.topk_lowest_index(each.float(), k)
            assert torch.equal(kernels.topk_lowest_index(each, k).long(), want.long())
            assert torch.equal(kernels.topk_lowest_index(each, k, kernel="portable").long(), want.long())


def test_candidate_mask() -> None:
    scores = torch.randint(0, 5, (4, 203)).to(DEVICE, torch.float32)
    visible = torch.tensor([203, 1, 57, 0], device=DEVICE)
    scores.masked_fill_(torch.arange(203, device=DEVICE) >= visible[:, None], -torch.inf)
    want = portable.candidate_mask(scores[:3], visible[:3], blocks=6, block_size=8)
    out = kernels.candidate_mask(scores, visible, blocks=6, block_size=8)
    assert torch.equal(out[:3], want)
    assert not out[3].any()
