#include "hopper.cuh"
#include "router.cuh"
// The selection alone.

constexpr int THREADS = 128, WARPS = THREADS / 32;
// Warps that sum the spans of one token: one of them or all of the block.
#ifndef TOGETHER
#define TOGETHER 1
#endif
static_assert(TOGETHER == 1 || TOGETHER == WARPS, "warps of a token");

// Grid (tokens * TOGETHER / WARPS); logits [spans, tokens, experts]; k <= MOST.
extern "C" __global__ void __launch_bounds__(THREADS)
router_select(const float* logits, const float* bias, i64* ids, float* gates, int tokens, int experts, int spans, int k, float scale,
              int normalise) {
    __shared__ int list[WARPS][MOST];
    __shared__ __align__(16) float kept[WARPS][32 * ITEMS];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, token = (blockIdx.x * WARPS + warp) / TOGETHER, begin = lane * ITEMS;
    const Row row(logits, bias, tokens, experts, spans);
    float offset[ITEMS], x[ITEMS];
    row.load(offset, bias, begin, NEG_INF);  // what is no expert comes last of all
    wait_for_kernels();
    if (token >= tokens) return;
    row.load_sum(x, logits + i64(token) * experts, begin, warp % TOGETHER, TOGETHER);
    if (TOGETHER > 1) {
        if (warp) keep(kept[warp], x);
        __syncthreads();
        if (warp) return;
#pragma unroll
        for (int w = 1; w < TOGETHER; ++w) {
            float more[ITEMS];
            recall(more, kept[w]);
#pragma unroll
            for (int i = 0; i < ITEMS; ++i) x[i] += more[i];
        }
    }
    keep(kept[warp], x);
    __syncwarp();
    Choice{bias, ids, gates, k, scale, normalise}.select<1>(offset, kept[warp], list[warp], token, 1, tokens);
}
