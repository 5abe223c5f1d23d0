#include "hopper.cuh"
#include "router.cuh"
// The selection alone, a warp a token. Logits in one piece, or in parts of a sum.

#ifndef PARTS
#define PARTS 1  // of a sum
#endif
#ifndef WARPS
#define WARPS 4
#endif
#ifndef TOGETHER
#define TOGETHER 0
#endif
#ifndef MINB
#define MINB 1
#endif
#ifndef KEEP
#define KEEP 0
#endif
constexpr int THREADS = 32 * WARPS;

// Grid (tokens / WARPS); logits [PARTS, tokens, experts].
extern "C" __global__ void __launch_bounds__(THREADS, MINB)
router_select(const float* logits, const float* bias, i64* ids, float* gates, int tokens, int experts, float scale, int normalise) {
    __shared__ int list[WARPS][32];
    const int warp = __reduce_max_sync(~0u, threadIdx.x >> 5), token = TOGETHER ? blockIdx.x : blockIdx.x * WARPS + warp;
    float offset[ITEMS], x[ITEMS];
    load_row(offset, bias, experts, NEG_INF);  // what is no expert comes last of all
    wait_for_kernels();
    if (token >= tokens) return;
    const float* own = logits + i64(token) * experts;
#if TOGETHER
    constexpr int OWN = (PARTS + WARPS - 1) / WARPS;
    __shared__ __align__(16) float kept[WARPS][32 * ITEMS];
    float more[OWN][ITEMS];
#pragma unroll
    for (int s = 0; s < OWN; ++s) {
        if (warp + s * WARPS < PARTS) {
            load_row(more[s], own + (warp + s * WARPS) * i64(tokens) * experts, experts, 0.0f);
        } else {
#pragma unroll
            for (int i = 0; i < ITEMS; ++i) more[s][i] = 0;
        }
    }
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) x[i] = more[0][i];
#pragma unroll
    for (int s = 1; s < OWN; ++s)
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) x[i] += more[s][i];
    if (warp) keep(kept[warp], x);
    __syncthreads();
    if (warp) return;
#pragma unroll
    for (int w = 1; w < WARPS; ++w) {
#pragma unroll
        for (int j = 0; j < PIECES; ++j) {
            const float4 four = *reinterpret_cast<const float4*>(kept[w] + first_of(j));
            x[4 * j] += four.x, x[4 * j + 1] += four.y, x[4 * j + 2] += four.z, x[4 * j + 3] += four.w;
        }
    }
    own = kept[0];
    keep(kept[0], x);
#else
    load_row(x, own, experts, 0.0f);
#if PARTS > 1 || KEEP
    __shared__ __align__(16) float kept[WARPS][32 * ITEMS];
#if PARTS > 1
    float more[PARTS - 1][ITEMS];
#pragma unroll
    for (int s = 1; s < PARTS; ++s) load_row(more[s - 1], own + s * i64(tokens) * experts, experts, 0.0f);
#pragma unroll
    for (int s = 1; s < PARTS; ++s)
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) x[i] += more[s - 1][i];
#endif
    own = kept[warp];
    keep(kept[warp], x);  // seen by the warp when it has made its list
#endif
#endif
    Choice{bias, ids, gates, experts, scale, normalise}.select(x, offset, own, list[warp], token);
}
