#include "wgmma.cuh"
// Sparse MLA over quantised records: 512 channels, keys equal values, blocks of up to 64 heads.
//
// A cluster shares one (query, block of heads): its blocks take runs of key tiles and merge through distributed shared memory,
// each finishing a slice of the channels. Inside a block two producer groups gather and dequantise tiles of 64 keys (the
// consumers help with the second tile, while they wait for the first); two consumer groups hold the left and right half of the output. Tiles go in pairs: each consumer computes the logits and the
// softmax of one, hands the probabilities over, and both multiply both.
//
// Channel order: within eight channels 0 4 1 5 2 6 3 7, so that a word of codes becomes pairs by shifts and masks. Queries are
// permuted when they are read, outputs when they are written.
//
// Scale: a code's bits, shifted into place, are the value times 2^-126 (e2m1) or 2^-120 (e4m3). One multiplication by the
// group's scale times 2^66 or 2^60 gives the value times 2^-60, exactly; the softmax scale and the output carry the 2^60.

constexpr int TILE = 64, BLOCK = 8192, TILE_BYTES = 8 * BLOCK, CONSUMERS = 256, THREADS = 512;
constexpr float TWO_60 = 1152921504606846976.0f, TWO_66 = 73786976294838206464.0f, LOG2E = 1.4426950408889634f;

struct Shared {
    u8 query[TILE_BYTES];
    u8 keys[2][TILE_BYTES];
    u32 weights[2][2048];
    float bias[2][TILE];
    float top[2][64];
    float sum[2][64];
    float final_top[64], final_sum[64];
    u64 full[2], empty[2];
};

struct Records {
    const u8* pool;
    const void* slots;
    i64 stride_page, stride_row, slots_stride;
    int keys, rows, page, page_shift, slots_are_long;  // page_shift < 0: the page is no power of two

    __device__ __forceinline__ int slot(i64 query, int key) const {
        if (key >= keys) return -1;
        i64 at = query * slots_stride + key;
        i64 value = slots_are_long ? static_cast<const i64*>(slots)[at] : static_cast<const int*>(slots)[at];
        return value >= 0 && value < rows ? int(value) : -1;
    }
    __device__ __forceinline__ const u8* record(int slot) const {
        const int number = page_shift < 0 ? slot / page : slot >> page_shift;
        return pool + number * stride_page + (slot - number * page) * stride_row;
    }
};

__device__ __forceinline__ u32 multiply_bf16(u32 a, u32 b) {
    u32 d;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

// Two chunks at once: registers of one are not reused before the other is stored.
__device__ __forceinline__ void store_chunks(u32 first, u32 second, const u32 (&x)[8]) {
    asm volatile("st.shared.v4.u32 [%0], {%2, %3, %4, %5};\nst.shared.v4.u32 [%1], {%6, %7, %8, %9};" ::"r"(first), "r"(second),
                 "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(x[4]), "r"(x[5]), "r"(x[6]), "r"(x[7])
                 : "memory");
}

// Sixteen e2m1 codes to two chunks of 16 bytes.
__device__ __forceinline__ void decode_e2m1(u32 w, u32 v, u32 factor, u32 first, u32 second) {
    u32 x[8];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const u32 c = i ? v : w;
        x[4 * i] = ((c << 6) & 0x01c001c0u) | ((c << 12) & 0x80008000u);
        x[4 * i + 1] = ((c << 2) & 0x01c001c0u) | ((c << 8) & 0x80008000u);
        x[4 * i + 2] = ((c >> 2) & 0x01c001c0u) | ((c << 4) & 0x80008000u);
        x[4 * i + 3] = ((c >> 6) & 0x01c001c0u) | (c & 0x80008000u);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = multiply_bf16(x[i], factor);
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

// What a producer thread holds of one step: 64 bytes of codes of one record, and their scales.
struct Piece {
    uint4 code[4];
    u32 scale[4];
};

__device__ __forceinline__ uint4 load_codes(const u8* p) { return __ldg(reinterpret_cast<const uint4*>(p)); }

// One of eight warps; lanes 0..7 hold different rows, so that their stores go to different banks.
struct Producer {
    const Records &window, &extra;
    i64 query;
    int begin, extra_tiles, own_extra;  // first tile; tiles of the other pool in all; how many of them this block has
    int warp, lane;

    // Tiles of the other pool come first and take one step; a tile of the window takes two, of 32 keys.
    __device__ __forceinline__ bool in_window(int step) const { return step >= own_extra; }
    __device__ __forceinline__ int half(int step) const { return (step - own_extra) & 1; }
    __device__ __forceinline__ int tile(int step) const { return in_window(step) ? (step + own_extra) >> 1 : step; }
    __device__ __forceinline__ int row(int step) const {
        return (in_window(step) ? half(step) * 32 + (warp >> 1) * 8 : warp * 8) + (lane & 7);
    }
    __device__ __forceinline__ bool starts_tile(int step) const { return !in_window(step) || half(step) == 0; }
    __device__ __forceinline__ bool ends_tile(int step) const { return !in_window(step) || half(step) == 1; }
    __device__ __forceinline__ int first_step(int tile) const { return tile + max(tile - own_extra, 0); }
    __device__ __forceinline__ int slot(int step) const {
        int key = (begin + tile(step)) * TILE + row(step);
        return in_window(step) ? window.slot(query, key - extra_tiles * TILE) : extra.slot(query, key);
    }
    __device__ __forceinline__ void fetch(int step, int slot, Piece& piece) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) piece.code[i] = uint4{0, 0, 0, 0}, piece.scale[i] = 0;
        if (slot < 0) return;
        const int quarter = lane >> 3;
        if (in_window(step)) {
            const u8* record = window.record(slot);
            const int first = (warp & 1) * 16 + quarter;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                piece.code[i] = load_codes(record + 16 * (first + 4 * i));
                piece.scale[i] = record[512 + ((first + 4 * i) >> 1)];
            }
        } else {
            const u8* record = extra.record(slot);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                piece.code[i] = load_codes(record + 16 * (quarter + 4 * i));
                piece.scale[i] = *reinterpret_cast<const u16*>(record + 256 + 2 * (quarter + 4 * i));
            }
        }
    }
    __device__ __forceinline__ void store(int step, const Piece& piece, u32 tile_address) const {
        const int quarter = lane >> 3, swizzle = lane & 7;
        const u32 target = tile_address + row(step) * 128;
        if (in_window(step)) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int unit = (warp & 1) * 16 + quarter + 4 * i, chunk = (unit & 3) * 2;
                const u32 bits = piece.scale[i] == 255 ? 0x7fc0u : min(piece.scale[i] + 60, 254u) << 7, factor = bits | bits << 16;
                const u32 block = target + (unit >> 2) * BLOCK;
                decode_e4m3(piece.code[i], factor, block + ((chunk ^ swizzle) << 4), block + (((chunk + 1) ^ swizzle) << 4));
            }
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int unit = quarter + 4 * i, chunk = (unit & 1) * 4;
                u32 halves;
                asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(u16(piece.scale[i])));
                float first, second;
                asm("{\n.reg .b16 lo, hi;\nmov.b32 {lo, hi}, %2;\ncvt.f32.f16 %0, lo;\ncvt.f32.f16 %1, hi;\n}"
                    : "=f"(first), "=f"(second)
                    : "r"(halves));
                const u32 both = pack_bf16(first * TWO_66, second * TWO_66), f0 = prmt(both, both, 0x1010), f1 = prmt(both, both, 0x3232);
                const u32 block = target + (unit >> 1) * BLOCK;
                decode_e2m1(piece.code[i].x, piece.code[i].y, f0, block + ((chunk ^ swizzle) << 4), block + (((chunk + 1) ^ swizzle) << 4));
                decode_e2m1(piece.code[i].z, piece.code[i].w, f1, block + (((chunk + 2) ^ swizzle) << 4),
                            block + (((chunk + 3) ^ swizzle) << 4));
            }
        }
    }
};

// Put one step's piece into its tile; the last one of a tile says so.
__device__ __forceinline__ void put(Shared& s, const Producer& p, int step, int slot, const Piece& piece) {
    const int buffer = p.tile(step) & 1;
    p.store(step, piece, shared_address(s.keys[buffer]));
    if (p.lane < 8) s.bias[buffer][p.row(step)] = slot >= 0 ? 0.0f : NEG_INF;
    if (p.ends_tile(step)) {
        fence_async_shared();
        __syncwarp();
        if (p.lane == 0) barrier_arrive(shared_address(&s.full[buffer]));
    }
}

// Fill the tiles of this block but the second, records one step ahead, slots two.
__device__ __forceinline__ void produce(Shared& s, const Producer& p, int tiles) {
    const int before = p.first_step(1), skipped = tiles > 1 ? p.first_step(2) - before : 0, steps = p.first_step(tiles);
    if (steps == 0) return;
    auto after = [&](int step) { return step + 1 == before ? before + skipped : step + 1; };
    Piece piece;
    int step = 0, coming = after(0), slot = p.slot(0), next = coming < steps ? p.slot(coming) : -1;
    p.fetch(0, slot, piece);
#pragma unroll 1
    while (step < steps) {
        const int tile = p.tile(step);
        if (p.starts_tile(step)) barrier_wait(shared_address(&s.empty[tile & 1]), ((tile >> 1) & 1) ^ 1);
        put(s, p, step, slot, piece);
        step = coming, coming = after(step), slot = next;
        if (step < steps) p.fetch(step, slot, piece);
        next = coming < steps ? p.slot(coming) : -1;
    }
}

struct Output {
    u16* out;
    i64 stride_n, stride_h;
    float* lse;
    const float* sink;
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

// Heads of this block to shared memory, channels permuted, absent heads zero; and the second tile.
__device__ __forceinline__ void prepare(Shared& s, const u16* q, i64 stride_h, int heads, const Producer& p, int tiles) {
    const int first = p.first_step(1), steps = tiles > 1 ? p.first_step(2) - first : 0;
    int slot = steps > 0 ? p.slot(first) : -1, next = steps > 1 ? p.slot(first + 1) : -1;
    uint4 value[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        const int item = i * CONSUMERS + threadIdx.x, head = item >> 6;
        value[i] = head < heads ? load_codes(reinterpret_cast<const u8*>(q + head * stride_h + 8 * (item & 63))) : uint4{0, 0, 0, 0};
    }
    Piece piece;
    if (steps > 0) p.fetch(first, slot, piece);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        const int item = i * CONSUMERS + threadIdx.x, head = item >> 6, chunk = item & 63;
        const u32 target = shared_address(s.query) + (chunk >> 3) * BLOCK + head * 128 + (((chunk & 7) ^ (head & 7)) << 4);
        const uint4 v = value[i];
        store_shared4(target, prmt(v.x, v.z, 0x5410), prmt(v.x, v.z, 0x7632), prmt(v.y, v.w, 0x5410), prmt(v.y, v.w, 0x7632));
    }
    fence_async_shared();
#pragma unroll 1
    for (int i = 0; i < steps; ++i) {
        put(s, p, first + i, slot, piece);
        slot = next;
        if (i + 1 < steps) p.fetch(first + 1, slot, piece);
    }
}

// Probabilities of this group's own tile of a pair: packed fragments in `p`, also handed to the other group.
__device__ __forceinline__ void own_tile(Shared& s, const Consumer& c, float scale, bool paired, u32 (&p)[16], float (&top)[2], float (&sum)[2]) {
    float logit[32];
    const u64 q = wgmma_operand(shared_address(s.query), 16, 1024), k = wgmma_operand(shared_address(s.keys[c.group]), 16, 1024);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 32; ++i) {
        const int offset = ((i >> 2) * BLOCK + (i & 3) * 32) / 16;
        wgmma_shared(logit, q + offset, k + offset, i > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
    float high[2] = {NEG_INF, NEG_INF};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float2 bias = *reinterpret_cast<const float2*>(&s.bias[c.group][8 * i + 2 * c.quad]);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float &x = logit[4 * i + 2 * r], &y = logit[4 * i + 2 * r + 1];
            x = fmaf(x, scale, bias.x), y = fmaf(y, scale, bias.y);
            high[r] = fmaxf(high[r], fmaxf(x, y));
        }
    }
    if (c.group == 1) named_sync(2, CONSUMERS);  // the first tile's maxima
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float before = c.group == 1 ? s.top[0][c.row + 8 * r] : c.top[r];
        top[r] = fmaxf(before, quad_max(high[r]));
        if (c.quad == 0) s.top[c.group][c.row + 8 * r] = top[r];
    }
    if (c.group == 0 && paired) named_arrive(2, CONSUMERS);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float safe = finite(top[r]);
        sum[r] = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float x = exp2_fast(logit[4 * i + 2 * r] - safe), y = exp2_fast(logit[4 * i + 2 * r + 1] - safe);
            sum[r] += x + y;
            p[2 * i + r] = pack_bf16(x, y);
        }
    }
    const u32 target = shared_address(s.weights[c.group]) + 16 * c.thread;
#pragma unroll
    for (int i = 0; i < 4; ++i) store_shared4(target + 2048 * i, p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3]);
}

// o = o * 2^(old top - new top) + p * (this group's channels of the tile).
__device__ __forceinline__ void accumulate(Shared& s, Consumer& c, int buffer, const u32 (&p)[16], const float (&top)[2]) {
    float factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        factor[r] = exp2_fast(c.top[r] - finite(top[r]));
        c.top[r] = top[r];
        c.sum[r] *= factor[r];
    }
    if (__any_sync(~0u, factor[0] != 1.0f || factor[1] != 1.0f)) {
#pragma unroll
        for (int i = 0; i < 128; ++i) c.value(i) *= factor[(i >> 1) & 1];
    }
    const u64 v = wgmma_operand(shared_address(s.keys[buffer]) + c.group * 4 * BLOCK, BLOCK, 1024);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int k = i & 3, half = i >> 2;
        wgmma_across(c.o[half], p[4 * k], p[4 * k + 1], p[4 * k + 2], p[4 * k + 3], v + (k * 2048 + half * 2 * BLOCK) / 16, 1);
    }
    wgmma_commit();
    wgmma_wait<0>();
    if ((c.thread & 31) == 0) barrier_arrive(shared_address(&s.empty[buffer]));
}

__device__ __forceinline__ void consume(Shared& s, Consumer& c, int tiles, float scale) {
    for (int begin = 0; begin < tiles; begin += 2) {
        const bool paired = begin + 1 < tiles;
        u32 p[16];
        float top[2], sum[2];
        const bool own = c.group == 0 || paired;
        if (own) {
            barrier_wait(shared_address(&s.full[c.group]), (begin >> 1) & 1);
            own_tile(s, c, scale, paired, p, top, sum);
            if (c.group == 0) named_arrive(3, CONSUMERS);
            else named_arrive(4, CONSUMERS);
        }
        u32 other[16];
        float other_top[2];
        // The first tile of the pair, then the second; each group has one of them at hand.
        if (c.group == 0) {
            accumulate(s, c, 0, p, top);
            c.sum[0] += sum[0], c.sum[1] += sum[1];
        }
        if (c.group == 1 || paired) {
            const int from = 1 - c.group;
            if (c.group == 1) named_sync(3, CONSUMERS);
            else named_sync(4, CONSUMERS);
            const u32 source = shared_address(s.weights[from]) + 16 * c.thread;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const uint4 four = load_shared4(source + 2048 * i);
                other[4 * i] = four.x, other[4 * i + 1] = four.y, other[4 * i + 2] = four.z, other[4 * i + 3] = four.w;
            }
            other_top[0] = s.top[from][c.row], other_top[1] = s.top[from][c.row + 8];
            accumulate(s, c, from, other, other_top);
        }
        if (c.group == 1 && paired) {
            accumulate(s, c, 1, p, top);
            c.sum[0] += sum[0], c.sum[1] += sum[1];
        }
    }
}

// Write COLUMNS channels, the values FIRST.. of this group's output, scaled, through shared memory.
template <int COLUMNS, int FIRST>
__device__ __forceinline__ void write_slice(Shared& s, Consumer& c, const float (&scale)[2], const Output& to, int first_channel) {
    constexpr int CHUNKS = COLUMNS / 8;
    const u32 staging = shared_address(s.query) + c.group * (TILE_BYTES / 2);
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = c.row + 8 * r;
            store_shared(staging + row * 512 + ((i ^ (row & 7)) << 4) + 4 * c.quad,
                         pack_bf16(c.value(FIRST + 4 * i + 2 * r) * scale[r], c.value(FIRST + 4 * i + 2 * r + 1) * scale[r]));
        }
    }
    named_sync(5 + c.group, 128);
#pragma unroll 4
    for (int item = c.thread; item < 64 * CHUNKS; item += 128) {
        const int row = item / CHUNKS, chunk = item % CHUNKS, head = to.first_head + row;
        const uint4 v = load_shared4(staging + row * 512 + ((chunk ^ (row & 7)) << 4));
        if (head < to.heads)
            *reinterpret_cast<uint4*>(to.out + to.query * to.stride_n + head * to.stride_h + first_channel + 8 * chunk) =
                uint4{prmt(v.x, v.y, 0x5410), prmt(v.z, v.w, 0x5410), prmt(v.x, v.y, 0x7632), prmt(v.z, v.w, 0x7632)};
    }
}

// Factors that turn the accumulator of keys times 2^-60 into the result; also stores the log-sum-exp.
__device__ __forceinline__ void finish_rows(const Consumer& c, const float (&top)[2], const float (&total)[2], const Output& to, bool write_lse,
                                   float (&scale)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int head = to.first_head + c.row + 8 * r;
        float norm = total[r];
        if (to.sink && head < to.heads) norm += exp2_fast(to.sink[head] * LOG2E - finite(top[r]));
        scale[r] = total[r] > 0.0f ? TWO_60 / norm : 0.0f;
        if (write_lse && c.quad == 0 && head < to.heads)
            to.lse[to.query * to.heads + head] = total[r] > 0.0f ? (finite(top[r]) + __log2f(total[r])) / LOG2E : -NEG_INF;
    }
}

// Slice I of this group's channels: to its owner, or, in its owner, the sum over the cluster, written out.
template <int SIZE, int I>
__device__ __forceinline__ void send_slice(Consumer& c, u32 area, int rank) {
    constexpr int VALUES = 256 / SIZE, AREA = VALUES * 512;
    const int target = c.group * (SIZE / 2) + I;
    if (target != rank) {
        const u32 address = peer_address(area + rank * AREA, target);
#pragma unroll
        for (int j = I * VALUES; j < (I + 1) * VALUES; j += 4)
            peer_store4(address + (j - I * VALUES) * 512, c.value(j), c.value(j + 1), c.value(j + 2), c.value(j + 3));
    }
}
template <int SIZE, int I>
__device__ __forceinline__ void collect_slice(Shared& s, Consumer& c, u32 area, int rank, const float (&scale)[2], const Output& to) {
    constexpr int VALUES = 256 / SIZE, AREA = VALUES * 512;
    if (c.group * (SIZE / 2) + I == rank) {
#pragma unroll 1
        for (int step = 1; step < SIZE; ++step) {
            const u32 address = area + (rank + step) % SIZE * AREA;
#pragma unroll
            for (int j = I * VALUES; j < (I + 1) * VALUES; j += 4) {
                const uint4 v = load_shared4(address + (j - I * VALUES) * 512);
                c.value(j) += __uint_as_float(v.x), c.value(j + 1) += __uint_as_float(v.y);
                c.value(j + 2) += __uint_as_float(v.z), c.value(j + 3) += __uint_as_float(v.w);
            }
        }
        write_slice<512 / SIZE, I * VALUES>(s, c, scale, to, rank * (512 / SIZE));
    }
}

// Blocks of a cluster hold results of different keys: block `rank` collects slice `rank` of the channels from all.
template <int SIZE>
__device__ __forceinline__ void merge(Shared& s, Consumer& c, int rank, const Output& to) {
    float top[2], total[2], scale[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const u32 at = shared_address(&s.final_top[c.row + 8 * r]), sum_at = shared_address(&s.final_sum[c.row + 8 * r]);
        top[r] = NEG_INF, total[r] = 0.0f;
        for (int i = 0; i < SIZE; ++i) top[r] = fmaxf(top[r], __uint_as_float(peer_load(peer_address(at, i))));
        for (int i = 0; i < SIZE; ++i)
            total[r] += __uint_as_float(peer_load(peer_address(sum_at, i))) *
                        exp2_fast(__uint_as_float(peer_load(peer_address(at, i))) - finite(top[r]));
        scale[r] = exp2_fast(c.top[r] - finite(top[r]));
    }
#pragma unroll
    for (int i = 0; i < 128; ++i) c.value(i) *= scale[(i >> 1) & 1];
    const u32 area = shared_address(s.keys[0]) + 16 * c.thread;
    send_slice<SIZE, 0>(c, area, rank);
    if constexpr (SIZE > 2) send_slice<SIZE, 1>(c, area, rank);
    if constexpr (SIZE > 4) send_slice<SIZE, 2>(c, area, rank), send_slice<SIZE, 3>(c, area, rank);
    cluster_sync();
    finish_rows(c, top, total, to, rank == 0 && c.group == 0, scale);
    collect_slice<SIZE, 0>(s, c, area, rank, scale, to);
    if constexpr (SIZE > 2) collect_slice<SIZE, 1>(s, c, area, rank, scale, to);
    if constexpr (SIZE > 4) {
        collect_slice<SIZE, 2>(s, c, area, rank, scale, to);
        collect_slice<SIZE, 3>(s, c, area, rank, scale, to);
    }
}

// Grid (cluster size, blocks of 64 heads, queries).
extern "C" __global__ void __launch_bounds__(THREADS, 1)
sparse_mla(const u16* q, i64 q_stride_n, i64 q_stride_h,
           const u8* window, const void* window_slots, i64 w_stride_page, i64 w_stride_row, i64 w_slots_stride, int w_keys, int w_rows,
           int w_page, int w_shift,
           const u8* extra, const void* extra_slots, i64 x_stride_page, i64 x_stride_row, i64 x_slots_stride, int x_keys, int x_rows,
           int x_page, int x_shift,
           const float* sink, u16* out, i64 out_stride_n, i64 out_stride_h, float* lse, int heads, int slots_are_long, float scale_log2) {
    extern __shared__ u8 memory[];
    Shared& s = *reinterpret_cast<Shared*>(memory + ((1024 - (shared_address(memory) & 1023)) & 1023));
    const int rank = cluster_rank(), size = cluster_size(), warp = threadIdx.x >> 5;
    const i64 query = blockIdx.z;
    const int extra_tiles = (x_keys + TILE - 1) / TILE, all = extra_tiles + (w_keys + TILE - 1) / TILE;
    const int begin = all * rank / size, tiles = all * (rank + 1) / size - begin;
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; ++i) {
            barrier_init(shared_address(&s.full[i]), 8);
            barrier_init(shared_address(&s.empty[i]), 8);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    wait_for_kernels();
    const Records w{window, window_slots, w_stride_page, w_stride_row, w_slots_stride, w_keys, w_rows, w_page, w_shift, slots_are_long};
    const Records x{extra, extra_slots, x_stride_page, x_stride_row, x_slots_stride, x_keys, x_rows, x_page, x_shift, slots_are_long};
    const Producer producer{w, x, query, begin, extra_tiles, min(max(extra_tiles - begin, 0), tiles), warp & 7, int(threadIdx.x & 31)};
    if (warp >= CONSUMERS / 32) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
        produce(s, producer, tiles);
        if (size > 1) {
            cluster_sync();
            cluster_sync();
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 200;");
        const int first_head = blockIdx.y * 64, thread = threadIdx.x & 127, lane = threadIdx.x & 31;
        prepare(s, q + query * q_stride_n + first_head * q_stride_h, q_stride_h, heads - first_head, producer, tiles);
        named_sync(1, CONSUMERS);
        Consumer c;
        c.group = warp >> 2, c.thread = thread, c.row = 16 * (warp & 3) + (lane >> 2), c.quad = lane & 3;
#pragma unroll
        for (int i = 0; i < 128; ++i) c.value(i) = 0.0f;
        c.top[0] = c.top[1] = NEG_INF, c.sum[0] = c.sum[1] = 0.0f;
        consume(s, c, tiles, scale_log2 * TWO_60);
        float total[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float own = quad_sum(c.sum[r]);
            if (c.quad == 0) s.sum[c.group][c.row + 8 * r] = own;
        }
        named_sync(1, CONSUMERS);
#pragma unroll
        for (int r = 0; r < 2; ++r) total[r] = s.sum[0][c.row + 8 * r] + s.sum[1][c.row + 8 * r];
        const Output to{out, out_stride_n, out_stride_h, lse, sink, heads, first_head, query};
        if (size == 1) {
            float scale[2];
            finish_rows(c, c.top, total, to, c.group == 0, scale);
            write_slice<256, 0>(s, c, scale, to, c.group * 256);
            return;
        }
        if (c.group == 0 && c.quad == 0) {
#pragma unroll
            for (int r = 0; r < 2; ++r) s.final_top[c.row + 8 * r] = c.top[r], s.final_sum[c.row + 8 * r] = total[r];
        }
        cluster_sync();
        if (size == 2) merge<2>(s, c, rank, to);
        else if (size == 4) merge<4>(s, c, rank, to);
        else merge<8>(s, c, rank, to);
    }
}
