"""Every provider of paged attention against a plain float64 loop over queries."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from deepinfer_offline.models.base import BatchCascade, ForwardBatch, HostBatch
from deepinfer_offline.ops.attention.base import GROUP, AttentionShape
from deepinfer_offline.ops.attention.items import make_items
from deepinfer_offline.ops.attention.portable import TorchAttention
from deepinfer_offline.ops.cpu.attention import CpuAttention
from deepinfer_offline.ops.cpu.build import cpu_kernels
from deepinfer_offline.ops.cpu.plan import shape_reason
from deepinfer_offline.ops.rope import RopeConfig, rope_table
from hypothesis import given, settings
from hypothesis import strategies as st

BLOCK = 32
SHAPES = [(9, 3, 64), (4, 4, 128), (14, 2, 64)]  # heads, key/value heads, channels


def make_batch(starts: list[int], counts: list[int], cascades: list[tuple[list[int], int]], seed: int) -> ForwardBatch:
    """Rows over scattered blocks; the rows of a cascade share its blocks. Rows of one token come first."""
    begin, count = np.array(starts, np.int32), np.array(counts, np.int32)
    lens = begin + count
    columns = -(-int(lens.max()) // BLOCK)
    rng = np.random.default_rng(seed)
    table = 1 + rng.permutation(len(lens) * columns).reshape(len(lens), columns).astype(np.int32)
    for rows, tokens in cascades:
        table[rows, : tokens // BLOCK] = table[rows[0], : tokens // BLOCK]
    query_starts = np.concatenate([[0], np.cumsum(count)]).astype(np.int32)
    positions = np.concatenate([np.arange(s, s + c) for s, c in zip(starts, counts, strict=True)])
    zeros = np.zeros(len(lens), np.int32)
    host = HostBatch(
        query_starts, lens, np.arange(len(lens), dtype=np.int32), count > 1, zeros, zeros, zeros > 0,
        np.arange(len(positions)), {GROUP: table}, int((count == 1).sum()),
    )  # fmt: skip
    put = torch.from_numpy
    return ForwardBatch(
        put(positions * 0), put(positions), put(query_starts), put(lens), put(host.slots), put(zeros), put(zeros),
        put(host.logit_rows), {GROUP: put(table)}, tuple(BatchCascade(np.array(r, np.int32), n) for r, n in cascades),
        torch.zeros(1, 1, dtype=torch.int32), host,
    )  # fmt: skip


class Reference:
    """Keys and values by block and offset in float64, and attention one query at a time."""

    def __init__(self, shape: AttentionShape, theta: float = 10000.0) -> None:
        self.shape, self.store = shape, {}  # (block, offset) -> keys, values
        self.frequencies = theta ** -(np.arange(0, shape.head_dim, 2) / shape.head_dim)

    def rotate(self, x: np.ndarray, position: int) -> np.ndarray:
        half = self.shape.head_dim // 2
        turned = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * position * self.frequencies)
        return np.concatenate([turned.real, turned.imag], axis=1)

    def norm(self, x: np.ndarray, weight: np.ndarray | None) -> np.ndarray:
        if weight is None:
            return x
        return x / np.sqrt((x**2).mean(axis=1, keepdims=True) + self.shape.norm_eps) * weight

    def __call__(self, qkv: np.ndarray, batch: ForwardBatch, weight: np.ndarray | None) -> np.ndarray:
        s, host = self.shape, batch.host
        heads = qkv.reshape(len(qkv), -1, s.head_dim)
        out = np.zeros((len(qkv), s.num_heads, s.head_dim))
        tokens = [(r, t) for r in range(host.num_rows) for t in range(host.query_starts[r], host.query_starts[r + 1])]
        for r, t in tokens:
            position = int(batch.positions[t])
            keys = self.rotate(self.norm(heads[t, s.num_heads : s.num_heads + s.num_kv_heads], weight), position)
            place = (int(host.block_tables[GROUP][r, position // BLOCK]), position % BLOCK)
            self.store[place] = (keys, heads[t, s.num_heads + s.num_kv_heads :])
        for r, t in tokens:
            position = int(batch.positions[t])
            queries = self.rotate(self.norm(heads[t, : s.num_heads], weight), position)
            places = [(int(host.block_tables[GROUP][r, p // BLOCK]), p % BLOCK) for p in range(position + 1)]
            keys = np.stack([self.store[place][0] for place in places])
            values = np.stack([self.store[place][1] for place in places])
            for h in range(s.num_heads):
                scores = keys[:, h // s.group_size] @ queries[h] / math.sqrt(s.head_dim)
                weights = np.exp(scores - scores.max())
                out[t, h] = weights @ values[:, h // s.group_size] / weights.sum()
        return out.reshape(len(qkv), -1)


def provider(name: str, dims: tuple[int, int, int]) -> tuple[Any, AttentionShape, float]:
    """The implementation, its shape, and the error it may make on outputs of size O(1)."""
    dtype = torch.float32 if name == "portable-float32" else torch.bfloat16
    shape = AttentionShape(*dims, BLOCK, dtype, "cpu", norm_eps=1e-6)
    if name == "cpu-kernels":
        if cpu_kernels().reason is not None:
            pytest.skip(f"the C kernels are not there: {cpu_kernels().reason}")
        return CpuAttention(shape), shape, 0.04
    # float32: sums of at most 400 terms. bfloat16: rotated q and k, probabilities and outputs are rounded to 8 bits
    return TorchAttention(shape), shape, 2e-5 if dtype == torch.float32 else 0.04


def check(name: str, dims: tuple[int, int, int], steps: list[ForwardBatch], normed: bool) -> None:
    attend, shape, tolerance = provider(name, dims)
    generator = torch.Generator().manual_seed(1)
    rope = rope_table(RopeConfig(shape.head_dim), 1024, "cpu")
    cache = attend.allocate(1 + max(int(step.host.block_tables[GROUP].max()) for step in steps))
    weight = (torch.rand(shape.head_dim, generator=generator) + 0.5).to(shape.dtype) if normed else None
    reference = Reference(shape)
    for step in steps:
        qkv = torch.randn(len(step.token_ids), shape.qkv_width, generator=generator).to(shape.dtype)
        expected = reference(qkv.double().numpy(), step, None if weight is None else weight.double().numpy())
        found = attend(qkv.clone(), cache, attend.prepare(step, rope), weight, weight)
        assert np.abs(found.double().numpy() - expected).max() < tolerance


PROVIDERS = ["portable-float32", "portable-bfloat16", "cpu-kernels"]


def same_blocks(step: ForwardBatch, starts: list[int], counts: list[int]) -> ForwardBatch:
    """The next step of the same rows: the block tables of `step`."""
    later = make_batch(starts, counts, [], 0)
    later.host.block_tables[GROUP][:] = step.host.block_tables[GROUP][:, : later.host.block_tables[GROUP].shape[1]]
    return later


@pytest.mark.parametrize("name", PROVIDERS)
@pytest.mark.parametrize("dims", SHAPES)
@pytest.mark.parametrize("normed", [False, True])
def test_chunks_then_decoding(name: str, dims: tuple[int, int, int], normed: bool) -> None:
    decode = make_batch([70, 33, 300], [1, 1, 1], [], 4)
    check(name, dims, [same_blocks(decode, [0, 0, 0], [70, 33, 300]), decode], normed)


@pytest.mark.parametrize("name", PROVIDERS)
def test_cascades_of_several_depths(name: str) -> None:
    cascades = [([0, 1, 3], 128), ([2, 4], 64)]
    known = [130, 140, 70, 128, 64, 40]
    decode = make_batch(known, [1, 1, 1, 1, 1, 50], cascades, 5)
    check(name, SHAPES[0], [_owner_first(decode, known, cascades), decode], normed=False)


def _owner_first(decode: ForwardBatch, known: list[int], cascades: list[tuple[list[int], int]]) -> ForwardBatch:
    """Fill the known positions. Followers of a cascade start past its prefix, as after a hit in the same step."""
    starts = [0] * len(known)
    for rows, tokens in cascades:
        for row in rows[1:]:
            starts[row] = tokens
    counts = [length - start for length, start in zip(known, starts, strict=True)]
    kept = sorted((row for row, count in enumerate(counts) if count > 0), key=lambda row: counts[row] != 1)
    step = make_batch([starts[row] for row in kept], [counts[row] for row in kept], [], 0)
    columns = step.host.block_tables[GROUP].shape[1]
    step.host.block_tables[GROUP][:] = decode.host.block_tables[GROUP][kept, :columns]
    return step


@pytest.mark.parametrize("name", PROVIDERS)
def test_one_long_context_alone(name: str) -> None:
    decode = make_batch([899], [1], [], 6)  # long enough for the kernels to split the keys
    check(name, (4, 4, 128), [same_blocks(decode, [0], [899]), decode], normed=False)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 300), st.integers(1, 90)), min_size=1, max_size=9),
    tile=st.integers(1, 20),
    shared=st.booleans(),
)
def test_items_cover_every_visible_key_once(rows: list[tuple[int, int]], tile: int, shared: bool) -> None:
    rows = sorted(rows, key=lambda row: row[1] != 1)
    decodes = [i for i, (start, count) in enumerate(rows) if count == 1 and start >= 64]
    cascades = [(decodes, 64)] if shared and len(decodes) > 1 else []
    batch = make_batch([start for start, _ in rows], [count for _, count in rows], cascades, 1)
    items = make_items(batch.host, batch.cascades, tile)
    seen = np.zeros((len(batch.token_ids), 512), int)
    for i, size in enumerate(items.sizes.tolist()):
        assert 1 <= size <= tile
        for token in items.tokens[items.offsets[i] : items.offsets[i + 1]].tolist():
            seen[token, items.key_begins[i] : min(items.key_ends[i], int(batch.positions[token]) + 1)] += 1
    visible = np.arange(512) <= batch.positions.numpy()[:, None]
    assert (seen == visible).all()


def test_shapes_that_the_kernels_lack_are_named() -> None:
    assert shape_reason(AttentionShape(4, 2, 80, 32, torch.bfloat16, "cpu")) == "head_dim 80 is not one of 64, 128"
    assert "block_size 16" in str(shape_reason(AttentionShape(4, 2, 64, 16, torch.bfloat16, "cpu")))
    assert shape_reason(AttentionShape(4, 2, 64, 32, torch.bfloat16, "cpu")) is None
