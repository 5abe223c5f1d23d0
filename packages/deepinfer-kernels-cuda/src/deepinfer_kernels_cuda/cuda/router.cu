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
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, token = (blockIdx.x * WARPS + warp) / TOGETHER, begin = lane * ITEMS;
    const Row row(logits, bias, tokens, experts, spans);
    const Choice choice{bias, ids, gates, k, scale, normalise};
    float offset[ITEMS], x[1][ITEMS];
    row.load(offset, bias, begin, NEG_INF);  // what is no expert comes last of all
    wait_for_kernels();
    if (token >= tokens) return;
    const float* own = logits + i64(token) * experts;
#if TOGETHER > 1
    __shared__ __align__(16) float kept[WARPS * 32 * ITEMS];
    sum_together<WARPS>(row, own, kept, [] { __syncthreads(); });
    if (warp) return;
    recall(x[0], kept);
    choice.select<1>(x, offset, [&](int, int expert) { return kept[expert]; }, list[warp], token, 1, tokens);
#elif PIECES
    __shared__ __align__(16) float all[WARPS][32 * ITEMS];
    float* const kept = all[warp];
    sum_alone(row, own, kept);
    recall(x[0], kept);
    choice.select<1>(x, offset, [&](int, int expert) { return kept[expert]; }, list[warp], token, 1, tokens);
#else
    row.load_sum(x[0], own, begin);
    choice.select<1>(x, offset, [&](int, int expert) { return row.sum_at(own + expert); }, list[warp], token, 1, tokens);
#endif
}
