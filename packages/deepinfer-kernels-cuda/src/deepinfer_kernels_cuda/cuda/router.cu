#include "hopper.cuh"
#include "router.cuh"
// The selection alone, a warp a token. Logits in one piece, or in parts of a sum.

#ifndef PARTS
#define PARTS 1  // of a sum: how many are loaded at once
#endif
constexpr int THREADS = 128, WARPS = THREADS / 32;

// Experts: a multiple of four, aligned, if there are parts.
__device__ __forceinline__ void load_parts(float (&x)[ITEMS], const float* from, i64 apart, int spans, int experts) {
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) x[i] = 0;
#pragma unroll 1
    for (int first = 0; first < spans; first += PARTS, from += PARTS * apart) {
        float4 part[PARTS][PIECES];
#pragma unroll
        for (int s = 0; s < PARTS; ++s)
#pragma unroll
            for (int j = 0; j < PIECES; ++j) {
                part[s][j] = make_float4(0, 0, 0, 0);
                if (first + s < spans && first_of(j) < experts) part[s][j] = __ldcg(reinterpret_cast<const float4*>(from + s * apart + first_of(j)));
            }
#pragma unroll
        for (int s = 0; s < PARTS; ++s)
#pragma unroll
            for (int j = 0; j < PIECES; ++j)
                x[4 * j] += part[s][j].x, x[4 * j + 1] += part[s][j].y, x[4 * j + 2] += part[s][j].z, x[4 * j + 3] += part[s][j].w;
    }
}

// Any grid; logits [spans, tokens, experts], of which there is one if PARTS is; k <= MOST.
extern "C" __global__ void __launch_bounds__(THREADS)
router_select(const float* logits, const float* bias, i64* ids, float* gates, int tokens, int experts, int spans, int k, float scale,
              int normalise) {
    __shared__ int list[WARPS][MOST];
    const int warp = __reduce_max_sync(~0u, threadIdx.x >> 5), stride = gridDim.x * WARPS;
    const Row row(logits, bias, experts);
    const Choice choice{bias, ids, gates, k, scale, normalise};
    float offset[ITEMS], x[ITEMS];
    row.load(offset, bias, NEG_INF);  // what is no expert comes last of all
    int token = blockIdx.x * WARPS + warp;
    wait_for_kernels();
    if (token >= tokens) return;
#if PARTS > 1
    __shared__ __align__(16) float kept[WARPS][32 * ITEMS];
#pragma unroll 1
    for (; token < tokens; token += stride) {
        load_parts(x, logits + i64(token) * experts, i64(tokens) * experts, spans, experts);
        keep(kept[warp], x);  // seen by the warp when it has made its list
        choice.select(x, offset, kept[warp], list[warp], token);
    }
#else
#pragma unroll 1
    for (; token < tokens; token += stride) {
        row.load(x, logits + i64(token) * experts, 0.0f);
        choice.select(x, offset, logits + i64(token) * experts, list[warp], token);
    }
#endif
}
