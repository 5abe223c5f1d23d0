#include "wgmma.cuh"
#include "slots.cuh"
// Sparse MLA over quantised records: 512 channels, keys equal values, blocks of up to 64 heads.
//
// A cluster shares one (query, block of heads): its blocks take runs of key tiles, send each other slices of their result through
// distributed shared memory, and each finishes a slice of the channels. Inside a block two producer groups gather and dequantise
// tiles of 64 keys into two buffers; the next step's records are on their way to a place of each warp's own meanwhile, as they are
// stored. Two consumer groups hold the left and right half of the output. Tiles alternate: the group that owns a tile computes its
// logits and probabilities and hands these over, and both multiply their half; the next tile's owner queues that tile's logits
// behind its product. Without a cluster a block takes one query after the other, and producers bring the next one's heads.
//
// Channel order: within eight channels 0 4 1 5 2 6 3 7, so that a word of codes becomes pairs by shifts and masks. Queries are
// permuted when they are read, outputs when they are written.
//
// Scale: a code's bits, shifted into place, are the value times 2^-126 (e2m1) or 2^-120 (e4m3). One multiplication by the
// group's scale times 2^66 or 2^60 gives the value times 2^-60, exactly; the softmax scale and the output carry the 2^60.

// Built once for each number of blocks in a cluster: SPLITS is 1, 2, 4 or 8.
constexpr int SIZE = SPLITS, PRODUCERS = 8, TILE = 64, BLOCK = 8192, TILE_BYTES = 8 * BLOCK, CONSUMERS = 256, THREADS = CONSUMERS + 32 * PRODUCERS;
constexpr int UNITS = 4;  // of 16 bytes, that a producer thread has of a step
constexpr int RECORD = 304, HALF_RECORD = 272;  // bytes from one record of a step to the next where a warp keeps them: no bank twice at once
// How probabilities are handed over: as an operand, or as the fragments that threads hold, which takes 16 registers more and no fence.
// Those are there only where producers do not bring queries.
constexpr bool FRAGMENTS = SIZE > 1;
constexpr int PIECES = SIZE == 2 ? 4 : SIZE == 4 ? 2 : 1;  // in which a slice travels, each with a barrier of its own

struct Shared {
    u8 query[TILE_BYTES];    // later, in a cluster: slices of the other blocks' results, where they have sent them
    u8 keys[2][TILE_BYTES];  // later, in a cluster: the output, on its way out
    u32 weights[2048];       // probabilities, rows of 128 bytes or, of 16 keys each, 16 bytes a thread; later, without a cluster: the output
    float2 peers[SIZE][64];  // of each other block and head: maximum, sum
    float inverse[SIZE][64];  // likewise, the factor that its slice is to be multiplied by
    u8 raw[PRODUCERS][8 * RECORD];  // of each warp: records of a step, of the window halves of them and the scales
    float bias[2][TILE];
    u8 absent[2][2 * PRODUCERS];  // whether a warp's rows of half a tile lack one
    float top[2][64];
    float sum[2][64];
    u64 full[2], empty[2], query_free, query_full, ready, received[PIECES];
};
static_assert(sizeof(Shared) <= 227 * 1024, "a block's shared memory");

// Two chunks at once: registers of one are not reused before the other is stored.
__device__ __forceinline__ void store_chunks(u32 first, u32 second, const u32 (&x)[8]) {
    asm volatile("st.shared.v4.u32 [%0], {%2, %3, %4, %5};\nst.shared.v4.u32 [%1], {%6, %7, %8, %9};" ::"r"(first), "r"(second),
                 "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(x[4]), "r"(x[5]), "r"(x[6]), "r"(x[7])
                 : "memory");
}

// Sixteen e2m1 codes to two chunks of 16 bytes. A code in the low four bits of each half, times 2^12 + 2^6, has its sign in the
// half's highest bit and the rest where bfloat16 has its lowest exponent bits and its highest mantissa bit.
__device__ __forceinline__ void decode_e2m1(u32 w, u32 v, u32 factor, u32 first, u32 second) {
    u32 x[8];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const u32 low = i ? v : w, high = low >> 8;
        x[4 * i] = (low & 0x000f000fu) * 0x1040u;
        x[4 * i + 1] = (low & 0x00f000f0u) * 0x0104u;
        x[4 * i + 2] = (high & 0x000f000fu) * 0x1040u;
        x[4 * i + 3] = (high & 0x00f000f0u) * 0x0104u;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = multiply_bf16(x[i] & 0x81c081c0u, factor);
    store_chunks(first, second, x);
}

// Sixteen e4m3 codes, likewise.
__device__ __forceinline__ void decode_e4m3(const uint4& c, u32 factor, u32 first, u32 second) {
    u32 x[8] = {prmt(c.x, c.y, 0x4000), prmt(c.x, c.y, 0x5010), prmt(c.x, c.y, 0x6020), prmt(c.x, c.y, 0x7030),
                prmt(c.z, c.w, 0x4000), prmt(c.z, c.w, 0x5010), prmt(c.z, c.w, 0x6020), prmt(c.z, c.w, 0x7030)};
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = multiply_bf16(((x[i] >> 4) & 0x07f007f0u) | (x[i] & 0x80008000u), factor);
    store_chunks(first, second, x);
}

// What a producer thread holds of one step: units of codes, and their scales.
struct Piece {
    uint4 code[UNITS];
    u32 scale[UNITS];
};
struct Step {
    int item, number;  // number: of the item's steps
};

// One of the producer warps; lanes 0..7 hold different rows, so that their stores go to different banks.
struct Producer {
    const Records &window, &extra;
    int items, stride, shift;  // an item is half a query if `shift`, else a query
    int begin, own_extra, window_begin;  // first tile of the other pool, how many of them this block has; first tile of the window
    int own_window, steps, warp, lane;
    bool window_first;

    static constexpr int PARTS = PRODUCERS / 4;  // warps that share a row of the window

    // A tile of the other pool takes one step, one of the window two, of 32 keys, and longer. The window comes last, or, where blocks
    // take several items, first: then its tiles are made while the output of the item before leaves.
    __device__ __forceinline__ bool in_window(int step) const { return window_first ? step < 2 * own_window : step >= own_extra; }
    __device__ __forceinline__ int half(int step) const { return (window_first ? step : step - own_extra) & 1; }
    __device__ __forceinline__ int of_window(int step) const { return (window_first ? step : step - own_extra) >> 1; }
    __device__ __forceinline__ int of_extra(int step) const { return window_first ? step - 2 * own_window : step; }
    __device__ __forceinline__ int tile(int step) const {
        return in_window(step) ? of_window(step) + (window_first ? 0 : own_extra) : of_extra(step) + (window_first ? own_window : 0);
    }
    __device__ __forceinline__ int first_row(int step) const { return in_window(step) ? half(step) * 32 + warp / PARTS * 8 : warp * 8; }
    __device__ __forceinline__ int first_unit(int step) const { return (lane >> 3) + (in_window(step) ? warp % PARTS * 16 : 0); }
    __device__ __forceinline__ bool starts_tile(int step) const { return !in_window(step) || half(step) == 0; }
    __device__ __forceinline__ bool ends_tile(int step) const { return !in_window(step) || half(step) == 1; }
    __device__ __forceinline__ Step after(const Step& step) const {
        return step.number + 1 < steps ? Step{step.item, step.number + 1} : Step{step.item + stride, 0};
    }
    // The slot of the record of which this lane copies a part.
    __device__ __forceinline__ int2 stored_slot(const Step& at) const {
        const bool there = at.item < items, in = in_window(at.number);
        const int first = in ? window_begin + of_window(at.number) : begin + of_extra(at.number);
        const int key = first * TILE + first_row(at.number) + (lane >> 2);
        return in ? window.slot(at.item >> shift, key, there) : extra.slot(at.item >> shift, key, there);
    }
    __device__ __forceinline__ int check(const Step& at, int2 stored) const {  // negative: absent
        return stored.y == 0 && u32(stored.x) < u32(in_window(at.number) ? window.rows : extra.rows) ? stored.x : -1;
    }
};

// A step's records to this warp's place, four lanes a row. Of the window a warp has one half of a row's codes, and all scales.
__device__ __forceinline__ void start_copies(Shared& s, const Producer& p, int step, int slot) {
    const bool in = p.in_window(step);
    const int part = p.lane & 3, skipped = in ? p.warp % 2 * 256 : 0;
    if (slot >= 0) {
        const u8* source = (in ? p.window.record(slot) + skipped : p.extra.record(slot)) + 16 * part;
        const u32 target = shared_address(s.raw[p.warp]) + (p.lane >> 2) * (in ? HALF_RECORD : RECORD) + 16 * part;
#pragma unroll
        for (int i = 0; i < 4; ++i) copy_async(target + 64 * i, source + 64 * i);
        if (part < (in ? 1 : 2)) copy_async(target + 256, source + (in ? 512 - skipped : 256));
    }
    copy_async_commit();
}
// What a thread decodes of them: units 64 bytes apart of row lane % 8; a unit's scale is one or both of two bytes.
__device__ __forceinline__ void load_piece(Shared& s, const Producer& p, int step, Piece& piece) {
    const bool in = p.in_window(step);
    const int unit = p.lane >> 3;
    const u32 row = shared_address(s.raw[p.warp]) + (p.lane & 7) * (in ? HALF_RECORD : RECORD);
    const u32 scale = row + 256 + (in ? (p.first_unit(step) >> 2) * 2 : 2 * unit), apart = in ? 2 : 8;
#pragma unroll
    for (int i = 0; i < UNITS; ++i) {
        piece.code[i] = load_shared4(row + 16 * unit + 64 * i);
        piece.scale[i] = load_shared_half(scale + apart * i);
    }
}

struct Queries {
    const u16* q;
    i64 stride_n, stride_h;
    int heads, shift;

    __device__ __forceinline__ int first_head(int item) const { return (item & shift) * 64; }
    __device__ __forceinline__ const u16* of(int item) const { return q + i64(item >> shift) * stride_n + first_head(item) * stride_h; }
};
// Heads of an item to shared memory by 256 threads, COUNT rows each at once, channels permuted, absent heads zero; `wait` once the
// first are on their way.
template <int COUNT, typename Wait>
__device__ __forceinline__ void load_query(Shared& s, const Queries& queries, int item, const Wait& wait) {
    const int first = (threadIdx.x >> 6) & 3, chunk = threadIdx.x & 63, heads = queries.heads - queries.first_head(item);
    const u16* source = queries.of(item) + first * queries.stride_h + 8 * chunk;
    const u32 target = shared_address(s.query) + (chunk >> 3) * BLOCK + first * 128;
#pragma unroll
    for (int begin = 0; begin < 16; begin += COUNT) {
        uint4 value[COUNT];
#pragma unroll
        for (int j = 0; j < COUNT; ++j) {
            value[j] = 4 * (begin + j) + first < heads ? __ldg(reinterpret_cast<const uint4*>(source)) : uint4{0, 0, 0, 0};
            source += 4 * queries.stride_h;
        }
        if (begin == 0) wait();
#pragma unroll
        for (int j = 0; j < COUNT; ++j) {  // head 4 (begin + j) + first
            const uint4 v = value[j];
            store_shared4(target + 512 * (begin + j) + ((((chunk & 7) ^ first) ^ (4 * (j & 1))) << 4), prmt(v.x, v.z, 0x5410), prmt(v.x, v.z, 0x7632),
                          prmt(v.y, v.w, 0x5410), prmt(v.y, v.w, 0x7632));
        }
    }
    fence_async_shared();
}
// Heads of the item to come to the L2 cache.
__device__ __forceinline__ void prefetch_query(const Queries& queries, int item) {
    const int head = threadIdx.x >> 2;
    if (head < queries.heads - queries.first_head(item)) {
        const u16* source = queries.of(item) + head * queries.stride_h + 128 * (threadIdx.x & 3);
        prefetch_l2(source), prefetch_l2(source + 64);
    }
}

// A step's units as operands. `absent`: this lane's row; `lacking`: one of the warp's.
__device__ __forceinline__ void put(Shared& s, const Producer& p, int step, int buffer, const Piece& piece, bool absent, bool lacking) {
    const int swizzle = p.lane & 7, first = p.first_unit(step);
    const u32 target = shared_address(s.keys[buffer]) + (p.first_row(step) + swizzle) * 128;
    if (p.in_window(step)) {
#pragma unroll
        for (int i = 0; i < UNITS; ++i) {
            const int chunk = (first & 3) * 2;
            const u32 scale = prmt(piece.scale[i], 0, 0x4440 + ((first >> 1) & 1));
            const u32 bits = absent ? 0 : scale == 255 ? 0x7fc0u : min(scale + 60, 254u) << 7, factor = bits | bits << 16;
            const u32 block = target + ((first >> 2) + i) * BLOCK;
            decode_e4m3(piece.code[i], factor, block + ((chunk ^ swizzle) << 4), block + (((chunk + 1) ^ swizzle) << 4));
        }
    } else {
#pragma unroll
        for (int i = 0; i < UNITS; ++i) {
            const int chunk = (first & 1) * 4;
            const float2 scales = unpack_f16(e4m3_halves(absent ? 0 : piece.scale[i]));
            const u32 both = pack_bf16(scales.x * TWO_66, scales.y * TWO_66), f0 = prmt(both, both, 0x1010), f1 = prmt(both, both, 0x3232);
            const u32 block = target + ((first >> 1) + 2 * i) * BLOCK;
            decode_e2m1(piece.code[i].x, piece.code[i].y, f0, block + ((chunk ^ swizzle) << 4), block + (((chunk + 1) ^ swizzle) << 4));
            decode_e2m1(piece.code[i].z, piece.code[i].w, f1, block + (((chunk + 2) ^ swizzle) << 4),
                        block + (((chunk + 3) ^ swizzle) << 4));
        }
    }
    if (p.lane < 8) s.bias[buffer][p.first_row(step) + swizzle] = absent ? NEG_INF : 0.0f;
    if (p.lane < 2 && (!p.in_window(step) || p.lane == p.half(step))) s.absent[buffer][PRODUCERS * p.lane + p.warp] = lacking;
    if (p.ends_tile(step)) {
        fence_async_shared();
        __syncwarp();
        if (p.lane == 0) barrier_arrive(shared_address(&s.full[buffer]));
    }
}

// Fill the tiles of this block's items, records one step ahead, slots two; the heads of each item but the first behind its first tile.
__device__ __forceinline__ void produce(Shared& s, const Producer& p, const Queries& queries, int item, int tiles) {
    if (tiles == 0) return;
    Step step{item, 0};
    const int2 stored = p.stored_slot(step), stored_coming = p.stored_slot(p.after(step));
    int slot = p.check(step, stored);
    start_copies(s, p, 0, slot);
    u32 present = __ballot_sync(~0u, slot >= 0);  // four bits a row
    slot = p.check(p.after(step), stored_coming);
    int turn = 0, parity = -1;  // tiles before this item; of queries, of which the first is not brought here
#pragma unroll 1
    while (step.item < p.items) {
        const Step coming = p.after(step), later = p.after(coming);
        const int tile = turn + p.tile(step.number), buffer = tile & 1;
        const int2 stored_later = p.stored_slot(later);
        Piece piece;
        copy_async_wait();
        __syncwarp();
        load_piece(s, p, step.number, piece);
        __syncwarp();
        start_copies(s, p, coming.number, slot);
        if (p.starts_tile(step.number)) barrier_wait(shared_address(&s.empty[buffer]), ((tile >> 1) & 1) ^ 1);
        put(s, p, step.number, buffer, piece, !((present >> 4 * (p.lane & 7)) & 1), present != ~0u);
        if (coming.number == 0) turn += tiles;
        present = __ballot_sync(~0u, slot >= 0);
        slot = p.check(later, stored_later);
        if (SIZE == 1 && p.ends_tile(step.number) && p.tile(step.number) == 0) {
            if (parity >= 0) {
                load_query<8>(s, queries, step.item, [&] { barrier_wait(shared_address(&s.query_free), parity); });
                __syncwarp();
                if (p.lane == 0) barrier_arrive(shared_address(&s.query_full));
            }
            parity = (parity + 1) & 1;
        }
        step = coming;
    }
}

struct Output {
    u16* out;
    i64 stride_n, stride_h;
    float* lse;
    float sink[2];  // of this thread's rows, in powers of two
    int heads, first_head;
    i64 query;
};

// State of a consumer thread: rows `row` and `row + 8` of the block's heads.
struct Consumer {
    float o[2][64];  // left and right half of this group's 256 channels
    float top[2], sum[2];
    int group, thread, row, quad;

    __device__ __forceinline__ float& value(int i) { return o[i >> 6][i & 63]; }
};

__device__ __forceinline__ float finite(float x) { return x == NEG_INF ? 0.0f : x; }
__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

// Queue products of the logits of a tile: those of 16 channels each from BEGIN to END of 32.
template <int BEGIN, int END>
__device__ __forceinline__ void start_logits(Shared& s, int buffer, float (&logit)[32]) {
    const u64 q = wgmma_operand(shared_address(s.query), 16, 1024), k = wgmma_operand(shared_address(s.keys[buffer]), 16, 1024);
    wgmma_fence();
#pragma unroll
    for (int i = BEGIN; i < END; ++i) {
        const int offset = ((i >> 2) * BLOCK + (i & 3) * 32) / 16;
        wgmma_shared(logit, operand_at(q, offset), operand_at(k, offset), i > 0);
    }
    wgmma_commit();
}

// Whether no key of a tile is absent: then it needs no bias.
__device__ __forceinline__ bool is_plain(Shared& s, int buffer, float scale) {
    const uint4 absent = load_shared4(shared_address(s.absent[buffer]));
    return (absent.x | absent.y | absent.z | absent.w) == 0 && scale > 0.0f;
}

// Logits to probabilities: packed fragments in `p`, handed over to the other group with the maxima that they refer to. A
// maximum moves only by 2^RISE and more, since all of the output is multiplied when it does: what is larger than 1 until then has
// as many digits. So lanes compare their own values and look for a row's maximum only where one rises.
constexpr float RISE = 8.0f;
__device__ __forceinline__ void probabilities(Shared& s, const Consumer& c, int buffer, float scale, bool plain, float (&logit)[32],
                                              u32 (&p)[16], float (&top)[2], float (&sum)[2]) {
    float high[2] = {NEG_INF, NEG_INF};
    float factor = 1.0f;
    if (plain) {
        factor = scale;
#pragma unroll
        for (int i = 0; i < 8; ++i)
#pragma unroll
            for (int r = 0; r < 2; ++r) high[r] = fmaxf(high[r], fmaxf(logit[4 * i + 2 * r], logit[4 * i + 2 * r + 1]));
        high[0] *= scale, high[1] *= scale;
    } else {
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
    top[0] = c.top[0], top[1] = c.top[1];
    if (__any_sync(~0u, high[0] > c.top[0] + RISE || high[1] > c.top[1] + RISE)) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float most = quad_max(high[r]);
            if (most > c.top[r] + RISE) top[r] = most;
        }
    }
    if (c.quad == 0) s.top[buffer][c.row] = top[0], s.top[buffer][c.row + 8] = top[1];
    const float safe[2] = {-finite(top[0]), -finite(top[1])};
    const int lane = c.thread & 31, row = (c.row & ~7) + (lane & 15);
    const u32 target = shared_address(s.weights) + row * 128 + ((row & 7) ^ (lane >> 4)) * 16;
    sum[0] = sum[1] = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float x = exp2_fast(fmaf(logit[4 * i + 2 * r], factor, safe[r])), y = exp2_fast(fmaf(logit[4 * i + 2 * r + 1], factor, safe[r]));
            sum[r] += x + y;
            p[2 * i + r] = pack_bf16(x, y);
        }
        if (i & 1) {
            const uint4 four{p[2 * i - 2], p[2 * i - 1], p[2 * i], p[2 * i + 1]};
            if (FRAGMENTS) reinterpret_cast<uint4*>(s.weights)[(i >> 1) * 128 + c.thread] = four;
            else store_matrices(target ^ (i >> 1) * 32, four.x, four.y, four.z, four.w);
        }
    }
    if (!FRAGMENTS) fence_async_shared();
    named_arrive(2 + buffer, CONSUMERS);
}

// o = o * 2^(old top - new top).
__device__ __forceinline__ void rescale(Consumer& c, const float (&top)[2]) {
    if (!__any_sync(~0u, top[0] != c.top[0] || top[1] != c.top[1])) return;
    float factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        factor[r] = c.top[r] == NEG_INF ? 1.0f : exp2_fast(c.top[r] - top[r]);  // without a key so far: all zeros
        c.top[r] = top[r];
        c.sum[r] *= factor[r];
    }
#pragma unroll
    for (int i = 0; i < 128; ++i) c.value(i) *= factor[(i >> 1) & 1];
}

// Queue o += probabilities * (this group's channels of the tile); of 16 keys each, `product` queues o[half] += them * operand.
template <typename Product>
__device__ __forceinline__ void start_product(Shared& s, Consumer& c, int buffer, const Product& product) {
    const u64 v = wgmma_operand(shared_address(s.keys[buffer]) + c.group * 4 * BLOCK, BLOCK, 1024);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int k = i & 3, half = i >> 2;
        product(c.o[half], k, operand_at(v, (k * 2048 + half * 2 * BLOCK) / 16));
    }
    wgmma_commit();
}
__device__ __forceinline__ void start_product(Shared& s, Consumer& c, int buffer, const u32 (&p)[16]) {
    start_product(s, c, buffer, [&](float (&o)[64], int k, u64 v) { wgmma_across(o, p[4 * k], p[4 * k + 1], p[4 * k + 2], p[4 * k + 3], v, 1); });
}
// Of a product under way: its registers are not taken for anything else before this.
__device__ __forceinline__ void keep(u32 (&p)[16]) {
#pragma unroll
    for (int i = 0; FRAGMENTS && i < 16; ++i) asm volatile("" : "+r"(p[i])::"memory");
}

__device__ __forceinline__ void release(Shared& s, const Consumer& c, int buffer) {
    if ((c.thread & 31) == 0) barrier_arrive(shared_address(&s.empty[buffer]));
}

// This block's query may be overwritten, by the other blocks' results or by the next one, as far as this warp is concerned.
__device__ __forceinline__ void release_query(Shared& s, int rank) {
    const int lane = threadIdx.x & 31;
    if (SIZE == 1 && lane == 0) barrier_arrive(shared_address(&s.query_free));
    if (SIZE > 1 && lane < SIZE && lane != rank) peer_arrive(peer_address(shared_address(&s.ready), lane));
}

// Wait for the other group's probabilities, take over its maxima, and queue the product. Fragments are of the same shape in both: each
// thread takes those of its counterpart, into `p`.
__device__ __forceinline__ void start_other_product(Shared& s, Consumer& c, int buffer, u32 (&p)[16]) {
    named_sync(2 + buffer, CONSUMERS);
    const float top[2] = {s.top[buffer][c.row], s.top[buffer][c.row + 8]};
    if constexpr (FRAGMENTS) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint4 v = reinterpret_cast<const uint4*>(s.weights)[i * 128 + c.thread];
            p[4 * i] = v.x, p[4 * i + 1] = v.y, p[4 * i + 2] = v.z, p[4 * i + 3] = v.w;
        }
        rescale(c, top);
        start_product(s, c, buffer, p);
    } else {
        rescale(c, top);
        const u64 weights = wgmma_operand(shared_address(s.weights), 16, 1024);
        start_product(s, c, buffer, [&](float (&o)[64], int k, u64 v) { wgmma_across(o, operand_at(weights, 2 * k), v, 1); });
    }
}

// A turn: the product of the other group's tile with the logits of the own tile queued behind it, then the product of the own tile.
// The buffer of the other's tile is given back under the first logits; a wait behind all of them would come to its turn only when most
// are done. Group 0 begins without another's tile, and one of them ends with nothing but one. `turn`: tiles of the items before.
__device__ __forceinline__ void consume(Shared& s, Consumer& c, int turn, int tiles, float scale, int rank) {
    const int buffer = c.group, other = 1 - c.group, first = (c.group ^ turn) & 1;
    if (first >= tiles) release_query(s, rank);
#pragma unroll 1
    for (int own = first; own < tiles; own += 2) {
        const int parity = ((turn + own) >> 1) & 1;
        u32 p[16];
        float logit[32], top[2], sum[2];
        if (own > 0) {
            u32 taken[16];
            start_other_product(s, c, other, taken);
            barrier_wait(shared_address(&s.full[buffer]), parity);
            start_logits<0, 8>(s, buffer, logit);
            wgmma_wait<1>();
            keep(taken);
            release(s, c, other);
            start_logits<8, 32>(s, buffer, logit);
        } else {
            barrier_wait(shared_address(&s.full[buffer]), parity);
            start_logits<0, 32>(s, buffer, logit);
        }
        const bool plain = is_plain(s, buffer, scale);
        wgmma_wait<0>();
        if (own + 2 >= tiles) release_query(s, rank);
        probabilities(s, c, buffer, scale, plain, logit, p, top, sum);
        rescale(c, top);
        start_product(s, c, buffer, p);
        c.sum[0] += sum[0], c.sum[1] += sum[1];
        wgmma_wait<0>();
        release(s, c, buffer);
    }
    if (tiles > 0 && c.group == ((turn + tiles) & 1)) {
        u32 taken[16];
        start_other_product(s, c, other, taken);
        wgmma_wait<0>();
        keep(taken);
        release(s, c, other);
    }
}

// In a cluster: write COLUMNS channels, the values FIRST.. of this group's output, through shared memory; PIECE: which of such places there.
template <int COLUMNS, int FIRST, int PIECE>
__device__ __forceinline__ void write_slice(Shared& s, Consumer& c, const float (&scale)[2], const Output& to, int first_channel) {
    constexpr int CHUNKS = COLUMNS / 8;
    const u32 staging = shared_address(s.keys[c.group]) + PIECE * COLUMNS * 128;
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = c.row + 8 * r;
            store_shared(staging + row * COLUMNS * 2 + ((i ^ (row & 7)) << 4) + 4 * c.quad,
                         pack_bf16(c.value(FIRST + 4 * i + 2 * r) * scale[r], c.value(FIRST + 4 * i + 2 * r + 1) * scale[r]));
        }
    }
    named_sync(5 + c.group, 128);
    constexpr int STEP = 128 / CHUNKS;  // rows that the group writes at once
    const int first = c.thread / CHUNKS, chunk = c.thread % CHUNKS;
    u16* target = to.out + to.query * to.stride_n + (to.first_head + first) * to.stride_h + first_channel + 8 * chunk;
#pragma unroll 4
    for (int row = first; row < 64; row += STEP) {
        const uint4 v = load_shared4(staging + row * COLUMNS * 2 + ((chunk ^ (row & 7)) << 4));
        if (to.first_head + row < to.heads)
            *reinterpret_cast<uint4*>(target) =
                uint4{prmt(v.x, v.y, 0x5410), prmt(v.z, v.w, 0x5410), prmt(v.x, v.y, 0x7632), prmt(v.z, v.w, 0x7632)};
        target += STEP * to.stride_h;
    }
}

// Without a cluster: write a warp's 16 heads of the group's 256 channels, 8 heads and 64 channels at once, through its part of the
// probabilities' place.
__device__ __forceinline__ void write_rows(Shared& s, Consumer& c, const float (&scale)[2], const Output& to, int first_channel) {
    const int lane = c.thread & 31, warp = threadIdx.x >> 5, own = lane >> 2, chunk = lane & 7;
    const u32 staging = shared_address(s.weights) + warp * 1024;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int first = (c.row & ~7) + 8 * r + (lane >> 3), left = to.heads - to.first_head - first;
        u16* target = to.out + to.query * to.stride_n + i64(to.first_head + first) * to.stride_h + first_channel + 8 * chunk;
#pragma unroll
        for (int part = 0; part < 4; ++part) {
            __syncwarp();
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int v = 32 * part + 4 * i + 2 * r;
                store_shared(staging + own * 128 + ((i ^ own) << 4) + 4 * c.quad, pack_bf16(c.value(v) * scale[r], c.value(v + 1) * scale[r]));
            }
            __syncwarp();
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = 4 * half + (lane >> 3);
                const uint4 v = load_shared4(staging + row * 128 + ((chunk ^ row) << 4));
                if (4 * half < left)
                    *reinterpret_cast<uint4*>(target + half * 4 * to.stride_h + 64 * part) =
                        uint4{prmt(v.x, v.y, 0x5410), prmt(v.z, v.w, 0x5410), prmt(v.x, v.y, 0x7632), prmt(v.z, v.w, 0x7632)};
            }
        }
    }
}

// Factors that turn the accumulator of keys times 2^-60 into the result; also stores the log-sum-exp.
__device__ __forceinline__ void finish_rows(const Consumer& c, const float (&top)[2], const float (&total)[2], const Output& to, bool write_lse,
                                   float (&scale)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int head = to.first_head + c.row + 8 * r;
        const float norm = total[r] + exp2_fast(to.sink[r] - finite(top[r]));
        scale[r] = total[r] > 0.0f ? __fdividef(TWO_60, norm) : 0.0f;
        if (write_lse && c.quad == 0 && head < to.heads)
            to.lse[to.query * to.heads + head] = total[r] > 0.0f ? (finite(top[r]) + __log2f(total[r])) * LN2 : -NEG_INF;
    }
}

// Blocks of a cluster hold results of different keys: block `rank` finishes slice `rank` of the channels. What travels is
// float16 times a power of two of its own for each head, so that a head's largest value lies between 2^14 and 2^15.
constexpr int VALUES = 256 / SIZE, AREA = TILE_BYTES / SIZE;  // of a thread in a slice; bytes of a slice
constexpr int PART = VALUES / PIECES;  // of a thread in a piece
constexpr u32 RECEIVED = (SIZE - 1) * (AREA / PIECES), HEADERS = (SIZE - 1) * 64 * (sizeof(float2) + sizeof(float));  // bytes of a piece; more with the first

// A piece of slice I of this group's channels to its owner.
template <int I, int PIECE>
__device__ __forceinline__ void send_piece(Shared& s, Consumer& c, int rank, const float (&factor)[2], const float (&inverse)[2],
                                           const float (&total)[2]) {
    const int target = c.group * (SIZE / 2) + I;
    if (target == rank) return;
    const u32 bar = peer_address(shared_address(&s.received[PIECE]), target);
    const u32 address = peer_address(shared_address(s.query) + rank * AREA + 16 * c.thread, target);
    if (PIECE == 0 && c.quad == 0) {
        const u32 header = peer_address(shared_address(&s.peers[rank][c.row]), target);
        const u32 third = peer_address(shared_address(&s.inverse[rank][c.row]), target);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            send_async2(header + 64 * r, __float_as_uint(c.top[r]), __float_as_uint(total[r]), bar);
            send_async(third + 32 * r, __float_as_uint(inverse[r]), bar);
        }
    }
#pragma unroll
    for (int j = PIECE * PART; j < (PIECE + 1) * PART; j += 8) {
        const int v = I * VALUES + j;
        send_async4(address + j * 256, pack_f16(c.value(v) * factor[0], c.value(v + 1) * factor[0]),
                    pack_f16(c.value(v + 2) * factor[1], c.value(v + 3) * factor[1]),
                    pack_f16(c.value(v + 4) * factor[0], c.value(v + 5) * factor[0]),
                    pack_f16(c.value(v + 6) * factor[1], c.value(v + 7) * factor[1]), bar);
    }
}
template <int PIECE>
__device__ __forceinline__ void send_pieces(Shared& s, Consumer& c, int rank, const float (&factor)[2], const float (&inverse)[2],
                                            const float (&total)[2]) {
    send_piece<0, PIECE>(s, c, rank, factor, inverse, total);
    if constexpr (SIZE > 2) send_piece<1, PIECE>(s, c, rank, factor, inverse, total);
    if constexpr (SIZE > 4) {
        send_piece<2, PIECE>(s, c, rank, factor, inverse, total);
        send_piece<3, PIECE>(s, c, rank, factor, inverse, total);
    }
    if constexpr (PIECE + 1 < PIECES) send_pieces<PIECE + 1>(s, c, rank, factor, inverse, total);
}

// What is sent of the pieces from PIECE on, added and written out.
template <int I, int PIECE>
__device__ __forceinline__ void collect_pieces(Shared& s, Consumer& c, int rank, const float (&top)[2], const float (&own)[2],
                                               const float (&scale)[2], const Output& to) {
    constexpr int FIRST = I * VALUES + PIECE * PART;
    if (PIECE > 0) barrier_wait_cluster(shared_address(&s.received[PIECE]), 0);
#pragma unroll
    for (int j = FIRST; j < FIRST + PART; ++j) c.value(j) *= own[(j >> 1) & 1];
#pragma unroll 1
    for (int step = 1; step < SIZE; ++step) {
        const int peer = (rank + step) % SIZE;
        const u32 address = shared_address(s.query) + peer * AREA + 16 * c.thread;
        float factor[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            factor[r] = s.inverse[peer][c.row + 8 * r] * exp2_fast(s.peers[peer][c.row + 8 * r].x - finite(top[r])) * scale[r];
        }
#pragma unroll
        for (int j = PIECE * PART; j < (PIECE + 1) * PART; j += 8) {
            const uint4 four = load_shared4(address + j * 256);
            const u32 word[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float2 pair = unpack_f16(word[i]);
                float &x = c.value(I * VALUES + j + 2 * i), &y = c.value(I * VALUES + j + 2 * i + 1);
                x = fmaf(pair.x, factor[i & 1], x), y = fmaf(pair.y, factor[i & 1], y);
            }
        }
    }
    constexpr int COLUMNS = 512 / SIZE / PIECES;
    const float one[2] = {1.0f, 1.0f};
    write_slice<COLUMNS, FIRST, PIECE>(s, c, one, to, rank * (512 / SIZE) + PIECE * COLUMNS);
    if constexpr (PIECE + 1 < PIECES) collect_pieces<I, PIECE + 1>(s, c, rank, top, own, scale, to);
}

// In the owner of slice I, the sum over the cluster, written out.
template <int I>
__device__ __forceinline__ void collect_slice(Shared& s, Consumer& c, int rank, const float (&own_total)[2], const Output& to) {
    if (c.group * (SIZE / 2) + I != rank) return;
    barrier_wait_cluster(shared_address(&s.received[0]), 0);
    float top[2], total[2], scale[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        top[r] = c.top[r];
#pragma unroll
        for (int step = 1; step < SIZE; ++step) top[r] = fmaxf(top[r], s.peers[(rank + step) % SIZE][c.row + 8 * r].x);
        total[r] = own_total[r] * exp2_fast(c.top[r] - finite(top[r]));
#pragma unroll
        for (int step = 1; step < SIZE; ++step) {
            const float2 header = s.peers[(rank + step) % SIZE][c.row + 8 * r];
            total[r] += header.y * exp2_fast(header.x - finite(top[r]));
        }
    }
    finish_rows(c, top, total, to, rank == 0, scale);
    const float own[2] = {scale[0] * exp2_fast(c.top[0] - finite(top[0])), scale[1] * exp2_fast(c.top[1] - finite(top[1]))};
    collect_pieces<I, 0>(s, c, rank, top, own, scale, to);
}

__device__ __forceinline__ void merge(Shared& s, Consumer& c, int rank, const float (&total)[2], const Output& to) {
    float factor[2], inverse[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float high = 0.0f;
#pragma unroll
        for (int i = 0; i < 128; i += 4) high = fmaxf(high, fmaxf(fabsf(c.value(i + 2 * r)), fabsf(c.value(i + 2 * r + 1))));
        const int exponent = min(max(268 - (__float_as_int(quad_max(high)) >> 23), 1), 253);  // of 2^14 over the largest value
        factor[r] = __int_as_float(exponent << 23), inverse[r] = __int_as_float((254 - exponent) << 23);
    }
    barrier_wait_cluster(shared_address(&s.ready), 0);
    send_pieces<0>(s, c, rank, factor, inverse, total);
    collect_slice<0>(s, c, rank, total, to);
    if constexpr (SIZE > 2) collect_slice<1>(s, c, rank, total, to);
    if constexpr (SIZE > 4) {
        collect_slice<2>(s, c, rank, total, to);
        collect_slice<3>(s, c, rank, total, to);
    }
}


// An item is a query's block of 64 heads. Grid: clusters; without them blocks, of which each may take several items.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
sparse_mla(const u16* q, i64 q_stride_n, i64 q_stride_h,
           const u8* window, const void* window_slots, i64 w_stride_page, i64 w_stride_row, i64 w_slots_stride, int w_keys, int w_rows,
           int w_page, int w_shift,
           const u8* extra, const void* extra_slots, i64 x_stride_page, i64 x_stride_row, i64 x_slots_stride, int x_keys, int x_rows,
           int x_page, int x_shift,
           const float* sink, u16* out, i64 out_stride_n, i64 out_stride_h, float* lse, int heads, int slots_are_long, float scale_log2,
           int items) {
    extern __shared__ __align__(1024) u8 memory[];
    Shared& s = *reinterpret_cast<Shared*>(memory);
    const int rank = SIZE > 1 ? cluster_rank() : 0, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
    const int shift = heads > 64, stride = SIZE > 1 ? items : gridDim.x;
    int item = blockIdx.x / SIZE;
    // Tiles of the window take longer. Shared out apart where that divides the work better, else in one row, the window's behind.
    const int extra_tiles = (x_keys + TILE - 1) / TILE, window_tiles = (w_keys + TILE - 1) / TILE, all = extra_tiles + window_tiles;
    constexpr bool apart = SIZE == 2;
    const int row_begin = (all * rank + SIZE - 1) / SIZE, row_end = (all * (rank + 1) + SIZE - 1) / SIZE;
    const int begin = apart ? (extra_tiles * rank + SIZE - 1) / SIZE : min(row_begin, extra_tiles);
    const int own_extra = (apart ? (extra_tiles * (rank + 1) + SIZE - 1) / SIZE : min(row_end, extra_tiles)) - begin;
    const int window_begin = apart ? window_tiles * rank / SIZE : max(row_begin - extra_tiles, 0);
    const int tiles = own_extra + (apart ? window_tiles * (rank + 1) / SIZE : max(row_end - extra_tiles, 0)) - window_begin;
    if (threadIdx.x == 0) {
        barrier_init(shared_address(&s.query_free), 8), barrier_init(shared_address(&s.query_full), PRODUCERS);
        for (int i = 0; i < 2; ++i) {
            barrier_init(shared_address(&s.full[i]), PRODUCERS);
            barrier_init(shared_address(&s.empty[i]), 8);
        }
        if (SIZE > 1) {
            barrier_init(shared_address(&s.ready), 8 * (SIZE - 1));
            for (int i = 0; i < PIECES; ++i) barrier_init(shared_address(&s.received[i]), 1);
        }
        fence_barriers();
        for (int i = 0; SIZE > 1 && i < PIECES; ++i) barrier_expect(shared_address(&s.received[i]), RECEIVED + (i == 0 ? HEADERS : 0));
    }
    __syncthreads();
    if (SIZE > 1) cluster_arrive();  // relaxed: what it publishes are barriers
    wait_for_kernels();
    const Records w{window, window_slots, w_stride_page, w_stride_row, w_slots_stride, w_keys, w_rows, w_page, w_shift, slots_are_long};
    const Records x{extra, extra_slots, x_stride_page, x_stride_row, x_slots_stride, x_keys, x_rows, x_page, x_shift, slots_are_long};
    const Queries queries{q, q_stride_n, q_stride_h, heads, shift};
    if (warp >= CONSUMERS / 32) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(FRAGMENTS ? 48 : 64));
        const int own_window = tiles - own_extra;
        const Producer producer{w, x, items, stride, shift, begin, own_extra, window_begin, own_window, own_extra + 2 * own_window,
                                warp - CONSUMERS / 32, int(threadIdx.x & 31), SIZE == 1 && items > gridDim.x};
        produce(s, producer, queries, item, tiles);
        if (SIZE > 1) cluster_wait();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(FRAGMENTS ? 208 : 192));
        const int thread = threadIdx.x & 127, lane = threadIdx.x & 31;
        const int first_item = item;
        int turn = 0, query_parity = 0;
#pragma unroll 1
        while (true) {
            if (SIZE > 1 || item == first_item) {
                load_query<16>(s, queries, item, [] {});
                named_sync(1, CONSUMERS);
            } else if (tiles > 0) {
                barrier_wait(shared_address(&s.query_full), query_parity);
                query_parity ^= 1;
            }
            if (SIZE == 1 && item + stride < items) prefetch_query(queries, item + stride);
            if (SIZE > 1) cluster_wait();
            Consumer c;
            c.group = warp >> 2, c.thread = thread, c.row = 16 * (warp & 3) + (lane >> 2), c.quad = lane & 3;
#pragma unroll
            for (int i = 0; i < 128; ++i) c.value(i) = 0.0f;
            c.top[0] = c.top[1] = NEG_INF, c.sum[0] = c.sum[1] = 0.0f;
            consume(s, c, turn, tiles, scale_log2 * TWO_60, rank);
            const int first_head = queries.first_head(item), head = first_head + c.row;
            const Output to{out, out_stride_n, out_stride_h, lse,
                            {sink && head < heads ? __ldg(sink + head) * LOG2E : NEG_INF,
                             sink && head + 8 < heads ? __ldg(sink + head + 8) * LOG2E : NEG_INF},
                            heads, first_head, item >> shift};
            float total[2];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float own = quad_sum(c.sum[r]);
                if (c.quad == 0) s.sum[c.group][c.row + 8 * r] = own;
            }
            named_sync(1, CONSUMERS);
#pragma unroll
            for (int r = 0; r < 2; ++r) total[r] = s.sum[0][c.row + 8 * r] + s.sum[1][c.row + 8 * r];
            if constexpr (SIZE > 1) {
                merge(s, c, rank, total, to);
                return;
            } else {
                float scale[2];
                finish_rows(c, c.top, total, to, c.group == 0, scale);
                item += stride, turn += tiles;
                write_rows(s, c, scale, to, c.group * 256);
                if (item >= items) return;
                named_sync(1, CONSUMERS);  // the output has left the probabilities' place
            }
        }
    }
}
