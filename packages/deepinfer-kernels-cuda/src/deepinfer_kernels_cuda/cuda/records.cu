// Records of 512 bfloat16 channels, a warp a row: a lane has 16 neighbouring channels. Rows are normalised, rotated, quantised and
// written.
// FORMAT 0: 512 e4m3, a power of two for 32. FORMAT 1: 512 e2m1, an e4m3 scale for 16. FORMAT 3: V4's planar record.
// NORM: an RMS norm first. TURN: the last 32 pairs are rotated. BLOCKS: at least so many on a multiprocessor.
#include "hopper.cuh"

#ifndef FORMAT
#define FORMAT 0
#endif
#ifndef NORM
#define NORM 1
#endif
#ifndef TURN
#define TURN 1
#endif
#ifndef BLOCKS
#define BLOCKS 4
#endif

constexpr int WARPS = 8;

// The larger magnitude of each half, with any sign; NaN where one is.
__device__ __forceinline__ u32 larger(u32 a, u32 b) {
    u32 d;
    asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
__device__ __forceinline__ float larger(float a, float b) {
    float d;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
    return d;
}
// As the compiler of the portable kernels divides and takes roots: records are the same bytes.
__device__ __forceinline__ float divide(float a, float b) {
    float d;
    asm("div.full.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
    return d;
}
__device__ __forceinline__ float root(float a) {
    float d;
    asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(a));
    return d;
}
__device__ __forceinline__ u32 e4m3_pair(float lo, float hi) {
    u16 d;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(d) : "f"(hi), "f"(lo));
    return d;
}
__device__ __forceinline__ float e4m3_value(u32 code) { return unpack_f16(e4m3_halves(code)).x; }

struct Pool {
    u8* start;
    i64 stride_page, stride_row;
    int page_shift, page_size;  // a page has 2^page_shift rows, or, where that is -1, page_size
};
struct Place {
    u8 *record, *scales;
};
__device__ __forceinline__ Place find(const Pool& pool, i64 slot) {
    const i64 page = pool.page_shift >= 0 ? slot >> pool.page_shift : slot / pool.page_size;
    const i64 inside = pool.page_shift >= 0 ? slot & ((i64(1) << pool.page_shift) - 1) : slot % pool.page_size;
    u8* start = pool.start + page * pool.stride_page;
    if (FORMAT == 3) return {start + inside * 576, start + pool.page_size * i64(576) + inside * 8};
    u8* record = start + inside * pool.stride_row;
    return {record, record + (FORMAT == 1 ? 256 : 512)};
}

// Two pairs of values over a scale, `over` its inverse times 2^-14, as e2m1 codes: a byte each in the low byte of each half.
// Times 2^-14 the values 0 .. 6 take float16's subnormal and first normal exponents just as e2m1 has them, so that rounding bits
// rounds values. float16 keeps ties: a bfloat16 over an e4m3 number is a tie or off by 1/300 and more.
__device__ __forceinline__ u32 e2m1_bytes(u32 first, u32 second, float over) {
    const u32 even = pack_f16(bf16_low(first) * over, bf16_low(second) * over);
    const u32 odd = pack_f16(bf16_high(first) * over, bf16_high(second) * over);
    const auto rounded = [](u32 pair) {
        u32 size = pair & 0x7fff7fffu;
        asm("min.f16x2 %0, %0, %1;" : "+r"(size) : "r"(0x0e000e00u));  // 6
        return size + 0x00ff00ffu + (size >> 9 & 0x00010001u);
    };
    const u32 low = (rounded(even) >> 9 & 0x00070007u) | (even >> 12 & 0x00080008u);
    return low | (rounded(odd) >> 5 & 0x00700070u) | (odd >> 8 & 0x00800080u);
}

struct Row {
    uint4 a, b;
    i64 slot;
    float cos, sin;
};

// Where a warp's next row lies, and how far the one after it.
struct Source {
    const u8 *x, *slot;
    const float *cos, *sin;
    int x_step, slot_step, table_step, wide;
    __device__ __forceinline__ Row fetch() {
        Row r;
        const uint4* from = reinterpret_cast<const uint4*>(x);
        r.a = from[0], r.b = from[1];
        r.slot = wide ? *reinterpret_cast<const i64*>(slot) : *reinterpret_cast<const int*>(slot);
        if (TURN) r.cos = *cos, r.sin = *sin;
        x += x_step, slot += slot_step, cos += table_step, sin += table_step;
        return r;
    }
};

__device__ __forceinline__ void normalise(u32 (&v)[8], const float (&weight)[16], float eps) {
    float part[8];
#pragma unroll
    for (int k = 0; k < 8; ++k)
        part[k] = __fmaf_rn(bf16_low(v[k]), bf16_low(v[k]), __fmul_rn(bf16_high(v[k]), bf16_high(v[k])));
    float square = __fadd_rn(__fadd_rn(__fadd_rn(part[0], part[1]), __fadd_rn(part[2], part[3])),
                             __fadd_rn(__fadd_rn(part[4], part[5]), __fadd_rn(part[6], part[7])));
#pragma unroll
    for (int distance = 16; distance; distance /= 2) square = __fadd_rn(square, __shfl_xor_sync(~0u, square, distance));
    const float factor = divide(1.0f, root(__fadd_rn(__fmul_rn(square, 1.0f / 512), eps)));
#pragma unroll
    for (int k = 0; k < 8; ++k)
        v[k] = pack_bf16(__fmul_rn(__fmul_rn(bf16_low(v[k]), factor), weight[2 * k]),
                         __fmul_rn(__fmul_rn(bf16_high(v[k]), factor), weight[2 * k + 1]));
}

// The last four lanes' channels are 32 pairs: a lane turns one.
__device__ __forceinline__ void rotate(u32 (&v)[8], u32 pairs, float c, float s, int lane) {
    const u32 mine = pairs + (lane & 3) * 32;
    if (lane >= 28) {
        store_shared4(mine, v[0], v[1], v[2], v[3]);
        store_shared4(mine + 16, v[4], v[5], v[6], v[7]);
    }
    __syncwarp();
    const u32 pair = load_shared(pairs + lane * 4);
    const float a = bf16_low(pair), b = bf16_high(pair);
    store_shared(pairs + lane * 4, pack_bf16(__fmaf_rn(a, c, -__fmul_rn(b, s)), __fmaf_rn(b, c, __fmul_rn(a, s))));
    __syncwarp();
    if (lane >= 28) {
        const uint4 first = load_shared4(mine), second = load_shared4(mine + 16);
        v[0] = first.x, v[1] = first.y, v[2] = first.z, v[3] = first.w;
        v[4] = second.x, v[5] = second.y, v[6] = second.z, v[7] = second.w;
    }
}

// Largest magnitude of 2^LANES lanes' channels, at least `floor`; NaN where one is.
template <int LANES>
__device__ __forceinline__ float group_maximum(const u32 (&v)[8], float floor) {
    u32 top = larger(larger(larger(v[0], v[1]), larger(v[2], v[3])), larger(larger(v[4], v[5]), larger(v[6], v[7])));
    top = larger(top, prmt(top, top, 0x1032));
#pragma unroll
    for (int k = 0; k < LANES; ++k) top = larger(top, __shfl_xor_sync(~0u, top, 1 << k));
    return larger(fabsf(bf16_low(top)), floor);
}

__device__ __forceinline__ void write_record(const u32 (&v)[8], u8* record, u8* scales, int lane) {
    if (FORMAT == 1) {
        const u32 code = e4m3_pair(divide(group_maximum<0>(v, 6.0f / 512), 6.0f), 0.0f);
        float over;
        asm("rcp.approx.f32 %0, %1;" : "=f"(over) : "f"(e4m3_value(code)));
        over *= 1.0f / 16384;
        const u32 low = prmt(e2m1_bytes(v[0], v[1], over), e2m1_bytes(v[2], v[3], over), 0x6420);
        const u32 high = prmt(e2m1_bytes(v[4], v[5], over), e2m1_bytes(v[6], v[7], over), 0x6420);
        *reinterpret_cast<uint2*>(record + lane * 8) = make_uint2(low, high);
        scales[lane] = u8(code);
        return;
    }
    // A power of two, and its inverse.
    const float top = group_maximum<FORMAT == 3 ? 2 : 1>(v, 1e-4f) * (1.0f / 448);
    const int exponent = (__float_as_int(top) + 0x7fffff) >> 23 & 0xff;
    const float over = __int_as_float(exponent == 254 ? 0x00400000 : int(u32(254 - exponent) << 23));
    u32 codes[4];
#pragma unroll
    for (int k = 0; k < 4; ++k)
        codes[k] = e4m3_pair(bf16_low(v[2 * k]) * over, bf16_high(v[2 * k]) * over) |
                   e4m3_pair(bf16_low(v[2 * k + 1]) * over, bf16_high(v[2 * k + 1]) * over) << 16;
    if (FORMAT == 0) {
        *reinterpret_cast<uint4*>(record + lane * 16) = make_uint4(codes[0], codes[1], codes[2], codes[3]);
        if (lane % 2 == 0) scales[lane / 2] = u8(exponent);
        return;
    }
    if (lane < 28)
        *reinterpret_cast<uint4*>(record + lane * 16) = make_uint4(codes[0], codes[1], codes[2], codes[3]);
    else {
        uint4* tail = reinterpret_cast<uint4*>(record + 448 + (lane - 28) * 32);
        tail[0] = make_uint4(v[0], v[1], v[2], v[3]), tail[1] = make_uint4(v[4], v[5], v[6], v[7]);
    }
    if (lane % 4 == 0) scales[lane / 4] = lane < 28 ? u8(exponent) : u8(0);
}

// x: rows `stride` bytes apart, 16 bytes aligned as the pool is; weight [512] bfloat16; cos, sin float32, rows table_stride apart;
// slots int32 or (wide) int64, negative: nothing is written.
extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)
    insert_records(const u8* x, int stride, const u32* weight, float eps, const float* cos, const float* sin, int table_stride,
                   const void* slots, int wide, u8* pool_start, i64 stride_page, i64 stride_row, int page_shift, int page_size, int rows) {
    const Pool pool{pool_start, stride_page, stride_row, page_shift, page_size};
    __shared__ __align__(16) u32 turned[WARPS][32];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, step = gridDim.x * WARPS;
    const u32 pairs = shared_address(turned[warp]);
    wait_for_kernels();
    int row = blockIdx.x * WARPS + warp;
    if (row >= rows) return;
    const int size = wide ? 8 : 4;
    const i64 at = i64(row) * table_stride + lane;
    Source source{x + i64(row) * stride + lane * 32, static_cast<const u8*>(slots) + i64(row) * size, cos + at, sin + at,
                  step * stride, step * size, step * table_stride, wide};
    Row next = source.fetch();
    float scale[16];
    if (NORM)
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            const u32 pair = weight[8 * lane + k];
            scale[2 * k] = bf16_low(pair), scale[2 * k + 1] = bf16_high(pair);
        }
    for (; row < rows; row += step) {
        const Row r = next;
        if (row + step < rows) next = source.fetch();
        if (r.slot < 0) continue;
        u32 v[8] = {r.a.x, r.a.y, r.a.z, r.a.w, r.b.x, r.b.y, r.b.z, r.b.w};
        if (NORM) normalise(v, scale, eps);
        if (TURN) rotate(v, pairs, r.cos, r.sin, lane);
        const Place place = find(pool, r.slot);
        write_record(v, place.record, place.scales, lane);
    }
}
