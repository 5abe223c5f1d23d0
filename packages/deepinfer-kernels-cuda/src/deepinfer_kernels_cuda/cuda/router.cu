#include "hopper.cuh"
#include "router.cuh"
// The selection alone, a warp a token. Logits in one piece, or in parts of a sum.

#ifndef PARTS
#define PARTS 1  // of a sum
#endif
constexpr int THREADS = 128, WARPS = THREADS / 32;

// Grid (tokens / WARPS); logits [PARTS, tokens, experts].
extern "C" __global__ void __launch_bounds__(THREADS)
router_select(const float* logits, const float* bias, i64* ids, float* gates, int tokens, int experts, float scale, int normalise) {
    __shared__ int list[WARPS][32];
    const int warp = __reduce_max_sync(~0u, threadIdx.x >> 5), token = blockIdx.x * WARPS + warp;  // so the compiler knows it is one
    float offset[ITEMS], x[ITEMS];
    load_row(offset, bias, experts, NEG_INF);  // what is no expert comes last of all
    wait_for_kernels();
    if (token >= tokens) return;
    const float* own = logits + i64(token) * experts;
    load_row(x, own, experts, 0.0f);
#if PARTS > 1
    __shared__ __align__(16) float kept[WARPS][32 * ITEMS];
    float more[PARTS - 1][ITEMS];
#pragma unroll
    for (int s = 1; s < PARTS; ++s) load_row(more[s - 1], own + s * i64(tokens) * experts, experts, 0.0f);
#pragma unroll
    for (int s = 1; s < PARTS; ++s)
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) x[i] += more[s - 1][i];
    own = kept[warp];
    keep(kept[warp], x);  // seen by the warp when it has made its list
#endif
    Choice{bias, ids, gates, experts, scale, normalise}.select(x, offset, own, list[warp], token);
}
