#include "records_mla.cuh"
// Sparse MLA over quantised records for few queries: 512 channels, keys equal values, blocks of HEADS heads.
//
// A cluster shares one (query, block of heads): each of its SPLITS blocks takes every SPLITS-th tile of 16 keys, all at once, and
// finishes a slice of the channels. A warp decodes a quarter of the channels of a tile into fragments of warp-level products, from
// which it makes its part of the logits, and stores them as rows of shared memory for the products with the probabilities.
//
// Order of the 64 chunks of 8 channels in shared memory: 16 p + 4 j + q holds chunk 16 p + 4 q + j, so that the four lanes of a row
// store neighbours; within a chunk 0 4 1 5 2 6 3 7, so that a word of codes becomes pairs by shifts and masks.

#ifndef PASS
#define PASS ((40 + SPLITS - 1) / SPLITS)
#endif
#ifndef ROOM
#define ROOM 1
#endif
constexpr int SIZE = SPLITS, TILES = PASS, KEYS = 16 * TILES, PARTS = 4;  // tiles and keys of a pass
constexpr int GROUPS = TILES <= 5 ? (TILES < 4 ? 4 : TILES) : (TILES + 1) / 2, UNITS = (TILES + GROUPS - 1) / GROUPS;
constexpr int THREADS = 32 * PARTS * GROUPS, SLICES = 16, SLOTS = (SLICES + SIZE - 1) / SIZE;  // slices of 32 channels; of a block
constexpr int LOGIT_ROW = KEYS + 4, WEIGHT_ROW = 2 * KEYS + 16;

struct Shared {
    u8 keys[ROOM][KEYS * 1024];
    u8 query[HEADS * 1024];
    u8 weights[ROOM > 1 ? HEADS * WEIGHT_ROW : 16];  // probabilities; with one pass in the query's place
    union {
        float logits[PARTS][HEADS][LOGIT_ROW];
        struct {
            u8 slices[SIZE * SLOTS * HEADS * 64];
            float factors[SIZE * SLOTS * HEADS];
        } from;
    };
    float bias[KEYS], sink[HEADS];  // sink: in powers of two
    float2 stats[SIZE][HEADS];  // of the cluster's blocks: maximum, sum
    float change[HEADS];  // of the maximum, as a factor
    u64 ready, received;
};

__device__ __forceinline__ u8* weights_of(Shared& s) { return ROOM > 1 ? s.weights : s.query; }
__device__ __forceinline__ u32 swizzle(int row) { return ((row & 1) << 2) | ((row >> 1) & 3); }

struct Codes {
    uint4 low, high;  // high: of e4m3 only
    u32 scale;
};

// A warp's records: of each pass its tiles, `group` and every GROUPS-th from there.
struct Reader {
    const Records &window, &extra;
    int query, rank, own_extra, tiles, group, part, lane;

    __device__ __forceinline__ int tile(int pass, int u) const {
        const int local = group + u * GROUPS;
        return local < TILES ? pass * TILES + local : tiles;
    }
    __device__ __forceinline__ void load_slots(int pass, int2 (&stored)[UNITS][2]) const {
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
            const int t = tile(pass, u);
            const bool in_window = t >= own_extra;
            const int key = 16 * (in_window ? (t - own_extra) * SIZE + SIZE - 1 - rank : t * SIZE + rank) + (lane >> 2);
            const Records from = in_window ? window : extra;
#pragma unroll
            for (int r = 0; r < 2; ++r) stored[u][r] = from.slot(query, key + 8 * r, t < tiles);
        }
    }
    __device__ __forceinline__ void load_records(int pass, const int2 (&stored)[UNITS][2], int (&slot)[UNITS][2], Codes (&codes)[UNITS][2]) const {
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
            const bool in_window = tile(pass, u) >= own_extra;
            const Records from = in_window ? window : extra;
            const int quad = lane & 3, code = in_window ? 128 * part + 32 * quad : 64 * part + 16 * quad;
            const int scale = in_window ? 512 + 4 * part + (quad & 2) : 256 + 8 * part + 2 * quad;
            int number[2];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                slot[u][r] = stored[u][r].y == 0 && u32(stored[u][r].x) < u32(from.rows) ? stored[u][r].x : -1;
                number[r] = slot[u][r] >> from.page_shift;
            }
            if (from.page_shift < 0) number[0] = slot[u][0] / from.page, number[1] = slot[u][1] / from.page;
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const u8* record = from.pool + number[r] * from.stride_page + (slot[u][r] - number[r] * from.page) * from.stride_row;
                codes[u][r] = Codes{};
                if (slot[u][r] >= 0) codes[u][r].low = __ldg(reinterpret_cast<const uint4*>(record + code));
                if (slot[u][r] >= 0 && in_window) codes[u][r].high = __ldg(reinterpret_cast<const uint4*>(record + code + 16));
                if (slot[u][r] >= 0) codes[u][r].scale = __ldg(reinterpret_cast<const u16*>(record + scale));
            }
        }
    }
};

// The factors of a thread's first and last 16 channels.
__device__ __forceinline__ void factors(const Codes& c, bool window, bool there, int quad, u32 (&f)[2]) {
    if (window) {
        const u32 scale = prmt(c.scale, 0, 0x4440 + (quad & 1)), bits = !there ? 0 : scale == 255 ? 0x7fc0u : min(scale + 60, 254u) << 7;
        f[0] = f[1] = bits | bits << 16;
    } else {
        const float2 scales = unpack_f16(e4m3_halves(there ? c.scale : 0));
        const u32 both = pack_bf16(scales.x * TWO_66, scales.y * TWO_66);
        f[0] = prmt(both, both, 0x1010), f[1] = prmt(both, both, 0x3232);
    }
}

__device__ __forceinline__ u32 word_of(const uint4& v, int j) { return j == 0 ? v.x : j == 1 ? v.y : j == 2 ? v.z : v.w; }

__device__ __forceinline__ void decode(const Codes& c, bool window, int j, u32 factor, u32 (&x)[4]) {
    if (window) {
        const u32 a = j == 0 ? c.low.x : j == 1 ? c.low.z : j == 2 ? c.high.x : c.high.z;
        const u32 b = j == 0 ? c.low.y : j == 1 ? c.low.w : j == 2 ? c.high.y : c.high.w;
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

#ifndef HOLD
#define HOLD 0
#endif
// A warp's quarter of the queries as operands.
struct Queries {
    uint4 of[HOLD ? 4 : 1][HEADS / 8];

    __device__ __forceinline__ void load(Shared& s, int part, int lane) {
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int n = 0; n < HEADS / 8; ++n) if (HOLD) of[j][n] = at(s, j, n, part, lane);
    }
    __device__ __forceinline__ static uint4 at(Shared& s, int j, int n, int part, int lane) {
        return load_shared4(shared_address(s.query) + n * 8192 + (lane >> 2) * 1024 + (((16 * part + 4 * j + (lane & 3)) ^ swizzle(lane >> 2)) << 4));
    }
};

// A tile's quarter of the channels: rows to shared memory, part of the logits.
__device__ __forceinline__ void multiply_tile(Shared& s, const Queries& queries, const Codes (&codes)[2], const int (&slot)[2], bool window, int buffer, int tile, int part, int lane) {
    const int row = lane >> 2, quad = lane & 3;
    u32 f0[2], f1[2];
    factors(codes[0], window, slot[0] >= 0, quad, f0), factors(codes[1], window, slot[1] >= 0, quad, f1);
    float c[HEADS / 8][4];
#pragma unroll
    for (int n = 0; n < HEADS / 8; ++n) c[n][0] = c[n][1] = c[n][2] = c[n][3] = 0.0f;
    const u32 target = shared_address(s.keys[buffer]) + (16 * tile + row) * 1024;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        u32 x[4], y[4];
        decode(codes[0], window, j, f0[j >> 1], x), decode(codes[1], window, j, f1[j >> 1], y);
        const u32 chunk = ((16 * part + 4 * j + quad) ^ swizzle(row)) << 4;
        store_shared4(target + chunk, x[0], x[1], x[2], x[3]);
        store_shared4(target + 8192 + chunk, y[0], y[1], y[2], y[3]);
#pragma unroll
        for (int n = 0; n < HEADS / 8; ++n) {
            const uint4 b = HOLD ? queries.of[HOLD ? j : 0][n] : Queries::at(s, j, n, part, lane);
            multiply_16816(c[n], x[0], y[0], x[1], y[1], b.x, b.y);
            multiply_16816(c[n], x[2], y[2], x[3], y[3], b.z, b.w);
        }
    }
    const int key = 16 * tile + row;
#pragma unroll
    for (int n = 0; n < HEADS / 8; ++n) {
        float *even = &s.logits[part][8 * n + 2 * quad][key], *odd = &s.logits[part][8 * n + 2 * quad + 1][key];
        even[0] = c[n][0], odd[0] = c[n][1], even[8] = c[n][2], odd[8] = c[n][3];
    }
    if (part == 0 && quad == 0) {
        s.bias[key] = slot[0] >= 0 ? 0.0f : NEG_INF;
        s.bias[key + 8] = slot[1] >= 0 ? 0.0f : NEG_INF;
    }
}

__device__ __forceinline__ float warp_max(float x) {  // as integers of the same order
    const int bits = __float_as_int(x), high = __reduce_max_sync(~0u, bits ^ (bits >> 31 & 0x7fffffff));
    return __int_as_float(high ^ (high >> 31 & 0x7fffffff));
}

// A warp's heads: what it has of them so far; a lane's part of the sums.
struct Heads {
    float top[HEADS / 16], sum[HEADS / 16];
};

// Logits to probabilities.
__device__ __forceinline__ void probabilities(Shared& s, Heads& state, int i, int head, int keys, float scale, int lane) {
    constexpr int STEPS = (KEYS + 31) / 32;
    float x[STEPS], high = state.top[i];
#pragma unroll
    for (int k = 0; k < STEPS; ++k) {
        const int key = 32 * k + lane;
        x[k] = NEG_INF;
        if (key < keys) {
            float all = 0.0f;
#pragma unroll
            for (int p = 0; p < PARTS; ++p) all += s.logits[p][head][key];
            x[k] = fmaf(all, scale, s.bias[key]);
        }
        high = fmaxf(high, x[k]);
    }
    high = warp_max(high);
    const float safe = high == NEG_INF ? 0.0f : high;
    const float change = state.top[i] == NEG_INF ? 1.0f : exp2_fast(state.top[i] - high);  // without a key so far: all zeros
    u16* weights = reinterpret_cast<u16*>(weights_of(s) + head * WEIGHT_ROW);
    if (ROOM > 1 && lane == 0) s.change[head] = change;
    float sum = state.sum[i] * change;
#pragma unroll
    for (int k = 0; k < STEPS; ++k) {
        const float p = exp2_fast(x[k] - safe);
        sum += p;
        if (32 * k + lane < keys) weights[32 * k + lane] = u16(pack_bf16(p, 0.0f));
    }
    state.top[i] = high, state.sum[i] = sum;
}

// Slice `warp` of the channels, and its way to the block that finishes it.
__device__ __forceinline__ void multiply_values(Shared& s, float (&o)[HEADS / 16][4][4], int pass, int tiles, int warp, int lane) {
    if (ROOM > 1 && pass) {
#pragma unroll
        for (int h = 0; h < HEADS / 16; ++h) {
            const float change[2] = {s.change[16 * h + (lane >> 2)], s.change[16 * h + 8 + (lane >> 2)]};
            if (__any_sync(~0u, change[0] != 1.0f || change[1] != 1.0f)) {
#pragma unroll
                for (int n = 0; n < 4; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i) o[h][n][i] *= change[i >> 1];
            }
        }
    }
    const int line = lane & 15, half = lane >> 4;
    const u32 weights = shared_address(weights_of(s)) + line * WEIGHT_ROW + 16 * half, values = shared_address(s.keys[ROOM > 1 ? pass & 1 : 0]) + line * 1024;
    const u32 left = ((4 * warp + half) ^ swizzle(line)) << 4, right = ((4 * warp + 2 + half) ^ swizzle(line)) << 4;
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
        if (t < tiles) {
            u32 a[4], b[4], c[4];
            load_matrices_across(b, values + t * 16384 + left);
            load_matrices_across(c, values + t * 16384 + right);
#pragma unroll
            for (int h = 0; h < HEADS / 16; ++h) {
                load_matrices(a, weights + 16 * h * WEIGHT_ROW + 32 * t);
                multiply_16816(o[h][0], a[0], a[1], a[2], a[3], b[0], b[1]);
                multiply_16816(o[h][1], a[0], a[1], a[2], a[3], b[2], b[3]);
                multiply_16816(o[h][2], a[0], a[1], a[2], a[3], c[0], c[1]);
                multiply_16816(o[h][3], a[0], a[1], a[2], a[3], c[2], c[3]);
            }
        }
    }
}
__device__ __forceinline__ int first_slice(int rank) { return (SLICES * rank + SIZE - 1) / SIZE; }

__device__ __forceinline__ void send(Shared& s, const float (&o)[HEADS / 16][4][4], int rank, int warp, int lane) {
    const int owner = warp * SIZE / SLICES, place = (rank * SLOTS + warp - first_slice(owner)) * HEADS, row = lane >> 2, quad = lane & 3;
    const u32 bar = peer_address(shared_address(&s.received), owner);
    const u32 slices = peer_address(shared_address(s.from.slices), owner), factors = peer_address(shared_address(s.from.factors), owner);
#pragma unroll
    for (int h = 0; h < HEADS / 16; ++h) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float high = 0.0f;
#pragma unroll
            for (int n = 0; n < 4; ++n) high = fmaxf(high, fmaxf(fabsf(o[h][n][2 * r]), fabsf(o[h][n][2 * r + 1])));
            high = fmaxf(high, __shfl_xor_sync(~0u, high, 1));
            high = fmaxf(high, __shfl_xor_sync(~0u, high, 2));
            const int exponent = min(max(268 - (__float_as_int(high) >> 23), 1), 253);  // of 2^14 over the largest value
            const float factor = __int_as_float(exponent << 23);
            const int head = 16 * h + 8 * r + row;
            send_async4(slices + (place + head) * 64 + 16 * quad, pack_f16(o[h][0][2 * r] * factor, o[h][0][2 * r + 1] * factor),
                        pack_f16(o[h][1][2 * r] * factor, o[h][1][2 * r + 1] * factor),
                        pack_f16(o[h][2][2 * r] * factor, o[h][2][2 * r + 1] * factor),
                        pack_f16(o[h][3][2 * r] * factor, o[h][3][2 * r + 1] * factor), bar);
            if (quad == 0) send_async(factors + (place + head) * 4, u32(254 - exponent) << 23, bar);
        }
    }
}

__device__ __forceinline__ void send_stats(Shared& s, const Heads& state, int rank, int warp, int lane) {
#pragma unroll
    for (int i = 0; i < HEADS / 16; ++i) {
        float sum = state.sum[i];
#pragma unroll
        for (int d = 16; d; d >>= 1) sum += __shfl_xor_sync(~0u, sum, d);
        if (lane < SIZE)
            send_async2(peer_address(shared_address(&s.stats[rank][16 * i + warp]), lane), __float_as_uint(state.top[i]), __float_as_uint(sum),
                        peer_address(shared_address(&s.received), lane));
    }
}

// This block's slices summed over the cluster, written out.
__device__ __forceinline__ void finish(Shared& s, int rank, int heads, u16* out, i64 stride_h, float* lse) {
    const int first = first_slice(rank), slots = first_slice(rank + 1) - first;
#pragma unroll 1
    for (int i = threadIdx.x; i < SLOTS * HEADS * 16; i += THREADS) {
        const int word = i & 15, chunk = word & 3, quad = word >> 2, slot = (i >> 4) % SLOTS, head = (i >> 4) / SLOTS, slice = first + slot;
        if (slot >= slots || head >= heads) continue;  // all 16 of a word together
        const u32 together = 0xffffu << (threadIdx.x & 16);
        float top = NEG_INF, total = 0.0f, low = 0.0f, high = 0.0f;
        float2 stats[SIZE];
        float factor[SIZE];
        u32 pair[SIZE];
#pragma unroll
        for (int p = 0; p < SIZE; ++p) {
            const int place = (p * SLOTS + slot) * HEADS + head;
            stats[p] = s.stats[p][head];
            factor[p] = s.from.factors[place];
            pair[p] = *reinterpret_cast<const u32*>(s.from.slices + place * 64 + 4 * word);
            top = fmaxf(top, stats[p].x);
        }
        const float safe = top == NEG_INF ? 0.0f : top;
#pragma unroll
        for (int p = 0; p < SIZE; ++p) {
            const float share = exp2_fast(stats[p].x - safe), times = share * factor[p];
            const float2 both = unpack_f16(pair[p]);
            total = fmaf(stats[p].y, share, total), low = fmaf(both.x, times, low), high = fmaf(both.y, times, high);
        }
        const float norm = total + exp2_fast(s.sink[head] - safe);
        const float scale = total > 0.0f ? __fdividef(TWO_60, norm) : 0.0f;
        low *= scale, high *= scale;
        const float got = __shfl_xor_sync(together, quad & 1 ? low : high, 4);
        const u32 packed = quad & 1 ? pack_bf16(got, high) : pack_bf16(low, got);
        const int channel = 128 * (slice >> 2) + 32 * chunk + 8 * (slice & 3) + (quad & 1 ? 3 + quad : quad);
        *reinterpret_cast<u32*>(out + head * stride_h + channel) = packed;
        if (slice == 0 && word == 0) lse[head] = total > 0.0f ? (safe + __log2f(total)) * LN2 : -NEG_INF;
    }
}

#ifdef CLOCKS
#define STAMP(i) if (threadIdx.x == 0) clocks[((blockIdx.z * gridDim.y + blockIdx.y) * SIZE + blockIdx.x) * 16 + i] = clock64()
#else
#define STAMP(i)
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1)
sparse_mla_few(const u16* q, i64 q_stride_n, i64 q_stride_h,
               const u8* window, const void* window_slots, i64 w_stride_page, i64 w_stride_row, i64 w_slots_stride, int w_keys, int w_rows,
               int w_page, int w_shift,
               const u8* extra, const void* extra_slots, i64 x_stride_page, i64 x_stride_row, i64 x_slots_stride, int x_keys, int x_rows,
               int x_page, int x_shift,
               const float* sink, u16* out, i64 out_stride_n, i64 out_stride_h, float* lse, int heads, int slots_are_long, float scale_log2
#ifdef CLOCKS
               , i64* clocks
#endif
) {
    extern __shared__ __align__(16) u8 memory[];
    Shared& s = *reinterpret_cast<Shared*>(memory);
    STAMP(0);
    const int rank = cluster_rank(), warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31, part = warp & 3, group = warp >> 2;
    const int query = blockIdx.z, first_head = blockIdx.y * HEADS;
    const int extra_tiles = (x_keys + 15) >> 4, window_tiles = (w_keys + 15) >> 4;
    const int own_extra = max(0, (extra_tiles - rank + SIZE - 1) / SIZE), window_rank = SIZE - 1 - rank;  // the other way round, for balance
    const int tiles = own_extra + max(0, (window_tiles - window_rank + SIZE - 1) / SIZE);
#ifdef EARLY
    asm volatile("griddepcontrol.launch_dependents;");
#endif
    if (threadIdx.x == 0) {
        barrier_init(shared_address(&s.ready), SIZE);
        barrier_init(shared_address(&s.received), 1);
        fence_barriers();
        barrier_expect(shared_address(&s.received), (first_slice(rank + 1) - first_slice(rank)) * SIZE * HEADS * 68 + SIZE * HEADS * 8);
    }
    cluster_arrive();  // relaxed: what it publishes are barriers
    wait_for_kernels();
    STAMP(1);
    const Records w{window, window_slots, w_stride_page, w_stride_row, w_slots_stride, w_keys, w_rows, w_page, w_shift, slots_are_long};
    const Records x{extra, extra_slots, x_stride_page, x_stride_row, x_slots_stride, x_keys, x_rows, x_page, x_shift, slots_are_long};

    const Reader reader{w, x, query, rank, own_extra, tiles, group, part, lane};
    int2 stored[UNITS][2];
    int slot[UNITS][2];
    Codes codes[UNITS][2];
    reader.load_slots(0, stored);
    constexpr int CHUNKS = (HEADS * 64 + THREADS - 1) / THREADS;
    const u16* source = q + query * q_stride_n + first_head * q_stride_h;
    uint4 value[CHUNKS];
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
        const int head = (threadIdx.x + i * THREADS) >> 6, chunk = (threadIdx.x + i * THREADS) & 63;
        value[i] = head < HEADS && first_head + head < heads ? __ldg(reinterpret_cast<const uint4*>(source + head * q_stride_h + 8 * chunk))
                                                             : uint4{0, 0, 0, 0};
    }
    if (threadIdx.x < HEADS)
        s.sink[threadIdx.x] = sink && first_head + int(threadIdx.x) < heads ? __ldg(sink + first_head + threadIdx.x) * LOG2E : NEG_INF;
    reader.load_records(0, stored, slot, codes);
    if (ROOM > 1) reader.load_slots(1, stored);
    STAMP(2);
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
        const int head = (threadIdx.x + i * THREADS) >> 6, chunk = (threadIdx.x + i * THREADS) & 63;
        const int place = (chunk & 48) + 4 * (chunk & 3) + ((chunk >> 2) & 3);
        const uint4 v = value[i];
        if (head < HEADS)
            store_shared4(shared_address(s.query) + head * 1024 + ((place ^ swizzle(head)) << 4), prmt(v.x, v.z, 0x5410),
                          prmt(v.x, v.z, 0x7632), prmt(v.y, v.w, 0x5410), prmt(v.y, v.w, 0x7632));
    }
    float o[HEADS / 16][4][4];
#pragma unroll
    for (int h = 0; h < HEADS / 16; ++h)
#pragma unroll
        for (int n = 0; n < 4; ++n) o[h][n][0] = o[h][n][1] = o[h][n][2] = o[h][n][3] = 0.0f;
    cluster_wait();
    __syncthreads();
    STAMP(3);
    Heads state;
#pragma unroll
    for (int i = 0; i < HEADS / 16; ++i) state.top[i] = NEG_INF, state.sum[i] = 0.0f;
    Queries queries;
    queries.load(s, part, lane);
    const int passes = ROOM > 1 ? max(1, (tiles + TILES - 1) / TILES) : 1;
#pragma unroll 1
    for (int pass = 0; pass <= passes; ++pass) {  // the products with values of one pass beside the logits of the next
        if (pass > 0 && warp < 16) multiply_values(s, o, pass - 1, tiles - (pass - 1) * TILES, warp, lane);
        if (pass == passes) break;
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
            const int local = group + u * GROUPS, tile = pass * TILES + local;
            if (local < TILES && tile < tiles) {
                if (tile >= own_extra) multiply_tile(s, queries, codes[u], slot[u], true, ROOM > 1 ? pass & 1 : 0, local, part, lane);
                else multiply_tile(s, queries, codes[u], slot[u], false, ROOM > 1 ? pass & 1 : 0, local, part, lane);
            }
        }
        if (ROOM > 1) {
            reader.load_records(pass + 1, stored, slot, codes);
            reader.load_slots(pass + 2, stored);
        }
        STAMP(4);
        __syncthreads();
        STAMP(5);
        if (warp < 16) {
#pragma unroll
            for (int h = 0; h < HEADS; h += 16)
                probabilities(s, state, h / 16, h + warp, min(TILES, tiles - pass * TILES) * 16, scale_log2 * TWO_60, lane);
        }
        STAMP(6);
        __syncthreads();
        if (pass + 1 == passes && threadIdx.x < SIZE) peer_arrive(peer_address(shared_address(&s.ready), threadIdx.x));  // the logits' place is free
        STAMP(7);
    }
    STAMP(8);
    if (warp < 16) {
        barrier_wait_cluster(shared_address(&s.ready), 0);
        STAMP(9);
        send(s, o, rank, warp, lane);
        send_stats(s, state, rank, warp, lane);
    }
    STAMP(10);
    barrier_wait_cluster(shared_address(&s.received), 0);
    STAMP(11);
    finish(s, rank, heads - first_head, out + query * out_stride_n + first_head * out_stride_h, out_stride_h,
           lse + i64(query) * heads + first_head);
    STAMP(12);
}
