// The same seam for up to 128 tokens: 32 blocks share rows of d = 512 GROUPS channels, a block has 16 GROUPS of them of 8 TILES
// tokens, a warp 32 channels of 8 tokens. All stays in registers from the first load to the normalised row; what needs whole
// rows crosses the blocks as messages.
#include "mhc.cuh"

#ifndef GROUPS
#define GROUPS 10
#endif
#ifndef TILES
#define TILES 2
#endif

constexpr int BLOCKS = 32, SPAN = GROUPS / 2, WARPS = SPAN * TILES, TOKENS = 8 * TILES, MOST = 32;
constexpr int THREADS = 32 * WARPS;
constexpr u64 WIDTH = 64 * SPAN * BLOCKS;  // bytes of a row

struct Shared {
    u8 fn[SPAN * FN_GROUP];
    float part[WARPS][8][SUMS];
    float mixes[WARPS][SUMS], sums[SUMS], model[MODEL + 1];
    u64 loaded;
};
#ifdef SHARED
static_assert(sizeof(Shared) == SHARED, "shared memory that is asked for");
#endif

// Where blocks that share rows leave messages, in global memory: [MOST][BLOCKS] squares of rows, then [MOST][BLOCKS][32] sums.
struct Mail {
    u64* at;
    u32 tag;
    __device__ u64* squares(int token, int block) const { return at + token * BLOCKS + block; }
    __device__ u64* sums(int token, int block) const { return at + MOST * BLOCKS + (token * BLOCKS + block) * 32; }
};
constexpr u64 MAIL = MOST * BLOCKS * (1 + 32);

__device__ __forceinline__ void post_sums(const Shared& s, Mail mail, int here) {
    for (int item = threadIdx.x; item < 7 * here; item += 32 * WARPS) {
        const int token = item / 7, piece = item % 7;
        float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int group = 0; group < SPAN; ++group) {
            const float4 more = reinterpret_cast<const float4*>(s.part[token / 8 * SPAN + group][token % 8])[piece];
            sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
        }
        if (piece == 6) post_word(mail.squares(token, blockIdx.x), tagged(sum.y, mail.tag));
        u64* to = mail.sums(token, blockIdx.x) + piece * 4;
        post_words(to, tagged(sum.x, mail.tag), tagged(sum.y, mail.tag));
        post_words(to + 2, tagged(sum.z, mail.tag), tagged(sum.w, mail.tag));
    }
}

// A warp's share of the sums of this block's token.
__device__ __forceinline__ void gather_sums(Shared& s, Mail mail, int warp, int lane) {
    const u64* from = mail.sums(blockIdx.x, warp) + min(lane, int(SUMS) - 1);
    float sum;
    bool missing;
    do {
        sum = 0, missing = false;
#pragma unroll
        for (int k = 0; k < (BLOCKS + WARPS - 1) / WARPS; ++k) {
            if (k * WARPS + warp >= BLOCKS) break;
            const u64 word = read_word(from + k * WARPS * 32);
            missing |= tag_of(word) != mail.tag;
            sum += value_of(word);
        }
    } while (__any_sync(~0u, missing));
    if (lane < SUMS) s.mixes[warp][lane] = sum;
}

// Squares of the row of a thread's token, over all blocks.
__device__ __forceinline__ float gather_squares(Mail mail, int token, int lane) {
    const u64* from = mail.squares(token, (lane & 3) * (BLOCKS / 4));
    float square;
    bool missing;
    do {
        square = 0, missing = false;
#pragma unroll
        for (int k = 0; k < BLOCKS / 8; ++k) {
            const ulonglong2 words = read_words(from + 2 * k);
            missing |= tag_of(words.x) != mail.tag || tag_of(words.y) != mail.tag;
            square += value_of(words.x) + value_of(words.y);
        }
    } while (__any_sync(~0u, missing));
    square += __shfl_xor_sync(~0u, square, 1);
    return square + __shfl_xor_sync(~0u, square, 2);
}

// As mhc_step; mail: these words of every TOKENS tokens and before them 256 bytes of their epochs.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    mhc_few(const u8* streams, const u8* output, const u8* post, const u8* comb, const u8* pre, const u8* fn, const float* base,
            const float* scale, const u8* weight, u8* new_streams, u8* x, float* new_pre, float* new_post, float* new_comb,
            u64* mail_at, int tokens, int iterations, float eps, float mix_eps, float norm_eps) {
    extern __shared__ __align__(1024) u8 memory[];
    Shared& s = *reinterpret_cast<Shared*>(memory);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, tile = warp / SPAN, group = warp % SPAN, quad = lane & 3;
    const int first = blockIdx.y * TOKENS, here = min(TOKENS, tokens - first);
    const int of = 8 * tile + (lane >> 2), read = min(of, here - 1);
    const bool busy = 8 * tile < here;
    const u32 loaded = shared_address(&s.loaded);
    if (threadIdx.x == 0) {
        barrier_init(loaded, 1);
        fence_barriers();
        fence_async_shared();
        // Constants of the model: no kernel ahead writes them.
        barrier_expect(loaded, SPAN * FN_GROUP);
        copy_bulk(shared_address(s.fn), fn + blockIdx.x * u64(SPAN * FN_GROUP), SPAN * FN_GROUP, loaded);
    }
    const u64 column = (blockIdx.x * SPAN + group) * 64 + quad * 16;
    const uint4 scales = load_global(weight + column);
    if (threadIdx.x < MODEL) s.model[threadIdx.x] = threadIdx.x < 24 ? base[threadIdx.x] : scale[threadIdx.x - 24];
    __syncthreads();
    wait_for_kernels();
    u32* epoch = reinterpret_cast<u32*>(mail_at) + blockIdx.y;
    const Mail mail{mail_at + 32 + blockIdx.y * MAIL, *const_cast<volatile u32*>(epoch) + 1};
    const u64 token = first + read;
    uint4 packed[5];
    if (busy) {
        float weights[5][4], pre4[4], acc[3][4] = {}, square = 0, row_square = 0;
        packed[0] = load_global(output + token * WIDTH + column);
#pragma unroll
        for (int i = 0; i < 4; ++i) packed[1 + i] = load_global(streams + (4 * token + i) * WIDTH + column);
        const auto floats = [](float(&d)[4], const u8* from) {
            const uint4 v = load_global(from);
            d[0] = __uint_as_float(v.x), d[1] = __uint_as_float(v.y), d[2] = __uint_as_float(v.z), d[3] = __uint_as_float(v.w);
        };
        floats(weights[0], post + token * 16);
#pragma unroll
        for (int i = 0; i < 4; ++i) floats(weights[1 + i], comb + token * 64 + i * 16);
        floats(pre4, pre + token * 16);
        barrier_wait(loaded, 0);
        update_tile(shared_address(s.fn) + group * FN_GROUP + lane * 16, weights, pre4, packed, acc, square, row_square);
        write_sums(shared_address(s.part[warp]), lane, acc, square, row_square);
    }
    __syncthreads();  // and all have read the epoch
    post_sums(s, mail, here);
    if (busy && of < here)
#pragma unroll
        for (int o = 0; o < 4; ++o) *reinterpret_cast<uint4*>(new_streams + (4 * token + o) * WIDTH + column) = packed[1 + o];
    if (blockIdx.x < here) {  // a token of this block's own
        gather_sums(s, mail, warp, lane);
        if (warp < WARPS - 1)
            named_arrive(1, THREADS);
        else {
            named_sync(1, THREADS);
            float sum = 0;
#pragma unroll
            for (int k = 0; k < WARPS; ++k) sum += s.mixes[k][min(lane, int(SUMS) - 1)];
            if (lane < SUMS) s.sums[lane] = sum;
            __syncwarp();
            finish_token(shared_address(s.sums), shared_address(s.model), 2.0f * WIDTH, iterations, eps, mix_eps, lane == 0,
                         first + blockIdx.x, new_pre, new_post, new_comb);
        }
    }
    if (!busy) return;
    const float f = 1.0f / sqrtf(gather_squares(mail, read, lane) / (0.5f * WIDTH) + norm_eps);
    const auto scaled = [f](u32 a, u32 b) {
        return pack_bf16(bf16_low(a) * f * bf16_low(b), bf16_high(a) * f * bf16_high(b));
    };
    if (of < here)
        *reinterpret_cast<uint4*>(x + token * WIDTH + column) = make_uint4(
            scaled(packed[0].x, scales.x), scaled(packed[0].y, scales.y), scaled(packed[0].z, scales.z), scaled(packed[0].w, scales.w));
    // All blocks have sent, so all have read this.
    if (blockIdx.x == 0 && threadIdx.x == 0) *epoch = mail.tag;
}
