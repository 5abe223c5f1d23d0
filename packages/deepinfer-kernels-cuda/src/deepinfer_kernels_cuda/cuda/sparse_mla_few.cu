#include "hopper.cuh"
#include "slots.cuh"
#include "mma.cuh"
// Sparse MLA over quantised records for few queries: 512 channels, keys equal values, blocks of 16 or 32 heads.
//
// A cluster shares one (query, block of heads): each of its SPLITS blocks takes every SPLITS-th tile of 16 keys, all at once, and
// finishes some slices of the channels. A warp decodes a part of the channels of one tile into fragments of warp-level products, from
// which it makes its part of the logits, and stores them as rows of shared memory for the products with the probabilities.
//
// Order of the 64 chunks of 8 channels in shared memory: 16 p + 4 j + q holds chunk 16 p + 4 q + j, so that the four lanes of a row
// store neighbours; within a chunk 0 4 1 5 2 6 3 7, so that a word of codes becomes pairs by shifts and masks.
//
// Scale: as in sparse_mla.cu keys are their values times 2^-60.

// Built for several SPLITS; HEADS is 16 or 32, PARTS (warps that share a tile) 1, 2 or 4, SHARED what a launch asks for, bytes.
constexpr int SIZE = SPLITS, GROUPS = HEADS / 16, TILES = (40 + SIZE - 1) / SIZE, KEYS = 16 * TILES;  // tiles, keys: a block's room
constexpr int WARPS = TILES * PARTS, THREADS = 32 * WARPS, QUARTERS = 4 / PARTS;  // quarters of the channels that a warp decodes
constexpr int WRITERS = WARPS >= 16 ? 16 : 8, EACH = 16 / WRITERS;  // warps that have heads and slices of 32 channels; slices of each
constexpr int SLOTS = (16 + SIZE - 1) / SIZE;                       // slices that a block finishes, at most
constexpr int LOGIT_ROW = KEYS + 8, WEIGHT_ROW = 2 * KEYS + 16;

struct Shared {
    u8 keys[KEYS * 1024];
    union {
        struct {
            u8 query[HEADS * 1024];
            float logits[PARTS][HEADS][LOGIT_ROW];
        };
        struct {
            u8 weights[HEADS * WEIGHT_ROW];  // probabilities; the queries are done with
            u8 slices[SIZE * SLOTS * HEADS * 64];  // as they come, once the logits are done with too
            float factors[SIZE * SLOTS * HEADS];
        };
    };
    float bias[KEYS], sink[HEADS];  // sink: in powers of two
    float2 stats[SIZE][HEADS];      // of the cluster's blocks: maximum, sum
    u64 ready, told, received;
};
static_assert(sizeof(Shared) <= SHARED, "the launch asks for less shared memory");
static_assert(WARPS >= WRITERS, "too few warps for the slices");

__device__ __forceinline__ u32 swizzle(int row) { return ((row & 1) << 2) | ((row >> 1) & 3); }
__host__ __device__ constexpr int first_slice(int rank) { return (16 * rank + SIZE - 1) / SIZE; }

// A quarter of the channels of a record, of which a thread has 32.
struct Codes {
    uint4 low, high;  // high: of e4m3 only
    u32 scale;
};

__device__ __forceinline__ u32 word_of(const uint4& v, int j) { return j == 0 ? v.x : j == 1 ? v.y : j == 2 ? v.z : v.w; }

// Eight channels as pairs. Sixteen channels of a window's record share a factor with the next sixteen, others have one each.
template <bool WINDOW>
__device__ __forceinline__ void decode(const Codes& c, int j, u32 factor, u32 (&x)[4]) {
    if (WINDOW) {
        const uint4& v = j < 2 ? c.low : c.high;
        const u32 a = j & 1 ? v.z : v.x, b = j & 1 ? v.w : v.y;
        x[0] = prmt(a, b, 0x4000), x[1] = prmt(a, b, 0x5010), x[2] = prmt(a, b, 0x6020), x[3] = prmt(a, b, 0x7030);
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = multiply_bf16(((x[i] >> 4) & 0x07f007f0u) | (x[i] & 0x80008000u), factor);
    } else {
        const u32 low = word_of(c.low, j), high = low >> 8;
        x[0] = (low & 0x000f000fu) * 0x1040u, x[1] = (low & 0x00f000f0u) * 0x0104u;
        x[2] = (high & 0x000f000fu) * 0x1040u, x[3] = (high & 0x00f000f0u) * 0x0104u;
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = multiply_bf16(x[i] & 0x81c081c0u, factor);
    }
}
template <bool WINDOW>
__device__ __forceinline__ void factors(const Codes& c, bool there, int quad, u32 (&f)[2]) {
    if (WINDOW) {
        const u32 scale = prmt(c.scale, 0, 0x4440 + (quad & 1)), bits = !there ? 0 : scale == 255 ? 0x7fc0u : min(scale + 60, 254u) << 7;
        f[0] = f[1] = bits | bits << 16;
    } else {
        const float2 scales = unpack_f16(e4m3_halves(there ? c.scale : 0));
        const u32 both = pack_bf16(scales.x * TWO_66, scales.y * TWO_66);
        f[0] = prmt(both, both, 0x1010), f[1] = prmt(both, both, 0x3232);
    }
}

// A warp's tile and part of the channels: to shared memory, and its part of the logits. Lanes of a row of four have keys row, row + 8.
template <bool WINDOW>
__device__ __forceinline__ void multiply_tile(Shared& s, const Codes (&codes)[QUARTERS][2], const int (&slot)[2], int tile, int part, int lane) {
    const int row = lane >> 2, quad = lane & 3;
    float c[2][GROUPS][2][4] = {};  // two sums each, so that a product does not wait for the one before
    const u32 target = shared_address(s.keys) + (16 * tile + row) * 1024, query = shared_address(s.query) + lane * 16 + part * QUARTERS * 4096;
    uint4 coming[GROUPS][2];
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) coming[g][0] = load_shared4(query + g * 16384), coming[g][1] = load_shared4(query + g * 16384 + 512);
#pragma unroll
    for (int i = 0; i < QUARTERS; ++i) {
        const int quarter = part * QUARTERS + i;
        u32 f[2][2];
        factors<WINDOW>(codes[i][0], slot[0] >= 0, quad, f[0]), factors<WINDOW>(codes[i][1], slot[1] >= 0, quad, f[1]);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const u32 chunk = ((16 * quarter + 4 * j + quad) ^ swizzle(row)) << 4;
            const bool last = i == QUARTERS - 1 && j == 3;
            uint4 q[GROUPS][2];
#pragma unroll
            for (int g = 0; g < GROUPS; ++g)
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    q[g][k] = coming[g][k];
                    if (!last) coming[g][k] = load_shared4(query + g * 16384 + (8 * i + 2 * j + 2 + k) * 512);
                }
            u32 x[2][4];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                decode<WINDOW>(codes[i][r], j, f[r][j >> 1], x[r]);
                store_shared4(target + 8192 * r + chunk, x[r][0], x[r][1], x[r][2], x[r][3]);
            }
#pragma unroll
            for (int k = 0; k < 2; ++k)
#pragma unroll
                for (int g = 0; g < GROUPS; ++g)
#pragma unroll
                    for (int r = 0; r < 2; ++r)
                        multiply_16816(c[k][g][r], q[g][k].x, q[g][k].y, q[g][k].z, q[g][k].w, x[r][2 * k], x[r][2 * k + 1]);
        }
    }
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float* at = &s.logits[part][16 * g + row][16 * tile + 8 * r + 2 * quad];
            const float (&a)[4] = c[0][g][r], (&b)[4] = c[1][g][r];
            *reinterpret_cast<float2*>(at) = float2{a[0] + b[0], a[1] + b[1]};
            *reinterpret_cast<float2*>(at + 8 * LOGIT_ROW) = float2{a[2] + b[2], a[3] + b[3]};
        }
    }
    if (part == 0 && quad < 2) s.bias[16 * tile + 8 * quad + row] = (quad ? slot[1] : slot[0]) >= 0 ? 0.0f : NEG_INF;
}

__device__ __forceinline__ float warp_max(float x) {  // as integers of the same order
    const int bits = __float_as_int(x), high = __reduce_max_sync(~0u, bits ^ (bits >> 31 & 0x7fffffff));
    return __int_as_float(high ^ (high >> 31 & 0x7fffffff));
}

// Logits of a warp's heads to probabilities; of each head the maximum and a lane's part of the sum.
__device__ __forceinline__ void probabilities(Shared& s, float (&top)[EACH * GROUPS], float (&sum)[EACH * GROUPS], int keys, float scale, int warp,
                                              int lane) {
    constexpr int STEPS = (KEYS + 31) / 32, MINE = EACH * GROUPS;
    float x[MINE][STEPS];
#pragma unroll
    for (int k = 0; k < STEPS; ++k) {
        const int key = 32 * k + lane;
        const bool there = key < keys;
        const float bias = there ? s.bias[key] : NEG_INF;
#pragma unroll
        for (int i = 0; i < MINE; ++i) {
            float all = there ? s.logits[0][warp + WRITERS * i][key] : 0.0f;
#pragma unroll
            for (int p = 1; p < PARTS; ++p) all += there ? s.logits[p][warp + WRITERS * i][key] : 0.0f;
            x[i][k] = fmaf(all, scale, bias);
        }
    }
#pragma unroll
    for (int i = 0; i < MINE; ++i) {
        top[i] = x[i][0];
#pragma unroll
        for (int k = 1; k < STEPS; ++k) top[i] = fmaxf(top[i], x[i][k]);
    }
#pragma unroll
    for (int i = 0; i < MINE; ++i) top[i] = warp_max(top[i]);
#pragma unroll
    for (int i = 0; i < MINE; ++i) {
        const float safe = top[i] == NEG_INF ? 0.0f : top[i];
        u16* weights = reinterpret_cast<u16*>(s.weights + (warp + WRITERS * i) * WEIGHT_ROW);
        sum[i] = 0.0f;
#pragma unroll
        for (int k = 0; k < STEPS; ++k) {
            const float p = exp2_fast(x[i][k] - safe);
            sum[i] += p;
            if (32 * k + lane < keys) weights[32 * k + lane] = u16(pack_bf16(p, 0.0f));
        }
    }
}

// A warp's slices of the channels: sums over this block's keys.
__device__ __forceinline__ void multiply_values(Shared& s, float (&o)[GROUPS][EACH][4][4], int tiles, int warp, int lane) {
    const int line = lane & 15, half = lane >> 4;
    const u32 weights = shared_address(s.weights) + line * WEIGHT_ROW + 16 * half, values = shared_address(s.keys) + line * 1024;
    u32 chunk[EACH][2];
#pragma unroll
    for (int e = 0; e < EACH; ++e)
#pragma unroll
        for (int i = 0; i < 2; ++i) chunk[e][i] = values + (((4 * (EACH * warp + e) + 2 * i + half) ^ swizzle(line)) << 4);
    u32 a[2][GROUPS][4], b[2][EACH][2][4];
    const auto load = [&](int t) {
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) load_matrices(a[t & 1][g], weights + 16 * g * WEIGHT_ROW + 32 * t);
#pragma unroll
        for (int e = 0; e < EACH; ++e)
#pragma unroll
            for (int i = 0; i < 2; ++i) load_matrices_across(b[t & 1][e][i], chunk[e][i] + t * 16384);
    };
    if (tiles > 0) load(0);
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
        if (t >= tiles) break;
        if (t + 1 < TILES && t + 1 < tiles) load(t + 1);
#pragma unroll
        for (int e = 0; e < EACH; ++e)
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int g = 0; g < GROUPS; ++g) {
                    const u32 (&w)[4] = a[t & 1][g], (&v)[4] = b[t & 1][e][i >> 1];
                    multiply_16816(o[g][e][i], w[0], w[1], w[2], w[3], v[2 * (i & 1)], v[2 * (i & 1) + 1]);
                }
    }
}

// What the cluster has to know of a warp's heads, to all of its blocks.
__device__ __forceinline__ void send_stats(Shared& s, const float (&top)[EACH * GROUPS], float (&sum)[EACH * GROUPS], int rank, int warp, int lane) {
#pragma unroll
    for (int d = 16; d; d >>= 1)
#pragma unroll
        for (int i = 0; i < EACH * GROUPS; ++i) sum[i] += __shfl_xor_sync(~0u, sum[i], d);
    if (lane < SIZE) {
        const u32 away = peer_address(shared_address(&s), lane) - shared_address(&s);
#pragma unroll
        for (int i = 0; i < EACH * GROUPS; ++i)
            send_async2(shared_address(&s.stats[rank][WRITERS * i + warp]) + away, __float_as_uint(top[i]), __float_as_uint(sum[i]),
                        shared_address(&s.told) + away);
    }
}

// Slices to the blocks that finish them: float16 times a power of two of its own for each head, so that the largest value lies between
// 2^14 and 2^15.
__device__ __forceinline__ void send_slices(Shared& s, const float (&o)[GROUPS][EACH][4][4], int rank, int warp, int lane) {
    u32 exponent[GROUPS][EACH][2];
#pragma unroll
    for (int g = 0; g < GROUPS; ++g)
#pragma unroll
        for (int e = 0; e < EACH; ++e)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float high = 7.7e-34f;  // 2^-110, so that both factors exist
#pragma unroll
                for (int n = 0; n < 4; ++n) high = fmaxf(high, fmaxf(fabsf(o[g][e][n][2 * r]), fabsf(o[g][e][n][2 * r + 1])));
                exponent[g][e][r] = __float_as_uint(high);
            }
#pragma unroll
    for (int d = 1; d < 4; d *= 2)
#pragma unroll
        for (int g = 0; g < GROUPS; ++g)
#pragma unroll
            for (int e = 0; e < EACH; ++e)
#pragma unroll
                for (int r = 0; r < 2; ++r) exponent[g][e][r] = max(exponent[g][e][r], __shfl_xor_sync(~0u, exponent[g][e][r], d));
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
        const int slice = EACH * warp + e, owner = slice * SIZE / 16, place = (rank * SLOTS + slice - first_slice(owner)) * HEADS + (lane >> 2);
        const u32 away = peer_address(shared_address(&s), owner) - shared_address(&s), bar = shared_address(&s.received) + away;
        const u32 target = shared_address(s.slices) + place * 64 + 16 * (lane & 3) + away, factors = shared_address(s.factors + place) + away;
#pragma unroll
        for (int g = 0; g < GROUPS; ++g)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const u32 high = exponent[g][e][r] & 0x7f800000u;
                const float f = __uint_as_float(0x86000000u - high);
                const float (&v)[4][4] = o[g][e];
                send_async4(target + 1024 * g + 512 * r, pack_f16(v[0][2 * r] * f, v[0][2 * r + 1] * f),
                            pack_f16(v[1][2 * r] * f, v[1][2 * r + 1] * f),
                            pack_f16(v[2][2 * r] * f, v[2][2 * r + 1] * f), pack_f16(v[3][2 * r] * f, v[3][2 * r + 1] * f), bar);
                if ((lane & 3) == 0) send_async(factors + 64 * g + 32 * r, high - 0x07000000u, bar);
            }
    }
}

// This block's slices summed over the cluster, written out: a thread has two chunks' channels quad and quad + 4 of a slice and head.
__device__ __forceinline__ void finish(Shared& s, int rank, int heads, u16* out, i64 stride_h, float* lse) {
    const int first = first_slice(rank), slots = first_slice(rank + 1) - first;
    barrier_wait_cluster(shared_address(&s.told), 0);
#pragma unroll
    for (int turn = 0; turn < (SLOTS * HEADS * 8 + THREADS - 1) / THREADS; ++turn) {
        const int i = threadIdx.x + turn * THREADS, pair = i & 1, quad = (i >> 1) & 3, slot = (i >> 3) % SLOTS, head = (i >> 3) / SLOTS;
        const int slice = first + slot;
        const bool mine = slot < slots && head < min(heads, HEADS);  // all eight of a slice and head together
        float top = NEG_INF, total = 0.0f, share[SIZE], sum[4] = {};
        float2 stats[SIZE];
#pragma unroll
        for (int p = 0; p < SIZE; ++p) stats[p] = s.stats[p][head % HEADS], top = fmaxf(top, stats[p].x);
        const float safe = top == NEG_INF ? 0.0f : top;
#pragma unroll
        for (int p = 0; p < SIZE; ++p) share[p] = exp2_fast(stats[p].x - safe), total = fmaf(stats[p].y, share[p], total);
        const float norm = total + exp2_fast(s.sink[head % HEADS] - safe), scale = total > 0.0f ? __fdividef(TWO_60, norm) : 0.0f;
        if (mine && slice == 0 && (i & 7) == 0) lse[head] = total > 0.0f ? (safe + __log2f(total)) * LN2 : -NEG_INF;
        const bool odd = quad & 1;
        u16* target = out + head * stride_h + 128 * (slice >> 2) + 32 * (2 * pair + odd) + 8 * (slice & 3) + (quad & 2);
        barrier_wait_cluster(shared_address(&s.received), 0);
        if (!mine) continue;
#pragma unroll
        for (int p = 0; p < SIZE; ++p) {
            const int place = (p * SLOTS + slot) * HEADS + head;
            const uint2 two = *reinterpret_cast<const uint2*>(s.slices + place * 64 + 16 * quad + 8 * pair);
            const float times = share[p] * s.factors[place];
            const float2 x = unpack_f16(two.x), y = unpack_f16(two.y);
            sum[0] = fmaf(x.x, times, sum[0]), sum[1] = fmaf(x.y, times, sum[1]);
            sum[2] = fmaf(y.x, times, sum[2]), sum[3] = fmaf(y.y, times, sum[3]);
        }
        // An even thread keeps its first chunk and gets the neighbour's channels of it.
        const u32 x = pack_bf16(sum[0] * scale, sum[1] * scale), y = pack_bf16(sum[2] * scale, sum[3] * scale);
        const u32 got = __shfl_xor_sync(0xffu << (threadIdx.x & 24), odd ? x : y, 2), low = odd ? got : x, high = odd ? y : got;
        *reinterpret_cast<u32*>(target) = prmt(low, high, 0x5410);
        *reinterpret_cast<u32*>(target + 4) = prmt(low, high, 0x7632);
    }
}

// Grid: SPLITS, blocks of heads, queries.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
sparse_mla_few(const u16* q, i64 q_stride_n, i64 q_stride_h,
               const u8* window, const void* window_slots, i64 w_stride_page, i64 w_stride_row, i64 w_slots_stride, int w_keys, int w_rows,
               int w_page, int w_shift,
               const u8* extra, const void* extra_slots, i64 x_stride_page, i64 x_stride_row, i64 x_slots_stride, int x_keys, int x_rows,
               int x_page, int x_shift,
               const float* sink, u16* out, i64 out_stride_n, i64 out_stride_h, float* lse, int heads, int slots_are_long, float scale_log2) {
    extern __shared__ __align__(16) u8 memory[];
    Shared& s = *reinterpret_cast<Shared*>(memory);
    const int rank = blockIdx.x, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
    const int tile = warp / PARTS, part = warp % PARTS, row = lane >> 2, quad = lane & 3;
    const i64 query = blockIdx.z;
    const int first_head = blockIdx.y * HEADS;
    // Tiles of the window go the other way round, for balance.
    const int own_extra = (((x_keys + 15) >> 4) - rank + SIZE - 1) / SIZE, tiles = own_extra + (((w_keys + 15) >> 4) + rank) / SIZE;
    const bool in_window = tile >= own_extra, there = tile < tiles;
    if (threadIdx.x == 0) {
        barrier_init(shared_address(&s.ready), SIZE);
        barrier_init(shared_address(&s.told), 1);
        barrier_init(shared_address(&s.received), 1);
        fence_barriers();
        barrier_expect(shared_address(&s.told), SIZE * HEADS * 8);
        barrier_expect(shared_address(&s.received), SIZE * HEADS * 68 * (first_slice(rank + 1) - first_slice(rank)));
    }
    cluster_arrive();  // relaxed: what it publishes are barriers
    wait_for_kernels();
    const Records w{window, window_slots, w_stride_page, w_stride_row, w_slots_stride, w_keys, w_rows, w_page, w_shift, slots_are_long};
    const Records x{extra, extra_slots, x_stride_page, x_stride_row, x_slots_stride, x_keys, x_rows, x_page, x_shift, slots_are_long};
    const Records from = in_window ? w : x;
    const int key = 16 * (in_window ? (tile - own_extra) * SIZE + SIZE - 1 - rank : tile * SIZE + rank) + row;
    const int2 stored[2] = {from.slot(query, key, there), from.slot(query, key + 8, there)};

    // Queries: fragments of 16 heads by 16 channels. A unit is a chunk of heads h and h + 8; two fragments have its words.
    constexpr int UNITS = (512 * GROUPS + THREADS - 1) / THREADS;
    uint4 value[UNITS][2];
#pragma unroll
    for (int i = 0; i < UNITS; ++i) {
        const int unit = threadIdx.x + i * THREADS, head = first_head + 16 * (unit >> 9) + ((unit >> 6) & 7);
        const u16* at = q + query * q_stride_n + head * q_stride_h + 8 * (unit & 63);
        value[i][0] = head < heads ? __ldg(reinterpret_cast<const uint4*>(at)) : uint4{0, 0, 0, 0};
        value[i][1] = head + 8 < heads ? __ldg(reinterpret_cast<const uint4*>(at + 8 * q_stride_h)) : uint4{0, 0, 0, 0};
    }
    float sink_log2 = NEG_INF;
    if (threadIdx.x < HEADS && sink && first_head + int(threadIdx.x) < heads) sink_log2 = __ldg(sink + first_head + threadIdx.x) * LOG2E;

    int slot[2];
    Codes codes[QUARTERS][2];
    const int code = (in_window ? 128 * QUARTERS : 64 * QUARTERS) * part + (in_window ? 32 : 16) * quad;
    const int scale = in_window ? 512 + 4 * QUARTERS * part + (quad & 2) : 256 + 8 * QUARTERS * part + 2 * quad;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        slot[r] = stored[r].y == 0 && u32(stored[r].x) < u32(from.rows) ? stored[r].x : -1;
        const u8* record = from.record(slot[r]);
#pragma unroll
        for (int i = 0; i < QUARTERS; ++i) {
            if (slot[r] < 0) continue;  // whatever is there then is finite, and times zero
            codes[i][r].low = __ldg(reinterpret_cast<const uint4*>(record + code + (in_window ? 128 : 64) * i));
            if (in_window) codes[i][r].high = __ldg(reinterpret_cast<const uint4*>(record + code + 128 * i + 16));
            codes[i][r].scale = __ldg(reinterpret_cast<const u16*>(record + scale + (in_window ? 4 : 8) * i));
        }
    }
    if (threadIdx.x < HEADS) s.sink[threadIdx.x] = sink_log2;
#pragma unroll
    for (int i = 0; i < UNITS; ++i) {
        const int unit = threadIdx.x + i * THREADS, head = (unit >> 6) & 7, chunk = unit & 63;
        if (unit >= 512 * GROUPS) continue;
        const uint4 v = value[i][0], u = value[i][1];
        const u32 fragment = shared_address(s.query) + (unit >> 9) * 16384 + (8 * (chunk >> 4) + 2 * (chunk & 3)) * 512;
        const u32 target = fragment + head * 64 + ((chunk >> 2) & 3) * 16;
        store_shared4(target, prmt(v.x, v.z, 0x5410), prmt(u.x, u.z, 0x5410), prmt(v.x, v.z, 0x7632), prmt(u.x, u.z, 0x7632));
        store_shared4(target + 512, prmt(v.y, v.w, 0x5410), prmt(u.y, u.w, 0x5410), prmt(v.y, v.w, 0x7632), prmt(u.y, u.w, 0x7632));
    }
    cluster_wait();
    __syncthreads();
    if (there) {
        if (in_window) multiply_tile<true>(s, codes, slot, tile, part, lane);
        else multiply_tile<false>(s, codes, slot, tile, part, lane);
    }
    __syncthreads();
    float top[EACH * GROUPS], sum[EACH * GROUPS];
    if (warp < WRITERS) probabilities(s, top, sum, 16 * tiles, scale_log2 * TWO_60, warp, lane);
    __syncthreads();
    if (threadIdx.x < SIZE) peer_arrive(peer_address(shared_address(&s.ready), threadIdx.x));  // the place of the logits is free
    if (warp < WRITERS) {
        float o[GROUPS][EACH][4][4] = {};
        multiply_values(s, o, tiles, warp, lane);
        send_stats(s, top, sum, rank, warp, lane);
        barrier_wait_cluster(shared_address(&s.ready), 0);
        send_slices(s, o, rank, warp, lane);
    }
    finish(s, rank, heads - first_head, out + query * out_stride_n + first_head * out_stride_h, out_stride_h, lse + query * heads + first_head);
}
