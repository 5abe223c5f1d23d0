// Kernels for x86-64 processors with AVX-512 BF16: paged attention, RMS norm, gated activation.
//
// Cache of one layer, bfloat16, [blocks][kv_heads][keys | values]:
//   keys    [d / 2][block_size][2]   one 32-bit lane a key, so 16 keys are multiplied at once
//   values  [block_size / 2][d][2]   one 32-bit lane a channel, holding two neighbouring keys
// Both are what vdpbf16ps (a += x0 * y0 + x1 * y1 in each 32-bit lane) reads without shuffling.
//
// Decoding is bound by reading the cache from memory, 4 KiB here and 4 KiB there, which the processor's own prefetcher
// does not foresee. So the keys of the next run and the values of this one are prefetched while this run is multiplied.

#include <immintrin.h>
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define MAX_ROWS 48 // query rows (tokens x heads of a group) of one item
#define MAX_DIM 128 // channels of a head
#define CHUNK 256   // keys whose scores exist at once

typedef uint16_t bf16;

// Mirrored field by field in plan.py.
typedef struct {
    int64_t tokens;       // T
    int32_t heads;        // query heads
    int32_t kv_heads;
    int32_t dim;          // channels of a head
    int32_t block_size;   // keys of a block
    float scale;          // of the scores
    float eps;            // of the query/key norms
    const float *rope;    // [positions][2][dim / 2]: cos, sin
    const int32_t *positions; // [T]
    const int64_t *slots;     // [T], block * block_size + offset, or -1: not written
    int32_t units;            // items x kv_heads
    int32_t columns;          // of the block table
    const int32_t *order;     // [units], item * kv_heads + kv_head, the longest first
    const int32_t *item_tokens;  // [sum of sizes]
    const int32_t *item_limits;  // [sum of sizes], keys below it are visible to that token
    const int32_t *item_offsets; // [items + 1]
    const int32_t *item_rows;    // [items], row of the block table
    const int32_t *item_begins;  // [items], first key, a multiple of the block size
    const int32_t *item_ends;    // [items], past the last key
    const int32_t *item_parts;   // [items], first row of `partial`, or -1: the item is all its tokens have
    const int32_t *table;        // [R][columns]
    int32_t merges;              // tokens that have several parts
    const int32_t *merge_tokens;  // [merges]
    const int32_t *merge_offsets; // [merges + 1]
    const int32_t *merge_parts;   // rows of `partial`
    bf16 *query;                  // [T][heads][dim], scratch
    float *partial;               // [rows][heads][dim + 1], normalised output and log-sum-exp, scratch
} Plan;

INLINE __m512 load_bf16(const bf16 *p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}

INLINE void store_bf16(bf16 *p, __m512 x) { _mm256_storeu_si256((__m256i *)p, (__m256i)_mm512_cvtneps_pbh(x)); }

INLINE __m512 round_bf16(__m512 x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x)), 16));
}

INLINE __m512 dot2(__m512 acc, __m512i x, __m512i y) { return _mm512_dpbf16_ps(acc, (__m512bh)x, (__m512bh)y); }

// e^x for x <= 0; below -87 the result is 0 to float precision.
INLINE __m512 exp_ps(__m512 x) {
    x = _mm512_max_ps(x, _mm512_set1_ps(-104.0f));
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341f)), 8);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
    p = _mm512_fmadd_ps(_mm512_mul_ps(p, r), r, _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
    return _mm512_scalef_ps(p, n);
}

// --- row kernels ------------------------------------------------------------------------------------------------

INLINE float inverse_rms(const bf16 *x, int64_t width, float eps) {
    __m512 sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < width; i += 16) {
        __m512 v = load_bf16(x + i);
        sum = _mm512_fmadd_ps(v, v, sum);
    }
    return 1.0f / sqrtf(_mm512_reduce_add_ps(sum) / (float)width + eps);
}

INLINE void norm_row(const bf16 *x, const bf16 *weight, bf16 *y, int64_t width, float eps) {
    __m512 s = _mm512_set1_ps(inverse_rms(x, width, eps));
    for (int64_t i = 0; i < width; i += 16)
        store_bf16(y + i, _mm512_mul_ps(round_bf16(_mm512_mul_ps(load_bf16(x + i), s)), load_bf16(weight + i)));
}

// y = weight * x / rms(x) for each of `rows` rows; width is a multiple of 16.
void deepinfer_rms_norm(const bf16 *x, const bf16 *weight, bf16 *y, int64_t rows, int64_t width, float eps) {
#pragma omp parallel for schedule(static) if (rows * width > 8192)
    for (int64_t r = 0; r < rows; r++) norm_row(x + r * width, weight, y + r * width, width, eps);
}

// y = silu(gate) * up; a row of gate_up is [gate | up], each `width` wide, a multiple of 16.
void deepinfer_silu_mul(const bf16 *gate_up, bf16 *y, int64_t rows, int64_t width) {
#pragma omp parallel for schedule(static) if (rows * width > 8192)
    for (int64_t r = 0; r < rows; r++) {
        const bf16 *gate = gate_up + r * 2 * width, *up = gate + width;
        for (int64_t i = 0; i < width; i += 16) {
            __m512 g = load_bf16(gate + i);
            __m512 e = exp_ps(_mm512_sub_ps(_mm512_setzero_ps(), _mm512_abs_ps(g))); // e^-|g|: no overflow
            __m512 one = _mm512_set1_ps(1.0f);
            __mmask16 negative = _mm512_cmp_ps_mask(g, _mm512_setzero_ps(), _CMP_LT_OQ);
            __m512 top = _mm512_mask_mov_ps(one, negative, e);
            __m512 silu = _mm512_mul_ps(g, _mm512_div_ps(top, _mm512_add_ps(one, e)));
            store_bf16(y + r * width + i, _mm512_mul_ps(round_bf16(silu), load_bf16(up + i)));
        }
    }
}

// --- attention: queries, and writing the cache ------------------------------------------------------------------

// Rotate one head: channel k with channel k + dim / 2.
INLINE void rotate(const bf16 *x, const float *table, bf16 *y, int dim) {
    const int half = dim / 2;
    for (int i = 0; i < half; i += 16) {
        __m512 a = load_bf16(x + i), b = load_bf16(x + half + i);
        __m512 c = _mm512_loadu_ps(table + i), s = _mm512_loadu_ps(table + half + i);
        store_bf16(y + i, _mm512_fmsub_ps(a, c, _mm512_mul_ps(b, s)));
        store_bf16(y + half + i, _mm512_fmadd_ps(b, c, _mm512_mul_ps(a, s)));
    }
}

INLINE void write_key(const bf16 *x, bf16 *block, int offset, int dim, int block_size) {
    uint32_t pair;
    for (int i = 0; i < dim / 2; i++) {
        memcpy(&pair, x + 2 * i, 4);
        memcpy(block + ((int64_t)i * block_size + offset) * 2, &pair, 4);
    }
}

INLINE void write_value(const bf16 *x, bf16 *block, int offset, int dim) {
    bf16 *row = block + (int64_t)(offset / 2) * dim * 2 + offset % 2;
    for (int i = 0; i < dim; i++) row[2 * i] = x[i];
}

static void prepare_token(const Plan *p, int64_t t, const bf16 *qkv, bf16 *cache, const bf16 *qn, const bf16 *kn) {
    const int dim = p->dim;
    const float *table = p->rope + (int64_t)p->positions[t] * dim;
    const bf16 *row = qkv + t * (p->heads + 2 * p->kv_heads) * dim;
    bf16 normed[MAX_DIM], key[MAX_DIM];
    for (int h = 0; h < p->heads; h++) {
        const bf16 *x = row + h * dim;
        if (qn) norm_row(x, qn, normed, dim, p->eps), x = normed;
        rotate(x, table, p->query + (t * p->heads + h) * dim, dim);
    }
    if (p->slots[t] < 0) return;
    const int64_t block = p->slots[t] / p->block_size;
    const int offset = (int)(p->slots[t] % p->block_size);
    for (int h = 0; h < p->kv_heads; h++) {
        bf16 *keys = cache + (block * p->kv_heads + h) * 2 * p->block_size * dim;
        const bf16 *x = row + (p->heads + h) * dim;
        if (kn) norm_row(x, kn, normed, dim, p->eps), x = normed;
        rotate(x, table, key, dim);
        write_key(key, keys, offset, dim, p->block_size);
        write_value(row + (p->heads + p->kv_heads + h) * dim, keys + p->block_size * dim, offset, dim);
    }
}

// --- attention: one item for one key/value head -----------------------------------------------------------------

// scores[r][0..31] = query[r] . keys of 32 neighbouring positions. Runs to prefetch meanwhile: 32 keys and 32 values.
INLINE void score_tile(const int rows, const bf16 *q, const bf16 *keys, int block_size, float *scores, int dim,
                       const bf16 *next_keys, const bf16 *values) {
    __m512 acc[6][2];
    for (int r = 0; r < rows; r++) acc[r][0] = acc[r][1] = _mm512_setzero_ps();
    for (int i = 0; i < dim / 2; i++) {
        const __m512i k0 = _mm512_loadu_si512(keys + (int64_t)i * block_size * 2);
        const __m512i k1 = _mm512_loadu_si512(keys + (int64_t)i * block_size * 2 + 32);
        if (values) {
            _mm_prefetch((const char *)(next_keys + (int64_t)i * block_size * 2), _MM_HINT_T0);
            _mm_prefetch((const char *)(next_keys + (int64_t)i * block_size * 2 + 32), _MM_HINT_T0);
            _mm_prefetch((const char *)(values + i * 64), _MM_HINT_T0);
            _mm_prefetch((const char *)(values + i * 64 + 32), _MM_HINT_T0);
        }
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            int32_t pair;
            memcpy(&pair, q + r * dim + 2 * i, 4);
            const __m512i b = _mm512_set1_epi32(pair);
            acc[r][0] = dot2(acc[r][0], b, k0);
            acc[r][1] = dot2(acc[r][1], b, k1);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
        _mm512_storeu_ps(scores + r * CHUNK, acc[r][0]);
        _mm512_storeu_ps(scores + r * CHUNK + 16, acc[r][1]);
    }
}

// out[r][0..63] += probabilities[r][0..keys-1] . values[0..keys-1][0..63], one block
INLINE void value_tile(const int rows, const bf16 *prob, const bf16 *values, int keys, int dim, float *out) {
    __m512 acc[6][4];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < 4; c++) acc[r][c] = _mm512_loadu_ps(out + r * dim + 16 * c);
    for (int k = 0; k < keys; k += 2) {
        const bf16 *row = values + (int64_t)k * dim;
        const __m512i v0 = _mm512_loadu_si512(row), v1 = _mm512_loadu_si512(row + 32);
        const __m512i v2 = _mm512_loadu_si512(row + 64), v3 = _mm512_loadu_si512(row + 96);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            int32_t pair;
            memcpy(&pair, prob + r * CHUNK + k, 4);
            const __m512i b = _mm512_set1_epi32(pair);
            acc[r][0] = dot2(acc[r][0], b, v0);
            acc[r][1] = dot2(acc[r][1], b, v1);
            acc[r][2] = dot2(acc[r][2], b, v2);
            acc[r][3] = dot2(acc[r][3], b, v3);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < 4; c++) _mm512_storeu_ps(out + r * dim + 16 * c, acc[r][c]);
}

#define BY_ROWS(n, call)         \
    switch (n) {                 \
    case 1: call(1); break;      \
    case 2: call(2); break;      \
    case 3: call(3); break;      \
    case 4: call(4); break;      \
    case 5: call(5); break;      \
    default: call(6); break;     \
    }

typedef struct {
    bf16 query[MAX_ROWS * MAX_DIM];
    float scores[MAX_ROWS * CHUNK];
    bf16 prob[MAX_ROWS * CHUNK];
    float out[MAX_ROWS * MAX_DIM];
    float top[MAX_ROWS], sum[MAX_ROWS];
} Scratch;

// Turn a row of scores into probabilities relative to the running maximum; rescale what was summed before.
INLINE void softmax_row(Scratch *s, int r, int visible, int keys, float scale, int dim) {
    const float *score = s->scores + r * CHUNK;
    bf16 *prob = s->prob + r * CHUNK;
    if (visible <= 0) {
        memset(prob, 0, keys * sizeof(bf16));
        return;
    }
    if (visible > keys) visible = keys;
    const __m512 low = _mm512_set1_ps(-INFINITY);
    __m512 m = low;
    for (int k = 0; k < visible; k += 16) {
        const __mmask16 in = visible - k >= 16 ? 0xffff : (__mmask16)((1u << (visible - k)) - 1);
        m = _mm512_max_ps(m, _mm512_mask_loadu_ps(low, in, score + k));
    }
    const float top = fmaxf(s->top[r], _mm512_reduce_max_ps(m));
    const __m512 shift = _mm512_set1_ps(top), by = _mm512_set1_ps(scale);
    __m512 total = _mm512_setzero_ps();
    int k = 0;
    for (; k < visible; k += 16) {
        const __mmask16 in = visible - k >= 16 ? 0xffff : (__mmask16)((1u << (visible - k)) - 1);
        const __m512 x = _mm512_mul_ps(_mm512_sub_ps(_mm512_maskz_loadu_ps(in, score + k), shift), by);
        const __m512 e = _mm512_maskz_mov_ps(in, exp_ps(x));
        total = _mm512_add_ps(total, e);
        store_bf16(prob + k, e);
    }
    if (k < keys) memset(prob + k, 0, (keys - k) * sizeof(bf16));
    const float fade = s->sum[r] > 0 ? expf((s->top[r] - top) * scale) : 0.0f;
    s->top[r] = top;
    s->sum[r] = s->sum[r] * fade + _mm512_reduce_add_ps(total);
    if (fade != 1.0f) {
        const __m512 f = _mm512_set1_ps(fade);
        for (int i = 0; i < dim; i += 16)
            _mm512_storeu_ps(s->out + r * dim + i, _mm512_mul_ps(_mm512_loadu_ps(s->out + r * dim + i), f));
    }
}

// The keys of 32 positions from `position`; their values follow `block_size * dim` elements later, less the key offset.
INLINE const bf16 *run_of_keys(const Plan *p, int item, int head, int position, const bf16 *cache, const int dim) {
    const int32_t *table = p->table + (int64_t)p->item_rows[item] * p->columns;
    const int64_t block = table[position / p->block_size];
    return cache + (block * p->kv_heads + head) * 2 * p->block_size * dim + position % p->block_size * 2;
}

INLINE const bf16 *run_of_values(const Plan *p, int item, int head, int position, const bf16 *cache, const int dim) {
    const int offset = position % p->block_size;
    return run_of_keys(p, item, head, position, cache, dim) - offset * 2 + (p->block_size + offset) * dim;
}

INLINE void attend_chunk(const Plan *p, Scratch *s, int item, int head, int rows, int first, const bf16 *cache,
                         const int dim) {
    const int group = p->heads / p->kv_heads, end = p->item_ends[item];
    const int32_t *limits = p->item_limits + p->item_offsets[item];
    const int last = end - first < CHUNK ? end : first + CHUNK;
    const int keys = (last - first + 31) & ~31;
    for (int k = 0; k < keys; k += 32) {
        const bf16 *run = run_of_keys(p, item, head, first + k, cache, dim);
        const bf16 *next = first + k + 32 < end ? run_of_keys(p, item, head, first + k + 32, cache, dim) : run;
        const bf16 *values = run_of_values(p, item, head, first + k, cache, dim);
        for (int r = 0; r < rows; r += 6) {
#define CALL(n) \
    score_tile(n, s->query + r * dim, run, p->block_size, s->scores + r * CHUNK + k, dim, next, r ? NULL : values)
            BY_ROWS(rows - r, CALL)
#undef CALL
        }
    }
    for (int r = 0; r < rows; r++) softmax_row(s, r, limits[r / group] - first, keys, p->scale, dim);
    for (int k = 0; k < keys; k += 32) {
        const bf16 *run = run_of_values(p, item, head, first + k, cache, dim);
        for (int r = 0; r < rows; r += 6)
            for (int d = 0; d < dim; d += 64) {
#define CALL(n) value_tile(n, s->prob + r * CHUNK + k, run + d * 2, 32, dim, s->out + r * dim + d)
                BY_ROWS(rows - r, CALL)
#undef CALL
            }
    }
}

INLINE void finish_item(const Plan *p, Scratch *s, int item, int head, bf16 *out, const int dim) {
    const int group = p->heads / p->kv_heads, first = p->item_offsets[item];
    const int tokens = p->item_offsets[item + 1] - first, part = p->item_parts[item];
    for (int t = 0; t < tokens; t++)
        for (int g = 0; g < group; g++) {
            const int r = t * group + g;
            const __m512 by = _mm512_set1_ps(1.0f / s->sum[r]);
            const int64_t h = head * group + g;
            if (part < 0) {
                bf16 *y = out + ((int64_t)p->item_tokens[first + t] * p->heads + h) * dim;
                for (int i = 0; i < dim; i += 16)
                    store_bf16(y + i, _mm512_mul_ps(_mm512_loadu_ps(s->out + r * dim + i), by));
            } else {
                float *y = p->partial + ((int64_t)(part + t) * p->heads + h) * (dim + 1);
                for (int i = 0; i < dim; i += 16)
                    _mm512_storeu_ps(y + i, _mm512_mul_ps(_mm512_loadu_ps(s->out + r * dim + i), by));
                y[dim] = s->top[r] * p->scale + logf(s->sum[r]);
            }
        }
}

INLINE void attend_item(const Plan *p, Scratch *s, int item, int head, const bf16 *cache, bf16 *out, const int dim) {
    const int group = p->heads / p->kv_heads, offset = p->item_offsets[item];
    const int tokens = p->item_offsets[item + 1] - offset, rows = tokens * group;
    for (int t = 0; t < tokens; t++)
        memcpy(s->query + t * group * dim,
               p->query + ((int64_t)p->item_tokens[offset + t] * p->heads + head * group) * dim,
               group * dim * sizeof(bf16));
    for (int r = 0; r < rows; r++) s->top[r] = -INFINITY, s->sum[r] = 0;
    memset(s->out, 0, rows * dim * sizeof(float));
    for (int first = p->item_begins[item]; first < p->item_ends[item]; first += CHUNK)
        attend_chunk(p, s, item, head, rows, first, cache, dim);
    finish_item(p, s, item, head, out, dim);
}

// Weigh the parts of one token and head by their log-sum-exps.
static void merge_token(const Plan *p, int index, bf16 *out) {
    const int dim = p->dim, first = p->merge_offsets[index], last = p->merge_offsets[index + 1];
    for (int h = 0; h < p->heads; h++) {
        float top = -INFINITY, sum = 0;
        for (int i = first; i < last; i++) {
            const float lse = p->partial[((int64_t)p->merge_parts[i] * p->heads + h) * (dim + 1) + dim];
            top = fmaxf(top, lse);
        }
        __m512 acc[MAX_DIM / 16];
        for (int c = 0; c < dim / 16; c++) acc[c] = _mm512_setzero_ps();
        for (int i = first; i < last; i++) {
            const float *part = p->partial + ((int64_t)p->merge_parts[i] * p->heads + h) * (dim + 1);
            const float weight = expf(part[dim] - top);
            sum += weight;
            for (int c = 0; c < dim / 16; c++)
                acc[c] = _mm512_fmadd_ps(_mm512_loadu_ps(part + 16 * c), _mm512_set1_ps(weight), acc[c]);
        }
        bf16 *y = out + ((int64_t)p->merge_tokens[index] * p->heads + h) * dim;
        for (int c = 0; c < dim / 16; c++) store_bf16(y + 16 * c, _mm512_mul_ps(acc[c], _mm512_set1_ps(1.0f / sum)));
    }
}

// Normalise and rotate queries and keys, write the cache, attend. qn, kn: norm weights [dim], or NULL.
void deepinfer_attention(const Plan *p, const bf16 *qkv, bf16 *cache, bf16 *out, const bf16 *qn, const bf16 *kn) {
#pragma omp parallel if (p->tokens * p->heads > 32 || p->units > 8)
    {
        Scratch scratch;
#pragma omp for schedule(static)
        for (int64_t t = 0; t < p->tokens; t++) prepare_token(p, t, qkv, cache, qn, kn);
#pragma omp for schedule(dynamic, 1)
        for (int u = 0; u < p->units; u++) {
            const int item = p->order[u] / p->kv_heads, head = p->order[u] % p->kv_heads;
            if (p->dim == 64)
                attend_item(p, &scratch, item, head, cache, out, 64);
            else
                attend_item(p, &scratch, item, head, cache, out, 128);
        }
        if (p->merges) {
#pragma omp for schedule(static)
            for (int i = 0; i < p->merges; i++) merge_token(p, i, out);
        }
    }
}

int deepinfer_plan_bytes(void) { return (int)sizeof(Plan); }
