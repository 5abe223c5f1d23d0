#include "wgmma.cuh"
#define ITEMS 12  // of the selection: at most 384 experts
#include "router.cuh"
// The router's logits for some hundred tokens at most, x [tokens, d] times weight [experts, d] transposed, split along d; with SELECTS
// the selection too.
//
// A block has 64 tokens, 96 experts and a span of d. One warp brings tiles of 64 columns (bulk tensor copies, 128-byte swizzle); two
// groups multiply, each for half of the experts.

WGMMA_SHARED(wgmma_shared, 24, 48, 24, 25, 26, 0)

struct alignas(64) TensorMap {
    u64 words[16];
};

constexpr int TOKENS = 64, EXPERTS = 96, STAGES = 5, THREADS = 288;
constexpr int WIDTH = EXPERTS / 2;  // experts of a group
constexpr u32 X_BYTES = TOKENS * 128, W_BYTES = EXPERTS * 128, STAGE = X_BYTES + W_BYTES;
#ifdef SHARED
static_assert(SHARED == STAGES * STAGE + 1024, "shared memory that is asked for");
#endif

// What comes behind this kernel may come onto the chip, and waits there for its end.
__device__ __forceinline__ void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;"); }
__device__ __forceinline__ void prefetch_map(const TensorMap& map) { asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory"); }
__device__ __forceinline__ void load_tile(u32 target, const TensorMap& map, int column, int row, u32 bar) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(target),
                 "l"(&map), "r"(column), "r"(row), "r"(bar)
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

// One thread. Weights are no kernel's result: the first come before the kernels ahead have ended.
__device__ __forceinline__ void produce(const Ring& ring, const TensorMap& x, const TensorMap& w, int token, int expert, int step, int count) {
    const auto weights = [&](int i) {
        barrier_expect(ring.filled(i), STAGE);
        load_tile(ring.w(i), w, (step + i) * 64, expert, ring.filled(i));
    };
    const auto tokens = [&](int i) { load_tile(ring.x(i), x, (step + i) * 64, token, ring.filled(i)); };
    const int first = min(count, STAGES);
    for (int i = 0; i < first; ++i) weights(i);
    wait_for_kernels();
    for (int i = 0; i < first; ++i) tokens(i);
#pragma unroll 1
    for (int i = STAGES; i < count; ++i) {
        barrier_wait(ring.freed(i), Ring::turn(i) ^ 1);
        weights(i), tokens(i);
    }
}

// Row quads to sixteen bytes a thread: of two neighbouring groups of eight columns an even lane keeps the first, an odd lane the second.
__device__ __forceinline__ void store_logits(float* out, const float (&acc)[WIDTH / 2], int experts, int left, int lane) {
    const bool odd = lane & 1;
    out += (odd ? 8 : 0) + (lane & 2) * 2;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int i = 0; i < WIDTH / 8; i += 2) {
            const float a = acc[4 * i + 2 * h], b = acc[4 * i + 2 * h + 1], c = acc[4 * i + 4 + 2 * h], d = acc[4 * i + 5 + 2 * h];
            const float x = __shfl_xor_sync(~0u, odd ? a : c, 1), y = __shfl_xor_sync(~0u, odd ? b : d, 1);
            if (8 * h < left)
                *reinterpret_cast<float4*>(out + i64(8 * h) * experts + 8 * i) = odd ? make_float4(x, y, c, d) : make_float4(a, b, x, y);
        }
    }
}

#if SELECTS
constexpr u32 EMPTY = 0xffffdeadu;  // no sum of products: those have NaN as 0x7fffffff
__device__ __forceinline__ uint4 read_words(const float* from) {
    uint4 d;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(d.x), "=r"(d.y), "=r"(d.z), "=r"(d.w) : "l"(from) : "memory");
    return d;
}

// The sum of a token's parts, which other blocks may be about to write: a word is there when it is not EMPTY, and is EMPTY again behind
// this. At most 16 spans, two a warp; the first warp puts them together in kept[0].
__device__ __forceinline__ void collect(float* from, i64 apart, int spans, int experts, float* kept, float (&x)[ITEMS]) {
    const int warp = threadIdx.x >> 5;
    uint4 words[2][PIECES];
    bool missing;
    do {
        missing = false;
#pragma unroll
        for (int s = 0; s < 2; ++s)
#pragma unroll
            for (int j = 0; j < PIECES; ++j) {
                words[s][j] = make_uint4(0, 0, 0, 0);
                if (warp + 8 * s < spans && first_of(j) < experts)
                    words[s][j] = read_words(from + (warp + 8 * s) * apart + first_of(j));
            }
#pragma unroll
        for (int s = 0; s < 2; ++s)
#pragma unroll
            for (int j = 0; j < PIECES; ++j)
                missing |= words[s][j].x == EMPTY || words[s][j].y == EMPTY || words[s][j].z == EMPTY || words[s][j].w == EMPTY;
    } while (__any_sync(~0u, missing));
#pragma unroll
    for (int j = 0; j < PIECES; ++j) {
        const uint4 a = words[0][j], b = words[1][j];
        x[4 * j] = __uint_as_float(a.x) + __uint_as_float(b.x), x[4 * j + 1] = __uint_as_float(a.y) + __uint_as_float(b.y);
        x[4 * j + 2] = __uint_as_float(a.z) + __uint_as_float(b.z), x[4 * j + 3] = __uint_as_float(a.w) + __uint_as_float(b.w);
    }
    keep(kept + warp * 32 * ITEMS, x);
    named_sync(1, 256);
#pragma unroll
    for (int s = 0; s < 2; ++s)
#pragma unroll
        for (int j = 0; j < PIECES; ++j)
            if (warp + 8 * s < spans && first_of(j) < experts)
                *reinterpret_cast<uint4*>(from + (warp + 8 * s) * apart + first_of(j)) = make_uint4(EMPTY, EMPTY, EMPTY, EMPTY);
    if (warp) return;
#pragma unroll
    for (int w = 1; w < 8; ++w)
#pragma unroll
        for (int j = 0; j < PIECES; ++j) {
            const float4 more = *reinterpret_cast<const float4*>(kept + w * 32 * ITEMS + first_of(j));
            x[4 * j] += more.x, x[4 * j + 1] += more.y, x[4 * j + 2] += more.z, x[4 * j + 3] += more.w;
        }
    keep(kept, x);  // seen by the warp when it has made its list
}

// The blocks that have parts of the same tokens select for a share of these each, as the parts come in. All of the grid are resident.
__device__ __forceinline__ void select_share(float* kept, float* part, const Choice& choice, int tokens, int experts) {
    __shared__ int list[32];
    const int warp = __reduce_max_sync(~0u, threadIdx.x >> 5);
    const int sharers = gridDim.y * gridDim.z, share = (TOKENS + sharers - 1) / sharers;
    const int first = blockIdx.x * TOKENS + (blockIdx.y + blockIdx.z * gridDim.y) * share;
    const int last = min(min(first + share, int(blockIdx.x + 1) * TOKENS), tokens);
    float offset[ITEMS];
    load_row(offset, choice.bias, experts, NEG_INF);
    named_sync(1, 256);  // the tiles in `kept` were read
#pragma unroll 1
    for (int token = first; token < last; ++token) {
        float x[ITEMS];
        collect(part + i64(token) * experts, i64(tokens) * experts, gridDim.z, experts, kept, x);
        if (warp == 0) choice.select(x, offset, kept, list, token);
        named_sync(1, 256);
    }
}
#endif

// Grid (tiles of tokens, tiles of experts, at most 16 spans of `span` steps of 64 columns, none empty); experts: a multiple of EXPERTS.
// part: float32 [spans, tokens, experts], with SELECTS all EMPTY before and after. Maps: boxes of 64 columns and TOKENS or EXPERTS rows.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
router_product(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, float* part, int tokens, int experts, int steps,
               int span
#if SELECTS
               ,
               const float* bias, i64* ids, float* gates, float scale, int normalise
#endif
) {
    extern __shared__ u8 memory[];
    __shared__ u64 barriers[2 * STAGES];
    const Ring ring{(shared_address(memory) + 1023) & ~1023u, shared_address(barriers), shared_address(barriers + STAGES)};
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, group = warp >> 2;
    const int step = blockIdx.z * span, count = min(span, steps - step);
    if (threadIdx.x == 256) prefetch_map(x), prefetch_map(w);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) barrier_init(ring.filled(i), 1), barrier_init(ring.freed(i), 8);
        fence_barriers();
    }
    __syncthreads();
    launch_dependents();
    if (warp == 8) {
        if (lane == 0) produce(ring, x, w, blockIdx.x * TOKENS, blockIdx.y * EXPERTS, step, count);
        return;
    }
    wait_for_kernels();
    float acc[WIDTH / 2];
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
        barrier_wait(ring.filled(i), Ring::turn(i));
        const u64 a = wgmma_operand(ring.x(i), 16, 1024), b = wgmma_operand(ring.w(i) + group * W_BYTES / 2, 16, 1024);
        wgmma_fence();
#pragma unroll
        for (int c = 0; c < 4; ++c) wgmma_shared(acc, operand_at(a, 2 * c), operand_at(b, 2 * c), i + c);
        wgmma_commit();
        wgmma_wait<1>();  // the step before is complete: its tiles may be overwritten
        if (i > 0 && lane == 0) barrier_arrive(ring.freed(i - 1));
    }
    wgmma_wait<0>();
    const int token = blockIdx.x * TOKENS + (warp & 3) * 16 + (lane >> 2), expert = blockIdx.y * EXPERTS + group * WIDTH;
    store_logits(part + (i64(blockIdx.z) * tokens + token) * experts + expert, acc, experts, tokens - token, lane);
#if SELECTS
    float* const kept = reinterpret_cast<float*>(memory + (ring.data - shared_address(memory)));
    select_share(kept, part, Choice{bias, ids, gates, experts, scale, normalise}, tokens, experts);
#endif
}
