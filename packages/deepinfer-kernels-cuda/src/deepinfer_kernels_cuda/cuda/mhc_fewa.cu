// The same seam for up to 64 tokens: a block has 64 of the d = 512 GROUPS channels of all tokens, a warp 8 tokens of 32 of them.
// Everything stays in registers from the first load to the normalised row; what needs whole rows crosses the blocks as messages.
#include "mhc.cuh"

#ifndef GROUPS
#define GROUPS 10
#endif

constexpr int BLOCKS = 8 * GROUPS, MOST = 64, WARPS = MOST / 4, TURNS = (MOST + BLOCKS - 1) / BLOCKS;
constexpr int THREADS = 32 * (WARPS + 1);
constexpr u64 WIDTH = 128 * BLOCKS;  // bytes of a row

struct Shared {
    u8 fn[2 * FN_GROUP];
    float part[WARPS][8][SUMS];
    float mixes[TURNS][WARPS][SUMS];
    float squares[WARPS][8];
    u64 loaded;
};

// Where blocks leave messages, in global memory: [MOST][BLOCKS] squares of rows, then [MOST][BLOCKS][32] sums.
struct Mail {
    u64* at;
    __device__ u64* squares(int token, int block) const { return at + token * BLOCKS + block; }
    __device__ u64* sums(int token, int block) const { return at + MOST * BLOCKS + (token * BLOCKS + block) * 32; }
};

__device__ __forceinline__ void post_sums(const Shared& s, Mail mail, int tokens, u32 tag) {
    const int token = threadIdx.x / 7, piece = threadIdx.x % 7;
    if (token >= tokens) return;
    const float4 a = reinterpret_cast<const float4*>(s.part[token / 8 * 2][token % 8])[piece];
    const float4 b = reinterpret_cast<const float4*>(s.part[token / 8 * 2 + 1][token % 8])[piece];
    if (piece == 6) post_word(mail.squares(token, blockIdx.x), tagged(a.y + b.y, tag));
    u64* to = mail.sums(token, blockIdx.x) + piece * 4;
    post_words(to, tagged(a.x + b.x, tag), tagged(a.y + b.y, tag));
    post_words(to + 2, tagged(a.z + b.z, tag), tagged(a.w + b.w, tag));
}

// A warp's share of the sums of the tokens that this block finishes.
__device__ __forceinline__ void gather_sums(Shared& s, Mail mail, int tokens, int warp, int lane, u32 tag) {
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
        const int token = blockIdx.x + turn * BLOCKS;
        if (token >= tokens) return;
        const u64* from = mail.sums(token, warp) + min(lane, int(SUMS) - 1);
        float sum;
        bool missing;
        do {
            sum = 0, missing = false;
#pragma unroll
            for (int k = 0; k < BLOCKS / WARPS; ++k) {
                const u64 word = read_word(from + k * WARPS * 32);
                missing |= tag_of(word) != tag;
                sum += value_of(word);
            }
        } while (__any_sync(~0u, missing));
        if (lane < SUMS) s.mixes[turn][warp][lane] = sum;
    }
}

// Squares of the row of a thread's token, over all blocks; two warps have half of them each.
__device__ __forceinline__ float gather_squares(Shared& s, Mail mail, int token, int warp, int lane, u32 tag) {
    const int tile = warp >> 1, of = lane >> 2;
    const u64* from = mail.squares(token, (warp & 1) * (BLOCKS / 2) + (lane & 3) * GROUPS);
    float square;
    bool missing;
    do {
        square = 0, missing = false;
#pragma unroll
        for (int k = 0; k < GROUPS / 2; ++k) {
            const ulonglong2 words = read_words(from + 2 * k);
            missing |= tag_of(words.x) != tag || tag_of(words.y) != tag;
            square += value_of(words.x) + value_of(words.y);
        }
    } while (__any_sync(~0u, missing));
    square += __shfl_xor_sync(~0u, square, 1);
    square += __shfl_xor_sync(~0u, square, 2);
    if ((lane & 3) == 0) s.squares[warp][of] = square;
    named_sync(1 + tile, 64);
    return s.squares[2 * tile][of] + s.squares[2 * tile + 1][of];
}

// As mhc_step; mail: these words and before them 256 bytes with the number of launches.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    mhc_fewa(const u8* streams, const u8* output, const u8* post, const u8* comb, const u8* pre, const u8* fn, const float* base,
            const float* scale, const u8* weight, u8* new_streams, u8* x, float* new_pre, float* new_post, float* new_comb,
            u64* mail_at, int tokens, int iterations, float eps, float mix_eps, float norm_eps) {
    __shared__ __align__(16) Shared s;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, group = warp & 1, quad = lane & 3;
    const int token = 8 * (warp >> 1) + (lane >> 2), read = min(token, tokens - 1);
    const bool busy = 8 * (warp >> 1) < tokens && warp < WARPS;
    const u32 loaded = shared_address(&s.loaded);
    if (threadIdx.x == 0) {
        barrier_init(loaded, 1);
        fence_barriers();
        fence_async_shared();
        // Constants of the model: no kernel ahead writes them.
        barrier_expect(loaded, 2 * FN_GROUP);
        copy_bulk(shared_address(s.fn), fn + blockIdx.x * u64(2 * FN_GROUP), 2 * FN_GROUP, loaded);
    }
    const u64 column = blockIdx.x * 128 + group * 64 + quad * 16;
    const uint4 scales = load_global(weight + column);
    const Mix mix(new_pre, new_post, new_comb, base, scale, lane);
    __syncthreads();
    wait_for_kernels();
    u32* epoch = reinterpret_cast<u32*>(mail_at);
    const u32 tag = *const_cast<volatile u32*>(epoch) + 1;
    const Mail mail{mail_at + 32};
    uint4 packed[5];
    if (busy) {
        float weights[5][4], pre4[4], acc[3][4] = {}, square = 0, row_square = 0;
        packed[0] = load_global(output + read * WIDTH + column);
#pragma unroll
        for (int i = 0; i < 4; ++i) packed[1 + i] = load_global(streams + (4ull * read + i) * WIDTH + column);
        const auto floats = [](float(&d)[4], const u8* from) {
            const uint4 v = load_global(from);
            d[0] = __uint_as_float(v.x), d[1] = __uint_as_float(v.y), d[2] = __uint_as_float(v.z), d[3] = __uint_as_float(v.w);
        };
        floats(weights[0], post + read * 16);
#pragma unroll
        for (int i = 0; i < 4; ++i) floats(weights[1 + i], comb + read * 64 + i * 16);
        floats(pre4, pre + read * 16);
        barrier_wait(loaded, 0);
        update_tile(shared_address(s.fn) + group * FN_GROUP + lane * 16, weights, pre4, packed, acc, square, row_square);
        write_sums(shared_address(s.part[warp]), lane, acc, square, row_square);
    }
    __syncthreads();  // and all have read the epoch
    if (warp < WARPS) {
        post_sums(s, mail, tokens, tag);
        if (busy && token < tokens)
#pragma unroll
            for (int o = 0; o < 4; ++o)
                *reinterpret_cast<uint4*>(new_streams + (4ull * token + o) * WIDTH + column) = packed[1 + o];
        gather_sums(s, mail, tokens, warp, lane, tag);
        named_arrive(15, THREADS);
    } else {
        named_sync(15, THREADS);
        for (int turn = 0; turn < TURNS; ++turn) {
            const int mine = blockIdx.x + turn * BLOCKS;
            if (mine >= tokens) break;
            float sum = 0;
#pragma unroll
            for (int k = 0; k < WARPS; ++k) sum += s.mixes[turn][k][min(lane, int(SUMS) - 1)];
            finish_token(sum, lane, mine, mix, 256.0f * BLOCKS, iterations, eps, mix_eps);
        }
    }
    if (!busy) return;
    const float f = 1.0f / sqrtf(gather_squares(s, mail, read, warp, lane, tag) / (64.0f * BLOCKS) + norm_eps);
    const auto scaled = [f](u32 a, u32 b) {
        return pack_bf16(bf16_low(a) * f * bf16_low(b), bf16_high(a) * f * bf16_high(b));
    };
    if (token < tokens)
        *reinterpret_cast<uint4*>(x + token * WIDTH + column) = make_uint4(
            scaled(packed[0].x, scales.x), scaled(packed[0].y, scales.y), scaled(packed[0].z, scales.z), scaled(packed[0].w, scales.w));
    // All blocks have sent, so all have read this.
    if (blockIdx.x == 0 && threadIdx.x == 0) *epoch = tag;
}
