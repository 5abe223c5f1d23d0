#include "wgmma.cuh"
// Indexer scores over paged MXFP4 keys: 64 bytes of e2m1 codes and 4 scales a key, heads <= 32, 128 channels.
//
// A block scores a run of tiles of 128 keys for one query; each of its four warps brings and scores 32 of them, and shares only
// the query. Keys are the register operand of the MMA: thread t of four owns channels 32 t .. 32 t + 31 of its keys, one scale
// group each, so no code crosses threads. A code's bits, put where a bf16 has them, are the value times 2^-126; one multiplication
// by a power of two makes it the key times 2^-32. The query is multiplied by 2^32 and its channels sit in the order in which the
// codes come out: products are those of the reference, exactly (but for keys below 2^-100, which may count as zero).

// BLOCKS: of a multiprocessor; STAGES: tiles on their way.
constexpr int TILE = 128, OWN = 32, RECORD = 68, THREADS = 128, PAGES = 512;
constexpr int WIDEST = 160;  // a scale byte up to which one factor is a bf16

// A warp's keys of one tile, and their barrier.
struct Slot {
    alignas(128) u8 keys[OWN * RECORD];
    u64 full;
};

struct Shared {
    alignas(1024) u8 query[2 * 32 * 128];
    Slot slot[STAGES][4];
    u32 place[PAGES];  // of every piece in the pool, in units of 16 bytes
};
constexpr int STAGE_BYTES = sizeof(Slot) * 4, FULL = OWN * RECORD;

// A value that the compiler keeps instead of computing it again.
__device__ __forceinline__ u32 kept(u32 x) {
    asm volatile("" : "+r"(x));
    return x;
}

__device__ __forceinline__ void multiply_warp(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Eight codes to four pairs (code p, code p + 4). A product with two bits set puts sign and magnitude in place at once.
__device__ __forceinline__ void decode(u32 w, u32 factor, u32 (&pair)[4]) {
    const u32 v = w >> 8;
    pair[0] = multiply_bf16(((w & 0x000f000fu) * 0x1040u) & 0x81c081c0u, factor);
    pair[1] = multiply_bf16(((w & 0x00f000f0u) * 0x0104u) & 0x81c081c0u, factor);
    pair[2] = multiply_bf16(((v & 0x000f000fu) * 0x1040u) & 0x81c081c0u, factor);
    pair[3] = multiply_bf16(((v & 0x00f000f0u) * 0x0104u) & 0x81c081c0u, factor);
}

// Query of one head and channel group (thread 4 head + group), times 2^32, into the MMA's layout.
__device__ __forceinline__ void place_query(Shared& s, const u16* q, i64 stride_h, int heads) {
    const int head = threadIdx.x >> 2, group = threadIdx.x & 3;
    u32 word[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) word[i] = 0;
    if (head < heads) {
        const u16* source = q + head * stride_h + 32 * group;
        if ((reinterpret_cast<u64>(source) & 15) == 0) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const uint4 four = reinterpret_cast<const uint4*>(source)[i];
                word[4 * i] = four.x, word[4 * i + 1] = four.y, word[4 * i + 2] = four.z, word[4 * i + 3] = four.w;
            }
        } else {
#pragma unroll
            for (int i = 0; i < 16; ++i) word[i] = source[2 * i] | (u32(source[2 * i + 1]) << 16);
        }
    }
    const u32 base = shared_address(s.query) + head * 128;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int p = 0; p < 4; ++p) {
            // Channels 8 j + p and 8 j + p + 4 of the group: contraction index 16 step + 2 group + 8 (p & 1).
            const u32 a = word[(8 * j + p) >> 1], b = word[(8 * j + p + 4) >> 1];
            const u32 both = multiply_bf16(prmt(a, b, p & 1 ? 0x7632 : 0x5410), 0x4f804f80u);
            const int step = 2 * j + (p >> 1), byte = 2 * (16 * step + 2 * group + 8 * (p & 1)), chunk = (byte & 127) >> 4;
            store_shared(base + (byte >> 7) * 4096 + ((chunk ^ (head & 7)) << 4) + (byte & 15), both);
        }
    }
}

// What a lane brings of each tile: piece `lane` of the warp's 32 keys, a page or a part of one.
struct Copier {
    const u8* pool;
    u32 target, full, place, step;  // shared addresses; from tile to tile `place` goes on by `step`
    int bytes;
    bool mine, leads;

    __device__ __forceinline__ void copy(u32 slot) {
        if (leads) barrier_expect(full + slot, OWN * RECORD);
        __syncwarp();
        if (mine) copy_bulk(target + slot, pool + u64(load_shared(place)) * 16, bytes, full + slot);
        place += step;
    }
};

struct Keys {
    u32 code[4][4], factor[4], extra;  // of keys g' + 4 r; `extra`: a byte each, the exponent that the factor lacks
    bool wide;                         // whether any of the warp's has one

    __device__ __forceinline__ void load(u32 codes, u32 scales) {
        u32 scale[4];
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            asm volatile("ld.shared.u8 %0, [%1];" : "=r"(scale[r]) : "r"(scales + 4 * r * RECORD) : "memory");
#pragma unroll
            for (int j = 0; j < 4; ++j) code[r][j] = load_shared(codes + 4 * r * RECORD + 4 * j);
        }
        wide = __any_sync(~0u, max(max(scale[0], scale[1]), max(scale[2], scale[3])) > WIDEST);
        extra = 0;
        if (wide) {
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                extra |= (max(scale[r], WIDEST) - WIDEST) << (8 * r);
                scale[r] = min(scale[r], WIDEST);
            }
        }
#pragma unroll
        for (int r = 0; r < 4; ++r) factor[r] = scale[r] * 0x00800080u + (126 - 32) * 0x00800080u;
    }

    // Words 2 half and 2 half + 1 of keys r and r + 1 as the MMA's left operand, four steps of 16 channels.
    __device__ __forceinline__ void operand(u32 (&a)[4][4], int r, int half) const {
#pragma unroll
        for (int j = 0; j < 2; ++j)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                u32 pair[4];
                decode(code[r + i][2 * half + j], factor[r + i], pair);
                a[2 * j][i] = pair[0];
                a[2 * j][2 + i] = pair[1];
                a[2 * j + 1][i] = pair[2];
                a[2 * j + 1][2 + i] = pair[3];
            }
        if (wide) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const u32 more = (extra >> (8 * (r + i))) & 255, second = more == 255 - WIDEST ? 0x7fff7fffu : (127 + more) * 0x00800080u;
#pragma unroll
                for (int k = 0; k < 4; ++k) a[k][i] = multiply_bf16(a[k][i], second), a[k][2 + i] = multiply_bf16(a[k][2 + i], second);
            }
        }
    }
};

// Products of 16 keys and 32 heads to their sums over the heads, in every column: rounded to bf16 before the ReLU, as the reference
// rounds them.
__device__ __forceinline__ void add_heads(float (&sum)[4], const float (&d)[16], const u32 (&w)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] = 0.0f;
#pragma unroll
    for (int i = 0; i < 2; ++i)
        multiply_warp(sum, pack_bf16_relu(d[8 * i], d[8 * i + 1]), pack_bf16_relu(d[8 * i + 2], d[8 * i + 3]),
                      pack_bf16_relu(d[8 * i + 4], d[8 * i + 5]), pack_bf16_relu(d[8 * i + 6], d[8 * i + 7]), w[2 * i], w[2 * i + 1]);
}

__device__ __forceinline__ void hold(float (&d)[16]) {
    asm volatile("" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
                 "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])::"memory");
}

__device__ __forceinline__ void multiply_half(float (&d)[16], const u32 (&a)[4][4], u64 query, int half) {
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) wgmma_bf16(d, a[k][0], a[k][1], a[k][2], a[k][3], query + (half * 4096 + k * 32) / 16, half || k);
    wgmma_commit();
}

// Grid (runs of `tiles_each` tiles, queries); a run has at most PAGES pieces.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
indexer_logits(const u16* q, i64 q_stride_t, i64 q_stride_h, const u16* weights, i64 w_stride, const u8* pool, i64 stride_page,
               const int* table, i64 table_stride, const void* rows, int rows_are_long, const int* visible, float* out,
               i64 out_stride, int heads, int max_entries, int page_shift, int tiles_each) {
    extern __shared__ __align__(1024) u8 memory[];
    Shared& s = *reinterpret_cast<Shared*>(memory);
    wait_for_kernels();
    const int query = blockIdx.y, lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const int first = blockIdx.x * tiles_each, last = min(first + tiles_each, (max_entries + TILE - 1) / TILE);
    const int seen = min(visible[query], max_entries);
    const i64 row = rows_are_long ? static_cast<const i64*>(rows)[query] : static_cast<const int*>(rows)[query];
    const int end = max(first, min(last, (seen + TILE - 1) / TILE));
    out += query * out_stride;
    const int piece = min(page_shift, 7);
    for (int i = threadIdx.x; i < (end - first) << (7 - piece); i += THREADS) {
        // Keys that nobody sees are brought from the first piece.
        const int key = first * TILE + (i << piece), page_key = key < seen ? key : first * TILE;
        const i64 page = table[row * table_stride + (page_key >> page_shift)];
        s.place[i] = u32((page * stride_page + (page_key & ((1 << page_shift) - 1)) * RECORD) >> 4);
    }
    if (threadIdx.x < 4 * STAGES) barrier_init(shared_address(&s.slot[0][threadIdx.x].full), 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    __syncthreads();
    const u32 slots = kept(shared_address(&s.slot[0][warp]));
    const int shift = min(page_shift, 5), at = lane << shift, key_in_tile = warp * OWN + at;
    Copier copier{pool + (key_in_tile & ((1 << piece) - 1)) * RECORD, slots + at * RECORD, slots + FULL,
                  shared_address(s.place + (key_in_tile >> piece)), 4u << (7 - piece), RECORD << shift, at < OWN, lane == 0};
    for (int i = 0; i < STAGES && first + i < end; ++i) copier.copy(i * STAGE_BYTES);
    u32 w[4] = {0, 0, 0, 0};
    if (first < end) {
        place_query(s, q + query * q_stride_t, q_stride_h, heads);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int head = 8 * i + 2 * t;
            if (head < heads) w[i] = weights[query * w_stride + head];
            if (head + 1 < heads) w[i] |= u32(weights[query * w_stride + head + 1]) << 16;
        }
    }
    fence_async_shared();
    __syncthreads();

    // Each thread's first key of the warp's: no two threads of a warp meet in a bank.
    const int own = (g & 3) + 16 * (g >> 2);
    const u32 codes = kept(slots + own * RECORD + 16 * t), scales = kept(slots + own * RECORD + 64 + t), full = kept(slots + FULL);
    const u64 operand = wgmma_operand(shared_address(s.query), 16, 1024);
    int key = first * TILE + warp * OWN + own + 4 * t;
    float* target = out + key;
    u32 slot = 0, phase = 0;
    for (int left = end - first; left > 0; --left) {
        barrier_wait(full + slot, phase);
        Keys k;
        k.load(codes + slot, scales + slot);
        float sum[2][4];
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            float d[16];
            u32 a[2][4][4];
            k.operand(a[0], 2 * m, 0);
            k.operand(a[1], 2 * m, 1);
            multiply_half(d, a[0], operand, 0);
            multiply_half(d, a[1], operand, 1);
            wgmma_wait<0>();
            hold(d);
            add_heads(sum[m], d, w);
        }
        __syncwarp();
        if (left > STAGES) copier.copy(slot);  // every lane has used what it read
        const float low = t & 1 ? sum[0][2] : sum[0][0], high = t & 1 ? sum[1][2] : sum[1][0];
        const float score = __uint_as_float(pack_bf16(0.0f, t & 2 ? high : low));
        if (key < max_entries) *target = key < seen ? score : NEG_INF;
        key += TILE, target += TILE;
        slot += STAGE_BYTES;
        if (slot == STAGES * STAGE_BYTES) slot = 0, phase ^= 1;
    }
    for (int key = end * TILE + threadIdx.x; key < min(last * TILE, max_entries); key += THREADS) out[key] = NEG_INF;
}
