// The seam between sublayers in one pass: update four streams, predict the next mix, collapse, normalise.
//
// A cluster of 16 blocks shares a row of d = 512 GROUPS channels; a block has 32 GROUPS of them, and its part of the projection
// stays in its shared memory while it walks over tiles of 8 tokens. Streams come by bulk copies and go from registers. A warp
// owns 32 channels: its values are the right operand of the matrix unit (channels in an order that makes a thread's share of a
// row 16 bytes). What needs whole rows (square sums, projections) crosses the cluster as one message a block and tile.
//
// Warps: GROUPS that compute and store streams; two each that load, that free what was loaded and that normalise; one that sums
// and sends and one that finishes mixes.
#include "hopper.cuh"

#ifndef GROUPS
#define GROUPS 10
#endif

constexpr int RANKS = 16, TOKENS = 8, SLOTS = 3, ROW_SLOTS = 4;
constexpr int THREADS = 32 * (GROUPS + 8);
constexpr int CHANNELS = 32 * GROUPS;
constexpr u32 ROW = 2 * CHANNELS;                            // bytes of a block's part of a row
constexpr u32 STREAM_PITCH = 4 * ROW + 64;                   // of a token: the next one's pieces lie in other banks
constexpr u32 ROW_PITCH = ROW + (GROUPS % 2 ? 0 : 64);
constexpr u32 STREAM_SLOT = TOKENS * STREAM_PITCH, ROW_SLOT = TOKENS * ROW_PITCH;
constexpr u32 FN_GROUP = 8 * 3 * 512;                        // bytes of the projection for 32 channels of four streams
constexpr u32 SUMS = 28;                                     // of a token: 16 comb, 4 pre, 4 post, squares of streams and row, 2 unused
constexpr u32 MIX = TOKENS * 96;                             // of a tile: comb, post, pre

constexpr u32 FN_AT = 0;
constexpr u32 STREAM_AT = FN_AT + GROUPS * FN_GROUP;
constexpr u32 ROW_AT = STREAM_AT + SLOTS * STREAM_SLOT;
constexpr u32 WEIGHT_AT = ROW_AT + ROW_SLOTS * ROW_SLOT;
constexpr u32 MIX_AT = WEIGHT_AT + ROW;
constexpr u32 PART_AT = MIX_AT + SLOTS * MIX;                // [GROUPS][TOKENS][SUMS]
constexpr u32 SQUARES_AT = PART_AT + GROUPS * TOKENS * SUMS * 4;   // [4][RANKS][TOKENS]: squares of rows, from every block
constexpr u32 SUMS_AT = SQUARES_AT + 4 * RANKS * TOKENS * 4;       // [2][RANKS][SUMS]: of the token that is this block's
constexpr u32 SEND_AT = SUMS_AT + 2 * RANKS * SUMS * 4;
constexpr u32 BARRIERS_AT = SEND_AT + 32;
constexpr u32 BYTES = BARRIERS_AT + 8 * (3 * SLOTS + ROW_SLOTS + 8);
static_assert(BYTES <= 227 * 1024, "shared memory");

__device__ __forceinline__ void peer_store4(u32 address, float a, float b, float c, float d) {
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}
__device__ __forceinline__ void peer_release(u32 bar) {
    asm volatile("fence.acq_rel.cluster;\nmbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(bar) : "memory");
}
__device__ __forceinline__ float4 load_floats(u32 address) {
    const uint4 d = load_shared4(address);
    return make_float4(__uint_as_float(d.x), __uint_as_float(d.y), __uint_as_float(d.z), __uint_as_float(d.w));
}
__device__ __forceinline__ float load_float(u32 address) { return __uint_as_float(load_shared(address)); }
__device__ __forceinline__ void store_float(u32 address, float value) { store_shared(address, __float_as_uint(value)); }
__device__ __forceinline__ float inverse(float x) {
    float y;
    asm("rcp.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float exponential(float x) { return exp2_fast(x * 1.4426950408889634f); }

// d += a * b: 16 rows of the projection, 16 channels, 8 tokens.
__device__ __forceinline__ void multiply(float (&d)[4], uint4 a, u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

struct Barriers {
    u32 base;
    __device__ u32 full(int n) const { return base + 8 * (n % SLOTS); }                       // a tile has come
    __device__ u32 done(int n) const { return base + 8 * (SLOTS + n % SLOTS); }               // it is updated, its sums are there
    __device__ u32 freed(int n) const { return base + 8 * (2 * SLOTS + n % SLOTS); }         // its streams may be overwritten
    __device__ u32 normalised(int n) const { return base + 8 * (3 * SLOTS + n % ROW_SLOTS); }   // its rows have left
    __device__ u32 message(int n) const { return base + 8 * (3 * SLOTS + ROW_SLOTS + n % 4); }  // all blocks' sums have come
    __device__ u32 taken(int n) const { return base + 8 * (3 * SLOTS + ROW_SLOTS + 4 + n % 2); }  // and were read
    __device__ u32 summed() const { return base + 8 * (3 * SLOTS + ROW_SLOTS + 6); }            // the warps' sums were read
    __device__ u32 constants() const { return base + 8 * (3 * SLOTS + ROW_SLOTS + 7); }         // projection and weight have come
};

// One tile of one warp: 32 channels of 8 tokens.
__device__ __forceinline__ void update_tile(u32 shared, int slot, int row_slot, int group, int lane, u8* target, bool here,
                                            float (&acc)[3][4], float& square, float& row_square) {
    const int token = lane >> 2, quad = lane & 3;
    const u32 streams = shared + STREAM_AT + slot * STREAM_SLOT + token * STREAM_PITCH + group * 64 + quad * 16;
    const u32 row = shared + ROW_AT + row_slot * ROW_SLOT + token * ROW_PITCH + group * 64 + quad * 16;
    const u32 mix = shared + MIX_AT + slot * MIX;
    const u32 fn = shared + FN_AT + group * FN_GROUP + lane * 16;
    uint4 packed[5] = {load_shared4(row), load_shared4(streams), load_shared4(streams + ROW), load_shared4(streams + 2 * ROW),
                       load_shared4(streams + 3 * ROW)};
    float weights[5][4], pre[4];
    {
        const float4 post4 = load_floats(mix + TOKENS * 64 + token * 16), pre4 = load_floats(mix + TOKENS * 80 + token * 16);
        weights[0][0] = post4.x, weights[0][1] = post4.y, weights[0][2] = post4.z, weights[0][3] = post4.w;
        pre[0] = pre4.x, pre[1] = pre4.y, pre[2] = pre4.z, pre[3] = pre4.w;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float4 c = load_floats(mix + token * 64 + i * 16);
            weights[1 + i][0] = c.x, weights[1 + i][1] = c.y, weights[1 + i][2] = c.z, weights[1 + i][3] = c.w;
        }
    }
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
            for (int m = 0; m < 3; ++m) multiply(acc[m], load_shared4(fn + ((half * 4 + o) * 3 + m) * 512), a, b);
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
    store_shared4(row, packed[0].x, packed[0].y, packed[0].z, packed[0].w);
#pragma unroll
    for (int o = 0; o < 4; ++o)
        if (here) *reinterpret_cast<uint4*>(target + o * (2ull * RANKS * CHANNELS)) = packed[1 + o];
}

struct Tiles {
    int first, step, count, tokens;
    __device__ int token(int n) const { return (first + n * step) * TOKENS; }
    __device__ int here(int n) const { return min(TOKENS, tokens - token(n)); }
    __device__ int here(int n, int half) const { return min(4, max(0, here(n) - 4 * half)); }
};

__device__ __forceinline__ void compute(u32 shared, Barriers bars, Tiles tiles, int group, int lane, u32 rank, u8* streams) {
    barrier_wait(bars.constants(), 0);
    const int quad = lane & 3;
    for (int n = 0; n < tiles.count; ++n) {
        barrier_wait(bars.full(n), n / SLOTS & 1);
        const bool here = lane >> 2 < tiles.here(n);
        u8* target = streams + (tiles.token(n) + (lane >> 2)) * (8ull * RANKS * CHANNELS) + rank * ROW + group * 64 + quad * 16;
        float acc[3][4] = {}, square = 0, row_square = 0;
        update_tile(shared, n % SLOTS, n % ROW_SLOTS, group, lane, target, here, acc, square, row_square);
        fence_async_shared();
        square += __shfl_xor_sync(~0u, square, 1), row_square += __shfl_xor_sync(~0u, row_square, 1);
        square += __shfl_xor_sync(~0u, square, 2), row_square += __shfl_xor_sync(~0u, row_square, 2);
        if (n >= 1) barrier_wait(bars.summed(), n - 1 & 1);
        // A thread has rows lane / 4 and that + 8 of the products for tokens 2 quad and 2 quad + 1. High and low parts meet here.
        const u32 part = shared + PART_AT + group * TOKENS * SUMS * 4 + 2 * quad * SUMS * 4 + (lane >> 2) * 4;
        store_float(part, acc[0][0] + acc[1][0]);
        store_float(part + SUMS * 4, acc[0][1] + acc[1][1]);
        store_float(part + 32, acc[0][2] + acc[1][2]);
        store_float(part + SUMS * 4 + 32, acc[0][3] + acc[1][3]);
        store_float(part + 64, acc[2][0] + acc[2][2]);
        store_float(part + SUMS * 4 + 64, acc[2][1] + acc[2][3]);
        store_float(shared + PART_AT + ((group * TOKENS + (lane >> 2)) * SUMS + 24 + quad) * 4,
                    quad == 0 ? square : quad == 1 ? row_square : 0.0f);
        __syncwarp();
        if (lane == 0) barrier_arrive(bars.done(n));
    }
}

__device__ __forceinline__ void load_tiles(u32 shared, Barriers bars, Tiles tiles, int lane, u32 rank, int half,
                                           const u8* streams, const u8* output, const u8* post, const u8* comb, const u8* pre) {
    const u64 width = 2ull * RANKS * CHANNELS;
    for (int n = 0; n < tiles.count; ++n) {
        if (n >= SLOTS) barrier_wait(bars.freed(n), (n / SLOTS - 1) & 1);
        if (n >= ROW_SLOTS) barrier_wait(bars.normalised(n), (n / ROW_SLOTS - 1) & 1);
        const u32 bar = bars.full(n), here = tiles.here(n, half), all = tiles.here(n);
        const u64 token = tiles.token(n);
        if (lane == 0) barrier_expect(bar, here * 5 * ROW + (half ? 0 : all * 96));
        __syncwarp();
        const u32 slot = shared + STREAM_AT + n % SLOTS * STREAM_SLOT, rows = shared + ROW_AT + n % ROW_SLOTS * ROW_SLOT;
        const int row = lane & 15, of = 4 * half + (row >> 2);
        if (row < 4 * here && lane < 16)
            copy_bulk(slot + of * STREAM_PITCH + (row & 3) * ROW, streams + ((token + of) * 4 + (row & 3)) * width + rank * ROW, ROW, bar);
        if (row < here && lane >= 16)
            copy_bulk(rows + (4 * half + row) * ROW_PITCH, output + (token + 4 * half + row) * width + rank * ROW, ROW, bar);
        const u32 mix = shared + MIX_AT + n % SLOTS * MIX;
        if (half == 0 && lane == 20) copy_bulk(mix, comb + token * 64, all * 64, bar);
        if (half == 0 && lane == 21) copy_bulk(mix + TOKENS * 64, post + token * 16, all * 16, bar);
        if (half == 0 && lane == 22) copy_bulk(mix + TOKENS * 80, pre + token * 16, all * 16, bar);
    }
}

// A tile's streams are in registers or have left: its slot may be loaded again.
__device__ __forceinline__ void free_tiles(Barriers bars, Tiles tiles, int lane) {
    for (int n = 0; n < tiles.count; ++n) {
        barrier_wait(bars.done(n), n / SLOTS & 1);
        __syncwarp();
        if (lane == 0) barrier_arrive(bars.freed(n));
    }
}

// Sums of the block's warps, then one message to each block: squares of the rows for all, all sums of one token for its owner.
__device__ __forceinline__ void send_sums(u32 shared, Barriers bars, int tiles, int lane, u32 rank) {
    for (int n = 0; n < tiles; ++n) {
        barrier_wait(bars.done(n), n / SLOTS & 1);
        float4 sums[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int item = min(lane + 32 * i, int(TOKENS * SUMS / 4) - 1);
            sums[i] = load_floats(shared + PART_AT + item * 16);
#pragma unroll
            for (int group = 1; group < GROUPS; ++group) {
                const float4 more = load_floats(shared + PART_AT + group * TOKENS * SUMS * 4 + item * 16);
                sums[i].x += more.x, sums[i].y += more.y, sums[i].z += more.z, sums[i].w += more.w;
            }
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(bars.summed());
        // The message before last was read by every block when it was read here: theirs of that tile came after it.
        if (n >= 2) barrier_wait(bars.taken(n), (n / 2 - 1) & 1);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int item = lane + 32 * i, token = item / 7, piece = item % 7;
            if (item < TOKENS * 7) {
                const u32 to = shared + SUMS_AT + ((n / 2 & 1) * RANKS + rank) * SUMS * 4 + piece * 16;
                peer_store4(peer_address(to, 8 * (n & 1) + token), sums[i].x, sums[i].y, sums[i].z, sums[i].w);
                if (piece == 6) store_float(shared + SEND_AT + token * 4, sums[i].y);
            }
        }
        __syncwarp();
        const float4 squares = load_floats(shared + SEND_AT + (lane & 1) * 16);
        const u32 to = shared + SQUARES_AT + ((n & 3) * RANKS + rank) * TOKENS * 4 + (lane & 1) * 16;
        peer_store4(peer_address(to, lane >> 1), squares.x, squares.y, squares.z, squares.w);
        __syncwarp();
        if (lane < RANKS) peer_release(peer_address(bars.message(n), lane));
    }
}

__device__ __forceinline__ float weighted(float a, float b, float c, float d, const float (&factor)[4], float eps) {
    return fmaf(b, factor[1], a * factor[0]) + fmaf(d, factor[3], fmaf(c, factor[2], eps));
}

// Coefficients of this block's token of every other tile.
__device__ __forceinline__ void finish_mixes(u32 shared, Barriers bars, Tiles tiles, int lane, u32 rank, const float* base,
                                             const float* scale, float* pre, float* post, float* comb, int iterations, float eps,
                                             float mix_eps) {
    // Lanes 0..15 comb, 16..19 pre, 20..23 post, as the sums lie; base and scale have pre, post, comb.
    const float bias = lane < 16 ? base[8 + lane] : lane < 24 ? base[lane - 16] : 0.0f;
    const float factor = lane < 16 ? scale[2] : lane < 20 ? scale[0] : scale[1];
    for (int n = 0; n < tiles.count; ++n) {
        barrier_wait_cluster(bars.message(n), n >> 2 & 1);
        const int mine = int(rank) - 8 * (n & 1);
        const bool own = mine >= 0 && mine < tiles.here(n);
        float sum = 0;
        if (own && lane < SUMS) {
            const u32 from = shared + SUMS_AT + (n / 2 & 1) * RANKS * SUMS * 4 + lane * 4;
#pragma unroll
            for (int source = 0; source < RANKS; ++source) sum += load_float(from + source * SUMS * 4);
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(bars.taken(n));
        if (!own) continue;
        const i64 token = tiles.token(n) + mine;
        const float square = __shfl_sync(~0u, sum, 24);
        const float value = bias + sum * (1.0f / sqrtf(square / (4.0f * RANKS * CHANNELS) + mix_eps)) * factor;
        if (lane >= 16 && lane < 20) pre[token * 4 + lane - 16] = 1.0f / (1.0f + exponential(-value)) + eps;
        if (lane >= 20 && lane < 24) post[token * 4 + lane - 20] = 2.0f / (1.0f + exponential(-value));
        float c[4][4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int o = 0; o < 4; ++o) c[i][o] = __shfl_sync(~0u, value, 4 * i + o);
            const float top = fmaxf(fmaxf(c[i][0], c[i][1]), fmaxf(c[i][2], c[i][3]));
#pragma unroll
            for (int o = 0; o < 4; ++o) c[i][o] = exponential(c[i][o] - top);
            const float factor = inverse((c[i][0] + c[i][1]) + (c[i][2] + c[i][3]));
#pragma unroll
            for (int o = 0; o < 4; ++o) c[i][o] = c[i][o] * factor + eps;
        }
        // Columns, then rows and columns in turn. A half sums products with the factors of the half before and applies those
        // beside: the way from factors to factors is what takes long.
        float row[4] = {1, 1, 1, 1}, column[4];
#pragma unroll
        for (int o = 0; o < 4; ++o) column[o] = inverse(weighted(c[0][o], c[1][o], c[2][o], c[3][o], row, eps));
        for (int k = 1; k < iterations; ++k) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                row[i] = inverse(weighted(c[i][0], c[i][1], c[i][2], c[i][3], column, eps));
#pragma unroll
                for (int o = 0; o < 4; ++o) c[i][o] *= column[o];
            }
#pragma unroll
            for (int o = 0; o < 4; ++o) {
                column[o] = inverse(weighted(c[0][o], c[1][o], c[2][o], c[3][o], row, eps));
#pragma unroll
                for (int i = 0; i < 4; ++i) c[i][o] *= row[i];
            }
        }
#pragma unroll
        for (int o = 0; o < 4; ++o)
#pragma unroll
            for (int i = 0; i < 4; ++i) c[i][o] *= column[o];
        if (lane == 0)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                reinterpret_cast<float4*>(comb)[token * 4 + i] = make_float4(c[i][0], c[i][1], c[i][2], c[i][3]);
    }
}

// Rows of four of a tile's tokens.
__device__ __forceinline__ void normalise(u32 shared, Barriers bars, Tiles tiles, int lane, u32 rank, int first, u8* x,
                                          float norm_eps) {
    const u64 width = 2ull * RANKS * CHANNELS;
    barrier_wait(bars.constants(), 0);
    for (int n = 0; n < tiles.count; ++n) {
        barrier_wait_cluster(bars.message(n), n >> 2 & 1);
        const u32 from = shared + SQUARES_AT + ((n & 3) * RANKS + (lane & 7)) * TOKENS * 4 + (first + (lane >> 3)) * 4;
        float square = load_float(from) + load_float(from + 8 * TOKENS * 4);
        __syncwarp();
        if (lane == 0) barrier_arrive(bars.taken(n));
        square += __shfl_xor_sync(~0u, square, 1);
        square += __shfl_xor_sync(~0u, square, 2);
        square += __shfl_xor_sync(~0u, square, 4);
        const float factor = 1.0f / sqrtf(square / (RANKS * CHANNELS) + norm_eps);
        const u32 rows = shared + ROW_AT + n % ROW_SLOTS * ROW_SLOT + first * ROW_PITCH;
#pragma unroll
        for (int k = 0; k < GROUPS / 2; ++k) {
            const int item = 32 * k + lane, token = item / (4 * GROUPS), piece = item % (4 * GROUPS);
            const float f = __shfl_sync(~0u, factor, 8 * token);
            const uint4 v = load_shared4(rows + token * ROW_PITCH + piece * 16);
            const uint4 w = load_shared4(shared + WEIGHT_AT + piece * 16);
            const auto scaled = [f](u32 a, u32 b) {
                return pack_bf16(bf16_low(a) * f * bf16_low(b), bf16_high(a) * f * bf16_high(b));
            };
            store_shared4(rows + token * ROW_PITCH + piece * 16, scaled(v.x, w.x), scaled(v.y, w.y), scaled(v.z, w.z),
                          scaled(v.w, w.w));
        }
        fence_async_shared();
        __syncwarp();
        if (lane < 4 && first + lane < tiles.here(n))
            bulk_store(x + (tiles.token(n) + first + lane) * width + rank * ROW, rows + lane * ROW_PITCH, ROW);
        bulk_commit();
        bulk_wait_read<0>();
        __syncwarp();
        if (lane == 0) barrier_arrive(bars.normalised(n));
    }
    bulk_wait();
}

// streams [t, 4, d], output [t, d], weight [d], new_streams, x: bfloat16. post, pre [t, 4], comb [t, 4, 4]: float32.
// fn: bfloat16 [RANKS][GROUPS][2 halves][4 streams][3][32 lanes][8], see `mhc.cluster_projection`.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    mhc_step(const u8* streams, const u8* output, const u8* post, const u8* comb, const u8* pre, const u8* fn, const float* base,
             const float* scale, const u8* weight, u8* new_streams, u8* x, float* new_pre, float* new_post, float* new_comb,
             int tokens, int iterations, float eps, float mix_eps, float norm_eps) {
    extern __shared__ __align__(1024) u8 memory[];
    const u32 shared = shared_address(memory), rank = cluster_rank();
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const Barriers bars{shared + BARRIERS_AT};
    const int clusters = gridDim.x / RANKS, cluster = blockIdx.x / RANKS, all = (tokens + TOKENS - 1) / TOKENS;
    const Tiles tiles{cluster, clusters, (all - cluster + clusters - 1) / clusters, tokens};
    if (threadIdx.x == 0) {
        for (int n = 0; n < SLOTS; ++n) {
            barrier_init(bars.full(n), 2);
            barrier_init(bars.done(n), GROUPS);
            barrier_init(bars.freed(n), 2);
        }
        for (int n = 0; n < ROW_SLOTS; ++n) barrier_init(bars.normalised(n), 2);
        for (int n = 0; n < 4; ++n) barrier_init(bars.message(n), RANKS);
        for (int n = 0; n < 2; ++n) barrier_init(bars.taken(n), 3);
        barrier_init(bars.summed(), 1);
        barrier_init(bars.constants(), 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        fence_async_shared();
        // Constants of the model: no kernel ahead writes them.
        barrier_expect(bars.constants(), GROUPS * FN_GROUP + ROW);
        for (int group = 0; group < GROUPS; ++group)
            copy_bulk(shared + FN_AT + group * FN_GROUP, fn + (rank * GROUPS + group) * u64(FN_GROUP), FN_GROUP, bars.constants());
        copy_bulk(shared + WEIGHT_AT, weight + rank * ROW, ROW, bars.constants());
    }
    __syncwarp();
    cluster_sync();
    wait_for_kernels();
    // Multiprocessors have four schedulers, warps go to them in turn: the busy ones of these to those with fewer that compute.
    const int role = warp - GROUPS;
    if (role < 0)
        compute(shared, bars, tiles, warp, lane, rank, new_streams);
    else if (role == 0)
        finish_mixes(shared, bars, tiles, lane, rank, base, scale, new_pre, new_post, new_comb, iterations, eps, mix_eps);
    else if (role == 1 || role == 5)
        normalise(shared, bars, tiles, lane, rank, role == 1 ? 0 : 4, x, norm_eps);
    else if (role == 2 || role == 3)
        load_tiles(shared, bars, tiles, lane, rank, role - 2, streams, output, post, comb, pre);
    else if (role == 4)
        send_sums(shared, bars, tiles.count, lane, rank);
    else
        free_tiles(bars, tiles, lane);
    __syncwarp();
    cluster_sync();
}
