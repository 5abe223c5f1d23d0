#include "wgmma.cuh"
// Grouped MXFP4 GEMM for many tokens an expert: out[row] = x[row] @ W[expert]^T, clamped SwiGLU or scatter fused.
//
// `gather_rows` sorts the tokens' rows by expert into planes of 64 columns: a row is 128 bytes, its 16-byte pieces exchanged as
// the matrix unit reads them, and an expert's rows begin at a multiple of 8. A tile's part of a plane is then one bulk copy.
// Blocks live as long as the launch and walk over (tile of tokens, block of weight rows): the producer runs ahead into the next
// unit while consumers finish theirs. A consumer group owns some tiles of 64 weight rows, decodes codes into the register operand
// of the MMA (layout and bits: `weights.py`), 64 columns at a time, while the products of the 64 before are under way.

#ifndef TILES  // tiles of 64 weight rows of a consumer group (even), most tokens of a tile (divisible by 8)
#define TILES 2
#define TOKENS 128
#endif
constexpr int GROUPS = 2, STAGES = 3, ROW_TILES = GROUPS * TILES, PLANE_TILE = TOKENS * 128, THREADS = 128 * GROUPS + 128;
constexpr float TWO_60 = 1152921504606846976.0f;

struct Shared {
    u8 x[STAGES][2 * PLANE_TILE];
    u32 code[STAGES][ROW_TILES][1024];  // tiles of 64 weight rows x 128 columns
    u32 scale[STAGES][ROW_TILES][64];
    u8 staging[GROUPS][2][TOKENS * 144];
    float weight[GROUPS][TOKENS];
    int4 unit[STAGES];  // whose first step is in this stage: tokens (0: no more units), first row, first weight tile
    u64 full[STAGES], empty[STAGES];
};

struct Problem {
    const u8* x;  // planes
    i64 plane;    // bytes of a plane
    const u32* weights;
    const u32* scales;
    u8* out;  // up: planes; down: rows of bfloat16
    i64 out_stride;
    const int4* tiles;  // expert, tokens, first row
    int units, blocks;  // blocks of weight rows of a tile
    const int* target;
    const float* weight;
    int* counter;  // units taken after the first of each block
    int rows, n_blocks, k_blocks, planes_out;
    float limit;
};

__device__ __forceinline__ u32 twice_low(u32 a) {
    u32 d;
    asm("{\n.reg .b16 lo, hi;\nmov.b32 {lo, hi}, %1;\nmov.b32 %0, {lo, lo};\n}" : "=r"(d) : "r"(a));
    return d;
}
__device__ __forceinline__ u32 twice_high(u32 a) {
    u32 d;
    asm("{\n.reg .b16 lo, hi;\nmov.b32 {lo, hi}, %1;\nmov.b32 %0, {hi, hi};\n}" : "=r"(d) : "r"(a));
    return d;
}

// One word, columns (0, 1) of four chunks of 32, to pairs times 2^-60, one a chunk.
__device__ __forceinline__ void decode(u32 w, const u32 (&factor)[4], u32 (&out)[4][4], int place) {
    out[0][place] = multiply_bf16(w & 0x81c081c0u, factor[0]);
    out[1][place] = multiply_bf16((w << 3) & 0x81c081c0u, factor[1]);
    out[2][place] = multiply_bf16((w << 6) & 0x81c081c0u, factor[2]);
    out[3][place] = multiply_bf16(((w << 1) & 0x80008000u) | ((w >> 3) & 0x01800180u) | ((w >> 7) & 0x00400040u), factor[3]);
}

__device__ __forceinline__ void unpack_factors(u32 word, u32 (&factor)[4]) {
    const u32 low = word & 0x7f807f80u, high = __funnelshift_l(word, word, 8) & 0x7f807f80u;
    factor[0] = twice_low(low), factor[1] = twice_high(low);
    factor[2] = twice_low(high), factor[3] = twice_high(high);
}

// Tokens that are multiplied for a tile of so many.
__device__ __forceinline__ constexpr int width_of(int tokens) {
    if (TOKENS <= 80) return tokens <= 32 ? 32 : tokens <= 48 ? 48 : tokens <= 56 ? 56 : tokens <= 64 ? 64 : tokens <= 72 ? 72 : 80;
    return tokens <= 64 ? 64 : tokens <= 80 ? 80 : tokens <= 96 ? 96 : tokens <= 104 ? 104 : tokens <= 112 ? 112 : tokens <= 120 ? 120 : 128;
}

// Two 8 x 8 blocks of bfloat16, a thread holding two values of a row, to rows of 16 bytes that hold a column each.
__device__ __forceinline__ void store_columns(u32 address, u32 a, u32 b) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(a), "r"(b) : "memory");
}

struct Turn {  // where in the ring of stages
    int stage = 0;
    u32 parity = 0;
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

// The steps of one unit, and which unit they are of.
__device__ __forceinline__ void fill(Shared& s, const Problem& p, int unit, Turn& turn, int& filled) {
    const int index = unit / p.blocks, row_tile = (unit - index * p.blocks) * ROW_TILES;
    const int4 tile = p.tiles[index];
    const int present = max(0, min(ROW_TILES, p.n_blocks - row_tile));
    const u32* codes = p.weights + (i64(tile.x) * p.n_blocks + row_tile) * p.k_blocks * 1024;
    const u32* scales = p.scales + (i64(tile.x) * p.k_blocks * p.n_blocks + row_tile) * 64;
    const u8* x = p.x + i64(tile.z) * 128;
#pragma unroll 1
    for (int k = 0; k < p.k_blocks; ++k, turn.next(), ++filled) {
        const u32 full = shared_address(&s.full[turn.stage]);
        if (filled >= STAGES) barrier_wait(shared_address(&s.empty[turn.stage]), turn.parity ^ 1);
        if (k == 0) s.unit[turn.stage] = make_int4(tile.y, tile.z, row_tile, 0);
        barrier_expect(full, present * (4096 + 256) + 2 * tile.y * 128);
        u32 rows = shared_address(s.x[turn.stage]), code = shared_address(s.code[turn.stage]);
#pragma unroll 1
        for (int c = 0; c < 2; ++c, rows += PLANE_TILE, x += p.plane) copy_bulk(rows, x, tile.y * 128, full);
        const u32* from = codes + k * 1024;
#pragma unroll 1
        for (int i = 0; i < present; ++i, code += 4096, from += p.k_blocks * 1024) copy_bulk(code, from, 4096, full);
        if (present > 0) copy_bulk(shared_address(s.scale[turn.stage]), scales, present * 256, full);
        scales += p.n_blocks * 64;
    }
}

// One thread: units as blocks become free, then the end.
__device__ __forceinline__ void produce(Shared& s, const Problem& p) {
    Turn turn;
    int filled = 0;
#pragma unroll 1
    for (int unit = blockIdx.x; unit < p.units;) {
        const int next = gridDim.x + atomicAdd(p.counter, 1);
        fill(s, p, unit, turn, filled);
        unit = next;
    }
    if (filled >= STAGES) barrier_wait(shared_address(&s.empty[turn.stage]), turn.parity ^ 1);
    s.unit[turn.stage] = make_int4(0, 0, 0, 0);
    barrier_arrive(shared_address(&s.full[turn.stage]));
}

__device__ __forceinline__ void release(Shared& s, int stage, int thread) {
    if ((thread & 31) == 0) barrier_arrive(shared_address(&s.empty[stage]));
}

// Codes and scales of one weight tile in a stage, as a thread of the MMA needs them.
struct Codes {
    uint4 half[2];
    u32 factor[2][4];

    __device__ __forceinline__ void load(Shared& s, int stage, int tile, int thread) {
        const int row = (thread >> 5) * 16 + ((thread & 31) >> 2);
        const u32 codes = shared_address(s.code[stage][tile]) + thread * 16, scales = shared_address(s.scale[stage][tile]) + row * 4;
        half[0] = load_shared4(codes), half[1] = load_shared4(codes + 2048);
        unpack_factors(load_shared(scales), factor[0]);
        unpack_factors(load_shared(scales + 32), factor[1]);
    }
    __device__ __forceinline__ void operand(int h, u32 (&a)[4][4]) const {
        decode(half[h].x, factor[0], a, 0);
        decode(half[h].y, factor[1], a, 1);
        decode(half[h].z, factor[0], a, 2);
        decode(half[h].w, factor[1], a, 3);
    }
};

// acc[m] = rows of weight tile m of this group times the tile's tokens. Products of 64 columns are under way while the operand of the
// next is decoded; over the end of a stage too, but none is under way there (ptxas would serialise them all).
template <int N>
__device__ __forceinline__ void multiply(Shared& s, float (&acc)[TILES][N / 2], int k_blocks, int group, int thread, Turn& turn) {
    u32 a[2][4][4];
    Codes codes;
#pragma unroll
    for (int m = 0; m < TILES; ++m)
#pragma unroll
        for (int i = 0; i < N / 2; ++i) acc[m][i] = 0.0f;
    barrier_wait(shared_address(&s.full[turn.stage]), turn.parity);
    codes.load(s, turn.stage, TILES * group, thread);
    codes.operand(0, a[0]);
    for (int k = 0; k < k_blocks; ++k) {
        const int stage = turn.stage;
        turn.next();
        const u64 operand = wgmma_operand(shared_address(s.x[stage]), 16, 1024);
#pragma unroll
        for (int batch = 0; batch < 2 * TILES; ++batch) {
            const int half = batch & 1;
            wgmma_fence();
#pragma unroll
            for (int c = 0; c < 4; ++c)
                wgmma_bf16(acc[batch / 2], a[half][c][0], a[half][c][1], a[half][c][2], a[half][c][3],
                           operand + ((c >> 1) * PLANE_TILE + 64 * (c & 1) + 32 * half) / 16, 1);
            wgmma_commit();
            wgmma_wait<1>();  // the products before these are complete: their operand may be overwritten
            if (batch < 2 * TILES - 1) {
                if (half) codes.load(s, stage, TILES * group + batch / 2 + 1, thread);
                codes.operand(half ^ 1, a[half ^ 1]);
            } else if (k + 1 < k_blocks) {
                barrier_wait(shared_address(&s.full[turn.stage]), turn.parity);
                codes.load(s, turn.stage, TILES * group, thread);
                codes.operand(0, a[0]);
            }
        }
        wgmma_wait<0>();
        release(s, stage, thread);
    }
}

__device__ __forceinline__ float swiglu(float gate, float up, float limit) {
    gate = fminf(gate, limit);
    up = fminf(fmaxf(up, -limit), limit);
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.0f + exp2_fast(gate * -1.4426950408889634f)));
    return gate * inverse * up;
}

// A unit: product, then 64 output channels at a time through shared memory.
template <int N, bool UP>
__device__ __forceinline__ void consume_unit(Shared& s, const Problem& p, int group, int thread, int tokens, int begin, int row_tile,
                                             Turn& turn, int& buffer) {
    const int lane = thread & 31, warp = thread >> 5, t = lane & 3;
    const int own = begin + min(thread, tokens - 1), target = UP ? 0 : p.target[own];
    const float own_weight = UP ? p.weight[own] : 0.0f;
    float acc[TILES][N / 2];
    multiply<N>(s, acc, p.k_blocks, group, thread, turn);
    row_tile += TILES * group;
    if (UP && thread < TOKENS) s.weight[group][thread] = own_weight;
#pragma unroll
    for (int phase = 0; phase < (UP ? TILES / 2 : TILES); ++phase, buffer ^= 1) {
        const u32 staging = shared_address(s.staging[group][buffer]);
        bulk_wait_read<1>();
        named_sync(1 + group, 128);
#pragma unroll
        for (int i = 0; i < N / 8; ++i) {
            const int token = 8 * i + (lane & 7), upper = (lane >> 3) & 1;
            u32 pair[2];
            if (UP) {
                const float2 weight = *reinterpret_cast<const float2*>(&s.weight[group][8 * i + 2 * t]);
#pragma unroll
                for (int m = 0; m < 2; ++m) {
                    const float(&d)[N / 2] = acc[2 * phase + (UP ? m : 0)];
                    const u32 gate = pack_bf16(d[4 * i] * TWO_60, d[4 * i + 1] * TWO_60);
                    const u32 up = pack_bf16(d[4 * i + 2] * TWO_60, d[4 * i + 3] * TWO_60);
                    pair[m] = pack_bf16(swiglu(bf16_low(gate), bf16_low(up), p.limit) * weight.x,
                                        swiglu(bf16_high(gate), bf16_high(up), p.limit) * weight.y);
                    if (row_tile + 2 * phase + m >= p.n_blocks) pair[m] = 0;  // channels that only pad the next product
                }
                store_columns(staging + token * 128 + (((upper * 4 + warp) ^ (lane & 7)) << 4), pair[0], pair[1]);
            } else {
#pragma unroll
                for (int r = 0; r < 2; ++r) pair[r] = pack_bf16(acc[phase][4 * i + 2 * r] * TWO_60, acc[phase][4 * i + 2 * r + 1] * TWO_60);
                store_columns(staging + token * 144 + ((warp * 2 + upper) << 4), pair[0], pair[1]);
            }
        }
        fence_async_shared();
        named_sync(1 + group, 128);
        if (UP) {
            const int plane = row_tile / 2 + phase;
            if (thread == 0 && plane < p.planes_out) bulk_store(p.out + plane * p.plane + i64(begin) * 128, staging, tokens * 128);
        } else {
            const int column = (row_tile + phase) * 64;
            if (thread < tokens && column < p.rows)
                bulk_store(p.out + 2 * (target * p.out_stride + column), staging + thread * 144, 2 * min(64, p.rows - column));
        }
        bulk_commit();
    }
}

template <bool UP>
__device__ __forceinline__ void consume(Shared& s, const Problem& p, int group, int thread) {
    Turn turn;
    int buffer = 0;
    for (;;) {
        barrier_wait(shared_address(&s.full[turn.stage]), turn.parity);
        const int4 unit = s.unit[turn.stage];
        if (unit.x == 0) break;
#define WIDTH(N) \
    case N: consume_unit<N, UP>(s, p, group, thread, unit.x, unit.y, unit.z, turn, buffer); break;
        switch (width_of(unit.x)) {
#if TOKENS <= 80
            WIDTH(32) WIDTH(48) WIDTH(56) WIDTH(64) WIDTH(72)
#else
            WIDTH(64) WIDTH(80) WIDTH(96) WIDTH(104) WIDTH(112) WIDTH(120)
#endif
            default: consume_unit<TOKENS, UP>(s, p, group, thread, unit.x, unit.y, unit.z, turn, buffer);
        }
    }
    bulk_wait();
}

template <bool UP>
__device__ __forceinline__ void run(Problem p, const int* plan) {
    extern __shared__ u8 memory[];
    Shared& s = *reinterpret_cast<Shared*>(memory + ((1024 - (shared_address(memory) & 1023)) & 1023));
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(shared_address(&s.full[i]), 1);
            barrier_init(shared_address(&s.empty[i]), 4 * GROUPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    wait_for_kernels();
    p.units = *reinterpret_cast<const volatile int*>(plan) * p.blocks;
    const int group = threadIdx.x >> 7, thread = threadIdx.x & 127;
    if (group == GROUPS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (thread == 0) produce(s, p);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        consume<UP>(s, p, group, thread);
    }
}

// plan: number of tiles, units taken by up and by down, 0, tiles. Up writes planes of `planes_out`, routing weights applied after the
// SwiGLU of interleaved gate and up rows; down writes row `target` of bfloat16 rows.
#define ENTRY(NAME, UP)                                                                                                            \
    extern "C" __global__ void __launch_bounds__(THREADS, 1)                                                                       \
    NAME(const u8* x, i64 plane, const u32* weights, const u32* scales, u8* out, i64 out_stride, int* plan, const int* target,     \
         const float* weight, int blocks, int rows, int n_blocks, int k_blocks, int planes_out, float limit) {                     \
        run<UP>(Problem{x, plane, weights, scales, out, out_stride, reinterpret_cast<const int4*>(plan + 4), 0, blocks, target,    \
                        weight, plan + (UP ? 1 : 2), rows, n_blocks, k_blocks, planes_out, limit}, plan);                          \
    }
ENTRY(experts_up, true)
ENTRY(experts_down, false)

// Block 0 cuts every expert's rows into equal tiles of at most TOKENS, each beginning at a multiple of 8; the others bring 8
// sorted rows each into planes, with their routing weights and the rows of the output.
extern "C" __global__ void __launch_bounds__(256)
gather_rows(const u16* x, i64 x_stride, const void* ids, int id_bytes, const int* order, const int* offsets, const float* pair_weights,
            u8* rows, i64 plane, int* target, float* weight, int* plan, int experts, int top_k, int columns, int planes) {
    wait_for_kernels();
    const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
    __shared__ int place[8], source[8], sums[8];
    if (blockIdx.x == 0) {
        int4* tiles = reinterpret_cast<int4*>(plan + 4);
        int base = 0;
        for (int start = 0; start < experts; start += 256) {
            const int e = start + thread;
            const int begin = e < experts ? offsets[e] : 0, count = e < experts ? offsets[e + 1] - begin : 0;
            const int cuts = (count + TOKENS - 1) / TOKENS, eights = (count + 7) / 8;
            int sum = cuts;
#pragma unroll
            for (int step = 1; step < 32; step *= 2) {
                const int other = __shfl_up_sync(0xffffffffu, sum, step);
                if (lane >= step) sum += other;
            }
            if (lane == 31) sums[warp] = sum;
            __syncthreads();
            int first = base + sum - cuts;
            for (int w = 0; w < 8; ++w) {
                if (w < warp) first += sums[w];
                base += sums[w];
            }
            const int padded = (begin + 8 * e) & ~7;
            for (int i = 0; i < cuts; ++i) {
                const int from = 8 * int(i64(eights) * i / cuts), to = min(count, 8 * int(i64(eights) * (i + 1) / cuts));
                tiles[first + i] = make_int4(e, to - from, padded + from, 0);
            }
            __syncthreads();
        }
        if (thread == 0) plan[0] = base, plan[1] = plan[2] = 0;
        return;
    }
    const int row = (blockIdx.x - 1) * 8, total = offsets[experts];
    if (thread < 8) {
        int here = -1, token = 0;
        if (row + thread < total) {
            const int pair = order[row + thread];
            const int e = id_bytes == 8 ? int(reinterpret_cast<const i64*>(ids)[pair]) : reinterpret_cast<const int*>(ids)[pair];
            const int begin = offsets[e];
            here = row + thread - begin + ((begin + 8 * e) & ~7), token = pair / top_k;
            target[here] = pair;
            weight[here] = pair_weights[pair];
        }
        place[thread] = here, source[thread] = token;
    }
    __syncthreads();
    const int piece = lane & 7;
#pragma unroll 2
    for (int c = warp; c < planes; c += 8) {
        const int column = c * 64 + piece * 8;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int r = h * 4 + (lane >> 3), to = place[r];
            if (to < 0) continue;
            uint4 value = make_uint4(0, 0, 0, 0);
            if (column < columns) value = *reinterpret_cast<const uint4*>(x + source[r] * x_stride + column);
            *reinterpret_cast<uint4*>(rows + c * plane + i64(to) * 128 + ((piece ^ (to & 7)) << 4)) = value;
        }
    }
}
