// Records of 512 bfloat16 channels, two rows a warp: a lane has channels 16 L .. 16 L + 15 of its row and the same of the second half.
// Rows are normalised, rotated, quantised and written.
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
#define BLOCKS 2
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
// The smaller magnitude of each half with the sign of `a`; b is positive. NaN becomes b.
__device__ __forceinline__ u32 limit(u32 a, u32 b) {
    u32 d;
    asm("min.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
__device__ __forceinline__ u32 add_f16(u32 a, u32 b) {
    u32 d;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
__device__ __forceinline__ u32 fma_f16(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
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
__device__ __forceinline__ u32 e4m3_pair(u32 halves) {
    u16 d;
    asm("cvt.rn.satfinite.e4m3x2.f16x2 %0, %1;" : "=h"(d) : "r"(halves));
    return d;
}
__device__ __forceinline__ float e4m3_value(u32 code) { return unpack_f16(e4m3_halves(code)).x; }

// Bits of a where the mask has ones, of b elsewhere.
__device__ __forceinline__ u32 mix(u32 mask, u32 a, u32 b) {
    u32 d;
    asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(d) : "r"(mask), "r"(a), "r"(b));
    return d;
}

struct Pool {
    u8* start;
    u32 stride_page, stride_row;
    int page_shift, page_size;  // a page has 2^page_shift rows, or, where that is -1, page_size
};
struct Place {
    u8 *record, *scales;
};
__device__ __forceinline__ Place find(const Pool& pool, u32 slot) {
    u32 page, inside;
    if (pool.page_shift >= 0)
        page = slot >> pool.page_shift, inside = slot & ((1u << pool.page_shift) - 1);
    else
        page = slot / u32(pool.page_size), inside = slot % u32(pool.page_size);
    u8* start = pool.start + u64(page) * pool.stride_page;
    if (FORMAT == 3) return {start + inside * 576u, start + u32(pool.page_size) * 576u + inside * 8u};
    u8* record = start + u64(inside) * pool.stride_row;
    return {record, record + (FORMAT == 1 ? 256 : 512)};
}

// Rows are read once: their lines are the first to leave the L2.
__device__ __forceinline__ uint4 load_row(const void* from) {
    uint4 d;
    asm volatile("ld.global.cs.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(d.x), "=r"(d.y), "=r"(d.z), "=r"(d.w) : "l"(from) : "memory");
    return d;
}
__device__ __forceinline__ float2 load_pair(const void* from) {
    float2 d;
    asm volatile("ld.global.v2.f32 {%0, %1}, [%2];" : "=f"(d.x), "=f"(d.y) : "l"(from) : "memory");
    return d;
}
// A row's 32 channels of a lane, in pairs, what turns them, and where they go.
struct Row {
    u32 v[16];
    u32 slot;
    int here;  // negative: nothing is written
    float2 cos, sin;
};

// A lane's part of the rows; strides are bytes.
struct Source {
    const u8 *x, *slots, *cos, *sin;
    u32 stride, table_stride, slot_stride;
    int rows;
    __device__ __forceinline__ void fetch(Row& r, int row) const {
        r.here = -1;
        if (row >= rows) return;
        const u8* from = x + u64(u32(row)) * stride;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const uint4 four = load_row(from + k / 2 * 512 + k % 2 * 16);
            r.v[4 * k] = four.x, r.v[4 * k + 1] = four.y, r.v[4 * k + 2] = four.z, r.v[4 * k + 3] = four.w;
        }
        const int* slot = reinterpret_cast<const int*>(slots + u64(u32(row)) * slot_stride);
        r.slot = slot[0], r.here = slot[slot_stride >> 3];
        if (TURN) {
            const u64 at = u64(u32(row)) * table_stride;
            r.cos = load_pair(cos + at), r.sin = load_pair(sin + at);
        }
    }
};

// Squares are added in the order of the portable kernel: 16 neighbours as a tree, then halves of the row, quarters, ...
__device__ __forceinline__ float sum_squares(const float (&x)[32]) {
    float half[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float part[8];
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            const float a = x[16 * h + 2 * k], b = x[16 * h + 2 * k + 1];
            part[k] = __fmaf_rn(a, a, __fmul_rn(b, b));
        }
        half[h] = __fadd_rn(__fadd_rn(__fadd_rn(part[0], part[1]), __fadd_rn(part[2], part[3])),
                            __fadd_rn(__fadd_rn(part[4], part[5]), __fadd_rn(part[6], part[7])));
    }
    float sum = __fadd_rn(half[0], half[1]);
#pragma unroll
    for (int distance = 8; distance; distance /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, distance));
    return sum;
}

__device__ __forceinline__ void normalise(u32 (&v)[16], const float (&x)[32], const float (&weight)[32], float eps) {
    const float factor = divide(1.0f, root(__fadd_rn(__fmul_rn(sum_squares(x), 1.0f / 512), eps)));
#pragma unroll
    for (int k = 0; k < 16; ++k)
        v[k] = pack_bf16(__fmul_rn(__fmul_rn(x[2 * k], factor), weight[2 * k]), __fmul_rn(__fmul_rn(x[2 * k + 1], factor), weight[2 * k + 1]));
}

// The last channels of a row's last four lanes are 32 pairs: a lane turns two.
__device__ __forceinline__ u32 turn(u32 pair, float c, float s) {
    const float a = bf16_low(pair), b = bf16_high(pair);
    return pack_bf16(__fmaf_rn(a, c, -__fmul_rn(b, s)), __fmaf_rn(b, c, __fmul_rn(a, s)));
}
__device__ __forceinline__ void rotate(u32 (&v)[16], u32 pairs, float2 c, float2 s, int lane) {
    const u32 mine = pairs + (lane & 3) * 32;
    if (lane >= 12) {
        store_shared4(mine, v[8], v[9], v[10], v[11]);
        store_shared4(mine + 16, v[12], v[13], v[14], v[15]);
    }
    __syncwarp();
    const uint2 two = load_shared2(pairs + lane * 8);
    store_shared2(pairs + lane * 8, turn(two.x, c.x, s.x), turn(two.y, c.y, s.y));
    __syncwarp();
    if (lane >= 12) {
        const uint4 first = load_shared4(mine), second = load_shared4(mine + 16);
        v[8] = first.x, v[9] = first.y, v[10] = first.z, v[11] = first.w;
        v[12] = second.x, v[13] = second.y, v[14] = second.z, v[15] = second.w;
    }
}

// Largest magnitude of 2^LANES lanes' 16 channels, at least `floor`; NaN where one is.
template <int LANES>
__device__ __forceinline__ float group_maximum(const u32* v, float floor) {
    u32 top = larger(larger(larger(v[0], v[1]), larger(v[2], v[3])), larger(larger(v[4], v[5]), larger(v[6], v[7])));
    top = larger(top, prmt(top, top, 0x1032));
#pragma unroll
    for (int k = 0; k < LANES; ++k) top = larger(top, __shfl_xor_sync(~0u, top, 1 << k));
    return larger(fabsf(bf16_low(top)), floor);
}

// e4m3 codes of four channels times a power of two (twice in `over`).
__device__ __forceinline__ u32 e4m3_codes(u32 first, u32 second, u32 over) {
    first = multiply_bf16(first, over), second = multiply_bf16(second, over);
    return e4m3_pair(bf16_low(first), bf16_high(first)) | e4m3_pair(bf16_low(second), bf16_high(second)) << 16;
}

struct Power {
    u32 exponent;  // of a scale, in the low byte
    u32 over;      // its inverse, twice
};
template <int LANES>
__device__ __forceinline__ Power power_of_two(const u32* v) {
    const u32 bits = __float_as_uint(group_maximum<LANES>(v, 1e-4f) * (1.0f / 448)) + 0x7fffff;
    const u32 over = 0x7f000000u - (bits & 0x7f800000u);
    return {bits >> 23, prmt(over, over, 0x3232)};
}

// e2m1. With g(q) = q/2 + min(q, 4)/2 + min(q, 2) for a quotient q >= 0 by the scale, odd for the others, the code is g rounded to
// an integer, ties to even: steps of a half up to 2, of one up to 4, of two up to 6. Halves q 2^-10 become g 2^-9, and what e4m3
// makes of those is the code, with the sign in bit 7. float16 keeps ties: a bfloat16 over an e4m3 number is a tie or off by 1/255
// and more, and the rounding of q and of the sums moves g by less.
__device__ __forceinline__ u32 scaled(float a, float b, float over) { return pack_f16(a * over, b * over); }
__device__ __forceinline__ u32 e2m1_pair(u32 q) {
    return e4m3_pair(fma_f16(limit(q, 0x18001800u), 0x40004000u, add_f16(q, limit(q, 0x1c001c00u))));
}
struct Group {
    u32 code;   // of the scale
    u32 q[8];  // quotients times 2^-10: of each four channels first the even, then the odd
};
__device__ __forceinline__ void quotients(Group& g, const u32* v) {
    g.code = e4m3_pair(divide(group_maximum<0>(v, 6.0f / 512), 6.0f), 0.0f);
    float over;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(over) : "f"(e4m3_value(g.code)));
    over *= 1.0f / 1024;
#pragma unroll
    for (int k = 0; k < 8; k += 2) {
        g.q[k] = scaled(bf16_low(v[k]), bf16_low(v[k + 1]), over);
        g.q[k + 1] = scaled(bf16_high(v[k]), bf16_high(v[k + 1]), over);
    }
}
// Eight channels' codes.
__device__ __forceinline__ u32 e2m1_codes(const u32* q) {
    const u32 even = e2m1_pair(q[0]) | e2m1_pair(q[2]) << 16, odd = e2m1_pair(q[1]) | e2m1_pair(q[3]) << 16;
    return mix(0x0f0f0f0fu, mix(0x07070707u, even, even >> 4), mix(0x70707070u, odd << 4, odd));
}

__device__ __forceinline__ void write_nvfp4(const u32 (&v)[16], const Place& to, bool here, int lane) {
    Group g[2];
    quotients(g[0], v), quotients(g[1], v + 8);
    // Only under a scale that is subnormal, at its limit or NaN a quotient comes to 7 and more.
    if (__any_sync(~0u, g[0].code - 8u > 0x75u || g[1].code - 8u > 0x75u))
#pragma unroll
        for (int k = 0; k < 8; ++k) g[0].q[k] = limit(g[0].q[k], 0x1e001e00u), g[1].q[k] = limit(g[1].q[k], 0x1e001e00u);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const uint2 codes = make_uint2(e2m1_codes(g[h].q), e2m1_codes(g[h].q + 4));
        if (here) {
            *reinterpret_cast<uint2*>(to.record + h * 128 + lane * 8) = codes;
            to.scales[h * 16 + lane] = u8(g[h].code);
        }
    }
}

__device__ __forceinline__ void write_fp8(const u32 (&v)[16], const Place& to, bool here, int lane) {
    Power power[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        power[h] = power_of_two<FORMAT == 3 ? 2 : 1>(v + 8 * h);
        u32 codes[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) codes[k] = e4m3_codes(v[8 * h + 2 * k], v[8 * h + 2 * k + 1], power[h].over);
        if (here && (FORMAT == 0 || h == 0 || lane < 12))
            *reinterpret_cast<uint4*>(to.record + h * 256 + lane * 16) = make_uint4(codes[0], codes[1], codes[2], codes[3]);
    }
    if (!here) return;
    if (FORMAT == 0) {
        to.scales[lane / 2 + lane % 2 * 8] = u8(lane % 2 ? power[1].exponent : power[0].exponent);
        return;
    }
    if (lane >= 12) {
        uint4* tail = reinterpret_cast<uint4*>(to.record + 448 + (lane - 12) * 32);
        tail[0] = make_uint4(v[8], v[9], v[10], v[11]), tail[1] = make_uint4(v[12], v[13], v[14], v[15]);
    }
    if (lane % 4 == 0) to.scales[lane / 4] = u8(power[0].exponent);
    if (lane % 4 == 1) to.scales[4 + lane / 4] = lane < 12 ? u8(power[1].exponent) : u8(0);
}

// x: rows `stride` bytes apart, 16 bytes aligned as the pool is; weight [512] bfloat16; cos, sin float32, 8 bytes aligned, rows
// table_stride apart; slots int32 or (wide) int64, below 2^31, negative: nothing is written.
extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)
    insert_records(const u8* x, u32 stride, const u32* weight, float eps, const u8* cos, const u8* sin, u32 table_stride,
                   const u8* slots, int wide, u8* pool_start, u32 stride_page, u32 stride_row, int page_shift, int page_size, int rows) {
    const Pool pool{pool_start, stride_page, stride_row, page_shift, page_size};
    __shared__ __align__(16) u32 turned[2 * WARPS][32];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 15, half = threadIdx.x >> 4 & 1, step = gridDim.x * 2 * WARPS;
    const u32 pairs = shared_address(turned[2 * warp + half]);
    wait_for_kernels();
    const Source source{x + lane * 32, slots, cos + lane * 8, sin + lane * 8, stride, table_stride * 4, wide ? 8 : 4, rows};
    // A block's 16 rows are next to each other, and all of its warps come this way as often.
    const int own_row = 2 * warp + half;
    Row even, odd;  // the next one is on its way
    source.fetch(even, blockIdx.x * 2 * WARPS + own_row);
    float own[32];
    if (NORM)
#pragma unroll
        for (int k = 0; k < 16; ++k) {
            const u32 pair = weight[k / 8 * 128 + 8 * lane + k % 8];
            own[2 * k] = bf16_low(pair), own[2 * k + 1] = bf16_high(pair);
            asm volatile("" : "+f"(own[2 * k]), "+f"(own[2 * k + 1]));  // else they are unpacked for each row
        }
    const auto insert = [&](const Row& r) {
        if (!__any_sync(~0u, r.here >= 0)) return;
        u32 v[16];
        float wide[32];
#pragma unroll
        for (int k = 0; k < 16; ++k) {
            v[k] = r.v[k];
            if (NORM) wide[2 * k] = bf16_low(v[k]), wide[2 * k + 1] = bf16_high(v[k]);
        }
        if (NORM) normalise(v, wide, own, eps);
        if (TURN) rotate(v, pairs, r.cos, r.sin, lane);
        const Place place = find(pool, r.slot);
        if (FORMAT == 1)
            write_nvfp4(v, place, r.here >= 0, lane);
        else
            write_fp8(v, place, r.here >= 0, lane);
    };
#pragma unroll 1
    for (int row = blockIdx.x * 2 * WARPS; row < rows; row += 2 * step) {
        source.fetch(odd, row + step + own_row);
        insert(even);
        source.fetch(even, row + 2 * step + own_row);
        insert(odd);
    }
}
