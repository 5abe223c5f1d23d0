#include "wgmma.cuh"
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
#ifndef NOSTORE
#define NOSTORE 0
#endif
#ifndef NOLOAD
#define NOLOAD 0
#endif
#ifndef NOMMA
#define NOMMA 0
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
WGMMA_SHARED(wgmma_shared, 64, 128, 64, 65, 66, 0)

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
    for (int i = STAGES; i < (NOLOAD ? 0 : count); ++i) {
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
#if NOMMA
        for (int i = 0; i < WIDTH / 2; ++i) acc[i] = i;
#endif
#pragma unroll 1
        for (int i = 0; i < count; ++i) {
            if (!NOLOAD || i < STAGES) barrier_wait(ring.filled(i), Ring::turn(i));
#if NOMMA
            if (i + STAGES < count && lane < CLUSTER) peer_arrive(peer_address(ring.freed(i), lane));
            continue;
#endif
            const u64 a = wgmma_operand(ring.x(i) + (TOKENS == 128 ? group * 8192 : 0), 16, 1024);
            const u64 b = wgmma_operand(ring.w(i) + (TOKENS == 128 ? 0 : group * W_BYTES / 2), 16, 1024);
            wgmma_fence();
#pragma unroll
            for (int c = 0; c < 4; ++c) wgmma_shared(acc, operand_at(a, 2 * c), operand_at(b, 2 * c), i + c);
            wgmma_commit();
            wgmma_wait<1>();  // the step before is complete: its tiles may be overwritten, here and by the other block
            // An arrival that orders more than itself is a fence, which waits for the copies. Each is waited for: no block ends before.
            if (!NOLOAD && i > 0 && i - 1 + STAGES < count && lane < CLUSTER) peer_arrive(peer_address(ring.freed(i - 1), lane));
        }
        wgmma_wait<0>();
        if (CLUSTER > 1) cluster_arrive();
#if !EARLY
        asm volatile("griddepcontrol.launch_dependents;");
#endif
        const int token = blockIdx.x * TOKENS + (TOKENS == 128 ? group * 64 : 0) + (warp & 3) * 16 + (lane >> 2);
        const int expert = blockIdx.y * EXPERTS + (TOKENS == 128 ? 0 : group * WIDTH);
        if (!NOSTORE || acc[0] == 12345.0f) store_logits(part + (i64(blockIdx.z) * tokens + token) * experts + expert, acc, experts, tokens - token, lane);
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
