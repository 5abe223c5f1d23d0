#include "wgmma.cuh"
// Indexer scores over paged MXFP4 keys: 64 bytes of e2m1 codes and 4 scales a key, heads <= 32, 128 channels.
//
// A block scores a run of tiles of 64 keys for one query. Keys are the register operand of the MMA: thread t of four owns
// channels 32 t .. 32 t + 31 of two keys, one scale group each, so no code crosses threads. A code's bits, shifted into place,
// are a half of the value times 2^-14; one multiplication brings the group's scale relative to the record's largest one: exact,
// groups more than 2^24 below the largest count as zero. The query is scaled by a power of two a head, its channels sit in the
// order in which the codes come out.

constexpr int TILE = 64, STAGES = 4, RECORD = 68, THREADS = 128, PAGES = 512;

struct Shared {
    alignas(1024) u8 query[2 * 32 * 128];
    alignas(128) u8 keys[STAGES][TILE * RECORD];
    alignas(8) u64 full[STAGES], empty[STAGES];
    float weight[32];
    u32 place[PAGES];  // of every piece in the pool, in units of 16 bytes
};

__device__ __forceinline__ void multiply_heads(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ u32 multiply_half(u32 a, u32 b) {
    u32 d;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

// Eight codes to four pairs (code p, code p + 4) of halves.
__device__ __forceinline__ void decode(u32 w, u32 factor, u32 (&pair)[4]) {
    pair[0] = multiply_half(((w << 9) & 0x0e000e00u) | ((w << 12) & 0x80008000u), factor);
    pair[1] = multiply_half(((w << 5) & 0x0e000e00u) | ((w << 8) & 0x80008000u), factor);
    pair[2] = multiply_half(((w << 1) & 0x0e000e00u) | ((w << 4) & 0x80008000u), factor);
    pair[3] = multiply_half(((w >> 3) & 0x0e000e00u) | (w & 0x80008000u), factor);
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
        s.weight[head] = weight * __uint_as_float(u32(exponent) << 23) * 0.5f;  // keys carry 2^1
    }
}

// One warp brings the keys: its lane i copies piece i of a tile, a page or a part of one.
struct Copier {
    const u8* pool;
    int shift, first, seen, lane;

    __device__ __forceinline__ void copy(Shared& s, u32 keys, u32 bar, int tile) const {
        const int left = seen - tile * TILE, at = lane << shift, bytes = RECORD << shift;
        if (lane == 0) barrier_expect(bar, min((left + (1 << shift) - 1) >> shift, TILE >> shift) * bytes);
        __syncwarp();
        if (at < min(left, TILE))
            copy_bulk(keys + at * RECORD, pool + u64(s.place[((tile - first) << (6 - shift)) + lane]) * 16, bytes, bar);
    }
};

// Grid (runs of `tiles_each` tiles, queries); a run has at most PAGES pieces.
extern "C" __global__ void __launch_bounds__(THREADS, 6)
indexer_logits(const u16* q, i64 q_stride_t, i64 q_stride_h, const u16* weights, i64 w_stride, const u8* pool, i64 stride_page,
               const int* table, i64 table_stride, const void* rows, int rows_are_long, const int* visible, float* out,
               i64 out_stride, int heads, int max_entries, int page_shift, int tiles_each) {
    __shared__ Shared s;
    wait_for_kernels();
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
    const int shift = min(page_shift, 6);
    const Copier copier{pool, shift, first, seen, lane};
    for (int i = threadIdx.x; i < (end - first) << (6 - shift); i += THREADS) {
        const int key = first * TILE + (i << shift);
        if (key < seen) {
            const i64 page = table[row * table_stride + (key >> page_shift)];
            s.place[i] = u32((page * stride_page + (key & ((1 << page_shift) - 1)) * RECORD) >> 4);
        }
    }
    __syncthreads();
    if (warp == 0)
        for (int i = 0; i < STAGES && first + i < end; ++i)
            copier.copy(s, shared_address(s.keys[i]), shared_address(&s.full[i]), first + i);
    if (first < end) place_query(s, q + query * q_stride_t, q_stride_h, heads, weights + query * w_stride);
    fence_async_shared();
    __syncthreads();

    // Head weights as the second operand of the last product: only column 0 is used.
    u32 w[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) w[i] = g == 0 && first < end ? pack_bf16(s.weight[8 * i + 2 * t], s.weight[8 * i + 2 * t + 1]) : 0;
    const u64 operand = wgmma_operand(shared_address(s.query), 16, 1024);
    const int own = 16 * warp + g;

    int stage = 0, phase = 0;
    for (int tile = first; tile < end; ++tile) {
        barrier_wait(shared_address(&s.full[stage]), phase);
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
        if (warp == 0 && tile > first && tile - 1 + STAGES < end) {
            // Refill the stage before this one: by now everyone has read it.
            const int freed = (stage + STAGES - 1) % STAGES;
            barrier_wait(shared_address(&s.empty[freed]), freed < stage ? phase : phase ^ 1);
            copier.copy(s, shared_address(s.keys[freed]), shared_address(&s.full[freed]), tile - 1 + STAGES);
        }
        u32 a[8][4], factor[2], top[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const u32 mine = prmt(scale[r], 0, 0x4440 + t), two = __vmaxu2(scale[r] & 0x00ff00ffu, (scale[r] >> 8) & 0x00ff00ffu);
            top[r] = max(two & 0xffffu, two >> 16);
            factor[r] = top[r] - mine > 24 ? 0 : (30 - (top[r] - mine)) * 0x04000400u;
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                u32 pair[4];
                decode(code[r][j], factor[r], pair);
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
                const int key = tile * TILE + own + 8 * r;
                const u32 bits = top[r] == 255 ? 0x7fc00000u : top[r] == 0 ? 0x00400000u : top[r] << 23;
                const float score = bf16_low(pack_bf16(sum[2 * r] * __uint_as_float(bits), 0.0f));
                if (key < max_entries) out[key] = key < seen ? score : NEG_INF;
            }
        }
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
    for (int key = end * TILE + threadIdx.x; key < min(last * TILE, max_entries); key += THREADS) out[key] = NEG_INF;
}
