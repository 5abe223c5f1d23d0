# The kernel language is no Python that a type checker knows.
# pyrefly: ignore-errors
"""W4A16 and W8A16 GEMM on Hopper: microscaled weights become the register operand of warpgroup MMA.

Weights are repacked once (`weights.py`) so that a thread's 16-byte load holds exactly the codes of its own MMA
fragment: no shared memory, no shuffles. Each element packs the codes of four chunks of 32 columns, k = 32 c + j; their
bits are placed so that one shift and one mask give a pair of bfloat16 numbers times 2^-126 (e2m1) or 2^-120 (e4m3). The
group's scale, times 2^66 or 2^60, makes that the value times 2^-60, exactly; the epilogue multiplies by 2^60.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

_barrier = getattr(gl, "thread_barrier", None) or gl.barrier  # Triton 3.6, 3.8

# Bits of an int16: chunk 0 sign 15 and magnitude 8:6, chunk 1 sign 12 and 5:3, chunk 2 sign 9 and 2:0,
# chunk 3 sign 14, magnitude 11:10 and 13.
_E2M1_CHUNKS = gl.constexpr("""
{
  .reg .b32 a, b, t0, t1, t2, t3;
  and.b32 t0, $4, 0x81c081c0;
  shl.b32 a, $4, 3;
  and.b32 t1, a, 0x81c081c0;
  shl.b32 a, $4, 6;
  and.b32 t2, a, 0x81c081c0;
  shl.b32 a, $4, 1;
  and.b32 a, a, 0x80008000;
  shr.b32 b, $4, 3;
  lop3.b32 a, b, 0x01800180, a, 0xea;
  shr.b32 b, $4, 7;
  lop3.b32 t3, b, 0x00400040, a, 0xea;
  mul.rn.bf16x2 $0, t0, $5;
  mul.rn.bf16x2 $1, t1, $6;
  mul.rn.bf16x2 $2, t2, $7;
  mul.rn.bf16x2 $3, t3, $8;
}
""")

# Byte c of an int32 is chunk c.
_E4M3_CHUNKS = gl.constexpr("""
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
  mul.rn.bf16x2 $1, t1, $7;
  mul.rn.bf16x2 $2, t2, $8;
  mul.rn.bf16x2 $3, t3, $9;
}
""")


@gluon.jit
def _factors(scales):
    """Four bf16 factors a row from one packed scale word: exponent bytes at bits 7, 23 and, rotated by 8, again."""
    low = scales & 0x7F807F80
    high = ((scales << 8) | ((scales >> 24) & 0xFF)) & 0x7F807F80
    f0 = low.to(gl.int16).to(gl.bfloat16, bitcast=True)
    f1 = (low >> 16).to(gl.int16).to(gl.bfloat16, bitcast=True)
    f2 = high.to(gl.int16).to(gl.bfloat16, bitcast=True)
    f3 = (high >> 16).to(gl.int16).to(gl.bfloat16, bitcast=True)
    return gl.expand_dims(f0, 1), gl.expand_dims(f1, 1), gl.expand_dims(f2, 1), gl.expand_dims(f3, 1)


@gluon.jit
def _decode(words, scales, FP4: gl.constexpr, BN: gl.constexpr, operand: gl.constexpr):
    """Packed int32 words in load order -> bf16 [BN, 128] * 2^-60 as the MMA's register operand."""
    M: gl.constexpr = BN // 64
    f0, f1, f2, f3 = _factors(scales)
    if FP4:
        # An int32 holds the int16 elements b0 = 0, 1. [m, half, thread, (b2, b1)] -> rows m, warp, b1, g; columns
        # half, b2, t, b0.
        halves = gl.join((words & 0xFFFF).to(gl.int16), (words >> 16).to(gl.int16))
        split = gl.reshape(halves, [M, 2, 4, 8, 4, 2, 2, 2])
        ordered = gl.permute(split, (0, 2, 6, 3, 1, 5, 4, 7))
        tile = gl.convert_layout(gl.reshape(ordered, [BN, 32]), operand, assert_trivial=True)
        f0, tile = gl.broadcast(f0, tile)
        f1, tile = gl.broadcast(f1, tile)
        f2, tile = gl.broadcast(f2, tile)
        f3, tile = gl.broadcast(f3, tile)
        c0, c1, c2, c3 = gl.inline_asm_elementwise(
            _E2M1_CHUNKS, "=r,=r,=r,=r,r,r,r,r,r", [tile, f0, f1, f2, f3],
            dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        # [m, (half, b2), thread, (b1, b0)]
        split = gl.reshape(words, [M, 2, 2, 4, 8, 4, 2, 2])
        ordered = gl.permute(split, (0, 3, 6, 4, 1, 2, 5, 7))
        tile = gl.convert_layout(gl.reshape(ordered, [BN, 32]), operand, assert_trivial=True)
        f0, tile = gl.broadcast(f0, tile)
        f1, tile = gl.broadcast(f1, tile)
        f2, tile = gl.broadcast(f2, tile)
        f3, tile = gl.broadcast(f3, tile)
        c0, c1, c2, c3 = gl.inline_asm_elementwise(
            _E4M3_CHUNKS, "=r,=r,=r,=r,r,r,r,r,r,r", [tile, f0, f1, f2, f3],
            dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    joined = gl.join(gl.join(c0, c2), gl.join(c1, c3))
    wide = gl.reshape(gl.permute(joined, (0, 2, 3, 1)), [BN, 128])
    return gl.convert_layout(wide, operand, assert_trivial=True)


@gluon.jit
def _copy_x(x_smem, x, rows, row_mask, x_stride, k_begin, K, columns, stage):
    column = k_begin + columns
    pointer = x + gl.expand_dims(rows * x_stride, 1) + gl.expand_dims(column, 0)
    mask = gl.expand_dims(row_mask, 1) & gl.expand_dims(column < K, 0)
    async_copy.async_copy_global_to_shared(x_smem.index(stage), pointer, mask=mask)


@gluon.jit
def sm90_mx_gemm_kernel(
    x, x_stride, weights, scales, out, out_stride, order, offsets, pair_weights,
    N, K, n_blocks, k_blocks, top_k, limit,
    FP4: gl.constexpr, GROUPED: gl.constexpr, GATHER: gl.constexpr, SCATTER: gl.constexpr, SWIGLU: gl.constexpr,
    SPLIT_K: gl.constexpr, BN: gl.constexpr, BT: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """out[row] = x[row] @ W^T, tiles of BN weight rows x BT tokens.

    Grid (ceil(N / BN), experts or token tiles, token tiles of an expert or splits of K). x, weights, scales and out are
    read and written by rows: GATHER reads x at `order[row] // top_k`, SCATTER writes at `order[row]`.
    """
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    warps: gl.constexpr = gl.num_warps()
    M: gl.constexpr = BN // 64
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, BT, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    block = gl.program_id(0)
    if GROUPED:
        expert = gl.program_id(1)
        row_begin = gl.load(offsets + expert)
        row_end = gl.load(offsets + expert + 1)
        tile_begin = gl.program_id(2)
        tile_step = gl.num_programs(2)
        k_first = 0
        k_last = k_blocks
    else:
        expert = 0
        row_begin = 0
        row_end = top_k  # rows of x
        tile_begin = gl.program_id(1)
        tile_step = gl.num_programs(1)
        k_first = k_blocks * gl.program_id(2) // SPLIT_K
        k_last = k_blocks * (gl.program_id(2) + 1) // SPLIT_K

    if FP4:
        HALVES: gl.constexpr = 2
    else:
        HALVES: gl.constexpr = 4
    WORDS: gl.constexpr = 4
    w_layout: gl.constexpr = gl.BlockedLayout([1, HALVES, 1, 4], [1, 1, 32, 1], [warps // 4, 1, 4, 1], [3, 2, 1, 0])
    TILE: gl.constexpr = HALVES * 128 * WORDS
    l3: gl.constexpr = gl.SliceLayout(3, w_layout)
    i_m = gl.arange(0, M, layout=gl.SliceLayout(1, gl.SliceLayout(2, l3)))
    i_h = gl.arange(0, HALVES, layout=gl.SliceLayout(0, gl.SliceLayout(2, l3)))
    i_t = gl.arange(0, 128, layout=gl.SliceLayout(0, gl.SliceLayout(1, l3)))
    i_w = gl.arange(0, WORDS, layout=gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(0, w_layout))))
    o_m = gl.expand_dims(gl.expand_dims(gl.expand_dims(i_m, 1), 2), 3)
    o_h = gl.expand_dims(gl.expand_dims(gl.expand_dims(i_h, 0), 2), 3)
    o_t = gl.expand_dims(gl.expand_dims(gl.expand_dims(i_t, 0), 1), 3)
    o_w = gl.expand_dims(gl.expand_dims(gl.expand_dims(i_w, 0), 0), 0)
    block64 = block * M
    w_offset = o_m * (k_blocks * TILE) + o_h * (128 * WORDS) + o_t * WORDS + o_w
    w_mask = (block64 + o_m + o_h * 0 + o_t * 0 + o_w * 0) < n_blocks
    w_base = (
        weights + (expert.to(gl.int64) * n_blocks + block64) * k_blocks * TILE
        if GROUPED
        else weights + (block64.to(gl.int64) * k_blocks * TILE)
    )
    s_row = block * BN + gl.arange(0, BN, layout=gl.SliceLayout(1, operand))
    s_mask = s_row < n_blocks * 64
    s_base = scales + expert.to(gl.int64) * k_blocks * n_blocks * 64 if GROUPED else scales

    x_layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [warps, 1], [1, 0])
    x_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BT, 128], gl.NVMMASharedLayout(128, 16, rank=2))
    columns = gl.arange(0, 128, layout=gl.SliceLayout(0, x_layout))

    for tile in range(tile_begin, gl.cdiv(row_end - row_begin, BT), tile_step):
        row = row_begin + tile * BT + gl.arange(0, BT, layout=gl.SliceLayout(1, x_layout))
        row_mask = row < row_end
        if GATHER:
            x_row = (gl.load(order + row, mask=row_mask, other=0) // top_k).to(gl.int64)
        else:
            x_row = row.to(gl.int64)
        acc = gl.zeros([BN, BT], gl.float32, layout=mma)
        _barrier()
        for stage in gl.static_range(STAGES - 1):
            _copy_x(x_smem, x, x_row, row_mask & (k_first + stage < k_last), x_stride, (k_first + stage) * 128, K,
                    columns, stage)  # fmt: skip
            async_copy.commit_group()
        words = gl.load(w_base + k_first * TILE + w_offset, mask=w_mask, other=0)
        scale = gl.load(s_base + k_first * n_blocks * 64 + s_row, mask=s_mask, other=0)
        k_next = gl.minimum(k_first + 1, k_last - 1)
        words_next = gl.load(w_base + k_next * TILE + w_offset, mask=w_mask, other=0)
        scale_next = gl.load(s_base + k_next * n_blocks * 64 + s_row, mask=s_mask, other=0)
        for k in range(k_first, k_last):
            step = k - k_first
            async_copy.wait_group(STAGES - 2)
            fence_async_shared()
            _barrier()
            ahead = k + STAGES - 1
            _copy_x(x_smem, x, x_row, row_mask & (ahead < k_last), x_stride, ahead * 128, K, columns,
                    (step + STAGES - 1) % STAGES)  # fmt: skip
            async_copy.commit_group()
            k_load = gl.minimum(k + 2, k_last - 1)
            words_far = gl.load(w_base + k_load * TILE + w_offset, mask=w_mask, other=0)
            scale_far = gl.load(s_base + k_load * n_blocks * 64 + s_row, mask=s_mask, other=0)
            a = _decode(words, scale, FP4, BN, operand)
            acc = warpgroup_mma(a, x_smem.index(step % STAGES).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            words = words_next
            scale = scale_next
            words_next = words_far
            scale_next = scale_far
        async_copy.wait_group(0)

        value = acc * 1152921504606846976.0  # 2^60
        if SWIGLU:
            # Row 16 i + 8 u + g of the tile is gate (u = 0) or up (u = 1) of channel 8 i + g.
            pair = gl.permute(gl.reshape(value, [BN // 16, 2, 8, BT]), (0, 2, 3, 1))
            gate, up = gl.split(pair)
            gate = gl.minimum(gate.to(gl.bfloat16).to(gl.float32), limit)
            up = gl.minimum(gl.maximum(up.to(gl.bfloat16).to(gl.float32), -limit), limit)
            hidden = gate / (1.0 + gl.exp2(gate * -1.4426950408889634)) * up
            value = gl.reshape(hidden, [BN // 2, BT])
            OUT_ROWS: gl.constexpr = BN // 2
        else:
            OUT_ROWS: gl.constexpr = BN
        value = gl.permute(value, (1, 0))
        o_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [warps, 1], [1, 0])
        o_row = row_begin + tile * BT + gl.arange(0, BT, layout=gl.SliceLayout(1, o_layout))
        o_mask = o_row < row_end
        o_col = block * OUT_ROWS + gl.arange(0, OUT_ROWS, layout=gl.SliceLayout(0, o_layout))
        if SPLIT_K > 1:
            result = gl.convert_layout(value, o_layout)
            target = out + (gl.program_id(2).to(gl.int64) * row_end + o_row) * out_stride
        else:
            if SWIGLU:
                if GROUPED:
                    pair_id = gl.load(order + o_row, mask=o_mask, other=0)
                    weight = gl.load(pair_weights + pair_id, mask=o_mask, other=0.0)
                    result = (gl.convert_layout(value, o_layout) * gl.expand_dims(weight, 1)).to(gl.bfloat16)
                else:
                    result = gl.convert_layout(value.to(gl.bfloat16), o_layout)
            else:
                result = gl.convert_layout(value.to(gl.bfloat16), o_layout)
            if SCATTER:
                o_row = gl.load(order + o_row, mask=o_mask, other=0)
            target = out + o_row.to(gl.int64) * out_stride
        o_limit = N // 2 if SWIGLU else N
        gl.store(gl.expand_dims(target, 1) + gl.expand_dims(o_col, 0), result,
                 mask=gl.expand_dims(o_mask, 1) & gl.expand_dims(o_col < o_limit, 0))  # fmt: skip
