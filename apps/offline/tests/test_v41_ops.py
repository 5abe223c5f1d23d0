"""The portable V4.1 ops against plain restatements."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from deepinfer_offline.ops import deepsig as ops
from deepinfer_offline.ops.deepsig.formats import quantize_fp4_rows
from hypothesis import given, settings
from hypothesis import strategies as st

FEW_VALUES = st.lists(
    st.lists(st.sampled_from([-math.inf, -1.0, -0.0, 0.0, 0.5, 2.0]), min_size=9, max_size=9), min_size=1
)


def best(row: list[float], k: int) -> list[int]:
    """Indices of the k highest finite entries, ties to the lowest index, ascending."""
    order = sorted((i for i, v in enumerate(row) if v > -math.inf), key=lambda i: (-row[i], i))
    return sorted(order[:k])


@given(FEW_VALUES, st.integers(1, 12))
def test_topk_breaks_ties_to_the_lowest_index(rows: list[list[float]], k: int) -> None:
    found = ops.topk_lowest_index(torch.tensor(rows), k)
    assert found.shape == (len(rows), k)
    for got, row in zip(found.tolist(), rows, strict=True):
        expected = best(row, k)
        assert got == expected + [-1] * (k - len(expected))


@given(st.integers(0, 10_000), st.integers(1, 9))
def test_topk_without_ties(seed: int, k: int) -> None:
    scores = torch.randn(4, 9, generator=torch.Generator().manual_seed(seed))
    for got, row in zip(ops.topk_lowest_index(scores, k).tolist(), scores.tolist(), strict=True):
        assert got == best(row, k)


@given(FEW_VALUES, st.integers(1, 4), st.integers(1, 4))
def test_candidates_keep_the_newest_block(rows: list[list[float]], blocks: int, size: int) -> None:
    visible = [1 + i % 9 for i in range(len(rows))]
    rows = [[v if j < n else -math.inf for j, v in enumerate(row)] for row, n in zip(rows, visible, strict=True)]
    mask = ops.candidate_mask(torch.tensor(rows), torch.tensor(visible), blocks=blocks, block_size=size)
    for got, row, n in zip(mask.tolist(), rows, visible, strict=True):
        best_of = [max(row[b : b + size]) for b in range(0, 9, size)]
        best_of[(n - 1) // size] = math.inf
        kept = best(best_of, blocks)
        assert got == [j // size in kept and v > -math.inf for j, v in enumerate(row)]


@pytest.mark.parametrize("streams", [1, 2, 4])
def test_mhc_matches_its_formula(streams: int) -> None:
    torch.manual_seed(streams)
    x = torch.randn(5, streams, 24)
    width = streams * (streams + 2)
    fn, base, scale = torch.randn(width, streams * 24) / 10, torch.randn(width), torch.rand(3) + 0.5
    mix = ops.mhc_pre(x, fn, base, scale, iterations=20, eps=1e-6, norm_eps=1e-20)
    for t in range(5):
        flat = x[t].flatten().double()
        m = (fn.double() @ flat) / math.sqrt(flat.square().mean().item() + 1e-20)
        spread = torch.cat([scale[0].repeat(streams), scale[1].repeat(streams), scale[2].repeat(streams**2)])
        z = base.double() + m * spread.double()
        assert torch.allclose(mix.pre[t].double(), torch.sigmoid(z[:streams]) + 1e-6, atol=1e-5)
        assert torch.allclose(mix.post[t].double(), 2 * torch.sigmoid(z[streams : 2 * streams]), atol=1e-5)
        c = torch.softmax(z[2 * streams :].view(streams, streams), -1) + 1e-6
        c = c / (c.sum(0) + 1e-6)
        for _ in range(19):
            c = c / (c.sum(1, keepdim=True) + 1e-6)
            c = c / (c.sum(0) + 1e-6)
        assert torch.allclose(mix.comb[t].double(), c, atol=1e-5)
    assert (mix.comb.sum(1) - 1).abs().max() < 1e-4  # the last normalisation was over columns
    y = torch.randn(5, 24)
    out = ops.mhc_post(y, x, mix.post, mix.comb)
    expected = torch.stack(
        [
            torch.stack(
                [
                    mix.post[t, o] * y[t] + sum(mix.comb[t, i, o] * x[t, i] for i in range(streams))
                    for o in range(streams)
                ]
            )
            for t in range(5)
        ]
    )
    assert torch.allclose(out, expected, atol=1e-5)
    assert torch.allclose(ops.mhc_collapse(x, mix.pre), (mix.pre.unsqueeze(-1) * x).sum(1), atol=1e-5)


def test_rope_turns_pairs_and_back() -> None:
    frequencies = ops.rope_frequencies(8, 10000.0)
    positions = torch.tensor([0, 3, 50])
    table = ops.rotary_table(positions, frequencies)
    x = torch.randn(3, 2, 12)
    turned = ops.apply_rope(x, table)
    assert torch.equal(turned[..., :4], x[..., :4])
    for t in range(3):
        for k in range(4):
            angle = float(positions[t]) * 10000.0 ** (-2 * k / 8)
            number = complex(x[t, 1, 4 + 2 * k], x[t, 1, 5 + 2 * k]) * complex(math.cos(angle), math.sin(angle))
            assert turned[t, 1, 4 + 2 * k].item() == pytest.approx(number.real, abs=1e-5)
            assert turned[t, 1, 5 + 2 * k].item() == pytest.approx(number.imag, abs=1e-5)
    assert torch.allclose(ops.apply_rope(turned, table, inverse=True), x, atol=1e-5)
    kept = x.clone()
    ops.apply_rope(x, table)
    assert torch.equal(x, kept)
    bf16 = ops.apply_rope(x.bfloat16(), table)
    assert bf16.dtype == torch.bfloat16
    assert torch.allclose(bf16.float(), turned, atol=0.05)


def test_yarn_keeps_fast_frequencies_and_divides_slow_ones() -> None:
    plain = ops.rope_frequencies(64, 160000.0)
    scaled = ops.rope_frequencies(64, 160000.0, factor=16, original_length=65536)
    ratio = (plain / scaled).tolist()
    assert ratio[0] == 1.0
    assert ratio[-1] == pytest.approx(16.0, rel=1e-6)
    assert ratio == sorted(ratio)


@pytest.mark.parametrize("experts", [6, 100])
def test_router_selects_by_biased_score_and_weighs_without_bias(experts: int) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(7, 16), torch.randn(experts, 16), torch.randn(experts)
    weight[3], bias[3] = weight[1], bias[1]  # a tie that must go to expert 1
    ids, weights = ops.router(x, weight, bias, k=2, normalise=True, scale=1.5)
    for t in range(7):
        scores = [math.sqrt(math.log1p(math.exp(v))) for v in (weight @ x[t]).tolist()]
        biased = [s + b for s, b in zip(scores, bias.tolist(), strict=True)]
        biased[3] = biased[1]
        chosen = sorted(range(experts), key=lambda e: (-biased[e], e))[:2]
        assert sorted(ids[t].tolist()) == sorted(chosen)
        whole = sum(scores[e] for e in chosen)
        for e, got in zip(ids[t].tolist(), weights[t].tolist(), strict=True):
            assert got == pytest.approx(scores[e] / whole * 1.5, rel=1e-5)


@pytest.mark.parametrize("packed", [False, True])
def test_grouped_experts_equal_a_loop_over_tokens(packed: bool) -> None:
    torch.manual_seed(1)
    tokens, experts, d, m, k = 11, 5, 64, 32, 2
    gate_up, down = torch.randn(experts, 2 * m, d) / 4, torch.randn(experts, d, m) / 4
    weights = ops.ExpertWeights(gate_up, down)
    if packed:
        codes = [quantize_fp4_rows(w) for w in gate_up], [quantize_fp4_rows(w) for w in down]
        weights = ops.ExpertWeights(
            torch.stack([c for c, _ in codes[0]]),
            torch.stack([c for c, _ in codes[1]]),
            torch.stack([s.view(torch.uint8) for _, s in codes[0]]).view(torch.float8_e8m0fnu),
            torch.stack([s.view(torch.uint8) for _, s in codes[1]]).view(torch.float8_e8m0fnu),
        )
        gate_up = torch.stack([weights.gate_up_of(e, torch.float32) for e in range(experts)])
        down = torch.stack([weights.down_of(e, torch.float32) for e in range(experts)])
    x = torch.randn(tokens, d)
    ids = torch.stack([torch.randperm(4)[:k] for _ in range(tokens)])  # expert 4 gets nothing
    scales = torch.rand(tokens, k)
    out = ops.moe_experts(x, ids, scales, weights, limit=0.8)
    for t in range(tokens):
        expected = torch.zeros(d)
        for e, s in zip(ids[t].tolist(), scales[t].tolist(), strict=True):
            gate, up = (gate_up[e] @ x[t]).chunk(2)
            gate, up = gate.clamp(max=0.8), up.clamp(-0.8, 0.8)
            expected += s * (down[e] @ (gate * torch.sigmoid(gate) * up))
        assert torch.allclose(out[t], expected, atol=1e-5)


def test_attention_with_sink_matches_its_formula() -> None:
    torch.manual_seed(2)
    b, m, heads, n, length = 2, 3, 4, 8, 6
    q, keys = torch.randn(b, m, heads, n), torch.randn(b, length, n)
    keys[:, -1] = 0
    allowed = torch.rand(b, m, length) < 0.5
    allowed[..., -1] = True
    allowed[0, 0, :-1] = False  # sees nothing but the sink
    sink = torch.randn(heads)
    out = ops.attend(q, keys, allowed, sink, 0.3)
    for i in range(b):
        for j in range(m):
            for h in range(heads):
                seen = [k for k in range(length - 1) if allowed[i, j, k]]
                e = [math.exp(0.3 * float(q[i, j, h] @ keys[i, k])) for k in seen]
                total = sum(e) + math.exp(sink[h].item())
                expected = sum((w * keys[i, k] for w, k in zip(e, seen, strict=True)), torch.zeros(n)) / total
                assert torch.allclose(out[i, j, h], expected, atol=1e-5)
    assert not out[0, 0].any()


def test_decode_and_prefill_attention_agree() -> None:
    torch.manual_seed(3)
    t, heads, n = 5, 4, 32
    window = torch.zeros(20, ops.record_bytes("fp8", n), dtype=torch.uint8)
    entries = torch.zeros(20, ops.record_bytes("nvfp4", n), dtype=torch.uint8)
    ops.kv_insert(window, torch.arange(20), torch.randn(20, n), "fp8")
    ops.kv_insert(entries, torch.arange(20), torch.randn(20, n), "nvfp4")
    q, sink = torch.randn(t, heads, n), torch.randn(heads)
    ws = torch.randint(-1, 20, (t, 6))
    cs = torch.randint(-1, 20, (t, 4))
    paged = ops.sparse_mla_decode(q, window, ws, sink, scale=n**-0.5, compressed_pool=entries, compressed_slots=cs)
    slots = torch.arange(20)
    kv = torch.cat(
        (
            ops.kv_gather(window, slots, "fp8", n, torch.float32),
            ops.kv_gather(entries, slots, "nvfp4", n, torch.float32),
        )
    )
    indices = torch.cat((ws, torch.where(cs >= 0, cs + 20, -1)), dim=1)
    dense = ops.sparse_mla_prefill(q, kv, indices, sink, scale=n**-0.5)
    assert torch.allclose(paged, dense, atol=1e-6)


@settings(max_examples=30)
@given(st.integers(0, 2**32 - 1))
def test_engram_rows_wrap_like_64_bit_integers(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n, heads, t = 4, 2, 3
    tokens, multipliers = rng.integers(0, 10**5, (t, n)), rng.integers(0, 2**62, n) * 2 + 1
    primes, offsets = rng.integers(2, 10**6, (n - 1) * heads), rng.integers(0, 10**6, (n - 1) * heads)
    got = ops.engram_rows(*(torch.from_numpy(a) for a in (tokens, multipliers, primes, offsets)))
    for i in range(t):
        rolling = _signed(int(tokens[i, 0]) * int(multipliers[0]))
        for k in range(1, n):
            rolling ^= _signed(int(tokens[i, k]) * int(multipliers[k]))
            for h in range(heads):
                column = (k - 1) * heads + h
                assert got[i, column].item() == rolling % int(primes[column]) + int(offsets[column])


def _signed(value: int) -> int:
    value &= 2**64 - 1
    return value - 2**64 if value >= 2**63 else value


def test_compression_weighs_each_channel_on_its_own() -> None:
    values, gates = torch.randn(3, 2, 5), torch.randn(3, 2, 5)
    out = ops.compress(values, gates)
    for g in range(3):
        for c in range(5):
            a, b = math.exp(gates[g, 0, c]), math.exp(gates[g, 1, c])
            expected = (a * values[g, 0, c] + b * values[g, 1, c]) / (a + b)
            assert out[g, c].item() == pytest.approx(expected.item(), abs=1e-5)
