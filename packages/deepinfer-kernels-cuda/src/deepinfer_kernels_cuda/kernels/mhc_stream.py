# The kernel language is no Python that a type checker knows.
# pyrefly: ignore-errors
"""mHC in one pass over bfloat16 streams: update, collapse and projection on values that never leave the registers.

A tile of streams is loaded from global memory straight into the layout of the matrix unit's right operand (16 bytes a
thread), updated there, multiplied there and stored from there; the projection's matrix is laid out to match. No second
pass. What needs a whole token (its norms, its coefficients) is left to a small second kernel.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2


@gluon.jit
def _project(new, fn, chunk, acc_comb, acc_rest, a_layout: gl.constexpr):
    """Add the chunk's 48 rows of fn times new [64, M]: 16 of comb (high, then low parts), 16 of pre and post."""
    row = gl.arange(0, 16, layout=gl.SliceLayout(1, a_layout))
    k = gl.arange(0, 64, layout=gl.SliceLayout(0, a_layout))
    # Packed so that a warp's load is 512 consecutive bytes.
    row, k = (row // 8) * 512 + (row % 8) * 32, (k // 32) * 256 + k % 32
    at = fn + chunk.to(gl.int64) * (48 * 64) + gl.expand_dims(row, 1) + gl.expand_dims(k, 0)
    acc_comb = mma_v2(gl.load(at), new, acc_comb)
    acc_comb = mma_v2(gl.load(at + 16 * 64), new, acc_comb)
    acc_rest = mma_v2(gl.load(at + 32 * 64), new, acc_rest)
    return acc_comb, acc_rest


@gluon.jit
def _update(post, comb, token, o: gl.constexpr, y, r0, r1, r2, r3):
    """Stream o after the update, rounded."""
    mix = comb + token * 16 + o
    value = gl.expand_dims(gl.load(post + token * 4 + o), 0) * y.to(gl.float32)
    value += gl.expand_dims(gl.load(mix), 0) * r0.to(gl.float32)
    value += gl.expand_dims(gl.load(mix + 4), 0) * r1.to(gl.float32)
    value += gl.expand_dims(gl.load(mix + 8), 0) * r2.to(gl.float32)
    value += gl.expand_dims(gl.load(mix + 12), 0) * r3.to(gl.float32)
    return value.to(gl.bfloat16)


@gluon.jit
def mhc_stream_kernel(
    streams, output, post, comb, pre, fn, new_streams, out, part, squares, tokens, d, spans, tiles,
    HAS_POST: gl.constexpr, HAS_COLLAPSE: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Grid (chunks of 64 channels, groups of `tiles` x 8 WARPS tokens); S = 4 streams; `spans` is the number of chunks.

    A block keeps its part of fn in the first-level cache and walks over tokens. Writes the new streams, the collapsed rows
    (not normalised), and for each (token, chunk): part float32 [T, spans, 32] (comb, then of each stream the high and low
    sums of pre and of post) and squares float32 [T, spans, 2] (of the streams, of the collapsed row).
    """
    # The closing kernel may be launched while this one runs: it waits for the results itself.
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    M: gl.constexpr = 8 * WARPS
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, WARPS], instr_shape=[16, 8])
    a_layout: gl.constexpr = gl.DotOperandLayout(0, mma, 8)
    b_layout: gl.constexpr = gl.DotOperandLayout(1, mma, 8)
    token_layout: gl.constexpr = gl.SliceLayout(0, b_layout)
    chunk = gl.program_id(0)
    first = gl.program_id(1) * tiles * M
    offset = gl.arange(0, M, layout=token_layout)
    place = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(1, b_layout)), 1) + chunk * 64
    row = gl.expand_dims(gl.arange(0, 16, layout=gl.SliceLayout(1, mma)), 1)
    for tile in range(gl.minimum(tiles, gl.cdiv(tokens - first, M))):
        index = first + tile * M + offset
        token = gl.minimum(index, tokens - 1).to(gl.int64)
        here = gl.expand_dims(index < tokens, 0)
        at = gl.expand_dims(token * (4 * d), 0) + place
        row_at = gl.expand_dims(token * d, 0) + place
        # Read once: they leave the first-level cache to fn.
        n0 = gl.load(streams + at, cache_modifier=".cg")
        n1 = gl.load(streams + at + d, cache_modifier=".cg")
        n2 = gl.load(streams + at + 2 * d, cache_modifier=".cg")
        n3 = gl.load(streams + at + 3 * d, cache_modifier=".cg")
        if HAS_POST:
            y = gl.load(output + row_at, cache_modifier=".cg")
            r0, r1, r2, r3 = n0, n1, n2, n3
            n0 = _update(post, comb, token, 0, y, r0, r1, r2, r3)
            n1 = _update(post, comb, token, 1, y, r0, r1, r2, r3)
            n2 = _update(post, comb, token, 2, y, r0, r1, r2, r3)
            n3 = _update(post, comb, token, 3, y, r0, r1, r2, r3)
        # All loads come before the first store, which the compiler could not move them over.
        acc_comb = gl.zeros([16, M], gl.float32, layout=mma)
        acc_rest = gl.zeros([16, M], gl.float32, layout=mma)
        acc_comb, acc_rest = _project(n0, fn, chunk, acc_comb, acc_rest, a_layout)
        acc_comb, acc_rest = _project(n1, fn, d // 64 + chunk, acc_comb, acc_rest, a_layout)
        acc_comb, acc_rest = _project(n2, fn, 2 * (d // 64) + chunk, acc_comb, acc_rest, a_layout)
        acc_comb, acc_rest = _project(n3, fn, 3 * (d // 64) + chunk, acc_comb, acc_rest, a_layout)
        f0, f1, f2, f3 = n0.to(gl.float32), n1.to(gl.float32), n2.to(gl.float32), n3.to(gl.float32)
        item = token * spans + chunk
        if HAS_COLLAPSE:
            collapsed = gl.expand_dims(gl.load(pre + token * 4), 0) * f0
            collapsed += gl.expand_dims(gl.load(pre + token * 4 + 1), 0) * f1
            collapsed += gl.expand_dims(gl.load(pre + token * 4 + 2), 0) * f2
            collapsed += gl.expand_dims(gl.load(pre + token * 4 + 3), 0) * f3
            x = collapsed.to(gl.bfloat16)
            gl.store(out + row_at, x, mask=here)
            gl.store(squares + item * 2 + 1, gl.sum(x.to(gl.float32) * x.to(gl.float32), 0), mask=index < tokens)
        if HAS_POST:
            gl.store(new_streams + at, n0, mask=here)
            gl.store(new_streams + at + d, n1, mask=here)
            gl.store(new_streams + at + 2 * d, n2, mask=here)
            gl.store(new_streams + at + 3 * d, n3, mask=here)
        gl.store(squares + item * 2, gl.sum(f0 * f0 + f1 * f1 + f2 * f2 + f3 * f3, 0), mask=index < tokens)
        acc_token = first + tile * M + gl.arange(0, M, layout=gl.SliceLayout(0, mma))
        target = part + gl.expand_dims(acc_token.to(gl.int64) * spans + chunk, 0) * 32 + row
        gl.store(target, acc_comb, mask=gl.expand_dims(acc_token < tokens, 0))
        gl.store(target + 16, acc_rest, mask=gl.expand_dims(acc_token < tokens, 0))


@gluon.jit
def _inverse(value):
    """1 / value to a unit in the last place or two."""
    return gl.inline_asm_elementwise("rcp.approx.f32 $0, $1;", "=r,r", [value], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _normalise_row(squares, x, token, spans, d, norm_eps, weights_a, weights_b,
                   SPANS: gl.constexpr, D: gl.constexpr, REST: gl.constexpr, WARPS: gl.constexpr):  # fmt: skip
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [WARPS], [0])
    one: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    span = gl.arange(0, SPANS, layout=one)
    at = squares + (token * spans + span) * 2 + 1
    square = gl.sum(gl.load(at, mask=span < spans, other=0.0), 0)
    inverse = 1.0 / gl.sqrt(square / d + norm_eps)
    first = gl.arange(0, D, layout=layout)
    a = gl.load(x + token * d + first)
    if REST > 0:
        second = D + gl.arange(0, REST, layout=layout)
        b = gl.load(x + token * d + second, mask=second < d)
        scaled = b.to(gl.float32) * inverse * weights_b.to(gl.float32)
        gl.store(x + token * d + second, scaled.to(x.dtype.element_ty), mask=second < d)
    scaled = a.to(gl.float32) * inverse * weights_a.to(gl.float32)
    gl.store(x + token * d + first, scaled.to(x.dtype.element_ty))


@gluon.jit
def _finish_mix(part, squares, base, scale, pre, post, comb, block, tokens, spans, d, eps, mix_eps,
                ITERATIONS: gl.constexpr, WARPS: gl.constexpr, TILE: gl.constexpr):  # fmt: skip
    """TILE tokens: a thread has one row of a token's 4 x 4 matrix, and that stream's pre and post; warps share the spans."""
    spread: gl.constexpr = gl.BlockedLayout([1, 1, 1, 4], [1, 8, 4, 1], [WARPS, 1, 1, 1], [3, 2, 1, 0])
    tile: gl.constexpr = gl.SliceLayout(0, spread)
    row_layout: gl.constexpr = gl.SliceLayout(2, tile)
    token_layout: gl.constexpr = gl.SliceLayout(1, row_layout)
    index = block * TILE + gl.arange(0, TILE, layout=token_layout)
    i = gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(0, row_layout)), 0)
    o = gl.expand_dims(gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, tile))), 0), 1)
    cell = gl.expand_dims(i * 4, 2) + o
    token = gl.minimum(index, tokens - 1).to(gl.int64)
    warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, spread))))
    warp_wide = gl.expand_dims(gl.expand_dims(gl.expand_dims(warp, 1), 2), 3)
    first = gl.expand_dims(gl.expand_dims(gl.expand_dims(token * spans, 1), 2), 0) + warp_wide
    cells = part + first * 32 + gl.expand_dims(cell, 0)
    narrow_layout: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, spread))
    warp_narrow = gl.expand_dims(gl.arange(0, WARPS, layout=gl.SliceLayout(1, narrow_layout)), 1)
    narrow_token = gl.convert_layout(token, gl.SliceLayout(0, narrow_layout))
    squares_at = squares + (gl.expand_dims(narrow_token * spans, 0) + warp_narrow) * 2
    c4 = gl.zeros([WARPS, TILE, 4, 4], gl.float32, layout=spread)
    rest4 = gl.zeros([WARPS, TILE, 4, 4], gl.float32, layout=spread)
    square2 = gl.zeros([WARPS, TILE], gl.float32, layout=narrow_layout)
    for begin in range(0, spans, WARPS * 8):
        for j in gl.static_range(8):
            span = begin + j * WARPS
            c4 += gl.load(cells + span * 32, mask=span + warp_wide < spans, other=0.0)
            rest4 += gl.load(cells + span * 32 + 16, mask=span + warp_wide < spans, other=0.0)
            square2 += gl.load(squares_at + span * 2, mask=span + warp_narrow < spans, other=0.0)
    c = gl.sum(c4, 0)
    rest = gl.sum(rest4, 0)
    square = gl.convert_layout(gl.sum(square2, 0), token_layout)
    inverse = 1.0 / gl.sqrt(square / (4 * d) + mix_eps)
    wide = gl.expand_dims(gl.expand_dims(inverse, 1), 2)
    c = gl.load(base + 8 + cell) + c * wide * gl.load(scale + 2)
    pairs = gl.sum(gl.reshape(rest, [TILE, 4, 2, 2]), 3)
    p, q = gl.split(pairs)
    p, q = gl.convert_layout(p, row_layout), gl.convert_layout(q, row_layout)
    narrow = gl.expand_dims(inverse, 1)
    p = gl.load(base + i) + p * narrow * gl.load(scale)
    q = gl.load(base + 4 + i) + q * narrow * gl.load(scale + 1)
    there = gl.expand_dims(index < tokens, 1)
    at = gl.expand_dims(token * 4, 1) + i
    gl.store(pre + at, 1.0 / (1.0 + gl.exp(-p)) + eps, mask=there)
    gl.store(post + at, 2.0 / (1.0 + gl.exp(-q)), mask=there)
    c = gl.exp(c - gl.expand_dims(gl.max(c, 2), 2))
    c = c * gl.expand_dims(_inverse(gl.sum(c, 2)), 2) + eps
    c = c * gl.expand_dims(_inverse(gl.sum(c, 1) + eps), 1)
    for _ in range(ITERATIONS - 1):
        c = c * gl.expand_dims(_inverse(gl.sum(c, 2) + eps), 2)
        c = c * gl.expand_dims(_inverse(gl.sum(c, 1) + eps), 1)
    gl.store(comb + gl.expand_dims(gl.expand_dims(token * 16, 1), 2) + cell, c, mask=gl.expand_dims(there, 2))


@gluon.jit
def mhc_close_kernel(
    part, squares, base, scale, x, weight, pre, post, comb, tokens, spans, d, eps, mix_eps, norm_eps, mix_blocks,
    HAS_NORM: gl.constexpr, ITERATIONS: gl.constexpr, SPANS: gl.constexpr, D: gl.constexpr, REST: gl.constexpr,
    WARPS: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    """Programs below mix_blocks finish the coefficients of TILE tokens each; the others normalise one row of x in place."""
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [WARPS], [0])
    program = gl.program_id(0)
    if HAS_NORM:
        first = gl.arange(0, D, layout=layout)
        weights_a = gl.load(weight + first)
        weights_b = weights_a
        if REST > 0:
            second = D + gl.arange(0, REST, layout=layout)
            weights_b = gl.load(weight + second, mask=second < d)
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    if program < mix_blocks:
        _finish_mix(part, squares, base, scale, pre, post, comb, program, tokens, spans, d, eps, mix_eps, ITERATIONS,
                    WARPS, TILE)  # fmt: skip
    elif HAS_NORM:
        token = (program - mix_blocks).to(gl.int64)
        _normalise_row(squares, x, token, spans, d, norm_eps, weights_a, weights_b, SPANS, D, REST, WARPS)
