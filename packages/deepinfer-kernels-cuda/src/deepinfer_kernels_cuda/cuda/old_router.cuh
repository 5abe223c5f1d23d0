#pragma once
// Behind hopper.cuh. A router's selection: top k of sqrt(softplus(logit)) + bias (lowest expert on ties), ids ascending, their weights.
//
// A warp selects for one token; a lane owns ITEMS neighbouring experts. The k-th largest key is found by walking down the
// distinct keys, one round each: of key - best, as an unsigned number, the largest is the next key below `best`. Where keys are
// equal that may end early or choose too many: then the threshold is found bit by bit, by counting.

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
    int experts;
    bool wide;  // whole vectors of four

    __device__ __forceinline__ Row(const float* logits, const float* bias, int experts_)
        : experts(experts_), wide((experts_ & 3) == 0 && ((reinterpret_cast<u64>(logits) | reinterpret_cast<u64>(bias)) & 15) == 0) {}

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
};

// Pieces of four experts (aligned; experts a multiple of four), a lane those of its number and of every 32nd after it.
__device__ __forceinline__ void load_pieces(float4 (&x)[ITEMS / 4], const float* from, int experts) {
#pragma unroll
    for (int j = 0; j < ITEMS / 4; ++j) {
        const int at = 4 * ((threadIdx.x & 31) + 32 * j);
        x[j] = at < experts ? __ldcg(reinterpret_cast<const float4*>(from + at)) : make_float4(0, 0, 0, 0);
    }
}
// Pieces to shared memory, [32 * ITEMS], and a lane's own experts from there.
__device__ __forceinline__ void keep(float* kept, const float4 (&x)[ITEMS / 4]) {
#pragma unroll
    for (int j = 0; j < ITEMS / 4; ++j) reinterpret_cast<float4*>(kept)[(threadIdx.x & 31) + 32 * j] = x[j];
}
__device__ __forceinline__ void recall(float (&x)[ITEMS], const float* kept) {
    kept += (threadIdx.x & 31) * ITEMS;
#pragma unroll
    for (int i = 0; i < ITEMS; i += 4) {
        const float4 four = *reinterpret_cast<const float4*>(kept + i);
        x[i] = four.x, x[i + 1] = four.y, x[i + 2] = four.z, x[i + 3] = four.w;
    }
}
__device__ __forceinline__ void add_pieces(float4 (&x)[ITEMS / 4], const float4 (&more)[ITEMS / 4]) {
#pragma unroll
    for (int j = 0; j < ITEMS / 4; ++j) x[j].x += more[j].x, x[j].y += more[j].y, x[j].z += more[j].z, x[j].w += more[j].w;
}
// What COUNT warps have kept, [COUNT][32 * ITEMS], added by the first, which has x, and kept there.
template <int COUNT>
__device__ __forceinline__ void add_kept(float4 (&x)[ITEMS / 4], float* kept) {
#pragma unroll
    for (int w = 1; w < COUNT; ++w) {
        float4 more[ITEMS / 4];
#pragma unroll
        for (int j = 0; j < ITEMS / 4; ++j) more[j] = reinterpret_cast<const float4*>(kept + w * 32 * ITEMS)[(threadIdx.x & 31) + 32 * j];
        add_pieces(x, more);
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

    // One warp. x, offset: logits and bias of a lane's experts; logits: the token's, of all experts; list: [MOST], the warp's own.
    __device__ __forceinline__ void select(const float (&x)[ITEMS], const float (&offset)[ITEMS], const float* logits, int* list, int token) const {
        const int lane = threadIdx.x & 31, begin = lane * ITEMS;
        u32 key[ITEMS], best = 0;
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            key[i] = ordered(score(x[i]) + offset[i]);
            best = max(best, key[i]);
        }
        best = __reduce_max_sync(~0u, best);
        bool descends = true;
#pragma unroll 1
        for (int round = 1; round < k; ++round) {
            u32 next = 0;
#pragma unroll
            for (int i = 0; i < ITEMS; ++i) next = max(next, key[i] - best);
            next = best + __reduce_max_sync(~0u, next);
            descends &= next < best;
            best = next;
        }
        u32 chosen = 0;
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) chosen |= u32(key[i] >= best) << i;
        if (!descends || __reduce_add_sync(~0u, __popc(chosen)) != k) chosen = choose_with_ties(key, k);
        for (u32 place = sum_before(__popc(chosen)); chosen; chosen &= chosen - 1) list[place++] = begin + __ffs(chosen) - 1;
        __syncwarp();
        const int expert = lane < k ? list[lane] : 0;
        float weight = lane < k ? score(logits[expert]) : 0.0f;
        if (normalise) {
            float sum = weight;
#pragma unroll
            for (int d = 16; d; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
            asm("div.full.f32 %0, %1, %2;" : "=f"(weight) : "f"(weight), "f"(sum + 1e-20f));
        }
        if (lane < k) {
            ids[i64(token) * k + lane] = expert;
            gates[i64(token) * k + lane] = weight * scale;
        }
    }
};
