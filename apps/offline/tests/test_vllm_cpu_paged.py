"""Batched paged attention against a per-query loop in float64."""

import math

import pytest
import torch
from deepinfer_offline.engine.vllm.cpu import paged
from hypothesis import given, settings
from hypothesis import strategies as st

BLOCK, KV_HEADS, HEADS, D = 4, 2, 6, 8


def build(rows: list[tuple[int, int]], seed: int):
    """rows: (query length, context length). Unused cache memory is NaN, so a read outside a sequence shows."""
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-(q + c) // BLOCK) for q, c in rows]
    order = torch.randperm(sum(needed) + 3, generator=generator)
    cache = torch.full((len(order), KV_HEADS, BLOCK, 2 * D), math.nan)
    table = torch.zeros(len(rows), max(needed), dtype=torch.int32)
    keys, values, at = [], [], 0
    for r, (q, c) in enumerate(rows):
        table[r, : needed[r]] = order[at : at + needed[r]]
        at += needed[r]
        kv = torch.randn(q + c, KV_HEADS, 2 * D, generator=generator)
        slots = table[r][torch.arange(q + c) // BLOCK].long() * BLOCK + torch.arange(q + c) % BLOCK
        paged.insert(kv[..., :D], kv[..., D:], cache, slots)
        keys.append(kv[..., :D])
        values.append(kv[..., D:])
    starts = torch.tensor([0, *torch.tensor([q for q, _ in rows]).cumsum(0).tolist()])
    query = torch.randn(int(starts[-1]), HEADS, D, generator=generator)
    return query, cache, table, starts, torch.tensor([q + c for q, c in rows]), keys, values


def reference(query, starts, keys, values, *, scale, window, causal, softcap, sinks):
    out = torch.empty_like(query, dtype=torch.float64)
    for r, (k, v) in enumerate(zip(keys, values, strict=True)):
        first, last = int(starts[r]), int(starts[r + 1])
        context = k.shape[0] - (last - first)
        for t in range(first, last):
            position = context + t - first
            low = max(0, position - window + 1) if window > 0 else 0
            high = position + 1 if causal else k.shape[0]
            for h in range(HEADS):
                kh = h // (HEADS // KV_HEADS)
                score = (k[low:high, kh].double() @ query[t, h].double()) * scale
                if softcap:
                    score = softcap * torch.tanh(score / softcap)
                top = score.exp()
                below = top.sum() + (sinks[h].double().exp() if sinks is not None else 0)
                out[t, h] = (top[:, None] * v[low:high, kh].double()).sum(0) / below
    return out


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 30)), min_size=1, max_size=7),
    window=st.sampled_from([0, 1, 3, 16]),
    softcap=st.sampled_from([0.0, 5.0]),
    with_sinks=st.booleans(),
    causal=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_any_batch_equals_the_loop(rows, window, softcap, with_sinks, causal, seed):
    query, cache, table, starts, lens, keys, values = build(rows, seed)
    # Blocks past a sequence's end are replaced by its first block; the tail of its last block is masked. NaN times zero
    # is NaN, so the masked tail must hold numbers: vLLM zeroes its cache, and so does this test.
    cache = torch.nan_to_num(cache)
    sinks = torch.randn(HEADS, generator=torch.Generator().manual_seed(seed)) if with_sinks else None
    options = {"scale": 0.3, "window": window, "causal": causal, "softcap": softcap, "sinks": sinks}
    groups = paged.plan_groups(starts, lens, table, BLOCK)
    out = torch.full_like(query, math.nan)
    paged.attend(query, cache, groups, out, **options)
    expected = reference(query, starts, keys, values, **options)
    torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=1e-5)  # float32 sums of <= 39 keys


def test_groups_hold_every_row_once_and_bound_their_padding():
    counts = torch.tensor([1] * 40 + [7, 64, 300])
    lens = torch.cat([torch.arange(10, 410, 10), torch.tensor([7, 500, 300])])
    starts = torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)])
    table = torch.zeros(43, 200, dtype=torch.int32)
    groups = paged.plan_groups(starts, lens, table, BLOCK)
    seen = torch.cat([(g.queries if g.valid is None else g.queries[g.valid]).reshape(-1) for g in groups])
    assert seen.sort().values.tolist() == list(range(int(starts[-1])))
    for group in groups:
        width = group.queries.shape[1]
        real = group.valid.sum(1) if group.valid is not None else torch.full_like(group.keys, width)
        padded = len(group.keys) * width * int(group.keys.max())
        assert padded <= paged.MAX_PADDING * int((real * group.keys).sum())
    assert len(groups) <= 20


def test_insert_skips_padding_slots():
    cache = torch.zeros(2, 1, 4, 4)
    key = torch.arange(3.0).view(3, 1, 1).expand(3, 1, 2)
    paged.insert(key, key + 10, cache, torch.tensor([5, -1, 2]))
    assert cache[1, 0, 1].tolist() == [0, 0, 10, 10]
    assert cache[0, 0, 2].tolist() == [2, 2, 12, 12]
    assert int((cache != 0).sum()) == 6


@pytest.mark.parametrize("rows", [[(1, 0)], [(5, 0), (1, 17)]])
def test_rows_without_queries_are_left_alone(rows):
    query, cache, table, starts, lens, *_ = build(rows, 0)
    starts = torch.cat([starts, starts[-1:]])  # one more row that computes nothing this step
    lens = torch.cat([lens, torch.tensor([9])])
    table = torch.cat([table, table[:1]])
    groups = paged.plan_groups(starts, lens, table, BLOCK)
    out = torch.full_like(query, math.nan)
    paged.attend(query, torch.nan_to_num(cache), groups, out, scale=1.0)
    assert not out.isnan().any()
