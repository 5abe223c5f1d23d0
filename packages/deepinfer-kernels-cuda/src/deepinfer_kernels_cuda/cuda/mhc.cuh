#pragma once
// What the kernels of hyper-connections share: messages between blocks, the update of a warp's tile, coefficients of a token.
#include "hopper.cuh"

// Words that carry the number of their message: sender and reader need no other order between them.
__device__ __forceinline__ u64 tagged(float value, u32 tag) { return u64(tag) << 32 | __float_as_uint(value); }
__device__ __forceinline__ u32 tag_of(u64 word) { return u32(word >> 32); }
__device__ __forceinline__ float value_of(u64 word) { return __uint_as_float(u32(word)); }
__device__ __forceinline__ void post_words(u64* target, u64 a, u64 b) {
    asm volatile("st.relaxed.gpu.global.v2.b64 [%0], {%1, %2};" ::"l"(target), "l"(a), "l"(b) : "memory");
}
__device__ __forceinline__ void post_word(u64* target, u64 a) {
    asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(target), "l"(a) : "memory");
}
__device__ __forceinline__ u64 read_word(const u64* from) {
    u64 d;
    asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(d) : "l"(from) : "memory");
    return d;
}
__device__ __forceinline__ ulonglong2 read_words(const u64* from) {
    ulonglong2 d;
    asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];" : "=l"(d.x), "=l"(d.y) : "l"(from) : "memory");
    return d;
}

__device__ __forceinline__ uint4 load_global(const void* from) {
    uint4 d;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(d.x), "=r"(d.y), "=r"(d.z), "=r"(d.w) : "l"(from) : "memory");
    return d;
}
__device__ __forceinline__ float4 load_floats(u32 address) {
    const uint4 d = load_shared4(address);
    return make_float4(__uint_as_float(d.x), __uint_as_float(d.y), __uint_as_float(d.z), __uint_as_float(d.w));
}
__device__ __forceinline__ void load_into(float (&d)[4], u32 address) {
    const float4 v = load_floats(address);
    d[0] = v.x, d[1] = v.y, d[2] = v.z, d[3] = v.w;
}
__device__ __forceinline__ float load_float(u32 address) { return __uint_as_float(load_shared(address)); }
__device__ __forceinline__ void store_float(u32 address, float value) { store_shared(address, __float_as_uint(value)); }
__device__ __forceinline__ float inverse(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float exponential(float x) { return exp2_fast(x * 1.4426950408889634f); }

// d += a * b: 16 rows of the projection, 16 channels, 8 tokens.
__device__ __forceinline__ void multiply(float (&d)[4], uint4 a, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

constexpr u32 FN_GROUP = 8 * 3 * 512;  // bytes of the projection for 32 channels of four streams
constexpr u32 SUMS = 28;               // of a token: 16 comb, 4 pre, 4 post, squares of streams and row, 2 unused

// One tile of one warp: 32 channels of 8 tokens, of each thread 8 channels of token lane / 4. In: the output and the streams;
// out: the collapsed row and the new streams. weights: of the output and of each stream in each new stream. fn: this lane's.
__device__ __forceinline__ void update_tile(const u8* fn, const float (&weights)[5][4], const float (&pre)[4], uint4 (&packed)[5],
                                            float (&acc)[3][4], float& square, float& row_square) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float in[5][4], collapsed[4] = {0, 0, 0, 0};
#pragma unroll
        for (int i = 0; i < 5; ++i) {
            const u32 a = half ? packed[i].z : packed[i].x, b = half ? packed[i].w : packed[i].y;
            in[i][0] = bf16_low(a), in[i][1] = bf16_high(a), in[i][2] = bf16_low(b), in[i][3] = bf16_high(b);
        }
#pragma unroll
        for (int o = 0; o < 4; ++o) {
            float v[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                v[k] = weights[0][o] * in[0][k];
#pragma unroll
                for (int i = 1; i < 5; ++i) v[k] += weights[i][o] * in[i][k];
            }
            const u32 a = pack_bf16(v[0], v[1]), b = pack_bf16(v[2], v[3]);
            if (half)
                packed[1 + o].z = a, packed[1 + o].w = b;
            else
                packed[1 + o].x = a, packed[1 + o].y = b;
#pragma unroll
            for (int m = 0; m < 3; ++m) multiply(acc[m], *reinterpret_cast<const uint4*>(fn + ((half * 4 + o) * 3 + m) * 512), a, b);
            v[0] = bf16_low(a), v[1] = bf16_high(a), v[2] = bf16_low(b), v[3] = bf16_high(b);
#pragma unroll
            for (int k = 0; k < 4; ++k) collapsed[k] += pre[o] * v[k], square += v[k] * v[k];
        }
        const u32 a = pack_bf16(collapsed[0], collapsed[1]), b = pack_bf16(collapsed[2], collapsed[3]);
        if (half)
            packed[0].z = a, packed[0].w = b;
        else
            packed[0].x = a, packed[0].y = b;
        row_square += bf16_low(a) * bf16_low(a) + bf16_high(a) * bf16_high(a);
        row_square += bf16_low(b) * bf16_low(b) + bf16_high(b) * bf16_high(b);
    }
}

// A warp's sums [8 tokens][SUMS]. A thread has rows lane / 4 and that + 8 of the products for tokens 2 quad and 2 quad + 1. High
// and low parts meet here.
__device__ __forceinline__ void write_sums(u32 warp, int lane, const float (&acc)[3][4], float square, float row_square) {
    const int of = lane >> 2, quad = lane & 3;
    square += __shfl_xor_sync(~0u, square, 1), row_square += __shfl_xor_sync(~0u, row_square, 1);
    square += __shfl_xor_sync(~0u, square, 2), row_square += __shfl_xor_sync(~0u, row_square, 2);
    const u32 part = warp + 2 * quad * SUMS * 4 + of * 4;
    store_float(part, acc[0][0] + acc[1][0]);
    store_float(part + SUMS * 4, acc[0][1] + acc[1][1]);
    store_float(part + 32, acc[0][2] + acc[1][2]);
    store_float(part + SUMS * 4 + 32, acc[0][3] + acc[1][3]);
    store_float(part + 64, acc[2][0] + acc[2][2]);
    store_float(part + SUMS * 4 + 64, acc[2][1] + acc[2][3]);
    store_float(warp + (of * SUMS + 24 + quad) * 4, quad == 0 ? square : quad == 1 ? row_square : 0.0f);
}

__device__ __forceinline__ float weighted(float a, float b, float c, float d, const float (&factor)[4], float more) {
    return fmaf(b, factor[1], fmaf(a, factor[0], more)) + fmaf(d, factor[3], c * factor[2]);
}
// Four reciprocals by two: the unit that makes them takes longest.
__device__ __forceinline__ void invert(float (&d)[4], const float (&x)[4]) {
    const float a = inverse(x[0] * x[1]), b = inverse(x[2] * x[3]);
    d[0] = a * x[1], d[1] = a * x[0], d[2] = b * x[3], d[3] = b * x[2];
}

// What coefficients are made from, in shared memory: base (4 of pre, 4 of post, 16 of comb), then scale (pre, post, comb).
constexpr u32 MODEL = 27;

// A thread's token: its sums lie at `sums`.
__device__ __forceinline__ void finish_token(u32 sums, u32 model, float width, int iterations, float eps, float mix_eps, bool store,
                                             i64 token, float* pre, float* post, float* comb) {
    const float norm = 1.0f / sqrtf(load_float(sums + 24 * 4) / width + mix_eps);
    float c[4][4];
    {
        float p[4], q[4];
        const float for_pre = norm * load_float(model + 24 * 4), for_post = norm * load_float(model + 25 * 4);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            p[i] = inverse(1.0f + exponential(-load_float(model + i * 4) - load_float(sums + (16 + i) * 4) * for_pre)) + eps;
            q[i] = 2.0f * inverse(1.0f + exponential(-load_float(model + (4 + i) * 4) - load_float(sums + (20 + i) * 4) * for_post));
        }
        if (store) {
            reinterpret_cast<float4*>(pre)[token] = make_float4(p[0], p[1], p[2], p[3]);
            reinterpret_cast<float4*>(post)[token] = make_float4(q[0], q[1], q[2], q[3]);
        }
    }
    const float factor = norm * load_float(model + 26 * 4);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int o = 0; o < 4; ++o) c[i][o] = load_float(model + (8 + 4 * i + o) * 4) + load_float(sums + (4 * i + o) * 4) * factor;
        const float top = fmaxf(fmaxf(c[i][0], c[i][1]), fmaxf(c[i][2], c[i][3]));
#pragma unroll
        for (int o = 0; o < 4; ++o) c[i][o] = exponential(c[i][o] - top);
        const float all = inverse((c[i][0] + c[i][1]) + (c[i][2] + c[i][3]));
#pragma unroll
        for (int o = 0; o < 4; ++o) c[i][o] = c[i][o] * all + eps;
    }
    // The matrix stays; its rows and columns have factors. Dividing row i by its sum and eps makes of its factor r
    // 1 / (sum over o of c[i][o] column[o] + eps / r), and so do columns: first those, then rows and columns in turn.
    float rows[4] = {1, 1, 1, 1}, columns[4] = {1, 1, 1, 1}, row[4] = {1, 1, 1, 1}, column[4];
#pragma unroll 1
    for (int k = 0;; ++k) {
#pragma unroll
        for (int o = 0; o < 4; ++o) columns[o] = weighted(c[0][o], c[1][o], c[2][o], c[3][o], row, eps * columns[o]);
        invert(column, columns);
        if (k + 1 >= iterations) break;
#pragma unroll
        for (int i = 0; i < 4; ++i) rows[i] = weighted(c[i][0], c[i][1], c[i][2], c[i][3], column, eps * rows[i]);
        invert(row, rows);
    }
    if (store)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            reinterpret_cast<float4*>(comb)[token * 4 + i] =
                make_float4(c[i][0] * row[i] * column[0], c[i][1] * row[i] * column[1], c[i][2] * row[i] * column[2],
                            c[i][3] * row[i] * column[3]);
}
