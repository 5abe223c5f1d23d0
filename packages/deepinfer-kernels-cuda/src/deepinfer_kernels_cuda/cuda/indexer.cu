#include "wgmma.cuh"
// Indexer scores over paged MXFP4 keys: 64 bytes of e2m1 codes and 4 scales a key, heads <= 32, 128 channels.
//
// A block scores a run of tiles of 64 keys for one query. Keys are the register operand of the MMA: thread t of four owns
// channels 32 t .. 32 t + 31 of two keys, one scale group each, so no code crosses threads. A code becomes the top byte of a
// half through a table of eight bytes (`prmt`) that holds 0, 0.5, ... 6 times 2^13 and the group's scale relative to the
// record's largest one: exact, groups more than 2^26 below the largest count as zero. The query is scaled by a power of two
// a head, its channels sit in the order in which the codes come out.

constexpr int TILE = 64, STAGES = 4, RECORD = 68, THREADS = 128, PAGES = 512;

struct Shared {
    alignas(1024) u8 query[2 * 32 * 128];
    alignas(128) u8 keys[STAGES][TILE * RECORD];
    alignas(8) u64 full[STAGES], empty[STAGES];
    float weight[32];
    int pages[PAGES];
};

__device__ __forceinline__ void multiply_heads(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Eight codes to four pairs (code p, code p + 4) of halves.
__device__ __forceinline__ void decode(u32 word, u32 low, u32 high, u32 (&pair)[4]) {
    u32 index = word & 0x77777777u;
    u32 first = prmt(low, high, index), second = prmt(low, high, index >> 16);
    pair[0] = prmt(first, second, 0x4808) | ((word << 12) & 0x80008000u);
    pair[1] = prmt(first, second, 0x5818) | ((word << 8) & 0x80008000u);
    pair[2] = prmt(first, second, 0x6828) | ((word << 4) & 0x80008000u);
    pair[3] = prmt(first, second, 0x7838) | (word & 0x80008000u);
}

// Byte tables of a scale group `below` powers of two under the record's largest.
__device__ __forceinline__ void scaled_table(u32 below, u32& low, u32& high) {
    low = below > 26 ? 0 : 0x72706c00u - below * 0x04040400u;
    high = below > 26 ? 0 : 0x7a787674u - below * 0x04040404u;
}

// Query of one head and channel group (thread 4 head + group): scaled to a largest value in [1, 2), into the MMA's layout.
__device__ __forceinline__ void place_query(Shared& s, const u16* q, i64 stride_h, int heads, const u16* weights) {
    int head = threadIdx.x >> 2, group = threadIdx.x & 3;
    u32 word[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) word[i] = 0;
    if (head < heads) {
        const u16* source = q + head * stride_h + 32 * group;
#pragma unroll
        for (int i = 0; i < 16; ++i) word[i] = source[2 * i] | (u32(source[2 * i + 1]) << 16);
    }
    u32 largest = 0;
#pragma unroll
    for (int i = 0; i < 16; ++i) largest = max(largest, max(word[i] & 0x7fffu, (word[i] >> 16) & 0x7fffu));
    largest = max(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = max(largest, __shfl_xor_sync(~0u, largest, 2));
    int exponent = min(max(int(largest >> 7), 1), 253);
    float scale = __uint_as_float(u32(254 - exponent) << 23);
    u32 base = shared_address(s.query) + head * 128;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int p = 0; p < 4; ++p) {
            // Channels 8 j + p and 8 j + p + 4 of the group: contraction index 16 step + 2 group + 8 (p & 1).
            u32 a = word[(8 * j + p) >> 1], b = word[(8 * j + p + 4) >> 1];
            float x = (p & 1 ? bf16_high(a) : bf16_low(a)) * scale, y = (p & 1 ? bf16_high(b) : bf16_low(b)) * scale;
            u32 both;
            asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(y), "f"(x));
            int step = 2 * j + (p >> 1), byte = 2 * (16 * step + 2 * group + 8 * (p & 1));
            int chunk = (byte & 127) >> 4;
            store_shared(base + (byte >> 7) * 4096 + ((chunk ^ (head & 7)) << 4) + (byte & 15), both);
        }
    }
    if (group == 0) {
        float weight = head < heads ? bf16_low(weights[head]) : 0.0f;
        s.weight[head] = weight * __uint_as_float(u32(exponent) << 23) * 0.0001220703125f;  // 2^-13 of the tables
    }
}

// One warp brings the keys: its lane i copies piece i of a tile, a page or a part of one.
struct Copier {
    const u8* pool;
    i64 stride;
    int page_shift, first, seen;

    __device__ __forceinline__ void copy(Shared& s, int stage, int tile) const {
        const int shift = min(page_shift, 6), lane = threadIdx.x & 31, at = lane << shift, key = tile * TILE, bytes = RECORD << shift;
        const u32 bar = shared_address(&s.full[stage]);
        if (lane == 0) barrier_expect(bar, min((seen - key + (1 << shift) - 1) >> shift, TILE >> shift) * bytes);
        __syncwarp();
        if (at < TILE && key + at < seen) {
            const int page = s.pages[((tile - first) << (6 - shift)) + lane];
            const int offset = ((key + at) & ((1 << page_shift) - 1)) * RECORD;
            copy_bulk(shared_address(s.keys[stage]) + at * RECORD, pool + page * stride + offset, bytes, bar);
        }
    }
};

// Grid (runs of `tiles_each` tiles, queries); a run has at most PAGES pieces.
extern "C" __global__ void __launch_bounds__(THREADS, 6)
indexer_logits(const u16* q, i64 q_stride_t, i64 q_stride_h, const u16* weights, i64 w_stride, const u8* pool, i64 stride_page,
               const int* table, i64 table_stride, const void* rows, int rows_are_long, const int* visible, float* out,
               i64 out_stride, int heads, int max_entries, int page_shift, int tiles_each) {
    __shared__ Shared s;
    const int query = blockIdx.y, lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const int first = blockIdx.x * tiles_each, last = min(first + tiles_each, (max_entries + TILE - 1) / TILE);
    const int seen = min(visible[query], max_entries);
    const i64 row = rows_are_long ? static_cast<const i64*>(rows)[query] : static_cast<const int*>(rows)[query];
    const int end = max(first, min(last, (seen + TILE - 1) / TILE));
    out += query * out_stride;
    if (threadIdx.x < STAGES) {
        barrier_init(shared_address(&s.full[threadIdx.x]), 1);
        barrier_init(shared_address(&s.empty[threadIdx.x]), 4);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    __syncthreads();
    const Copier copier{pool, stride_page, page_shift, first, seen};
    const int shift = min(page_shift, 6);
    for (int i = threadIdx.x; i < (end - first) << (6 - shift); i += THREADS) {
        const int key = first * TILE + (i << shift);
        s.pages[i] = key < seen ? table[row * table_stride + (key >> page_shift)] : -1;
    }
    __syncthreads();
    if (warp == 0)
        for (int i = 0; i < STAGES && first + i < end; ++i) copier.copy(s, i, first + i);
    if (first < end) place_query(s, q + query * q_stride_t, q_stride_h, heads, weights + query * w_stride);
    fence_async_shared();
    __syncthreads();

    // Head weights as the second operand of the last product: only column 0 is used.
    u32 w[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) w[i] = g == 0 && first < end ? pack_bf16(s.weight[8 * i + 2 * t], s.weight[8 * i + 2 * t + 1]) : 0;
    const u64 operand = wgmma_operand(shared_address(s.query), 16, 1024);
    const int own = 16 * warp + g;

    for (int tile = first; tile < end; ++tile) {
        const int step = tile - first, stage = step % STAGES;
        barrier_wait(shared_address(&s.full[stage]), (step / STAGES) & 1);
        u32 code[2][4], scale[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            u32 record = shared_address(s.keys[stage]) + (own + 8 * r) * RECORD;
#pragma unroll
            for (int j = 0; j < 4; ++j) code[r][j] = load_shared(record + 16 * t + 4 * j);
            scale[r] = load_shared(record + 64);
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(shared_address(&s.empty[stage]));
        if (warp == 0 && step > 0 && tile - 1 + STAGES < end) {
            const int freed = (step - 1) % STAGES;
            barrier_wait(shared_address(&s.empty[freed]), ((step - 1) / STAGES) & 1);
            copier.copy(s, freed, tile - 1 + STAGES);
        }
        u32 a[8][4], low[2], high[2], top[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const u32 mine = prmt(scale[r], 0, 0x4440 + t), two = __vmaxu2(scale[r] & 0x00ff00ffu, (scale[r] >> 8) & 0x00ff00ffu);
            top[r] = max(two & 0xffffu, two >> 16);
            scaled_table(top[r] - mine, low[r], high[r]);
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                u32 pair[4];
                decode(code[r][j], low[r], high[r], pair);
                a[2 * j][r] = pair[0];
                a[2 * j][2 + r] = pair[1];
                a[2 * j + 1][r] = pair[2];
                a[2 * j + 1][2 + r] = pair[3];
            }
        }
        float d[16];
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 8; ++k)
            wgmma_f16(d, a[k][0], a[k][1], a[k][2], a[k][3], operand + ((k >> 2) * 4096 + (k & 3) * 32) / 16, k > 0);
        wgmma_commit();
        wgmma_wait<0>();
        // Products are rounded to bf16 before the ReLU, as the reference rounds them.
        float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int i = 0; i < 2; ++i)
            multiply_heads(sum, pack_bf16_relu(d[8 * i], d[8 * i + 1]), pack_bf16_relu(d[8 * i + 2], d[8 * i + 3]),
                           pack_bf16_relu(d[8 * i + 4], d[8 * i + 5]), pack_bf16_relu(d[8 * i + 6], d[8 * i + 7]), w[2 * i],
                           w[2 * i + 1]);
        if (t == 0) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                int key = tile * TILE + own + 8 * r;
                u32 bits = top[r] == 255 ? 0x7fc00000u : top[r] == 0 ? 0x00400000u : top[r] << 23;
                float score = bf16_low(pack_bf16(sum[2 * r] * __uint_as_float(bits), 0.0f));
                if (key < max_entries) out[key] = key < seen ? score : NEG_INF;
            }
        }
    }
    for (int key = end * TILE + threadIdx.x; key < min(last * TILE, max_entries); key += THREADS) out[key] = NEG_INF;
}
