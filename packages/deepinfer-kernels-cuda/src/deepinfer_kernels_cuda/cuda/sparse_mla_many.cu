#include "wgmma.cuh"
#include "slots.cuh"
#include "sparse_mla.cuh"
// Sparse MLA over quantised records, many queries: a block of 64 heads takes queries one after the other, with a role for each group
// of four warps. The producers decode tiles of 64 keys into two buffers, in halves of the channels; one group computes logits and
// probabilities; two add the products with the left and right half of the channels and write the output. Nothing but barriers ties them:
// logits of a tile run beside the product of the one before, and the next query begins under the output of the last.

#ifndef AHEAD
#define AHEAD 0
#endif
#ifndef LATE
#define LATE 1
#endif
#ifndef EARLY
#define EARLY 1
#endif
#ifndef WEIGH_REGISTERS
#define WEIGH_REGISTERS "96"
#define DECODE_REGISTERS "96"
#endif
constexpr int TILE = 64, BLOCK = 8192, TILE_BYTES = 8 * BLOCK, THREADS = 512;

struct Shared {
    u8 query[TILE_BYTES];
    u8 keys[2][TILE_BYTES];
    u32 weights[2][2048];   // probabilities, rows of 128 bytes
    u32 staging[8][512];    // of a warp's output: 16 heads, 64 channels
    float factor[2][64];    // that the output so far is multiplied by before a tile is added
    float final[2][64];     // and in the end
    float bias[2][TILE];
    u32 changed[2][4];      // whether a factor of 16 heads is not 1
    u8 absent[2][4];        // whether a warp's rows lack one
    u64 full[2][2], empty[2][2], ready[2];  // halves of a buffer; probabilities
#ifdef CLOCKS
    u32 stamps[64];
#endif
};
#ifdef CLOCKS
#define STAMP(k) \
    if ((CLOCKS >> (k) & 1) && (threadIdx.x & 127) == 0 && turn >= 104 && turn < 108) { \
        u32 now; \
        asm volatile("mov.u32 %0, %%clock;" : "=r"(now)::"memory"); \
        s.stamps[(turn & 3) * 16 + (k)] = now; \
    }
#else
#define STAMP(k) {}
#endif
static_assert(sizeof(Shared) + 1024 <= SHARED, "shared memory");

// What a producer thread holds of one step: half of a tile's channels, or in the window of 32 keys; units of 16 bytes, and their scales.
struct Piece {
    uint4 code[4];
    u32 scale[4];
};
struct Slots {
    int of[2];  // negative: absent
};
struct StoredSlots {
    int2 of[2];
};
struct Tile {
    int item, number;
};

// One of the four producer warps; lanes 0..7 hold different rows, so that their stores go to different banks.
struct Producer {
    const Records &window, &extra;
    int items, stride, shift, extra_tiles, tiles, warp, lane;

    // Tiles of the other pool come first: a thread has rows 8 apart; in the window 32 apart.
    __device__ __forceinline__ bool in_window(const Tile& t) const { return t.number >= extra_tiles; }
    __device__ __forceinline__ int row(bool window, int r) const { return (window ? 32 * r + 8 * warp : 16 * warp + 8 * r) + (lane & 7); }
    __device__ __forceinline__ Tile after(const Tile& t) const {
        return t.number + 1 < tiles ? Tile{t.item, t.number + 1} : Tile{t.item + stride, 0};
    }
    __device__ __forceinline__ StoredSlots stored_slots(const Tile& t) const {
        const bool in = in_window(t), there = t.item < items;
        const int key = (in ? t.number - extra_tiles : t.number) * TILE;
        StoredSlots found;
#pragma unroll
        for (int r = 0; r < 2; ++r)
            if (in) found.of[r] = window.slot(t.item >> shift, key + row(true, r), there);
            else found.of[r] = extra.slot(t.item >> shift, key + row(false, r), there);
        return found;
    }
    __device__ __forceinline__ Slots check(const Tile& t, const StoredSlots& stored) const {
        Slots found;
#pragma unroll
        for (int r = 0; r < 2; ++r)
            found.of[r] = stored.of[r].y == 0 && u32(stored.of[r].x) < u32(in_window(t) ? window.rows : extra.rows) ? stored.of[r].x : -1;
        return found;
    }
};

// A record, moved to where a thread's units and scales of it begin.
struct Place {
    const u8 *code, *scale;
};
struct Places {
    Place of[2];

    __device__ __forceinline__ Places(const Producer& p, bool window, const Slots& slots) {
        const int unit = p.lane >> 3;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const u8* record = window ? p.window.record(slots.of[r]) : p.extra.record(slots.of[r]);
            of[r].code = record + 16 * unit, of[r].scale = record + (window ? 512 : 256 + 2 * unit);
        }
    }
};

__device__ __forceinline__ void load_unit(Piece& piece, int i, const Place& at, bool there, int code, int scale) {
    if (!there) return;
    piece.code[i] = load_codes(at.code + code);
    piece.scale[i] = __ldg(reinterpret_cast<const u16*>(at.scale + scale));
}
// A piece: half of the channels, in the window of the keys of slot r. A unit has one or both of two scales.
__device__ __forceinline__ void load_window(Piece& piece, int i, const Places& at, const Slots& slots, int half, int r) {
        load_unit(piece, i, at.of[r], slots.of[r] >= 0, 256 * (i >> 1) + 128 * half + 64 * (i & 1), 8 * (i >> 1) + 4 * half + 2 * (i & 1));
}
__device__ __forceinline__ void load_extra(Piece& piece, int i, const Places& at, const Slots& slots, int half) {
    load_unit(piece, i, at.of[i >> 1], slots.of[i >> 1] >= 0, 64 * half + 128 * (i & 1), 8 * half + 16 * (i & 1));
}
// The first or second piece of a tile.
__device__ __forceinline__ void load_piece(Piece& piece, int i, bool window, const Places& at, const Slots& slots, int which) {
    if (window) load_window(piece, i, at, slots, 0, which);
    else load_extra(piece, i, at, slots, which);
}
template <class Load>
__device__ __forceinline__ void load_four(const Load& load) {
#pragma unroll
    for (int i = 0; i < 4; ++i) load(i);
}

// A piece to shared memory. `place`: of a thread's first chunk there; others are an exclusive or away.
template <class Load>
__device__ __forceinline__ void put_window(u32 place, const Producer& p, const Piece& piece, int slot, int half, int r, const Load& load) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const u32 scale = prmt(piece.scale[i], 0, 0x4440 + (p.lane >> 4));
        const u32 factor = (scale == 255 ? 0x7fc07fc0u : (min(scale + 60, 254u) << 7) * 0x10001u) & ~u32(slot >> 31);
        const u32 at = r * 4096 + (4 * (i >> 1) + (i & 1) + 2 * half) * BLOCK;
        decode_e4m3(piece.code[i], factor, place + at, (place ^ 16) + at);
        if (LATE == 0) load(i);
    }
}
template <class Load>
__device__ __forceinline__ void put_extra(u32 place, const Piece& piece, const Slots& slots, int half, const Load& load) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 scales = unpack_f16(e4m3_halves(slots.of[i >> 1] < 0 ? 0 : piece.scale[i]));
        const u32 both = pack_bf16(scales.x * TWO_66, scales.y * TWO_66), f0 = prmt(both, both, 0x1010), f1 = prmt(both, both, 0x3232);
        const u32 at = (i >> 1) * 1024 + (4 * (i & 1) + 2 * half) * BLOCK;
        decode_e2m1(piece.code[i].x, piece.code[i].y, f0, place + at, (place ^ 16) + at);
        decode_e2m1(piece.code[i].z, piece.code[i].w, f1, (place ^ 32) + at, (place ^ 48) + at);
        if (LATE == 0) load(i);
    }
}

__device__ __forceinline__ void filled(Shared& s, const Producer& p, int buffer, int half) {
    if (LATE < 2) fence_async_shared();
    __syncwarp();
    if (p.lane == 0) barrier_arrive(shared_address(&s.full[buffer][half]));
}

// Fill the tiles of this block's items: codes a tile ahead, slots two. Codes are fetched behind the fence, which waits for all loads
// under way.
__device__ __forceinline__ void produce(Shared& s, const Producer& p, int item) {
    Piece first{}, second{};
    Tile tile{item, 0}, coming = p.after(tile);
    const StoredSlots stored = p.stored_slots(tile), stored_coming = p.stored_slots(coming);
    Slots slots = p.check(tile, stored);
    Places here(p, p.in_window(tile), slots);
    load_four([&](int i) { load_piece(first, i, p.in_window(tile), here, slots, 0); });
    load_four([&](int i) { load_piece(second, i, p.in_window(tile), here, slots, 1); });
    Slots coming_slots = p.check(coming, stored_coming);
    const int unit = p.lane >> 3, swizzle = p.lane & 7;
    const u32 window_place = shared_address(s.keys[0]) + p.row(true, 0) * 128 + ((2 * unit ^ swizzle) << 4);
    const u32 extra_place = shared_address(s.keys[0]) + p.row(false, 0) * 128 + (unit >> 1) * BLOCK + (((unit & 1) * 4 ^ swizzle) << 4);
    int turn = 0;
#pragma unroll 1
    while (tile.item < p.items) {
        const int buffer = turn & 1, parity = ((turn >> 1) & 1) ^ 1;
        const Tile later = p.after(coming);
        const StoredSlots stored_later = p.stored_slots(later);
        const bool in = p.in_window(tile), next_in = p.in_window(coming);
        const Places next(p, next_in, coming_slots);
        barrier_wait(shared_address(&s.empty[buffer][0]), parity);
        STAMP(10)
        const bool lacking = __any_sync(~0u, slots.of[0] < 0 || slots.of[1] < 0);
        if (p.lane < 8) {
#pragma unroll
            for (int r = 0; r < 2; ++r) s.bias[buffer][p.row(in, r)] = slots.of[r] >= 0 ? 0.0f : NEG_INF;
            if (p.lane == 0) s.absent[buffer][p.warp] = lacking;
        }
        const u32 place = (in ? window_place : extra_place) + buffer * TILE_BYTES;
        const auto to_first = [&](int i) { load_piece(first, i, next_in, next, coming_slots, 0); };
        const auto to_second = [&](int i) { load_piece(second, i, next_in, next, coming_slots, 1); };
        if (in) {
            const auto half_first = [&](int i) { load_window(first, i, here, slots, 1, 0); };
            const auto half_second = [&](int i) { load_window(second, i, here, slots, 1, 1); };
            put_window(place, p, first, slots.of[0], 0, 0, half_first);
            put_window(place, p, second, slots.of[1], 0, 1, half_second);
            filled(s, p, buffer, 0);
            if (LATE) load_four(half_first), load_four(half_second);
        } else {
            put_extra(place, first, slots, 0, to_first);
            filled(s, p, buffer, 0);
            if (LATE) load_four(to_first);
        }
        STAMP(11)
        barrier_wait(shared_address(&s.empty[buffer][1]), parity);
        STAMP(12)
        if (in) {
            put_window(place, p, first, slots.of[0], 1, 0, to_first);
            put_window(place, p, second, slots.of[1], 1, 1, to_second);
            filled(s, p, buffer, 1);
            if (LATE) load_four(to_first), load_four(to_second);
        } else {
            put_extra(place, second, slots, 1, to_second);
            filled(s, p, buffer, 1);
            if (LATE) load_four(to_second);
        }
        STAMP(13)
        ++turn;
        tile = coming, coming = later, slots = coming_slots, here = next;
        coming_slots = p.check(later, stored_later);
    }
}

struct Problem {
    const u16* q;
    i64 q_stride_n, q_stride_h;
    u16* out;
    i64 out_stride_n, out_stride_h;
    float* lse;
    const float* sink;
    int heads, items, stride, shift, tiles;
    float scale;
};

// Heads of an item to shared memory, channels permuted, absent heads zero. Of 128 threads.
__device__ __forceinline__ void load_query(Shared& s, const u16* q, i64 stride_h, int heads, int thread) {
    const int first = thread >> 6, chunk = thread & 63;
    const u16* source = q + first * stride_h + 8 * chunk;
    const u32 target = shared_address(s.query) + (chunk >> 3) * BLOCK + first * 128;
#pragma unroll 1
    for (int part = 0; part < 4; ++part) {  // of eight rows for each half of the threads: heads 16 part + 2 i + first
        uint4 value[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            value[i] = 16 * part + 2 * i + first < heads ? load_codes(reinterpret_cast<const u8*>(source)) : uint4{0, 0, 0, 0};
            source += 2 * stride_h;
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const uint4 v = value[i];
            store_shared4(target + part * 2048 + i * 256 + (((chunk & 7) ^ ((2 * i + first) & 7)) << 4), prmt(v.x, v.z, 0x5410),
                          prmt(v.x, v.z, 0x7632), prmt(v.y, v.w, 0x5410), prmt(v.y, v.w, 0x7632));
        }
    }
    fence_async_shared();
}
// Heads of the item to come to the L2 cache.
__device__ __forceinline__ void prefetch_query(const u16* q, i64 stride_h, int heads, int thread) {
    const int head = thread >> 1;
    if (head < heads) {
        const u16* source = q + head * stride_h + 256 * (thread & 1);
#pragma unroll
        for (int i = 0; i < 4; ++i) prefetch_l2(source + 64 * i);
    }
}

// Logits over a part of the channels, 16 at a time: steps BEGIN to END of 32, the first half those of each side of the output half.
template <int BEGIN, int END>
__device__ __forceinline__ void start_logits(Shared& s, int buffer, float (&logit)[32]) {
    const u64 q = wgmma_operand(shared_address(s.query), 16, 1024), k = wgmma_operand(shared_address(s.keys[buffer]), 16, 1024);
    if (LATE == 2 && (BEGIN == 0 || BEGIN == 16)) fence_async_shared();
    wgmma_fence();
#pragma unroll
    for (int i = BEGIN; i < END; ++i) {
        const int step = (i & 7) + (i >> 3 & 1) * 16 + (i >> 4) * 8, offset = ((step >> 2) * BLOCK + (step & 3) * 32) / 16;
        wgmma_shared(logit, operand_at(q, offset), operand_at(k, offset), i > 0);
    }
    wgmma_commit();
}

// State of a thread of the logits' group: rows `row` and `row + 8`.
struct Rows {
    float top[2], sum[2];
    int thread, row, quad;
};

// A tile's logits to probabilities, with factors for the output so far. The maximum that they refer to moves only by 2^8 and more.
__device__ __forceinline__ void probabilities(Shared& s, Rows& c, int buffer, float scale, float (&logit)[32]) {
    float high[2] = {NEG_INF, NEG_INF}, factor = scale;
    const bool plain = load_shared(shared_address(s.absent[buffer])) == 0 && scale > 0.0f;
    if (plain) {
#pragma unroll
        for (int i = 0; i < 8; ++i)
#pragma unroll
            for (int r = 0; r < 2; ++r) high[r] = fmaxf(high[r], fmaxf(logit[4 * i + 2 * r], logit[4 * i + 2 * r + 1]));
        high[0] *= scale, high[1] *= scale;
    } else {
        factor = 1.0f;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float2 bias = *reinterpret_cast<const float2*>(&s.bias[buffer][8 * i + 2 * c.quad]);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float &x = logit[4 * i + 2 * r], &y = logit[4 * i + 2 * r + 1];
                x = fmaf(x, scale, bias.x), y = fmaf(y, scale, bias.y);
                high[r] = fmaxf(high[r], fmaxf(x, y));
            }
        }
    }
    float change[2], safe[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float most = quad_max(high[r]), top = most > c.top[r] + 8.0f ? most : c.top[r];
        change[r] = c.top[r] == NEG_INF ? 1.0f : exp2_fast(c.top[r] - top);
        c.top[r] = top, c.sum[r] *= change[r];
        safe[r] = -finite(top);
    }
    const int lane = c.thread & 31, row = (c.row & ~7) + (lane & 15);
    const u32 target = shared_address(s.weights[buffer]) + row * 128 + ((row & 7) ^ (lane >> 4)) * 16;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        u32 p[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int r = j & 1, k = 8 * i + 4 * (j >> 1) + 2 * r;
            const float x = exp2_fast(fmaf(logit[k], factor, safe[r])), y = exp2_fast(fmaf(logit[k + 1], factor, safe[r]));
            c.sum[r] += x + y;
            p[j] = pack_bf16(x, y);
        }
        store_matrices(target ^ i * 32, p[0], p[1], p[2], p[3]);
    }
    const bool changed = __any_sync(~0u, change[0] != 1.0f || change[1] != 1.0f);
    if (lane == 0) s.changed[buffer][c.thread >> 5] = changed;
    if (changed && c.quad == 0) s.factor[buffer][c.row] = change[0], s.factor[buffer][c.row + 8] = change[1];
}

// Factors that turn the accumulator of keys times 2^-60 into the result; also stores the log-sum-exp.
__device__ __forceinline__ void finish_rows(Shared& s, const Rows& c, int buffer, const Problem& a, i64 query, int first_head) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int head = first_head + c.row + 8 * r;
        const float total = quad_sum(c.sum[r]), sink = a.sink && head < a.heads ? __ldg(a.sink + head) * LOG2E : NEG_INF;
        const float norm = total + exp2_fast(sink - finite(c.top[r]));
        if (c.quad == 0) {
            s.final[buffer][c.row + 8 * r] = total > 0.0f ? __fdividef(TWO_60, norm) : 0.0f;
#ifndef CLOCKS
            if (head < a.heads) a.lse[query * a.heads + head] = total > 0.0f ? (finite(c.top[r]) + __log2f(total)) * LN2 : -NEG_INF;
#endif
        }
    }
}

#if EARLY
// Not moved by the compiler: a load that comes earlier than it is written takes registers that are not there.
__device__ __forceinline__ uint4 load_here(const u16* p) {
    uint4 d;
    asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(d.x), "=r"(d.y), "=r"(d.z), "=r"(d.w) : "l"(p) : "memory");
    return d;
}
// Eight of the heads of an item, 16 part + 2 i + (0 or 1), to registers, absent ones zero; to shared memory, channels permuted.
__device__ __forceinline__ void fetch_heads(uint4 (&value)[8], const Problem& a, int item, int part, int thread) {
    const int first = (item & a.shift) * 64 + 16 * part + (thread >> 6);
    const u16* source = a.q + i64(item >> a.shift) * a.q_stride_n + first * a.q_stride_h + 8 * (thread & 63);
#pragma unroll
    for (int i = 0; i < 8; ++i)
        value[i] = first + 2 * i < a.heads ? load_here(source + 2 * i * a.q_stride_h) : uint4{0, 0, 0, 0};
}
__device__ __forceinline__ void store_heads(Shared& s, const uint4 (&value)[8], int part, int thread) {
    const int first = thread >> 6, chunk = thread & 63;
    const u32 target = shared_address(s.query) + (chunk >> 3) * BLOCK + first * 128 + part * 2048;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const uint4 v = value[i];
        store_shared4(target + i * 256 + (((chunk & 7) ^ ((2 * i + first) & 7)) << 4), prmt(v.x, v.z, 0x5410), prmt(v.x, v.z, 0x7632),
                      prmt(v.y, v.w, 0x5410), prmt(v.y, v.w, 0x7632));
    }
}

__device__ __forceinline__ void tile_logits(Shared& s, int turn, float (&logit)[32]) {
    const int buffer = turn & 1, parity = (turn >> 1) & 1;
    barrier_wait(shared_address(&s.full[buffer][0]), parity);
    STAMP(0)
    start_logits<0, 16>(s, buffer, logit);
    STAMP(1)
    barrier_wait(shared_address(&s.full[buffer][1]), parity);
    STAMP(2)
    start_logits<16, 32>(s, buffer, logit);
    STAMP(3)
    wgmma_wait<0>();
    STAMP(4)
}
__device__ __forceinline__ void arrive_ready(Shared& s, int turn, int lane) {
    if (LATE < 2) fence_async_shared();
    __syncwarp();
    if (lane == 0) barrier_arrive(shared_address(&s.ready[turn & 1]));
    STAMP(5)
}

__device__ __forceinline__ void weigh(Shared& s, const Problem& a, int item, int thread) {
    const int lane = thread & 31;
    int turn = 0;
    uint4 v[8], w[8];
    fetch_heads(v, a, item, 0, thread);
    fetch_heads(w, a, item, 1, thread);
#pragma unroll 1
    while (true) {
        store_heads(s, v, 0, thread);
        fetch_heads(v, a, item, 2, thread);
        store_heads(s, w, 1, thread);
        fetch_heads(w, a, item, 3, thread);
        store_heads(s, v, 2, thread);
        store_heads(s, w, 3, thread);
        fence_async_shared();
        named_sync(1, 128);
        const int coming = item + a.stride;
        if (coming < a.items) {
            const int head = (coming & a.shift) * 64;
            prefetch_query(a.q + i64(coming >> a.shift) * a.q_stride_n + head * a.q_stride_h, a.q_stride_h, a.heads - head, thread);
        }
        Rows c;
        c.thread = thread, c.row = 16 * (thread >> 5) + (lane >> 2), c.quad = lane & 3;
        c.top[0] = c.top[1] = NEG_INF, c.sum[0] = c.sum[1] = 0.0f;
        float logit[32];
#if AHEAD
        tile_logits(s, turn, logit);
#pragma unroll 1
        for (int tile = 1; tile < a.tiles; ++tile, ++turn) {
            float next[32];
            const int buffer = (turn + 1) & 1, parity = ((turn + 1) >> 1) & 1;
            STAMP(4)
            barrier_wait(shared_address(&s.full[buffer][0]), parity);
            STAMP(0)
            start_logits<0, AHEAD>(s, buffer, next);
            STAMP(1)
            probabilities(s, c, turn & 1, a.scale, logit);
            arrive_ready(s, turn, lane);
            start_logits<AHEAD, 16>(s, buffer, next);
            barrier_wait(shared_address(&s.full[buffer][1]), parity);
            STAMP(2)
            start_logits<16, 32>(s, buffer, next);
            STAMP(3)
            wgmma_wait<0>();
#pragma unroll
            for (int i = 0; i < 32; ++i) logit[i] = next[i];
        }
#else
#pragma unroll 1
        for (int tile = 1; tile < a.tiles; ++tile, ++turn) {
            tile_logits(s, turn, logit);
            probabilities(s, c, turn & 1, a.scale, logit);
            arrive_ready(s, turn, lane);
        }
        tile_logits(s, turn, logit);
#endif
        probabilities(s, c, turn & 1, a.scale, logit);
        finish_rows(s, c, turn & 1, a, item >> a.shift, (item & a.shift) * 64);
        arrive_ready(s, turn, lane);
        ++turn, item = coming;
        if (item >= a.items) return;
        fetch_heads(v, a, item, 0, thread);
        fetch_heads(w, a, item, 1, thread);
        named_sync(1, 128);  // all of the group's products have read the query
    }
}
#else
#if AHEAD
__device__ __forceinline__ void first_logits(Shared& s, int turn, float (&logit)[32]) {
    const int buffer = turn & 1, parity = (turn >> 1) & 1;
    barrier_wait(shared_address(&s.full[buffer][0]), parity);
    STAMP(0)
    start_logits<0, 16>(s, buffer, logit);
    barrier_wait(shared_address(&s.full[buffer][1]), parity);
    start_logits<16, 32>(s, buffer, logit);
    wgmma_wait<0>();
}
__device__ __forceinline__ void arrive_ready(Shared& s, int turn, int lane) {
    if (LATE < 2) fence_async_shared();
    __syncwarp();
    if (lane == 0) barrier_arrive(shared_address(&s.ready[turn & 1]));
}
#endif

__device__ __forceinline__ void weigh(Shared& s, const Problem& a, int item, int thread) {
    const int lane = thread & 31;
    int turn = 0;
#pragma unroll 1
    for (; item < a.items; item += a.stride) {
        const i64 query = item >> a.shift;
        const int first_head = (item & a.shift) * 64;
        load_query(s, a.q + query * a.q_stride_n + first_head * a.q_stride_h, a.q_stride_h, a.heads - first_head, thread);
        named_sync(1, 128);
        if (item + a.stride < a.items) {
            const int coming = item + a.stride, head = (coming & a.shift) * 64;
            prefetch_query(a.q + i64(coming >> a.shift) * a.q_stride_n + head * a.q_stride_h, a.q_stride_h, a.heads - head, thread);
        }
        Rows c;
        c.thread = thread, c.row = 16 * (thread >> 5) + (lane >> 2), c.quad = lane & 3;
        c.top[0] = c.top[1] = NEG_INF, c.sum[0] = c.sum[1] = 0.0f;
#if AHEAD
        float logit[32];
        first_logits(s, turn, logit);
#pragma unroll 1
        for (int tile = 0; tile < a.tiles; ++tile, ++turn) {
            float next[32];
            const bool last = tile + 1 == a.tiles;
            const int coming = (turn + 1) & 1, parity = ((turn + 1) >> 1) & 1;
            STAMP(4)
            if (!last) {
                barrier_wait(shared_address(&s.full[coming][0]), parity);
                STAMP(0)
                start_logits<0, AHEAD>(s, coming, next);
                STAMP(1)
            }
            probabilities(s, c, turn & 1, a.scale, logit);
            if (last) finish_rows(s, c, turn & 1, a, query, first_head);
            arrive_ready(s, turn, lane);
            STAMP(5)
            if (!last) {
                start_logits<AHEAD, 16>(s, coming, next);
                barrier_wait(shared_address(&s.full[coming][1]), parity);
                STAMP(2)
                start_logits<16, 32>(s, coming, next);
                STAMP(3)
                wgmma_wait<0>();
#pragma unroll
                for (int i = 0; i < 32; ++i) logit[i] = next[i];
            }
        }
#else
#pragma unroll 1
        for (int tile = 0; tile < a.tiles; ++tile, ++turn) {
            const int buffer = turn & 1, parity = (turn >> 1) & 1;
            float logit[32];
            barrier_wait(shared_address(&s.full[buffer][0]), parity);
            STAMP(0)
            start_logits<0, 16>(s, buffer, logit);
            STAMP(1)
            barrier_wait(shared_address(&s.full[buffer][1]), parity);
            STAMP(2)
            start_logits<16, 32>(s, buffer, logit);
            STAMP(3)
            wgmma_wait<0>();
            STAMP(4)
            probabilities(s, c, buffer, a.scale, logit);
            if (tile + 1 == a.tiles) finish_rows(s, c, buffer, a, query, first_head);
            fence_async_shared();
            __syncwarp();
            if (lane == 0) barrier_arrive(shared_address(&s.ready[buffer]));
            STAMP(5)
        }
#endif
        named_sync(1, 128);  // all of the group's products have read the query
    }
}
#endif

// 256 channels of 16 heads, 64 at a time through a warp's own place.
__device__ __forceinline__ void write_output(Shared& s, float (&o)[2][64], const float (&scale)[2], const Problem& a, i64 query, int first_head,
                                             int first_channel, int warp, int lane) {
    const u32 staging = shared_address(s.staging[warp]);
    const int quad = lane & 3, inner = lane >> 2, chunk = lane & 7, head = first_head + 16 * (warp & 3);
    u16* target = a.out + query * a.out_stride_n + (head + (lane >> 3)) * a.out_stride_h + first_channel + 8 * chunk;
#pragma unroll
    for (int part = 0; part < 4; ++part) {
#pragma unroll
        for (int i = 0; i < 8; ++i)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int v = 32 * (part & 1) + 4 * i + 2 * r;
                store_shared(staging + (inner + 8 * r) * 128 + ((i ^ inner) << 4) + 4 * quad,
                             pack_bf16(o[part >> 1][v] * scale[r], o[part >> 1][v + 1] * scale[r]));
            }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = 4 * i + (lane >> 3);
            const uint4 v = load_shared4(staging + row * 128 + ((chunk ^ (row & 7)) << 4));
            if (head + row < a.heads)
                *reinterpret_cast<uint4*>(target + i * 4 * a.out_stride_h + 64 * part) =
                    uint4{prmt(v.x, v.y, 0x5410), prmt(v.z, v.w, 0x5410), prmt(v.x, v.y, 0x7632), prmt(v.z, v.w, 0x7632)};
        }
        __syncwarp();
    }
}

__device__ __forceinline__ void add_products(Shared& s, const Problem& a, int item, int group, int thread) {
    const int lane = thread & 31, warp = thread >> 5, row = 16 * warp + (lane >> 2);
    int turn = 0;
#pragma unroll 1
    for (; item < a.items; item += a.stride) {
        float o[2][64], scale[2];
#pragma unroll
        for (int i = 0; i < 128; ++i) o[i >> 6][i & 63] = 0.0f;
#pragma unroll 1
        for (int tile = 0; tile < a.tiles; ++tile, ++turn) {
            const int buffer = turn & 1, parity = (turn >> 1) & 1;
            barrier_wait(shared_address(&s.ready[buffer]), parity);
            if (group == 0) STAMP(6)
            if (s.changed[buffer][warp]) {
                const float factor[2] = {s.factor[buffer][row], s.factor[buffer][row + 8]};
#pragma unroll
                for (int i = 0; i < 128; ++i) o[i >> 6][i & 63] *= factor[(i >> 1) & 1];
            }
            const u64 p = wgmma_operand(shared_address(s.weights[buffer]), 16, 1024);
            if (LATE == 2) fence_async_shared();
            const u64 v = wgmma_operand(shared_address(s.keys[buffer]) + group * 4 * BLOCK, BLOCK, 1024);
            wgmma_fence();
#pragma unroll
            for (int half = 0; half < 2; ++half) {
#pragma unroll
                for (int k = 0; k < 4; ++k)
                    wgmma_across(o[half], operand_at(p, 2 * k), operand_at(v, (k * 2048 + half * 2 * BLOCK) / 16), 1);
                wgmma_commit();
            }
            scale[0] = s.final[buffer][row], scale[1] = s.final[buffer][row + 8];  // of the last tile they are this item's
            if (group == 0) STAMP(7)
            wgmma_wait<1>();
            if (group == 0) STAMP(8)
            if (lane == 0) barrier_arrive(shared_address(&s.empty[buffer][0]));
            wgmma_wait<0>();
            if (group == 0) STAMP(9)
            __syncwarp();
            if (lane == 0) barrier_arrive(shared_address(&s.empty[buffer][1]));
        }
        write_output(s, o, scale, a, item >> a.shift, (item & a.shift) * 64, group * 256, 4 * group + warp, lane);
    }
}

// An item is a query's block of 64 heads; a block takes every gridDim.x-th. There is a key at least.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
sparse_mla_many(const u16* q, i64 q_stride_n, i64 q_stride_h,
                const u8* window, const void* window_slots, i64 w_stride_page, i64 w_stride_row, i64 w_slots_stride, int w_keys, int w_rows,
                int w_page, int w_shift,
                const u8* extra, const void* extra_slots, i64 x_stride_page, i64 x_stride_row, i64 x_slots_stride, int x_keys, int x_rows,
                int x_page, int x_shift,
                const float* sink, u16* out, i64 out_stride_n, i64 out_stride_h, float* lse, int heads, int slots_are_long, float scale_log2,
                int items) {
    extern __shared__ u8 memory[];
    Shared& s = *reinterpret_cast<Shared*>(memory + ((1024 - (shared_address(memory) & 1023)) & 1023));
    const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), shift = heads > 64;
    const int extra_tiles = (x_keys + TILE - 1) / TILE, tiles = extra_tiles + (w_keys + TILE - 1) / TILE;
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; ++i) {
            for (int h = 0; h < 2; ++h) barrier_init(shared_address(&s.full[i][h]), 4), barrier_init(shared_address(&s.empty[i][h]), 8);
            barrier_init(shared_address(&s.ready[i]), 4);
        }
        fence_barriers();
    }
    __syncthreads();
    wait_for_kernels();
    const Problem problem{q, q_stride_n, q_stride_h, out, out_stride_n, out_stride_h, lse, sink, heads, items, int(gridDim.x), shift, tiles,
                          scale_log2 * TWO_60};
    if (warp >= 12) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 " DECODE_REGISTERS ";");
        const Records w{window, window_slots, w_stride_page, w_stride_row, w_slots_stride, w_keys, w_rows, w_page, w_shift, slots_are_long};
        const Records x{extra, extra_slots, x_stride_page, x_stride_row, x_slots_stride, x_keys, x_rows, x_page, x_shift, slots_are_long};
        const Producer producer{w, x, items, int(gridDim.x), shift, extra_tiles, tiles, warp - 12, int(threadIdx.x & 31)};
        produce(s, producer, blockIdx.x);
    } else if (warp >= 8) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 " WEIGH_REGISTERS ";");
        weigh(s, problem, blockIdx.x, threadIdx.x & 127);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 160;");
        add_products(s, problem, blockIdx.x, warp >> 2, threadIdx.x & 127);
#ifdef CLOCKS
        if (threadIdx.x < 64) reinterpret_cast<u32*>(lse)[blockIdx.x * 64 + threadIdx.x] = s.stamps[threadIdx.x];
#endif
    }
}
