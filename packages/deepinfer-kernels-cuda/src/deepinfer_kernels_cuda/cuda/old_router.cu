#include "hopper.cuh"
#include "old_router.cuh"
// The selection alone. Logits in one piece: a warp a token. In spans, parts of a sum each (a multiple of four experts): a block a token, whose
// warps add them.

#ifndef TOGETHER
#define TOGETHER 0
#endif
constexpr int THREADS = 128, WARPS = THREADS / 32;

// Grid (tokens / WARPS, or tokens if TOGETHER); logits [spans, tokens, experts], of which there is one if not TOGETHER; k <= MOST.
extern "C" __global__ void __launch_bounds__(THREADS)
router_select(const float* logits, const float* bias, i64* ids, float* gates, int tokens, int experts, int spans, int k, float scale,
              int normalise) {
    __shared__ int list[WARPS][MOST];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, token = TOGETHER ? blockIdx.x : blockIdx.x * WARPS + warp;
    const Row row(logits, bias, experts);
    const Choice choice{bias, ids, gates, k, scale, normalise};
    float offset[ITEMS], x[ITEMS];
    row.load(offset, bias, lane * ITEMS, NEG_INF);  // what is no expert comes last of all
    wait_for_kernels();
    if (token >= tokens) return;
    const float* own = logits + i64(token) * experts;
#if TOGETHER
    __shared__ __align__(16) float kept[WARPS * 32 * ITEMS];
    float4 sum[ITEMS / 4];
#pragma unroll
    for (int j = 0; j < ITEMS / 4; ++j) sum[j] = make_float4(0, 0, 0, 0);
#pragma unroll 4
    for (int span = warp; span < spans; span += WARPS) {
        float4 more[ITEMS / 4];
        load_pieces(more, own + i64(span) * tokens * experts, experts);
        add_pieces(sum, more);
    }
    if (warp) keep(kept + warp * 32 * ITEMS, sum);
    __syncthreads();
    if (warp) return;
    add_kept<WARPS>(sum, kept);
    recall(x, kept);
    own = kept;
#else
    row.load(x, own, lane * ITEMS, 0.0f);
#endif
    choice.select(x, offset, own, list[warp], token);
}
