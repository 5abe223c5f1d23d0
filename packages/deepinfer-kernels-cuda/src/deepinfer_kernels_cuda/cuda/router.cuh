#pragma once
// Behind hopper.cuh. A router's selection: top k of sqrt(softplus(logit)) + bias (lowest expert on ties), ids ascending, their weights.
//
// A warp selects for one token; a lane has ITEMS experts, four neighbours at a time. Keys are computed roughly first. The k-th key is
// no less than the k-th largest of the lanes' best, but for the error; the few experts that come up to that get a lane and an exact
// key each, and the worst of them leave. Where more than 32 come up to it, or keys are no finite numbers, all are computed exactly and
// the threshold is found bit by bit, by counting.
//
// TOP: experts of a token. WHOLE: there are 32 * ITEMS experts, and their biases and logits lie at addresses in 16s.

#ifndef TOP
#define TOP 6
#endif
#ifndef WHOLE
#define WHOLE 1
#endif
static_assert(TOP >= 1 && TOP <= 32, "a lane for each");
constexpr int PIECES = ITEMS / 4;

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

// The same within ROUGH (a polynomial within 2.9e-3; 1.2e-3 in all, and from 17 on the same bits).
constexpr float ROUGH = 1.3e-3f;
__device__ __forceinline__ float rough_score(float logit) {
    const float u = exp2_fast(-1.44269504f * fabsf(logit));
    float root;
    asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(fmaf(fmaf(fmaf(0.14171f, u, -0.443776f), u, 0.997173f), u, fmaxf(logit, 0.0f))));
    return root;
}

// Unsigned, in the order of the floats (of which none is -0.0), never 0 or ~0; NaN counts as -1e30.
__device__ __forceinline__ u32 ordered(float value) {
    const u32 bits = __float_as_uint(value == value ? value : -1e30f);
    return bits ^ (u32(int(bits) >> 31) | 0x80000000u);
}
__device__ __forceinline__ float from_ordered(u32 key) { return __uint_as_float(key ^ (~u32(int(key) >> 31) | 0x80000000u)); }

// Lanes' sums up to this one's.
__device__ __forceinline__ u32 sum_until(u32 sum) {
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const u32 other = __shfl_up_sync(~0u, sum, d);
        if ((threadIdx.x & 31) >= d) sum += other;
    }
    return sum;
}

// A lane's experts: item i is expert first_of(i / 4) + i % 4.
__device__ __forceinline__ int first_of(int piece) { return 4 * ((threadIdx.x & 31) + 32 * piece); }

// Lanes' items that are set, counted, and if there are 32 at most put in the order of the experts.
__device__ __forceinline__ int make_list(int* list, u32 items) {
    u32 own = 0;  // a byte a piece
#pragma unroll
    for (int j = 0; j < PIECES; ++j) own |= u32(__popc(items >> 4 * j & 15)) << 8 * j;
    const u32 until = sum_until(own), all = __shfl_sync(~0u, until, 31);
    const int count = __dp4a(all, 0x01010101u, 0u);
    if (count > 32) return count;
    u32 place = all * 0x01010100u + until - own;
    for (; items; items &= items - 1) {
        const int i = __ffs(items) - 1, shift = 2 * (i & ~3);
        list[place >> shift & 255] = first_of(i >> 2) + (i & 3);
        place += 1u << shift;
    }
    __syncwarp();
    return count;
}

// A lane's share of a row.
__device__ __forceinline__ void load_row(float (&x)[ITEMS], const float* from, int experts, float missing) {
#if WHOLE
#pragma unroll
    for (int j = 0; j < PIECES; ++j) {
        const float4 four = *reinterpret_cast<const float4*>(from + first_of(j));
        x[4 * j] = four.x, x[4 * j + 1] = four.y, x[4 * j + 2] = four.z, x[4 * j + 3] = four.w;
    }
#else
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const int at = first_of(i / 4) + i % 4;
        x[i] = at < experts ? from[at] : missing;
    }
#endif
}

__device__ __forceinline__ u32 count_from(const u32 (&key)[ITEMS], u32 bound) {
    u32 count = 0;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) count += key[i] >= bound;
    return __reduce_add_sync(~0u, count);
}

// The lane's chosen items: all over the k-th key and the first of those equal to it. Logits and biases are read once more, so that
// nothing is held for this.
__device__ __forceinline__ u32 choose_by_counting(const float* logits, const float* bias, int experts) {
    float x[ITEMS], offset[ITEMS];
    load_row(x, logits, experts, 0.0f);
    load_row(offset, bias, experts, NEG_INF);
    u32 key[ITEMS], found = 0;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) key[i] = ordered(score(x[i]) + offset[i]);
#pragma unroll 1
    for (u32 bit = 1u << 31; bit; bit >>= 1)
        if (count_from(key, found | bit) >= TOP) found |= bit;
    u32 chosen = 0, equal = 0;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) chosen |= u32(key[i] > found) << i, equal |= u32(key[i] == found) << i;
    int room = TOP - int(__reduce_add_sync(~0u, __popc(chosen)));
#pragma unroll 1
    for (int j = 0; j < PIECES; ++j) {
        u32 piece = equal & 15u << 4 * j;
        const u32 own = __popc(piece), until = sum_until(own);
        for (int left = room - int(until - own); piece && left > 0; piece &= piece - 1, --left) chosen |= piece & -piece;
        room -= __shfl_sync(~0u, until, 31);
    }
    return chosen;
}

// The lane's items that may be among the best, by rough keys; none if fewer than TOP lanes have keys that are finite numbers.
__device__ __forceinline__ u32 choose_by_lanes(const float (&key)[ITEMS]) {
    float best = key[0];
#pragma unroll
    for (int i = 1; i < ITEMS; ++i) best = fmaxf(best, key[i]);
    u32 own = ordered(best), bound = __reduce_max_sync(~0u, own);
#pragma unroll(TOP <= 8 ? 8 : 1)
    for (int round = 1; round < TOP; ++round) {
        if (own == bound) own = 0;
        bound = __reduce_max_sync(~0u, own);
    }
    // Less than each that may be, so that a difference has the sign; the sum with a bias is rounded too. None is below infinity so.
    const float best_kth = from_ordered(bound), below = best_kth - (2 * ROUGH + 4e-7f * fabsf(best_kth));
    u32 items = 0;
#pragma unroll
    for (int i = ITEMS - 1; i >= 0; --i) items = __funnelshift_l(__float_as_uint(below - key[i]), items, 1);
    return bound > ordered(-1e30f) ? items : 0;
}

// Pieces to shared memory, [32 * ITEMS].
__device__ __forceinline__ void keep(float* kept, const float (&x)[ITEMS]) {
#pragma unroll
    for (int j = 0; j < PIECES; ++j)
        *reinterpret_cast<float4*>(kept + first_of(j)) = make_float4(x[4 * j], x[4 * j + 1], x[4 * j + 2], x[4 * j + 3]);
}

// One warp's selections.
struct Choice {
    const float* bias;
    i64* ids;
    float* gates;
    int experts;
    float scale;
    int normalise;

    // x, offset: logits and bias of a lane's experts; logits: the token's, of all experts; list: [32], the warp's own.
    __device__ __forceinline__ void select(const float (&x)[ITEMS], const float (&offset)[ITEMS], const float* logits, int* list, int token) const {
        const int lane = threadIdx.x & 31;
        float key[ITEMS];
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) key[i] = rough_score(x[i]) + offset[i];
        int count = make_list(list, choose_by_lanes(key));
        if (count < TOP || count > 32) count = make_list(list, choose_by_counting(logits, bias, experts));
        bool chosen = lane < count;
        const bool many = count > 8;
        const int expert = chosen ? list[lane] : 0;
        float weight = chosen ? score(logits[expert]) : 0.0f;
        if (count > TOP) {
            u32 own = chosen ? ordered(weight + bias[expert]) : ~0u;
#pragma unroll 1
            for (; count > TOP; --count) {  // of equal keys the last leaves
                const u32 same = __ballot_sync(~0u, own == __reduce_min_sync(~0u, own));
                if (lane == 31 - __clz(same)) own = ~0u, weight = 0, chosen = false;
            }
        }
        const u32 place = __popc(__ballot_sync(~0u, chosen) & ((1u << lane) - 1));
        if (normalise) {
            float sum = weight;
            if (many) sum += __shfl_xor_sync(~0u, sum, 16), sum += __shfl_xor_sync(~0u, sum, 8);
#pragma unroll
            for (int d = 4; d; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
            asm("div.full.f32 %0, %1, %2;" : "=f"(weight) : "f"(weight), "f"(sum + 1e-20f));
        }
        if (chosen) {
            ids[i64(token) * TOP + place] = expert;
            gates[i64(token) * TOP + place] = weight * scale;
        }
        __syncwarp();  // the list was read
    }
};
