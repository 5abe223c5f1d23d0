#include "wgmma.cuh"
#ifndef ITEMS
#define ITEMS 12
#endif
#include "router.cuh"
// The router's logits for many tokens: x [tokens, d] times weight [experts, d] transposed, split along d.
//
// A block has TOKENS tokens, EXPERTS experts and a span of d. The two blocks of a cluster have the same experts and bring each other
// half of the weights. One warp brings tiles of 64 columns (bulk tensor copies, 128-byte swizzle); two groups multiply.

#ifndef TOKENS
#define TOKENS 128
#endif
#ifndef EXPERTS
#define EXPERTS 192
#endif
#ifndef STAGES
#define STAGES 5
#endif
#ifndef CLUSTER
#define CLUSTER 2
#endif

#define WGMMA_D68 WGMMA_D64 ", %64, %65, %66, %67"
#define WGMMA_D72 WGMMA_D68 ", %68, %69, %70, %71"
#define WGMMA_D76 WGMMA_D72 ", %72, %73, %74, %75"
#define WGMMA_D80 WGMMA_D76 ", %76, %77, %78, %79"
#define WGMMA_D84 WGMMA_D80 ", %80, %81, %82, %83"
#define WGMMA_D88 WGMMA_D84 ", %84, %85, %86, %87"
#define WGMMA_D92 WGMMA_D88 ", %88, %89, %90, %91"
#define WGMMA_D96 WGMMA_D92 ", %92, %93, %94, %95"
#define WGMMA_OUT96                                                                                                           \
    WGMMA_OUT64, WGMMA_OUT(64), WGMMA_OUT(68), WGMMA_OUT(72), WGMMA_OUT(76), WGMMA_OUT(80), WGMMA_OUT(84), WGMMA_OUT(88),     \
        WGMMA_OUT(92)
WGMMA_SHARED(wgmma_shared, 12, 24, 12, 13, 14, 0)
WGMMA_SHARED(wgmma_shared, 24, 48, 24, 25, 26, 0)
WGMMA_SHARED(wgmma_shared, 48, 96, 48, 49, 50, 0)
WGMMA_SHARED(wgmma_shared, 96, 192, 96, 97, 98, 0)

#ifndef PAIR
#define PAIR 2  // tokens that a warp selects for at once
#endif

struct alignas(64) TensorMap {
    u64 words[16];
};

constexpr int THREADS = 288;
constexpr int WIDTH = TOKENS == 128 ? EXPERTS : EXPERTS / 2;  // experts of a group
constexpr u32 X_BYTES = TOKENS * 128, W_BYTES = EXPERTS * 128, STAGE = X_BYTES + W_BYTES, W_PART = W_BYTES / CLUSTER;
#ifdef SHARED
static_assert(SHARED == STAGES * STAGE + 1024, "shared memory that is asked for");
#endif

__device__ __forceinline__ void prefetch_map(const TensorMap& map) { asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory"); }
__device__ __forceinline__ void load_tile(u32 target, const TensorMap& map, int column, int row, u32 bar) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(target),
                 "l"(&map), "r"(column), "r"(row), "r"(bar)
                 : "memory");
}
// To the same place of every block of the cluster, counted there.
__device__ __forceinline__ void load_tile_for_all(u32 target, const TensorMap& map, int column, int row, u32 bar) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], "
        "[%4], %5;" ::"r"(target),
        "l"(&map), "r"(column), "r"(row), "r"(bar), "h"(u16((1 << CLUSTER) - 1))
        : "memory");
}
struct Ring {
    u32 data, full, empty;  // shared addresses
    __device__ __forceinline__ u32 x(int i) const { return data + i % STAGES * STAGE; }
    __device__ __forceinline__ u32 w(int i) const { return x(i) + X_BYTES; }
    __device__ __forceinline__ u32 filled(int i) const { return full + i % STAGES * 8; }
    __device__ __forceinline__ u32 freed(int i) const { return empty + i % STAGES * 8; }
    __device__ __forceinline__ static u32 turn(int i) { return i / STAGES & 1; }
};

struct Tiles {
    const TensorMap *x, *w;
    int token, expert, step;

    __device__ __forceinline__ void weights(const Ring& ring, int i, u32 rank) const {
        barrier_expect(ring.filled(i), STAGE);
        const int column = (step + i) * 64, row = expert + rank * (EXPERTS / CLUSTER);
        if (CLUSTER > 1)
            load_tile_for_all(ring.w(i) + rank * W_PART, *w, column, row, ring.filled(i));
        else
            load_tile(ring.w(i), *w, column, row, ring.filled(i));
    }
    __device__ __forceinline__ void tokens(const Ring& ring, int i) const { load_tile(ring.x(i), *x, (step + i) * 64, token, ring.filled(i)); }
};

// One thread. Weights are no kernel's result: the first come before the kernels ahead have ended.
__device__ __forceinline__ void produce(const Ring& ring, const Tiles& tiles, int count, u32 rank) {
    const int first = min(count, STAGES);
    for (int i = 0; i < first; ++i) tiles.weights(ring, i, rank);
    wait_for_kernels();
    for (int i = 0; i < first; ++i) tiles.tokens(ring, i);
#pragma unroll 1
    for (int i = STAGES; i < count; ++i) {
        barrier_wait(ring.freed(i), Ring::turn(i) ^ 1);
        tiles.weights(ring, i, rank);
        tiles.tokens(ring, i);
    }
}

// Row quads to sixteen bytes a thread: of two neighbouring groups of eight columns an even lane keeps the first, an odd lane the second.
__device__ __forceinline__ void store_logits(float* out, const float (&acc)[WIDTH / 2], int experts, int left, int lane) {
    const bool odd = lane & 1;
    float* const end = out + (lane & 3) * 2 + WIDTH - 8;
    out += (odd ? 8 : 0) + (lane & 2) * 2;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int i = 0; i + 1 < WIDTH / 8; i += 2) {
            const float a = acc[4 * i + 2 * h], b = acc[4 * i + 2 * h + 1], c = acc[4 * i + 4 + 2 * h], d = acc[4 * i + 5 + 2 * h];
            const float x = __shfl_xor_sync(~0u, odd ? a : c, 1), y = __shfl_xor_sync(~0u, odd ? b : d, 1);
            if (8 * h < left)
                *reinterpret_cast<float4*>(out + i64(8 * h) * experts + 8 * i) = odd ? make_float4(x, y, c, d) : make_float4(a, b, x, y);
        }
        if (WIDTH / 8 % 2 && 8 * h < left)
            *reinterpret_cast<float2*>(end + i64(8 * h) * experts) = make_float2(acc[WIDTH / 2 - 4 + 2 * h], acc[WIDTH / 2 - 3 + 2 * h]);
    }
}

#if FUSE
__device__ __forceinline__ void add_released(u32* counter) {
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}
__device__ __forceinline__ u32 read_acquired(const u32* counter) {
    u32 d;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(d) : "l"(counter) : "memory");
    return d;
}

// The logits of tokens first + i, first + i + 8, ... to shared memory: loads of all are on their way together.
template <int COUNT>
__device__ __forceinline__ void row_sums(const Row& row, float* kept, const float* part, int first, int i, int last) {
    float4 x[COUNT][ITEMS / 4];
#pragma unroll
    for (int j = 0; j < COUNT; ++j) row.load_pieces(x[j], part + i64(min(first + i + 8 * j, last - 1)) * row.experts);
#pragma unroll(COUNT == 1 ? 7 : 1)
    for (int span = 1; span < row.spans; ++span) {
        float4 more[COUNT][ITEMS / 4];
#pragma unroll
        for (int j = 0; j < COUNT; ++j)
            row.load_pieces(more[j], part + span * row.apart + i64(min(first + i + 8 * j, last - 1)) * row.experts);
#pragma unroll
        for (int j = 0; j < COUNT; ++j) add_pieces(x[j], more[j]);
    }
#pragma unroll
    for (int j = 0; j < COUNT; ++j)
        if (first + i + 8 * j < last) keep(kept + (i + 8 * j) * 32 * ITEMS, x[j]);
}

#if FUSE == 2
constexpr u32 EMPTY = 0xffffdeadu;  // no sum of products: those have NaN as 0x7fffffff
__device__ __forceinline__ uint4 read_words(const float* from) {
    uint4 d;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(d.x), "=r"(d.y), "=r"(d.z), "=r"(d.w) : "l"(from) : "memory");
    return d;
}

// As sum_together, of parts that other blocks may be about to write: a word is there when it is not EMPTY, and is EMPTY again behind
// this. At most 16 spans.
__device__ __forceinline__ void collect(const Row& row, float* from, float* kept) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    uint4 words[2][ITEMS / 4];
    bool missing;
    do {
        missing = false;
#pragma unroll
        for (int s = 0; s < 2; ++s)
#pragma unroll
            for (int j = 0; j < ITEMS / 4; ++j) {
                words[s][j] = make_uint4(0, 0, 0, 0);
                if (warp + 8 * s < row.spans && 4 * (lane + 32 * j) < row.experts)
                    words[s][j] = read_words(from + (warp + 8 * s) * row.apart + 4 * (lane + 32 * j));
            }
#pragma unroll
        for (int s = 0; s < 2; ++s)
#pragma unroll
            for (int j = 0; j < ITEMS / 4; ++j)
                missing |= words[s][j].x == EMPTY || words[s][j].y == EMPTY || words[s][j].z == EMPTY || words[s][j].w == EMPTY;
    } while (__any_sync(~0u, missing));
    float4 x[ITEMS / 4];
#pragma unroll
    for (int j = 0; j < ITEMS / 4; ++j) {
        const uint4 a = words[0][j], b = words[1][j];
        x[j] = make_float4(__uint_as_float(a.x) + __uint_as_float(b.x), __uint_as_float(a.y) + __uint_as_float(b.y),
                           __uint_as_float(a.z) + __uint_as_float(b.z), __uint_as_float(a.w) + __uint_as_float(b.w));
    }
    keep(kept + warp * 32 * ITEMS, x);
    named_sync(1, 256);
#pragma unroll
    for (int s = 0; s < 2; ++s)
#pragma unroll
        for (int j = 0; j < ITEMS / 4; ++j)
            if (warp + 8 * s < row.spans && 4 * (lane + 32 * j) < row.experts)
                *reinterpret_cast<uint4*>(from + (warp + 8 * s) * row.apart + 4 * (lane + 32 * j)) = make_uint4(EMPTY, EMPTY, EMPTY, EMPTY);
    if (warp) return;
#pragma unroll
    for (int w = 1; w < 8; ++w) {
        float4 more[ITEMS / 4];
#pragma unroll
        for (int j = 0; j < ITEMS / 4; ++j) more[j] = reinterpret_cast<const float4*>(kept + w * 32 * ITEMS)[lane + 32 * j];
        add_pieces(x, more);
    }
    keep(kept, x);
    __syncwarp();
}
#endif

// The blocks that have parts of the same tile of tokens meet when all are written, and select for a share of its tokens each.
// counters: two a tile, zeros before and after. All blocks of the grid are resident.
__device__ __forceinline__ void select_share(float* kept, int* lists, const float* part, u32* counters, const Choice& choice, int tokens,
                                             int experts) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, begin = lane * ITEMS;
    const int sharers = gridDim.y * gridDim.z, share = (TOKENS + sharers - 1) / sharers, own = blockIdx.y + blockIdx.z * gridDim.y;
    const int first = blockIdx.x * TOKENS + own * share, last = min(min(first + share, int(blockIdx.x + 1) * TOKENS), tokens);
    const Row row(part, choice.bias, tokens, experts, gridDim.z);
#if FUSE == 1
    __threadfence();
#endif
    named_sync(1, 256);
#if FUSE == 1
    if (threadIdx.x == 0) {
        u32* counter = counters + 2 * blockIdx.x;
        add_released(counter);
        while (read_acquired(counter) < u32(sharers)) {}
        if (atomicAdd(counter + 1, 1) == u32(sharers) - 1) counter[0] = 0, counter[1] = 0;
    }
#endif
#if FUSE == 1
    named_sync(1, 256);
#endif
    if (FUSE == 1 && share >= 8) {
#pragma unroll 1
        for (int i = warp; first + i < last; i += 32) {
            if (first + i + 8 < last)
                row_sums<4>(row, kept, part, first, i, last);
            else
                row_sums<1>(row, kept, part, first, i, last);
        }
        float offset[ITEMS];
        row.load(offset, choice.bias, begin, NEG_INF);
        __syncwarp();
#pragma unroll 1
        for (int i = warp; first + i < last; i += 8 * PAIR) {
            const float* own = kept + i * 32 * ITEMS;
            float x[PAIR][ITEMS];
#pragma unroll
            for (int n = 0; n < PAIR; ++n) recall(x[n], own + n * 8 * 32 * ITEMS);
            choice.select<PAIR>(x, offset, [&](int n, int expert) { return own[n * 8 * 32 * ITEMS + expert]; }, lists + warp * PAIR * MOST,
                                first + i, 8, last);
        }
    } else {
        float offset[ITEMS];
        row.load(offset, choice.bias, begin, NEG_INF);
#pragma unroll 1
        for (int token = first; token < last; ++token) {
#if FUSE == 2
            collect(row, const_cast<float*>(part) + i64(token) * experts, kept);
#else
            sum_together<8>(row, part + i64(token) * experts, kept, [] { named_sync(1, 256); });
#endif
            if (warp == 0) {
                float x[1][ITEMS];
                recall(x[0], kept);
                choice.select<1>(x, offset, [&](int, int expert) { return kept[expert]; }, lists, token, 1, last);
            }
            named_sync(1, 256);
        }
    }
}
#endif

// Grid (tiles of tokens, a multiple of CLUSTER; tiles of experts; spans of `span` steps of 64 columns, none empty).
// part: float32 [spans, tokens, experts]; experts: a multiple of EXPERTS. Maps: boxes of 64 columns and TOKENS or EXPERTS / CLUSTER rows.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
router_product(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, float* part, int tokens, int experts, int steps,
               int span
#if FUSE
               ,
               const float* bias, i64* ids, float* gates, int k, float scale, int normalise, u32* counters
#endif
) {
    extern __shared__ u8 memory[];
    __shared__ u64 barriers[2 * STAGES];
    const Ring ring{(shared_address(memory) + 1023) & ~1023u, shared_address(barriers), shared_address(barriers + STAGES)};
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, group = warp >> 2;
    const u32 rank = CLUSTER > 1 ? cluster_rank() : 0;
    const int step = blockIdx.z * span, count = min(span, steps - step);
#if EARLY
    if (threadIdx.x == 256) prefetch_map(x), prefetch_map(w);
#endif
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) barrier_init(ring.filled(i), 1), barrier_init(ring.freed(i), 8 * CLUSTER);
        fence_barriers();
    }
    if (CLUSTER > 1)
        cluster_arrive(), cluster_wait();
    else
        __syncthreads();
#if EARLY
    asm volatile("griddepcontrol.launch_dependents;");
#endif
    if (warp == 8) {
        if (lane == 0) produce(ring, Tiles{&x, &w, int(blockIdx.x) * TOKENS, int(blockIdx.y) * EXPERTS, step}, count, rank);
    } else {
        wait_for_kernels();
        float acc[WIDTH / 2];
#pragma unroll 1
        for (int i = 0; i < count; ++i) {
            barrier_wait(ring.filled(i), Ring::turn(i));
            const u64 a = wgmma_operand(ring.x(i) + (TOKENS == 128 ? group * 8192 : 0), 16, 1024);
            const u64 b = wgmma_operand(ring.w(i) + (TOKENS == 128 ? 0 : group * W_BYTES / 2), 16, 1024);
            wgmma_fence();
#pragma unroll
            for (int c = 0; c < 4; ++c) wgmma_shared(acc, operand_at(a, 2 * c), operand_at(b, 2 * c), i + c);
            wgmma_commit();
            wgmma_wait<1>();  // the step before is complete: its tiles may be overwritten, here and by the other block
            // An arrival that orders more than itself is a fence, which waits for the copies. Each is waited for: no block ends before.
            if (i > 0 && i - 1 + STAGES < count && lane < CLUSTER) peer_arrive(peer_address(ring.freed(i - 1), lane));
        }
        wgmma_wait<0>();
        if (CLUSTER > 1) cluster_arrive();
#if !EARLY
        asm volatile("griddepcontrol.launch_dependents;");
#endif
        const int token = blockIdx.x * TOKENS + (TOKENS == 128 ? group * 64 : 0) + (warp & 3) * 16 + (lane >> 2);
        const int expert = blockIdx.y * EXPERTS + (TOKENS == 128 ? 0 : group * WIDTH);
        store_logits(part + (i64(blockIdx.z) * tokens + token) * experts + expert, acc, experts, tokens - token, lane);
#if FUSE
        __shared__ int lists[8 * PAIR * MOST];
        select_share(reinterpret_cast<float*>(memory + (ring.data - shared_address(memory))), lists, part, counters,
                     Choice{bias, ids, gates, k, scale, normalise}, tokens, experts);
#endif
    }
    if (CLUSTER > 1) {
        __syncwarp();
        if (warp == 8) cluster_arrive();
        cluster_wait();
    }
}
