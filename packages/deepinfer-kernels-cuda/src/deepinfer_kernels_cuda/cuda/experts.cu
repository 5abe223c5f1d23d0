#include "wgmma.cuh"
// Grouped MXFP4 GEMM for many tokens an expert: out[row] = x[row] @ W[expert]^T, clamped SwiGLU or scatter fused.
//
// A block owns 256 weight rows of one expert (four tiles of 64). Its tokens come in equal tiles of at most 80 or 128, each computed with the narrowest
// MMA that holds it, so that weights are decoded once a tile and little of the matrix unit works on padding. Consumer
// groups of one tile (wide: two tiles) decode codes into the register operand of the MMA (layout and bits: `weights.py`) while the previous
// product runs; a producer group gathers the tokens and has the copy engine bring codes and scales.

constexpr float TWO_60 = 1152921504606846976.0f;

// Wide kernels multiply 128 tokens at a time, the others as many as the narrowest MMA up to 80 holds (accumulators of all widths
// in one kernel do not fit its registers).
template <bool WIDE>
struct Shared {
    static constexpr int TOKENS = WIDE ? 128 : 80, STAGES = WIDE ? 3 : 4, BLOCK = TOKENS * 128;
    static constexpr int GROUPS = WIDE ? 2 : 4, TILES = 4 / GROUPS, THREADS = 128 * GROUPS + 128;
    u8 x[STAGES][2 * BLOCK];
    u32 code[STAGES][4][1024];  // tiles of 64 weight rows x 128 columns
    u32 scale[STAGES][4][64];
    u8 staging[GROUPS][TOKENS * 144];
    i64 source[2][128];  // element offset of a token's row, -1 for padding
    i64 target[2][128];  // row of the output
    float weight[2][128];
    u64 full[STAGES], empty[STAGES], done[2];

    static __device__ __forceinline__ int width(int tokens) { return WIDE ? 128 : tokens <= 32 ? 32 : tokens <= 64 ? 64 : tokens <= 72 ? 72 : 80; }
};

struct Problem {
    const u16* x;
    const u32* weights;
    const u32* scales;
    u16* out;
    const int* order;
    const float* pair_weights;
    i64 x_stride, out_stride;
    int rows, columns, n_blocks, k_blocks, top_k;
    float limit;
    i64 expert;
    int row_begin, row_end, tiles;

    __device__ __forceinline__ int begin(int tile) const { return row_begin + int(i64(row_end - row_begin) * tile / tiles); }
};

__device__ __forceinline__ u32 multiply_bf16(u32 a, u32 b) {
    u32 d;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

// One word, columns (0, 1) of four chunks of 32, to pairs times 2^-60: chunks 0 and 1, or 2 and 3.
__device__ __forceinline__ void decode(u32 w, const u32 (&factor)[4], int upper, u32& first, u32& second) {
    if (upper) {
        first = multiply_bf16((w << 6) & 0x81c081c0u, factor[2]);
        second = multiply_bf16(((w << 1) & 0x80008000u) | ((w >> 3) & 0x01800180u) | ((w >> 7) & 0x00400040u), factor[3]);
    } else {
        first = multiply_bf16(w & 0x81c081c0u, factor[0]);
        second = multiply_bf16((w << 3) & 0x81c081c0u, factor[1]);
    }
}

__device__ __forceinline__ void unpack_factors(u32 word, u32 (&factor)[4]) {
    const u32 low = word & 0x7f807f80u, high = __funnelshift_l(word, word, 8) & 0x7f807f80u;
    factor[0] = prmt(low, low, 0x1010), factor[1] = prmt(low, low, 0x3232);
    factor[2] = prmt(high, high, 0x1010), factor[3] = prmt(high, high, 0x3232);
}

template <bool UP, bool WIDE>
__device__ __forceinline__ void produce(Shared<WIDE>& s, const Problem& p, int thread) {
    using S = Shared<WIDE>;
    const int chunk = thread & 15, first = thread >> 4, row_tile = blockIdx.x * 4, present = min(4, p.n_blocks - row_tile);
    const u32* codes = p.weights + (p.expert * p.n_blocks + row_tile) * p.k_blocks * 1024;
    const u32* scales = p.scales + (p.expert * p.k_blocks * p.n_blocks + row_tile) * 64;
    int step = 0;
    for (int tile = 0; tile < p.tiles; ++tile) {
        const int begin = p.begin(tile), tokens = p.begin(tile + 1) - begin, width = S::width(tokens), slot = tile & 1;
        if (tile >= 2) barrier_wait(shared_address(&s.done[slot]), ((tile >> 1) & 1) ^ 1);
        const int row = begin + thread;
        const bool here = thread < tokens;
        const int pair = here ? p.order[row] : 0;
        s.source[slot][thread] = here ? (UP ? i64(pair / p.top_k) : i64(row)) * p.x_stride : -1;
        s.target[slot][thread] = UP ? row : pair;
        s.weight[slot][thread] = UP && here ? p.pair_weights[pair] : 0.0f;
        named_sync(1, 128);
        for (int k = 0; k < p.k_blocks; ++k, ++step) {
            const int stage = step % S::STAGES, column = k * 128 + chunk * 8;
            const u32 full = shared_address(&s.full[stage]);
            if (step >= S::STAGES) barrier_wait(shared_address(&s.empty[stage]), (step / S::STAGES & 1) ^ 1);
            if (thread == 0) {
                barrier_expect(full, present * (4096 + 256));
                for (int i = 0; i < present; ++i)
                    copy_bulk(shared_address(s.code[stage][i]), codes + (i64(i) * p.k_blocks + k) * 1024, 4096, full);
                copy_bulk(shared_address(s.scale[stage]), scales + i64(k) * p.n_blocks * 64, present * 256, full);
            }
            const u32 target = shared_address(s.x[stage]) + (chunk >> 3) * S::BLOCK;
            for (int r = first; r < width; r += 8) {
                const i64 offset = s.source[slot][r];
                const int bytes = offset >= 0 && column < p.columns ? 16 : 0;
                const u16* source = p.x + (bytes ? offset + column : 0);
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target + r * 128 + (((chunk & 7) ^ (r & 7)) << 4)),
                             "l"(source), "r"(bytes)
                             : "memory");
            }
            asm volatile("cp.async.commit_group;" ::: "memory");
            if (step >= 1) {
                asm volatile("cp.async.wait_group 1;" ::: "memory");
                fence_async_shared();
                barrier_arrive(shared_address(&s.full[(step - 1) % S::STAGES]));
            }
        }
    }
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    fence_async_shared();
    barrier_arrive(shared_address(&s.full[(step - 1) % S::STAGES]));
}

// acc[m] = rows of weight tile m of this group times the tile's tokens.
template <int N, bool WIDE>
__device__ __forceinline__ void multiply(Shared<WIDE>& s, float (&acc)[Shared<WIDE>::TILES][N / 2], int k_blocks, int group, int thread, int& step) {
    using S = Shared<WIDE>;
    const int row = (thread >> 5) * 16 + ((thread & 31) >> 2);
    u32 a[2][2][4];
#pragma unroll
    for (int m = 0; m < S::TILES; ++m)
#pragma unroll
        for (int i = 0; i < N / 2; ++i) acc[m][i] = 0.0f;
    for (int k = 0; k < k_blocks; ++k, ++step) {
        const int stage = step % S::STAGES;
        barrier_wait(shared_address(&s.full[stage]), (step / S::STAGES) & 1);
        const u64 operand = wgmma_operand(shared_address(s.x[stage]), 16, 1024);
        uint4 code[S::TILES][2];
#pragma unroll
        for (int m = 0; m < S::TILES; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                code[m][half] = load_shared4(shared_address(s.code[stage][S::TILES * group + m]) + half * 2048 + thread * 16);
#pragma unroll
        for (int m = 0; m < S::TILES; ++m) {
            u32 factor[2][4];
#pragma unroll
            for (int r = 0; r < 2; ++r) unpack_factors(s.scale[stage][S::TILES * group + m][row + 8 * r], factor[r]);
#pragma unroll
            for (int part = 0; part < 4; ++part) {
                const int half = part >> 1, upper = part & 1;
                const uint4 four = code[m][half];
                u32(&x)[2][4] = a[upper];
                decode(four.x, factor[0], upper, x[0][0], x[1][0]);
                decode(four.y, factor[1], upper, x[0][1], x[1][1]);
                decode(four.z, factor[0], upper, x[0][2], x[1][2]);
                decode(four.w, factor[1], upper, x[0][3], x[1][3]);
                wgmma_wait<0>();  // the previous product ran while this one's operand was decoded
                if (m == 0 && part == 0 && k > 0 && (thread & 31) == 0) barrier_arrive(shared_address(&s.empty[(step - 1) % S::STAGES]));
                wgmma_fence();
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    const int offset = (upper * S::BLOCK + 64 * c + 32 * half) / 16;
                    wgmma_bf16(acc[m], x[c][0], x[c][1], x[c][2], x[c][3], operand + offset, 1);
                }
                wgmma_commit();
            }
        }
    }
    wgmma_wait<0>();
    if ((thread & 31) == 0) barrier_arrive(shared_address(&s.empty[(step - 1) % S::STAGES]));
}

__device__ __forceinline__ float swiglu(float gate, float up, float limit) {
    gate = fminf(bf16_low(pack_bf16(gate * TWO_60, 0.0f)), limit);
    up = fminf(fmaxf(bf16_low(pack_bf16(up * TWO_60, 0.0f)), -limit), limit);
    return gate / (1.0f + exp2_fast(gate * -1.4426950408889634f)) * up;
}

__device__ __forceinline__ void store_half(u32 address, float value) {
    const u32 bits = pack_bf16(value, 0.0f);
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(u16(bits)) : "memory");
}

// One tile of tokens: product, then the result through shared memory, 64 channels at a time.
template <int N, bool UP, bool WIDE>
__device__ __forceinline__ void consume_tile(Shared<WIDE>& s, const Problem& p, int group, int thread, int slot, int tokens, int& step) {
    const int lane = thread & 31, warp = thread >> 5, g = lane >> 2, t = lane & 3;
    using S = Shared<WIDE>;
    constexpr int CHUNKS = UP ? 4 * S::TILES : 8;
    float acc[S::TILES][N / 2];
    multiply<N>(s, acc, p.k_blocks, group, thread, step);
    const u32 staging = shared_address(s.staging[group]);
    const int limit = UP ? p.rows / 2 : p.rows;
#pragma unroll
    for (int phase = 0; phase < (UP ? 1 : S::TILES); ++phase) {
#pragma unroll
        for (int i = 0; i < N / 8; ++i) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int token = 8 * i + 2 * t + e;
                const u32 row = staging + token * 144;
                if (UP) {
                    const float weight = s.weight[slot][token];
#pragma unroll
                    for (int m = 0; m < S::TILES; ++m)
                        store_half(row + 2 * (m * 32 + warp * 8 + g), swiglu(acc[m][4 * i + e], acc[m][4 * i + 2 + e], p.limit) * weight);
                } else {
#pragma unroll
                    for (int r = 0; r < 2; ++r) store_half(row + 2 * (warp * 16 + g + 8 * r), acc[phase][4 * i + e + 2 * r] * TWO_60);
                }
            }
        }
        named_sync(2 + group, 128);
        const int tile = blockIdx.x * 4 + group * S::TILES + phase, column = tile * (UP ? 32 : 64);
        for (int item = thread; item < tokens * CHUNKS; item += 128) {
            const int token = item / CHUNKS, chunk = item % CHUNKS;
            if (column + 8 * chunk < limit)
                *reinterpret_cast<uint4*>(p.out + s.target[slot][token] * p.out_stride + column + 8 * chunk) =
                    load_shared4(staging + token * 144 + 16 * chunk);
        }
        named_sync(2 + group, 128);
    }
    if (lane == 0) barrier_arrive(shared_address(&s.done[slot]));
}

template <bool UP, bool WIDE>
__device__ __forceinline__ void consume(Shared<WIDE>& s, const Problem& p, int group, int thread) {
    int step = 0;
    for (int i = 0; i < p.tiles; ++i) {
        const int tokens = p.begin(i + 1) - p.begin(i), slot = i & 1;
        if constexpr (WIDE) {
            consume_tile<128, UP>(s, p, group, thread, slot, tokens, step);
        } else {
            switch (Shared<WIDE>::width(tokens)) {
                case 32: consume_tile<32, UP>(s, p, group, thread, slot, tokens, step); break;
                case 64: consume_tile<64, UP>(s, p, group, thread, slot, tokens, step); break;
                case 72: consume_tile<72, UP>(s, p, group, thread, slot, tokens, step); break;
                default: consume_tile<80, UP>(s, p, group, thread, slot, tokens, step);
            }
        }
    }
}

template <bool UP, bool WIDE>
__device__ __forceinline__ void run(Problem p, const int* offsets) {
    extern __shared__ u8 memory[];
    using S = Shared<WIDE>;
    S& s = *reinterpret_cast<S*>(memory + ((1024 - (shared_address(memory) & 1023)) & 1023));
    wait_for_kernels();
    p.expert = blockIdx.y;
    p.row_begin = offsets[blockIdx.y], p.row_end = offsets[blockIdx.y + 1];
    p.tiles = (p.row_end - p.row_begin + S::TOKENS - 1) / S::TOKENS;
    if (p.tiles == 0) return;
    if (threadIdx.x == 0) {
        for (int i = 0; i < S::STAGES; ++i) {
            barrier_init(shared_address(&s.full[i]), 129);
            barrier_init(shared_address(&s.empty[i]), 4 * S::GROUPS);
        }
        for (int i = 0; i < 2; ++i) barrier_init(shared_address(&s.done[i]), 4 * S::GROUPS);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    const int group = threadIdx.x >> 7, thread = threadIdx.x & 127;
    if (group == S::GROUPS) {
        if constexpr (WIDE) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        else asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
        produce<UP, WIDE>(s, p, thread);
    } else {
        if constexpr (WIDE) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        else asm volatile("setmaxnreg.inc.sync.aligned.u32 112;");
        consume<UP, WIDE>(s, p, group, thread);
    }
}

// Grid (ceil(rows / 256), experts). Up: x is gathered at order[row] / top_k and the routing weight applied after the SwiGLU of
// interleaved gate and up rows; down: results go to row order[row].
#define ENTRY(NAME, UP, WIDE)                                                                                                        \
    extern "C" __global__ void __launch_bounds__(Shared<WIDE>::THREADS, 1)                                                                         \
    NAME(const u16* x, i64 x_stride, const u32* weights, const u32* scales, u16* out, i64 out_stride, const int* order,              \
         const int* offsets, const float* pair_weights, int rows, int columns, int n_blocks, int k_blocks, int top_k, float limit) { \
        run<UP, WIDE>(Problem{x, weights, scales, out, order, pair_weights, x_stride, out_stride, rows, columns, n_blocks, k_blocks, \
                              top_k, limit, 0, 0, 0, 0}, offsets);                                                                   \
    }
ENTRY(experts_up, true, false)
ENTRY(experts_down, false, false)
ENTRY(experts_up_wide, true, true)
ENTRY(experts_down_wide, false, true)
