#pragma once
// To be included behind hopper.cuh. A router's selection: top k of sqrt(softplus(logit)) + bias (lowest expert on ties), ids ascending, their weights.
//
// Logits may be cut into spans, of which each has a part: they are added in order.
//
// A warp selects for one token; a lane owns ITEMS neighbouring experts. The k-th largest key is found by walking down the
// distinct keys, one round each: of key - best, as an unsigned number, the largest is the next key below `best`. Where keys are
// equal that may end early or choose too many: then the threshold is found bit by bit, by counting.

constexpr int BATCH = 2;  // spans on their way at once
constexpr int MOST = 32;  // experts of a token

// sqrt(softplus): the logarithm of 1 + u, u in [0, 1], as a polynomial (relative error 2e-7).
__device__ __forceinline__ float score(float logit) {
    const float u = exp2_fast(-1.44269504f * fabsf(logit));
    float p = -0.0032439809292554855f;
    p = fmaf(p, u, 0.019851263612508774f);
    p = fmaf(p, u, -0.056959159672260284f);
    p = fmaf(p, u, 0.10603617131710052f);
    p = fmaf(p, u, -0.15305569767951965f);
    p = fmaf(p, u, 0.19675931334495544f);
    p = fmaf(p, u, -0.24954132735729218f);
    p = fmaf(p, u, 0.3332996368408203f);
    p = fmaf(p, u, -0.4999990165233612f);
    p = fmaf(p, u, 1.0f);
    const float sum = fmaf(p, u, fmaxf(logit, 0.0f));
    float root;
    asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(sum));
    return root;
}

// Unsigned, in the order of the floats (of which none is -0.0); NaN counts as -1e30.
__device__ __forceinline__ u32 ordered(float value) {
    const u32 bits = __float_as_uint(value == value ? value : -1e30f);
    return bits ^ (u32(int(bits) >> 31) | 0x80000000u);
}

// Lanes' sums before this one's.
__device__ __forceinline__ u32 sum_before(u32 own) {
    u32 sum = own;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const u32 other = __shfl_up_sync(~0u, sum, d);
        if ((threadIdx.x & 31) >= d) sum += other;
    }
    return sum - own;
}

__device__ __forceinline__ u32 count_from(const u32 (&key)[ITEMS], u32 bound) {
    u32 count = 0;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) count += key[i] >= bound;
    return __reduce_add_sync(~0u, count);
}

// The lane's chosen experts, a bit each, where keys are equal: all over the k-th key and the first of those equal to it.
__device__ __forceinline__ u32 choose_with_ties(const u32 (&key)[ITEMS], u32 k) {
    u32 found = 0;
    for (int bit = 31; bit >= 0; --bit)
        if (count_from(key, found | (1u << bit)) >= k) found |= 1u << bit;
    u32 above = 0, equal = 0;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) above |= u32(key[i] > found) << i, equal |= u32(key[i] == found) << i;
    int room = int(k) - int(__reduce_add_sync(~0u, __popc(above))) - int(sum_before(__popc(equal)));
    for (; equal && room > 0; equal &= equal - 1, --room) above |= equal & -equal;
    return above;
}

struct Row {
    int experts, spans;
    i64 apart;  // from a span's part to the next
    bool wide;  // whole vectors of four

    __device__ __forceinline__ Row(const float* logits, const float* bias, int tokens, int experts_, int spans_)
        : experts(experts_), spans(spans_), apart(i64(tokens) * experts_),
          wide((experts_ & 3) == 0 && ((reinterpret_cast<u64>(logits) | reinterpret_cast<u64>(bias)) & 15) == 0) {}

    // A lane's own experts, neighbours.
    __device__ __forceinline__ void load(float (&x)[ITEMS], const float* from, int begin, float missing) const {
        if (wide) {
#pragma unroll
            for (int i = 0; i < ITEMS; i += 4) {
                float4 four = make_float4(missing, missing, missing, missing);
                if (begin + i < experts) four = *reinterpret_cast<const float4*>(from + begin + i);
                x[i] = four.x, x[i + 1] = four.y, x[i + 2] = four.z, x[i + 3] = four.w;
            }
        } else {
#pragma unroll
            for (int i = 0; i < ITEMS; ++i) x[i] = begin + i < experts ? from[begin + i] : missing;
        }
    }
    // The sum of all spans: some are on their way at once.
    __device__ __forceinline__ void load_sum(float (&x)[ITEMS], const float* from, int begin) const {
#pragma unroll 1
        for (int span = 0; span < spans; span += BATCH) {
            float part[BATCH][ITEMS];
#pragma unroll
            for (int s = 0; s < BATCH; ++s) {
#pragma unroll
                for (int i = 0; i < ITEMS; ++i) part[s][i] = 0.0f;
                if (s == 0 || span + s < spans) load(part[s], from + (span + s) * apart, begin, 0.0f);
            }
#pragma unroll
            for (int i = 0; i < ITEMS; ++i) {
                const float sum = part[0][i] + part[1][i];
                x[i] = span ? x[i] + sum : sum;
            }
        }
    }
    __device__ __forceinline__ float sum_at(const float* from) const {
        float sum = *from;
#pragma unroll 4
        for (int span = 1; span < spans; ++span) sum += from[span * apart];
        return sum;
    }
    // Pieces of four experts, a lane those of its number and of every 32nd after it; not from the first-level cache.
    __device__ __forceinline__ void load_pieces(float4 (&x)[ITEMS / 4], const float* from) const {
#pragma unroll
        for (int j = 0; j < ITEMS / 4; ++j) {
            const int at = 4 * ((threadIdx.x & 31) + 32 * j);
            x[j] = make_float4(0, 0, 0, 0);
            if (wide) {
                if (at < experts) x[j] = __ldcg(reinterpret_cast<const float4*>(from + at));
            } else {
                if (at < experts) x[j].x = __ldcg(from + at);
                if (at + 1 < experts) x[j].y = __ldcg(from + at + 1);
                if (at + 2 < experts) x[j].z = __ldcg(from + at + 2);
                if (at + 3 < experts) x[j].w = __ldcg(from + at + 3);
            }
        }
    }
};

// Pieces to shared memory, [32 * ITEMS], and a lane's own experts from there.
__device__ __forceinline__ void keep(float* kept, const float4 (&x)[ITEMS / 4]) {
#pragma unroll
    for (int j = 0; j < ITEMS / 4; ++j) reinterpret_cast<float4*>(kept)[(threadIdx.x & 31) + 32 * j] = x[j];
}
__device__ __forceinline__ void add_pieces(float4 (&x)[ITEMS / 4], const float4 (&more)[ITEMS / 4]) {
#pragma unroll
    for (int j = 0; j < ITEMS / 4; ++j) x[j].x += more[j].x, x[j].y += more[j].y, x[j].z += more[j].z, x[j].w += more[j].w;
}
__device__ __forceinline__ void recall(float (&x)[ITEMS], const float* kept) {
    kept += (threadIdx.x & 31) * ITEMS;
#pragma unroll
    for (int i = 0; i < ITEMS; i += 4) {
        const float4 four = *reinterpret_cast<const float4*>(kept + i);
        x[i] = four.x, x[i + 1] = four.y, x[i + 2] = four.z, x[i + 3] = four.w;
    }
}
// One token by WARPS warps: each adds every WARPS-th span's pieces, then the first warp these sums. kept: [WARPS][32 * ITEMS].
// What the first warp has put together lies in kept[0]. Every thread of them must come here.
template <int WARPS, class Sync>
__device__ __forceinline__ void sum_together(const Row& row, const float* from, float* kept, Sync sync) {
    const int warp = threadIdx.x >> 5;
    float4 x[ITEMS / 4];
#pragma unroll
    for (int j = 0; j < ITEMS / 4; ++j) x[j] = make_float4(0, 0, 0, 0);
#pragma unroll 4
    for (int span = warp; span < row.spans; span += WARPS) {
        float4 more[ITEMS / 4];
        row.load_pieces(more, from + span * row.apart);
        add_pieces(x, more);
    }
    if (warp) keep(kept + warp * 32 * ITEMS, x);
    sync();
    if (warp) return;
#pragma unroll
    for (int w = 1; w < WARPS; ++w) {
        float4 more[ITEMS / 4];
#pragma unroll
        for (int j = 0; j < ITEMS / 4; ++j) more[j] = reinterpret_cast<const float4*>(kept + w * 32 * ITEMS)[(threadIdx.x & 31) + 32 * j];
        add_pieces(x, more);
    }
    keep(kept, x);
    __syncwarp();
}

// Likewise by one warp: some spans are on their way at once.
__device__ __forceinline__ void sum_alone(const Row& row, const float* from, float* kept) {
    float4 x[ITEMS / 4];
#pragma unroll
    for (int j = 0; j < ITEMS / 4; ++j) x[j] = make_float4(0, 0, 0, 0);
#pragma unroll 1
    for (int span = 0; span < row.spans; span += BATCH) {
        float4 part[BATCH][ITEMS / 4];
#pragma unroll
        for (int s = 0; s < BATCH; ++s) {
#pragma unroll
            for (int j = 0; j < ITEMS / 4; ++j) part[s][j] = make_float4(0, 0, 0, 0);
            if (s == 0 || span + s < row.spans) row.load_pieces(part[s], from + (span + s) * row.apart);
        }
#pragma unroll
        for (int s = 0; s < BATCH; ++s) add_pieces(x, part[s]);
    }
    keep(kept, x);
    __syncwarp();
}

struct Choice {
    const float* bias;
    i64* ids;
    float* gates;
    int k;
    float scale;
    int normalise;

    // One warp, COUNT tokens at once: from `token` on, `apart` apart, below `end` (the first is). x, offset: logits and bias of a
    // lane's experts; logit(n, expert): any; list: [COUNT][MOST], the warp's own.
    template <int COUNT, class Logit>
    __device__ __forceinline__ void select(const float (&x)[COUNT][ITEMS], const float (&offset)[ITEMS], Logit logit, int* list, int token,
                                           int apart, int end) const {
        const int lane = threadIdx.x & 31, begin = lane * ITEMS;
        u32 key[COUNT][ITEMS], best[COUNT];
#pragma unroll
        for (int n = 0; n < COUNT; ++n) {
            best[n] = 0;
#pragma unroll
            for (int i = 0; i < ITEMS; ++i) {
                key[n][i] = ordered(score(x[n][i]) + offset[i]);
                best[n] = max(best[n], key[n][i]);
            }
        }
        bool descends[COUNT];
#pragma unroll
        for (int n = 0; n < COUNT; ++n) best[n] = __reduce_max_sync(~0u, best[n]), descends[n] = true;
#pragma unroll 1
        for (int round = 1; round < k; ++round) {
            u32 next[COUNT];
#pragma unroll
            for (int n = 0; n < COUNT; ++n) {
                next[n] = 0;
#pragma unroll
                for (int i = 0; i < ITEMS; ++i) next[n] = max(next[n], key[n][i] - best[n]);
            }
#pragma unroll
            for (int n = 0; n < COUNT; ++n) {
                const u32 below = best[n] + __reduce_max_sync(~0u, next[n]);
                descends[n] &= below < best[n];
                best[n] = below;
            }
        }
        u32 chosen[COUNT], place[COUNT];
#pragma unroll
        for (int n = 0; n < COUNT; ++n) {
            chosen[n] = 0;
#pragma unroll
            for (int i = 0; i < ITEMS; ++i) chosen[n] |= u32(key[n][i] >= best[n]) << i;
            if (!descends[n] || __reduce_add_sync(~0u, __popc(chosen[n])) != k) chosen[n] = choose_with_ties(key[n], k);
        }
#pragma unroll
        for (int n = 0; n < COUNT; ++n) place[n] = sum_before(__popc(chosen[n]));
#pragma unroll
        for (int n = 0; n < COUNT; ++n)
            for (; chosen[n]; chosen[n] &= chosen[n] - 1) list[n * MOST + place[n]++] = begin + __ffs(chosen[n]) - 1;
        __syncwarp();
        int expert[COUNT];
        float weight[COUNT];
#pragma unroll
        for (int n = 0; n < COUNT; ++n) {
            expert[n] = lane < k ? list[n * MOST + lane] : 0;
            weight[n] = lane < k ? score(logit(n, expert[n])) : 0.0f;
        }
        if (normalise) {
            float sum[COUNT];
#pragma unroll
            for (int n = 0; n < COUNT; ++n) sum[n] = weight[n];
#pragma unroll
            for (int d = 16; d; d /= 2)
#pragma unroll
                for (int n = 0; n < COUNT; ++n) sum[n] += __shfl_xor_sync(~0u, sum[n], d);
#pragma unroll
            for (int n = 0; n < COUNT; ++n) asm("div.full.f32 %0, %1, %2;" : "=f"(weight[n]) : "f"(weight[n]), "f"(sum[n] + 1e-20f));
        }
#pragma unroll
        for (int n = 0; n < COUNT; ++n)
            if (lane < k && token + n * apart < end) {
                ids[i64(token + n * apart) * k + lane] = expert[n];
                gates[i64(token + n * apart) * k + lane] = weight[n] * scale;
            }
        __syncwarp();
    }
};
