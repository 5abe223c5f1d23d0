# The kernel language is no Python that a type checker knows.
# pyrefly: ignore-errors
"""Sparse MLA over quantised records on Hopper: one warp group gathers and dequantises, two multiply.

Channel order. Inside the kernel channel `4 i + c` sits in column `128 c + i`: byte c of an int32 (e4m3) or nibble c of
an int16 (e2m1) then becomes a bfloat16 pair with a shift, a mask and one multiplication. Queries are permuted when
they are read, outputs when they are written; the dot products do not care.

Scale. A code's bits, shifted into place, are the value times 2^-120 (e4m3) or 2^-126 (e2m1). One multiplication by
the group's scale times 2^60 / 2^66 gives the value times 2^-60, exactly, with room for every scale; the softmax scale
and the output carry the 2^60.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# Triton 3.6 calls it thread_barrier, 3.8 barrier.
_barrier = getattr(gl, "thread_barrier", None) or gl.barrier

# Four e4m3 codes of each of two int32 -> four bf16 pairs, scaled.
_E4M3_PAIRS = gl.constexpr("""
{
  .reg .b32 t0, t1, t2, t3, s0, s1, s2, s3;
  prmt.b32 t0, $4, $5, 0x4000;
  prmt.b32 t1, $4, $5, 0x5010;
  prmt.b32 t2, $4, $5, 0x6020;
  prmt.b32 t3, $4, $5, 0x7030;
  and.b32 s0, t0, 0x80008000;
  and.b32 s1, t1, 0x80008000;
  and.b32 s2, t2, 0x80008000;
  and.b32 s3, t3, 0x80008000;
  shr.b32 t0, t0, 4;
  shr.b32 t1, t1, 4;
  shr.b32 t2, t2, 4;
  shr.b32 t3, t3, 4;
  lop3.b32 t0, t0, 0x07f007f0, s0, 0xea;
  lop3.b32 t1, t1, 0x07f007f0, s1, 0xea;
  lop3.b32 t2, t2, 0x07f007f0, s2, 0xea;
  lop3.b32 t3, t3, 0x07f007f0, s3, 0xea;
  mul.rn.bf16x2 $0, t0, $6;
  mul.rn.bf16x2 $1, t1, $6;
  mul.rn.bf16x2 $2, t2, $6;
  mul.rn.bf16x2 $3, t3, $6;
}
""")

# Four e2m1 codes of each of two int16 -> four bf16 pairs, scaled.
_E2M1_PAIRS = gl.constexpr("""
{
  .reg .b32 t0, t1, t2, t3, s0, s1, s2, s3;
  shl.b32 s0, $4, 12;
  shl.b32 s1, $4, 8;
  shl.b32 s2, $4, 4;
  and.b32 s0, s0, 0x80008000;
  and.b32 s1, s1, 0x80008000;
  and.b32 s2, s2, 0x80008000;
  and.b32 s3, $4, 0x80008000;
  shl.b32 t0, $4, 6;
  shl.b32 t1, $4, 2;
  shr.b32 t2, $4, 2;
  shr.b32 t3, $4, 6;
  lop3.b32 t0, t0, 0x01c001c0, s0, 0xea;
  lop3.b32 t1, t1, 0x01c001c0, s1, 0xea;
  lop3.b32 t2, t2, 0x01c001c0, s2, 0xea;
  lop3.b32 t3, t3, 0x01c001c0, s3, 0xea;
  mul.rn.bf16x2 $0, t0, $5;
  mul.rn.bf16x2 $1, t1, $5;
  mul.rn.bf16x2 $2, t2, $5;
  mul.rn.bf16x2 $3, t3, $5;
}
""")


@gluon.jit
def _store_columns(tile, row: gl.constexpr, c0, c1, c2, c3, ROWS: gl.constexpr):
    """Store four [ROWS, 32, 4] chunks as columns 0, 128, 256, 384 of rows `row..row+ROWS` of a [BN, 512] tile.

    One store, because the compiler puts a barrier between two stores into one buffer.
    """
    joined = gl.join(gl.join(c0, c2), gl.join(c1, c3))
    tile.slice(row, ROWS, dim=0).store(gl.reshape(gl.permute(joined, (0, 3, 4, 1, 2)), [ROWS, 512]))


@gluon.jit
def _row_offsets(slot, slots, stride_page, stride_row, PAGE: gl.constexpr):
    """Record addresses as int64 byte offsets [ROWS, 1], and which rows exist [ROWS, 1]."""
    valid = (slot >= 0) & (slot < slots)
    page = slot // PAGE
    base = page.to(gl.int64) * stride_page + (slot - page * PAGE).to(gl.int64) * stride_row
    return gl.expand_dims(base, 1), gl.expand_dims(valid, 1)


@gluon.jit
def _load_mxfp8(cache, slot, slots, stride_page, stride_row, column, groups, PAGE: gl.constexpr):
    """Read 528-byte records: int32 words [ROWS, 32, 4] and E8M0 bytes [ROWS, 32]."""
    base, valid = _row_offsets(slot, slots, stride_page, stride_row, PAGE)
    scale = gl.load(cache + (base + 512 + gl.expand_dims(groups, 0) // 2), mask=valid, other=0)
    pointer = (cache + gl.expand_dims(base, 2)).to(gl.pointer_type(gl.int32)) + column
    return gl.load(pointer, mask=gl.expand_dims(valid, 2), other=0), scale


@gluon.jit
def _load_nvfp4(cache, slot, slots, stride_page, stride_row, column, groups, PAGE: gl.constexpr):
    """Read 288-byte records: int16 words [ROWS, 32, 4] and e4m3 scale bytes [ROWS, 32]."""
    base, valid = _row_offsets(slot, slots, stride_page, stride_row, PAGE)
    scale = gl.load(cache + (base + 256 + gl.expand_dims(groups, 0)), mask=valid, other=0)
    pointer = (cache + gl.expand_dims(base, 2)).to(gl.pointer_type(gl.int16)) + column
    return gl.load(pointer, mask=gl.expand_dims(valid, 2), other=0), scale


@gluon.jit
def _decode_mxfp8(words, scale):
    """Four bf16 chunks [ROWS, 32, 4] of value * 2^-60; a NaN scale gives NaN."""
    exponent = scale.to(gl.int32)
    bits = gl.where(exponent == 255, 0x7FC0, gl.minimum(exponent + 60, 254) << 7)
    factor = gl.expand_dims(bits.to(gl.int16).to(gl.bfloat16, bitcast=True), 2)
    factor, words = gl.broadcast(factor, words)
    return gl.inline_asm_elementwise(
        _E4M3_PAIRS, "=r,=r,=r,=r,r,r,r", [words, factor],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def _decode_nvfp4(words, scale):
    """Four bf16 chunks [ROWS, 32, 4] of value * 2^-60; a NaN scale gives NaN."""
    value = scale.to(gl.float8e4nv, bitcast=True).to(gl.float32) * 73786976294838206464.0  # 2^66
    factor = gl.expand_dims(value.to(gl.bfloat16), 2)
    factor, words = gl.broadcast(factor, words)
    return gl.inline_asm_elementwise(
        _E2M1_PAIRS, "=r,=r,=r,=r,r,r", [words, factor],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def _slots(index, part, keys, rows, ROWS: gl.constexpr):
    """Slots of one group of ROWS keys, -1 past the end."""
    key = part * ROWS + rows
    return gl.load(index + key, mask=key < keys, other=-1)


@gluon.jit
def _produce_tiles(
    kv_smem, full, empty, first_step, cache, index, tile_begin, tile_end, keys, slots, stride_page, stride_row,
    FP8: gl.constexpr, PAGE: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Fill the tiles of one record format. Records are requested two groups ahead, their slots four groups ahead."""
    PARTS: gl.constexpr = BN // ROWS
    layout: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 32, 1], [WARPS, 1, 1], [2, 1, 0])
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    groups = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    words = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    column = gl.expand_dims(gl.expand_dims(groups, 0), 2) * 4 + gl.expand_dims(gl.expand_dims(words, 0), 1)
    part = tile_begin * PARTS
    keys = gl.minimum(keys, tile_end * BN)
    slot0 = _slots(index, part, keys, rows, ROWS)
    slot1 = _slots(index, part + 1, keys, rows, ROWS)
    slot2 = _slots(index, part + 2, keys, rows, ROWS)
    slot3 = _slots(index, part + 3, keys, rows, ROWS)
    if FP8:
        words0, scale0 = _load_mxfp8(cache, slot0, slots, stride_page, stride_row, column, groups, PAGE)
        words1, scale1 = _load_mxfp8(cache, slot1, slots, stride_page, stride_row, column, groups, PAGE)
    else:
        words0, scale0 = _load_nvfp4(cache, slot0, slots, stride_page, stride_row, column, groups, PAGE)
        words1, scale1 = _load_nvfp4(cache, slot1, slots, stride_page, stride_row, column, groups, PAGE)
    for tile in range(tile_begin, tile_end):
        step = first_step + tile - tile_begin
        stage = step % STAGES
        buffer = kv_smem.index(stage)
        mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
        for inner in gl.static_range(PARTS):
            if FP8:
                words2, scale2 = _load_mxfp8(cache, slot2, slots, stride_page, stride_row, column, groups, PAGE)
            else:
                words2, scale2 = _load_nvfp4(cache, slot2, slots, stride_page, stride_row, column, groups, PAGE)
            slot2 = slot3
            slot3 = _slots(index, tile * PARTS + inner + 4, keys, rows, ROWS)
            if FP8:
                c0, c1, c2, c3 = _decode_mxfp8(words0, scale0)
            else:
                c0, c1, c2, c3 = _decode_nvfp4(words0, scale0)
            _store_columns(buffer, inner * ROWS, c0, c1, c2, c3, ROWS)
            words0, scale0 = words1, scale1
            words1, scale1 = words2, scale2
        fence_async_shared()
        _barrier()
        mbarrier.arrive(full.index(stage), count=1)


@gluon.jit
def _produce(
    kv_smem, full, empty,
    window, window_idx, w_stride_page, w_stride_row, w_idx_stride, W_PAGE: gl.constexpr, W_KEYS, w_slots,
    extra, extra_idx, x_stride_page, x_stride_row, x_idx_stride, X_PAGE: gl.constexpr, X_KEYS, x_slots,
    query, tile_begin, tile_end, w_tiles,
    BN: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Gather records tile by tile, dequantise them to bf16 * 2^-60 and hand the tiles to the consumers."""
    w_begin = gl.minimum(tile_begin, w_tiles)
    w_end = gl.minimum(tile_end, w_tiles)
    if w_begin < w_end:
        _produce_tiles(kv_smem, full, empty, 0, window, window_idx + query.to(gl.int64) * w_idx_stride, w_begin, w_end,
                       W_KEYS, w_slots, w_stride_page, w_stride_row, True, W_PAGE, BN, STAGES, 16, WARPS)  # fmt: skip
    x_begin = gl.maximum(tile_begin, w_tiles) - w_tiles
    x_end = gl.maximum(tile_end, w_tiles) - w_tiles
    if x_begin < x_end:
        _produce_tiles(kv_smem, full, empty, w_end - w_begin, extra, extra_idx + query.to(gl.int64) * x_idx_stride,
                       x_begin, x_end, X_KEYS, x_slots, x_stride_page, x_stride_row, False, X_PAGE, BN, STAGES, 16,
                       WARPS)  # fmt: skip


@gluon.jit
def _valid_keys(window_idx, w_idx_stride, W_KEYS, w_slots, extra_idx, x_idx_stride, X_KEYS, x_slots, query, tile, w_tiles,
                columns, BN: gl.constexpr):  # fmt: skip
    """Which keys of a tile exist: bool [BN]."""
    in_window = tile < w_tiles
    key = gl.where(in_window, tile, tile - w_tiles) * BN + columns
    slots = gl.where(in_window, w_slots, x_slots)
    ptr = gl.where(
        in_window, window_idx + query.to(gl.int64) * w_idx_stride, extra_idx + query.to(gl.int64) * x_idx_stride
    )
    slot = gl.load(ptr + key, mask=key < gl.where(in_window, W_KEYS, X_KEYS), other=-1)
    return (slot >= 0) & (slot < slots)


@gluon.jit
def _consume(
    q_smem, kv_smem, p_smem, full, empty,
    window_idx, w_idx_stride, W_KEYS, w_slots, extra_idx, x_idx_stride, X_KEYS, x_slots,
    sink, out, out_stride_n, out_stride_h, lse, partial, partial_ml, counters,
    query, head_block, split, heads, tile_begin, tile_end, w_tiles, scale_log2,
    HAS_SINK: gl.constexpr, SPLITS: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Two warp groups: logits, online softmax, weighted sum, and the merge of splits by the last one to finish."""
    qk_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, BN // 2, 16])
    pv_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 256, 16])
    qk_row: gl.constexpr = gl.SliceLayout(1, qk_layout)
    pv_row: gl.constexpr = gl.SliceLayout(1, pv_layout)
    columns = gl.arange(0, BN, layout=gl.SliceLayout(0, qk_layout))
    scale_log2 = scale_log2 * 1152921504606846976.0  # keys carry 2^-60
    acc = gl.zeros([64, 512], gl.float32, layout=pv_layout)
    m = gl.full([64], float("-inf"), gl.float32, layout=qk_row)
    total = gl.zeros([64], gl.float32, layout=qk_row)
    valid = _valid_keys(window_idx, w_idx_stride, W_KEYS, w_slots, extra_idx, x_idx_stride, X_KEYS, x_slots, query,
                        tile_begin, w_tiles, columns, BN)  # fmt: skip
    for tile in range(tile_begin, tile_end):
        step = tile - tile_begin
        stage = step % STAGES
        next_tile = gl.minimum(tile + 1, tile_end - 1)
        next_valid = _valid_keys(window_idx, w_idx_stride, W_KEYS, w_slots, extra_idx, x_idx_stride, X_KEYS, x_slots,
                                 query, next_tile, w_tiles, columns, BN)  # fmt: skip
        mbarrier.wait(full.index(stage), (step // STAGES) & 1)
        keys = kv_smem.index(stage)
        logits = gl.zeros([64, BN], gl.float32, layout=qk_layout)
        logits = warpgroup_mma(q_smem, keys.permute((1, 0)), logits, use_acc=False, is_async=True)
        logits = warpgroup_mma_wait(0, deps=[logits])
        logits = gl.where(gl.expand_dims(valid, 0), logits * scale_log2, float("-inf"))
        m_new = gl.maximum(m, gl.max(logits, axis=1))
        m_safe = gl.where(m_new == float("-inf"), 0.0, m_new)
        p = gl.exp2(logits - gl.expand_dims(m_safe, 1))
        alpha = gl.exp2(m - m_safe)
        total = total * alpha + gl.sum(p, axis=1)
        m = m_new
        p_smem.store(p.to(gl.bfloat16))
        acc = acc * gl.expand_dims(gl.convert_layout(alpha, pv_row), 1)
        fence_async_shared()
        _barrier()
        acc = warpgroup_mma(p_smem, keys, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        _barrier()
        mbarrier.arrive(empty.index(stage), count=1)
        valid = next_valid

    # The accumulator holds sum(p * value) * 2^-60.
    row = gl.arange(0, 64, layout=qk_row)
    head = head_block * 64 + row
    if SPLITS > 1:
        unit = query * gl.num_programs(1) + head_block
        pv_rows = gl.arange(0, 64, layout=pv_row)
        pv_cols = gl.arange(0, 512, layout=gl.SliceLayout(0, pv_layout))
        offsets = gl.expand_dims(pv_rows, 1) * 512 + gl.expand_dims(pv_cols, 0)
        slot = (unit * SPLITS + split).to(gl.int64)
        gl.store(partial + slot * 32768 + offsets, acc)
        gl.store(partial_ml + slot * 128 + row, m)
        gl.store(partial_ml + slot * 128 + 64 + row, total)
        _barrier()
        arrived = gl.atomic_add(counters + unit, 1, sem="acq_rel", scope="gpu")
        last = arrived == SPLITS - 1
        if last:
            gl.store(counters + unit, 0)
            m = gl.full([64], float("-inf"), gl.float32, layout=qk_row)
            for other in range(SPLITS):
                m = gl.maximum(m, gl.load(partial_ml + (unit * SPLITS + other).to(gl.int64) * 128 + row, volatile=True))
            m_safe = gl.where(m == float("-inf"), 0.0, m)
            total = gl.zeros([64], gl.float32, layout=qk_row)
            acc = gl.zeros([64, 512], gl.float32, layout=pv_layout)
            # In the order of the splits, whoever is last: the result does not depend on timing.
            for other in range(SPLITS):
                slot = (unit * SPLITS + other).to(gl.int64)
                m_part = gl.load(partial_ml + slot * 128 + row, volatile=True)
                weight = gl.exp2(m_part - m_safe)
                total = total + weight * gl.load(partial_ml + slot * 128 + 64 + row, volatile=True)
                part = gl.load(partial + slot * 32768 + offsets)
                acc = acc + part * gl.expand_dims(gl.convert_layout(weight, pv_row), 1)
    else:
        last = True
    if last:
        m_safe = gl.where(m == float("-inf"), 0.0, m)
        norm = total
        if HAS_SINK:
            # sink is a natural-log logit; -inf is legal and adds nothing, +inf takes all the weight.
            sink_value = gl.load(sink + head, mask=head < heads, other=float("-inf")) * 1.4426950408889634
            norm = total + gl.exp2(sink_value - m_safe)
        inverse = gl.where(total > 0.0, 1152921504606846976.0 / norm, 0.0)  # 2^60 / norm; an empty row gives 0
        log_total = gl.where(total > 0.0, (m_safe + gl.log2(total)) * 0.6931471805599453, float("inf"))
        gl.store(lse + query.to(gl.int64) * heads + head, log_total, mask=head < heads)
        result = acc * gl.expand_dims(gl.convert_layout(inverse, pv_row), 1)
        staging = kv_smem.index(0)
        staging.store(result.to(gl.bfloat16))
        _barrier()
        wide: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0])
        c0 = staging.slice(0, 128, dim=1).load(wide)
        c1 = staging.slice(128, 128, dim=1).load(wide)
        c2 = staging.slice(256, 128, dim=1).load(wide)
        c3 = staging.slice(384, 128, dim=1).load(wide)
        joined = gl.reshape(gl.join(gl.join(c0, c2), gl.join(c1, c3)), [64, 512])
        store_layout: gl.constexpr = gl.BlockedLayout([1, 32], [2, 16], [8, 1], [1, 0])
        joined = gl.convert_layout(joined, store_layout)
        o_row = head_block * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, store_layout))
        o_col = gl.arange(0, 512, layout=gl.SliceLayout(0, store_layout))
        target = out + query.to(gl.int64) * out_stride_n + gl.expand_dims(o_row, 1) * out_stride_h
        gl.store(target + gl.expand_dims(o_col, 0), joined, mask=gl.expand_dims(o_row < heads, 1))


@gluon.jit
def sm90_sparse_mla_kernel(
    q, q_stride_n, q_stride_h,
    window, window_idx, w_stride_page, w_stride_row, w_idx_stride, W_KEYS, w_slots,
    extra, extra_idx, x_stride_page, x_stride_row, x_idx_stride, X_KEYS, x_slots,
    sink, out, out_stride_n, out_stride_h, lse, partial, partial_ml, counters, heads, scale_log2,
    W_PAGE: gl.constexpr, X_PAGE: gl.constexpr, HAS_SINK: gl.constexpr, SPLITS: gl.constexpr,
    BN: gl.constexpr, STAGES: gl.constexpr, PRODUCER_WARPS: gl.constexpr,
    PRODUCER_REGS: gl.constexpr,
):  # fmt: skip
    """Grid (splits, head blocks of 64, queries); 8 consumer warps and PRODUCER_WARPS producer warps."""
    split = gl.program_id(0)
    head_block = gl.program_id(1)
    query = gl.program_id(2)
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    q_smem = gl.allocate_shared_memory(gl.bfloat16, [64, 512], shared)
    kv_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BN, 512], shared)
    p_smem = gl.allocate_shared_memory(gl.bfloat16, [64, BN], shared)
    bar_layout: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar_layout)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar_layout)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)

    w_tiles = gl.cdiv(W_KEYS, BN)
    tiles = w_tiles + gl.cdiv(X_KEYS, BN)
    tile_begin = tiles * split // SPLITS
    tile_end = tiles * (split + 1) // SPLITS

    wide: gl.constexpr = gl.BlockedLayout([1, 32], [2, 16], [8, 1], [1, 0])
    q_row = head_block * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, wide))
    q_col = gl.arange(0, 512, layout=gl.SliceLayout(0, wide))
    q_ptr = q + query.to(gl.int64) * q_stride_n + gl.expand_dims(q_row, 1) * q_stride_h + gl.expand_dims(q_col, 0)
    q_tile = gl.load(q_ptr, mask=gl.expand_dims(q_row < heads, 1), other=0.0)
    even, odd = gl.split(gl.reshape(q_tile, [64, 128, 2, 2]))
    c0, c2 = gl.split(even)
    c1, c3 = gl.split(odd)
    q_smem.slice(0, 128, dim=1).store(c0)
    q_smem.slice(128, 128, dim=1).store(c1)
    q_smem.slice(256, 128, dim=1).store(c2)
    q_smem.slice(384, 128, dim=1).store(c3)
    fence_async_shared()
    _barrier()

    gl.warp_specialize(
        [
            (_consume, (
                q_smem, kv_smem, p_smem, full, empty,
                window_idx, w_idx_stride, W_KEYS, w_slots, extra_idx, x_idx_stride, X_KEYS, x_slots,
                sink, out, out_stride_n, out_stride_h, lse, partial, partial_ml, counters,
                query, head_block, split, heads, tile_begin, tile_end, w_tiles, scale_log2,
                HAS_SINK, SPLITS, BN, STAGES,
            )),
            (_produce, (
                kv_smem, full, empty,
                window, window_idx, w_stride_page, w_stride_row, w_idx_stride, W_PAGE, W_KEYS, w_slots,
                extra, extra_idx, x_stride_page, x_stride_row, x_idx_stride, X_PAGE, X_KEYS, x_slots,
                query, tile_begin, tile_end, w_tiles,
                BN, STAGES, PRODUCER_WARPS,
            )),
        ],
        [PRODUCER_WARPS],
        [PRODUCER_REGS],
    )  # fmt: skip
