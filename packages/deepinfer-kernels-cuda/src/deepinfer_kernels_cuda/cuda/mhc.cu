// The seam between sublayers in one pass: update four streams, predict the next mix, collapse, normalise.
//
// 16 blocks share a row of d = 512 GROUPS channels; a block has 32 GROUPS of them, and its part of the projection stays in its
// shared memory while it walks over tiles of 8 tokens. A warp updates 32 channels of a tile at a time and WARPS of them take turns,
// as many for each of the four schedulers. A thread brings its own 16 bytes of each row two turns ahead and stores the new streams
// from registers; they are the right operand of the matrix unit in between (channels in an order that makes a thread's share of a
// row 16 bytes). What needs whole rows (square sums, projections) crosses the blocks as messages of a block and tile. Two blocks with
// the same channels of different rows may be a cluster; each then brings half of the projection to both.
//
// Warps: WARPS that compute; two that normalise, each every other tile and two tiles at a time; one that finishes mixes; one that
// sends the sums and loads mixes. What crosses the blocks takes longer than a tile, so nobody waits for the answer about a tile before
// the next is taken up.
#include "hopper.cuh"

#ifndef GROUPS
#define GROUPS 10
#endif
#ifndef WARPS
#define WARPS (GROUPS >= 8 ? 12 : GROUPS)
#endif


// Words that carry the number of their message: sender and reader need no other order between them.
__device__ __forceinline__ u64 tagged(float value, u32 tag) { return u64(tag) << 32 | __float_as_uint(value); }
__device__ __forceinline__ u32 tag_of(u64 word) { return u32(word >> 32); }
__device__ __forceinline__ float value_of(u64 word) { return __uint_as_float(u32(word)); }
__device__ __forceinline__ void post_words(u64* target, u64 a, u64 b) {
    asm volatile("st.relaxed.gpu.global.v2.b64 [%0], {%1, %2};" ::"l"(target), "l"(a), "l"(b) : "memory");
}
__device__ __forceinline__ void post_word(u64* target, u64 a) {
    asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(target), "l"(a) : "memory");
}
__device__ __forceinline__ u64 read_word(const u64* from) {
    u64 d;
    asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(d) : "l"(from) : "memory");
    return d;
}

__device__ __forceinline__ float4 load_floats(u32 address) {
    const uint4 d = load_shared4(address);
    return make_float4(__uint_as_float(d.x), __uint_as_float(d.y), __uint_as_float(d.z), __uint_as_float(d.w));
}
__device__ __forceinline__ void load_into(float (&d)[4], u32 address) {
    const float4 v = load_floats(address);
    d[0] = v.x, d[1] = v.y, d[2] = v.z, d[3] = v.w;
}
__device__ __forceinline__ float load_float(u32 address) { return __uint_as_float(load_shared(address)); }
__device__ __forceinline__ void store_float(u32 address, float value) { store_shared(address, __float_as_uint(value)); }
__device__ __forceinline__ float inverse(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float exponential(float x) { return exp2_fast(x * 1.4426950408889634f); }

// d += a * b: 16 rows of the projection, 16 channels, 8 tokens.
__device__ __forceinline__ void multiply(float (&d)[4], uint4 a, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}


constexpr u32 FN_GROUP = 8 * 3 * 512;  // bytes of the projection for 32 channels of four streams
constexpr u32 SUMS = 28;               // of a token: 16 comb, 4 pre, 4 post, squares of streams and row, 2 unused

// One tile of one warp: 32 channels of 8 tokens, of each thread 8 channels of token lane / 4. In: the output and the streams;
// out: the collapsed row and the new streams. weights: of the output and of each stream in each new stream. fn: this lane's.
__device__ __forceinline__ void update_tile(const u8* fn, const float (&weights)[5][4], const float (&pre)[4], uint4 (&packed)[5],
                                            float (&acc)[3][4], float& square, float& row_square) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float in[5][4], collapsed[4] = {0, 0, 0, 0};
#pragma unroll
        for (int i = 0; i < 5; ++i) {
            const u32 a = half ? packed[i].z : packed[i].x, b = half ? packed[i].w : packed[i].y;
            in[i][0] = bf16_low(a), in[i][1] = bf16_high(a), in[i][2] = bf16_low(b), in[i][3] = bf16_high(b);
        }
#pragma unroll
        for (int o = 0; o < 4; ++o) {
            float v[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                v[k] = weights[0][o] * in[0][k];
#pragma unroll
                for (int i = 1; i < 5; ++i) v[k] += weights[i][o] * in[i][k];
            }
            const u32 a = pack_bf16(v[0], v[1]), b = pack_bf16(v[2], v[3]);
            if (half)
                packed[1 + o].z = a, packed[1 + o].w = b;
            else
                packed[1 + o].x = a, packed[1 + o].y = b;
#pragma unroll
            for (int m = 0; m < 3; ++m) multiply(acc[m], *reinterpret_cast<const uint4*>(fn + ((half * 4 + o) * 3 + m) * 512), a, b);
            v[0] = bf16_low(a), v[1] = bf16_high(a), v[2] = bf16_low(b), v[3] = bf16_high(b);
#pragma unroll
            for (int k = 0; k < 4; ++k) collapsed[k] += pre[o] * v[k], square += v[k] * v[k];
        }
        const u32 a = pack_bf16(collapsed[0], collapsed[1]), b = pack_bf16(collapsed[2], collapsed[3]);
        if (half)
            packed[0].z = a, packed[0].w = b;
        else
            packed[0].x = a, packed[0].y = b;
        row_square += bf16_low(a) * bf16_low(a) + bf16_high(a) * bf16_high(a);
        row_square += bf16_low(b) * bf16_low(b) + bf16_high(b) * bf16_high(b);
    }
}

// A warp's sums [8 tokens][SUMS]. A thread has rows lane / 4 and that + 8 of the products for tokens 2 quad and 2 quad + 1. High
// and low parts meet here.
__device__ __forceinline__ void write_sums(u32 warp, int lane, const float (&acc)[3][4], float square, float row_square) {
    const int of = lane >> 2, quad = lane & 3;
    square += __shfl_xor_sync(~0u, square, 1), row_square += __shfl_xor_sync(~0u, row_square, 1);
    square += __shfl_xor_sync(~0u, square, 2), row_square += __shfl_xor_sync(~0u, row_square, 2);
    const u32 part = warp + 2 * quad * SUMS * 4 + of * 4;
    store_float(part, acc[0][0] + acc[1][0]);
    store_float(part + SUMS * 4, acc[0][1] + acc[1][1]);
    store_float(part + 32, acc[0][2] + acc[1][2]);
    store_float(part + SUMS * 4 + 32, acc[0][3] + acc[1][3]);
    store_float(part + 64, acc[2][0] + acc[2][2]);
    store_float(part + SUMS * 4 + 64, acc[2][1] + acc[2][3]);
    store_float(warp + (of * SUMS + 24 + quad) * 4, quad == 0 ? square : quad == 1 ? row_square : 0.0f);
}

// Sums of four times their factors, which are x[1] first, x[0] first, x[3] second and x[2] second: reciprocals of x by two, and
// what does not need them while they are made.
__device__ __forceinline__ float weighted(float a, float b, float c, float d, const float (&x)[4], float first, float second, float more) {
    return fmaf(fmaf(a, x[1], b * x[0]), first, fmaf(fmaf(c, x[3], d * x[2]), second, more));
}

// A thread's token: the matrix at `from` after the softmax of its rows.
__device__ __forceinline__ void finish_token(u32 from, int iterations, float eps, bool store, i64 token, float* comb) {
    float c[4][4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int o = 0; o < 4; ++o) c[i][o] = load_float(from + (4 * i + o) * 4);
    // The matrix stays; its rows and columns have factors. Dividing row i by its sum and eps makes of its factor r
    // 1 / (sum over o of c[i][o] column[o] + eps / r), and so do columns: first those, then rows and columns in turn.
    float rows[4] = {1, 1, 1, 1}, columns[4] = {1, 1, 1, 1}, row[2] = {1, 1}, column[2];
#pragma unroll 1
    for (int k = 0;; ++k) {
#pragma unroll
        for (int o = 0; o < 4; ++o)
            columns[o] = weighted(c[0][o], c[1][o], c[2][o], c[3][o], rows, row[0], row[1], eps * columns[o]);
        column[0] = inverse(columns[0] * columns[1]), column[1] = inverse(columns[2] * columns[3]);
        if (k + 1 >= iterations) break;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            rows[i] = weighted(c[i][0], c[i][1], c[i][2], c[i][3], columns, column[0], column[1], eps * rows[i]);
        row[0] = inverse(rows[0] * rows[1]), row[1] = inverse(rows[2] * rows[3]);
    }
    if (store)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float own = row[i >> 1] * rows[i ^ 1], a = own * column[0], b = own * column[1];
            reinterpret_cast<float4*>(comb)[token * 4 + i] =
                make_float4(c[i][0] * a * columns[1], c[i][1] * a * columns[0], c[i][2] * b * columns[3], c[i][3] * b * columns[2]);
        }
}

constexpr int RANKS = 16, TOKENS = 8, SLOTS = 2, RING = 4, LAG = 8, MESSAGES = 16;
constexpr int TURNS = 2;  // warps that normalise, each every other tile
constexpr int MANY = 1024;  // tokens from which the next kernel is let in early and the first mixes come behind the projection
constexpr int THREADS = 32 * (WARPS + 4);
constexpr int CHANNELS = 32 * GROUPS;
constexpr u32 ROW = 2 * CHANNELS;                            // bytes of a block's part of a row
constexpr u64 WIDTH = u64(RANKS) * ROW;                      // of a row
// Where a token's part of the row lies: the second of two in other banks than the first.
__device__ constexpr u32 row_of(int token) { return (token >> 1) * (2 * ROW + 64) + (token & 1) * (ROW + 64); }
constexpr u32 ROW_SLOT = TOKENS / 2 * (2 * ROW + 64);
constexpr u32 STREAM_SLOT = 5 * 512;                         // of a warp: 16 bytes a thread of the output and four streams
constexpr u32 PART = GROUPS * 8 * SUMS * 4;
constexpr u32 MIX = TOKENS * 96;                             // of a tile: comb, post, pre

constexpr u32 FN_AT = 0;
constexpr u32 STREAM_AT = FN_AT + GROUPS * FN_GROUP;
constexpr u32 ROW_AT = STREAM_AT + WARPS * SLOTS * STREAM_SLOT;
constexpr u32 WEIGHT_AT = ROW_AT + RING * ROW_SLOT;
constexpr u32 MIX_AT = WEIGHT_AT + ROW;
constexpr u32 PART_AT = MIX_AT + RING * MIX;                 // [2][GROUPS][8][SUMS]
constexpr u32 KEPT = 17;                                     // words of a token whose matrix is not made yet: it, which token
constexpr u32 KEPT_AT = PART_AT + 2 * PART;                  // [32][KEPT]
constexpr u32 BARRIERS_AT = KEPT_AT + 32 * KEPT * 4;
constexpr int ALL_BARRIERS = 2 * RING + 2 * LAG + 2 + GROUPS + 1;
__device__ constexpr int arrivals(int barrier) {  // in the order of Barriers
    const bool done = barrier >= 2 * RING && barrier < 2 * RING + LAG;
    const bool summed = barrier >= 2 * RING + 2 * LAG && barrier < 2 * RING + 2 * LAG + 2;
    return done ? GROUPS : summed ? 2 : 1;
}
constexpr u32 BYTES = BARRIERS_AT + 8 * ALL_BARRIERS;
#ifdef SHARED
static_assert(BYTES == SHARED, "shared memory that is asked for");
#endif

__device__ __forceinline__ void copy_16(u32 target, const void* source) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(target), "l"(source) : "memory");
}
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}
// Written once: it leaves the second-level cache first.
__device__ __forceinline__ void store_16(void* target, uint4 v) {
    asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(target), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// The same bytes to both blocks of a pair.
__device__ __forceinline__ void copy_bulk_pair(u32 target, const void* source, u32 bytes, u32 bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;"
                 ::"r"(target), "l"(source), "r"(bytes), "r"(bar), "h"(u16(3))
                 : "memory");
}

struct Barriers {
    u32 base;
    __device__ u32 full(int n) const { return base + 8 * (n % RING); }                 // a tile's mixes have come
    __device__ u32 normalised(int n) const { return base + 8 * (RING + n % RING); }    // its rows have left
    __device__ u32 done(int n) const { return base + 8 * (2 * RING + n % LAG); }       // it is updated, its sums are there
    __device__ u32 mixed(int n) const { return base + 8 * (2 * RING + LAG + n % LAG); }  // its sums have come and were read
    __device__ u32 summed(int n) const { return base + 8 * (2 * RING + 2 * LAG + n % 2); }  // the warps' sums were read, by two
    __device__ u32 constants(int k) const { return base + 8 * (2 * RING + 2 * LAG + 2 + k); }  // a warp's projection; at GROUPS the weight
};

struct Tiles {
    int first, step, count, tokens;
    __device__ int token(int n) const { return (first + n * step) * TOKENS; }
    __device__ int here(int n) const { return min(TOKENS, tokens - token(n)); }
};

// What a warp updates: 32 channels of a tile. A warp's next is WARPS further.
struct Item {
    int n, group;
    __device__ void advance() {
        n += WARPS / GROUPS, group += WARPS % GROUPS;
        if (WARPS % GROUPS && group >= GROUPS) group -= GROUPS, ++n;
    }
};

__device__ __forceinline__ void compute(u32 shared, const u8* fn, Barriers bars, Tiles tiles, int warp, int lane, u32 rank,
                                        const u8* streams, const u8* output, u8* new_streams) {
    const int of = lane >> 2, quad = lane & 3;
    const u32 column = rank * ROW + quad * 16, own = shared + STREAM_AT + warp * SLOTS * STREAM_SLOT + lane * 16;
    Item item{warp / GROUPS, warp % GROUPS}, next = item;
    u32 slot = 0;
    // A thread reads only what it brought itself.
    const auto bring = [&](u32 to) {
        if (next.n < tiles.count) {
            const u64 token = min(tiles.token(next.n) + of, tiles.tokens - 1), at = column + next.group * 64;
            copy_16(to, output + token * WIDTH + at);
#pragma unroll
            for (int i = 0; i < 4; ++i) copy_16(to + 512 * (1 + i), streams + (4 * token + i) * WIDTH + at);
        }
        copy_commit();
        next.advance();
    };
#pragma unroll
    for (int n = 0; n < SLOTS; ++n) bring(own + n * STREAM_SLOT);
    const u32 row_to = shared + ROW_AT + row_of(of) + quad * 16, mix_of = shared + MIX_AT + of * 64;
    fn += lane * 16;
#pragma unroll 1
    for (; item.n < tiles.count; item.advance()) {
        const int n = item.n, group = item.group;
        uint4 packed[5];
        copy_wait<SLOTS - 1>();
#pragma unroll
        for (int i = 0; i < 5; ++i) packed[i] = load_shared4(own + slot + 512 * i);
        bring(own + slot);
        slot = STREAM_SLOT - slot;
        if (n < GROUPS) barrier_wait(bars.constants(group), 0);  // by then a warp has had all groups that it gets
        // In this order: a tile's mixes of RING tiles before have come when its rows have left, so phases are told apart.
        if (n >= RING) barrier_wait(bars.normalised(n), (n / RING - 1) & 1);
        barrier_wait(bars.full(n), n / RING & 1);
        float weights[5][4], pre[4], acc[3][4] = {};
        float square = 0, row_square = 0;
        const u32 mix = mix_of + n % RING * MIX;
        load_into(pre, mix + TOKENS * 80 - of * 48);
        load_into(weights[0], mix + TOKENS * 64 - of * 48);
#pragma unroll
        for (int i = 0; i < 4; ++i) load_into(weights[1 + i], mix + i * 16);
        update_tile(fn + group * FN_GROUP, weights, pre, packed, acc, square, row_square);
        store_shared4(row_to + n % RING * ROW_SLOT + group * 64, packed[0].x, packed[0].y, packed[0].z, packed[0].w);
        u8* target = new_streams + 4 * u64(tiles.token(n) + of) * WIDTH + column + group * 64;
        if (of < tiles.here(n))
#pragma unroll
            for (int o = 0; o < 4; ++o) store_16(target + o * WIDTH, packed[1 + o]);
        if (n >= 2) barrier_wait(bars.summed(n), (n / 2 - 1) & 1);
        write_sums(shared + PART_AT + (n & 1) * PART + group * 8 * SUMS * 4, lane, acc, square, row_square);
        __syncwarp();
        if (lane == 0) barrier_arrive(bars.done(n));
    }
}

// A tile's mixes, into its part of the ring.
__device__ __forceinline__ void load_mixes(u32 shared, Barriers bars, Tiles tiles, int lane, int n, const u8* post, const u8* comb,
                                           const u8* pre) {
    if (n >= tiles.count) return;
    if (n >= LAG) barrier_wait(bars.mixed(n), (n / LAG - 1) & 1);
    const u32 bar = bars.full(n), here = tiles.here(n), mix = shared + MIX_AT + n % RING * MIX;
    const u64 token = tiles.token(n);
    if (lane == 0) {
        barrier_expect(bar, here * 96);
        copy_bulk(mix, comb + token * 64, here * 64, bar);
        copy_bulk(mix + TOKENS * 64, post + token * 16, here * 16, bar);
        copy_bulk(mix + TOKENS * 80, pre + token * 16, here * 16, bar);
    }
    __syncwarp();
}

// Where blocks that share rows leave messages, in global memory: [MESSAGES][RANKS][TOKENS] squares of rows, then
// [MESSAGES][TOKENS][RANKS][32] sums. Who writes a slot again, MESSAGES tiles later, has read all squares of RING + 2 TURNS tiles
// before; who sent those had read the squares of 2 (RING + 2 TURNS) tiles before and the sums of RING + 2 TURNS + LAG tiles before.
static_assert(MESSAGES >= 2 * (RING + 2 * TURNS) && MESSAGES >= RING + 2 * TURNS + LAG, "messages are read before they are written over");
struct Mail {
    u64* at;
    u32 epoch;  // of the launch: its tiles' tags follow
    __device__ u32 tag(int n) const { return epoch + n + 1; }
    __device__ u64* squares(int n, u32 rank, int token) const { return at + ((n % MESSAGES) * RANKS + rank) * TOKENS + token; }
    __device__ u64* sums(int n, u32 rank, int token) const {
        return at + MESSAGES * RANKS * TOKENS + (((n % MESSAGES) * TOKENS + token) * RANKS + rank) * 32;
    }
};
constexpr u64 HEADER = 64;  // words before them: 128 epochs, in halves
constexpr u64 MAIL = MESSAGES * RANKS * TOKENS * (1 + 32);  // words of 16 blocks

// Of each tile sums of the block's warps, then one message to each block, the sums of the tokens that it owns; then mixes of the tile
// that takes its place in the ring. A block that has sent has read the epoch with all warps.
__device__ __forceinline__ void serve(u32 shared, Barriers bars, Mail mail, Tiles tiles, int lane, u32 rank, const u8* post,
                                      const u8* comb, const u8* pre, const u32* epoch) {
    mail.epoch = *const_cast<volatile u32*>(epoch);
    named_sync(1, THREADS - 32 * WARPS);
#pragma unroll 1
    for (int n = 0; n < tiles.count; ++n) {
        barrier_wait(bars.done(n), n / LAG & 1);
        float4 sums[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int item = min(lane + 32 * i, TOKENS * 7 - 1);
            const u32 from = shared + PART_AT + (n & 1) * PART + item * 16;
            sums[i] = load_floats(from);
#pragma unroll
            for (int group = 1; group < GROUPS; ++group) {
                const float4 more = load_floats(from + group * 8 * SUMS * 4);
                sums[i].x += more.x, sums[i].y += more.y, sums[i].z += more.z, sums[i].w += more.w;
            }
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(bars.summed(n));
        const u32 tag = mail.tag(n);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int item = lane + 32 * i, token = item / 7, piece = item % 7;
            if (item < TOKENS * 7) {
                u64* to = mail.sums(n, rank, token) + piece * 4;
                post_words(to, tagged(sums[i].x, tag), tagged(sums[i].y, tag));
                if (piece < 6) post_words(to + 2, tagged(sums[i].z, tag), tagged(sums[i].w, tag));
            }
        }
        load_mixes(shared, bars, tiles, lane, n + RING, post, comb, pre);
    }
}

// Coefficients of this block's token of every other tile, a tile late, when others' sums have come as a rule: a lane makes one of pre,
// post or comb after the softmax; the iterations of up to 32 tokens go at once, a thread has one.
__device__ __forceinline__ void finish_mixes(u32 shared, Barriers bars, Mail mail, Tiles tiles, int lane, u32 rank, int iterations,
                                             float eps, float mix_eps, const float* base, const float* scale, float* pre, float* post,
                                             float* comb) {
    const bool of_comb = lane < 16, of_pre = lane < 20;
    const float own_base = base[of_comb ? 8 + lane : min(lane, 23) - 16], own_scale = scale[of_comb ? 2 : of_pre ? 0 : 1];
    int kept = 0;
#pragma unroll 1
    for (int n = 0; n < tiles.count; ++n) {
        const int mine = int(rank) - TOKENS * (n & 1);
        const bool own = mine >= 0 && mine < tiles.here(n);
        const int late = min(n + 1, tiles.count - 1);
        barrier_wait(bars.done(late), late / LAG & 1);
        if (own) {
            const u64* from = mail.sums(n, 0, mine) + min(lane, 24);
            float sum;
            while (true) {
                bool missing = false;
                sum = 0;
#pragma unroll
                for (int source = 0; source < RANKS; ++source) {
                    const u64 word = read_word(from + source * 32);
                    missing |= tag_of(word) != mail.tag(n);
                    sum += value_of(word);
                }
                if (!__any_sync(~0u, missing)) break;
                __nanosleep(n + 2 < tiles.count ? 200 : 20);  // the last are waited for
            }
            const float square = __shfl_sync(~0u, sum, 24);
            const float value = fmaf(sum, rsqrtf(fmaf(square, 1.0f / (4 * RANKS * CHANNELS), mix_eps)) * own_scale, own_base);
            float top = fmaxf(value, __shfl_xor_sync(~0u, value, 1));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
            const float power = exponential(of_comb ? value - top : -value);
            float all = power + __shfl_xor_sync(~0u, power, 1);
            all += __shfl_xor_sync(~0u, all, 2);
            const float over = inverse(of_comb ? all : 1.0f + power);
            const i64 at = tiles.token(n) + mine;
            if (of_comb)
                store_float(shared + KEPT_AT + (kept * KEPT + lane) * 4, fmaf(power, over, eps));
            else if (of_pre)
                pre[at * 4 + lane - 16] = over + eps;
            else if (lane < 24)
                post[at * 4 + lane - 20] = 2.0f * over;
            else if (lane == 24)
                store_shared(shared + KEPT_AT + (kept * KEPT + 16) * 4, u32(at));
            ++kept;
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(bars.mixed(n));
        if (kept == 32 || (n + 1 == tiles.count && kept)) {
            const u32 from = shared + KEPT_AT + min(lane, kept - 1) * KEPT * 4;
            __syncwarp();
            finish_token(from, iterations, eps, lane < kept, load_shared(from + 16 * 4), comb);
            kept = 0;
            __syncwarp();
        }
    }
}

// Rows of every other tile. A warp has two tiles: while the squares of one come it takes the rows of the next.
__device__ __forceinline__ void normalise(u32 shared, Barriers bars, Mail mail, Tiles tiles, int lane, u32 rank, int turn, u8* x,
                                          float norm_eps) {
    barrier_wait(bars.constants(GROUPS), 0);  // the weight is there, long since: what a bulk copy brought is seen by who waits
    constexpr int CHUNKS = 4 * GROUPS;  // of 16 bytes of a row
    // Which of four tokens a thread's k-th chunk is of.
    const auto token_of = [](int k, int lane) {
        return CHUNKS >= 32 ? 32 * k / CHUNKS + (32 * k % CHUNKS + lane >= CHUNKS ? 1 : 0) : (32 * k + lane) / CHUNKS;
    };
    // A tile's rows into registers, and their squares to all blocks.
    const auto take = [&](int n, uint4 (&values)[2][GROUPS / 2]) {
        int own = lane;
        asm volatile("" : "+r"(own));  // addresses are made here, not kept
        barrier_wait(bars.done(n), n / LAG & 1);
        const u32 part = shared + PART_AT + (n & 1) * PART + ((lane >> 2) * SUMS + 25) * 4;
        float square = 0;
#pragma unroll
        for (int k = 0; k < GROUPS; k += 4)
            if (k + 4 <= GROUPS || k + (lane & 3) < GROUPS) square += load_float(part + (k + (lane & 3)) * 8 * SUMS * 4);
        square += __shfl_xor_sync(~0u, square, 1);
        square += __shfl_xor_sync(~0u, square, 2);
        if ((lane & 3) == 0) post_word(mail.squares(n, rank, lane >> 2), tagged(square, mail.tag(n)));
#pragma unroll
        for (int k = 0; k < GROUPS / 2; ++k) {
            const int token = token_of(k, own), chunk = 32 * k + own - token * CHUNKS;
            const u32 from = shared + ROW_AT + n % RING * ROW_SLOT + row_of(token) + chunk * 16;
            values[0][k] = load_shared4(from), values[1][k] = load_shared4(from + ROW_SLOT / 2);
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(bars.normalised(n)), barrier_arrive(bars.summed(n));
    };
    const auto give = [&](int n, const uint4 (&values)[2][GROUPS / 2]) {
        // Of each half of the tokens a thread reads two squares.
        const u64* at = mail.squares(n, lane & 7, lane >> 3);
        float square[2], factor[2];
        while (true) {
            bool missing = false;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const u64 low = read_word(at + half * (TOKENS / 2)), high = read_word(at + half * (TOKENS / 2) + 8 * TOKENS);
                square[half] = value_of(low) + value_of(high);
                missing |= tag_of(low) != mail.tag(n) || tag_of(high) != mail.tag(n);
            }
            if (!__any_sync(~0u, missing)) break;
            __nanosleep(32);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            square[half] += __shfl_xor_sync(~0u, square[half], 1);
            square[half] += __shfl_xor_sync(~0u, square[half], 2);
            square[half] += __shfl_xor_sync(~0u, square[half], 4);
            factor[half] = rsqrtf(fmaf(square[half], 1.0f / (RANKS * CHANNELS), norm_eps));
        }
        int own = lane;
        asm volatile("" : "+r"(own));
        u8* target = x + u64(tiles.token(n)) * WIDTH + rank * ROW + own * 16;
        const int here = tiles.here(n);
#pragma unroll
        for (int k = 0; k < GROUPS / 2; ++k) {
            const int of = token_of(k, own);
            const uint4 w = load_shared4(shared + WEIGHT_AT + (32 * k + own - of * CHUNKS) * 16);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float f = __shfl_sync(~0u, factor[half], 8 * of);
                const uint4 v = values[half][k];
                const auto scaled = [f](u32 a, u32 b) {
                    return pack_bf16(bf16_low(a) * f * bf16_low(b), bf16_high(a) * f * bf16_high(b));
                };
                const uint4 out = make_uint4(scaled(v.x, w.x), scaled(v.y, w.y), scaled(v.z, w.z), scaled(v.w, w.w));
                if (of + TOKENS / 2 * half < here) store_16(target + (of + TOKENS / 2 * half) * u32(WIDTH) + (32 * k - of * CHUNKS) * 16, out);
            }
        }
    };
    uint4 values[2][GROUPS / 2], next[2][GROUPS / 2];
    if (turn < tiles.count) take(turn, next);
#pragma unroll 1
    for (int n = turn; n < tiles.count; n += TURNS) {
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int k = 0; k < GROUPS / 2; ++k) values[half][k] = next[half][k];
        if (n + TURNS < tiles.count) take(n + TURNS, next);
        give(n, values);
    }
}

// streams [t, 4, d], output [t, d], weight [d], new_streams, x: bfloat16. post, pre [t, 4], comb [t, 4, 4]: float32.
// fn: bfloat16 [RANKS][GROUPS][2 halves][4 streams][3][32 lanes][8], see `mhc.lane_projection`.
// mail: HEADER words, then those of all blocks that share rows; zeros before the first launch.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    mhc_step(const u8* streams, const u8* output, const u8* post, const u8* comb, const u8* pre, const u8* fn, const float* base,
             const float* scale, const u8* weight, u8* new_streams, u8* x, float* new_pre, float* new_post, float* new_comb,
             u64* mail_at, int tokens, int iterations, float eps, float mix_eps, float norm_eps) {
    extern __shared__ __align__(1024) u8 memory[];
    const bool paired = cluster_size() == 2;  // with the block of another team that has the same channels
    const u32 shared = shared_address(memory), rank = (paired ? blockIdx.x / 2 : blockIdx.x) % RANKS;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const Barriers bars{shared + BARRIERS_AT};
    const int teams = gridDim.x / RANKS, all = (tokens + TOKENS - 1) / TOKENS;
    const int team = paired ? blockIdx.x / (2 * RANKS) * 2 + blockIdx.x % 2 : blockIdx.x / RANKS;
    const Tiles tiles{team, teams, (all - team + teams - 1) / teams, tokens};
    if (threadIdx.x == 0) {
#pragma unroll
        for (int k = 0; k < ALL_BARRIERS; ++k) barrier_init(bars.base + 8 * k, arrivals(k));
        fence_barriers();
        fence_async_shared();
    }
    __syncwarp();
    __syncthreads();
    if (paired) cluster_arrive();  // relaxed: what it publishes are barriers
    if (warp == WARPS + 3) {
        // Constants of the model: no kernel ahead writes them. Blocks of a pair bring each other half of the projection.
        if (lane == 0) {
#pragma unroll
            for (int group = 0; group < GROUPS; ++group) barrier_expect(bars.constants(group), FN_GROUP);
            barrier_expect(bars.constants(GROUPS), ROW);
        }
        __syncwarp();
        if (paired) cluster_wait();
        if (lane == 0) {
#pragma unroll
            for (int group = 0; group < GROUPS; ++group) {
                const u32 to = shared + FN_AT + group * FN_GROUP, bar = bars.constants(group);
                const u8* from = fn + (rank * GROUPS + group) * u64(FN_GROUP);
                if (!paired)
                    copy_bulk(to, from, FN_GROUP, bar);
                else if (blockIdx.x % 2 == group % 2)
                    copy_bulk_pair(to, from, FN_GROUP, bar);
            }
            copy_bulk(shared + WEIGHT_AT, weight + rank * ROW, ROW, bars.constants(GROUPS));
        }
    }
    __syncwarp();
    wait_for_kernels();
    // All blocks are on the card. The next kernel's come as these leave; those of a small one would crowd onto the few idle
    // multiprocessors, but behind many tokens none is small.
    if (tokens >= MANY) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    u32* epoch = reinterpret_cast<u32*>(mail_at) + team;
    Mail mail{mail_at + HEADER + team * MAIL, 0};
    // The first mixes. Few tokens are 0.4 us faster if these do not wait behind the projection; many gain nothing, and with a cold
    // cache seemed to lose.
    if (warp == (tokens < MANY ? WARPS + TURNS : WARPS + 3))
        for (int n = 0; n < RING; ++n) load_mixes(shared, bars, tiles, lane, n, post, comb, pre);
    if (warp >= WARPS && warp < WARPS + 3) {
        mail.epoch = *const_cast<volatile u32*>(epoch);
        named_sync(1, THREADS - 32 * WARPS);
    }
    const int role = warp - WARPS;
    if (role < 0)
        compute(shared, memory + FN_AT, bars, tiles, warp, lane, rank, streams, output, new_streams);
    else if (role < TURNS)
        normalise(shared, bars, mail, tiles, lane, rank, role, x, norm_eps);
    else if (role == TURNS)
        finish_mixes(shared, bars, mail, tiles, lane, rank, iterations, eps, mix_eps, base, scale, new_pre, new_post, new_comb);
    else
        serve(shared, bars, mail, tiles, lane, rank, post, comb, pre, epoch);
    // All blocks have sent, so all have read this.
    if (role == 0 && lane == 0 && rank == 0) *epoch = mail.epoch + tiles.count;
}
