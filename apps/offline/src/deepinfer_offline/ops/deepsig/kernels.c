// CPU kernels of V4.1's small ops: cache records, Sinkhorn normalisation, top-k with a tie rule. Any processor, plain C, one
// thread: a second OpenMP runtime beside the one of torch makes both spin for the same cores.
// Results equal the portable ops': records and selections bit for bit, Sinkhorn to float32 rounding.

#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define LANES 16       // tokens that one Sinkhorn block normalises side by side
#define MAX_STREAMS 8
#define MAX_CHANNELS 4096

enum { FP8 = 0, NVFP4 = 1, MXFP4 = 2 };

INLINE float as_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

INLINE uint32_t as_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

// Round to E4M3, ties to even. |value| <= 448; NaN stays NaN.
INLINE uint8_t to_e4m3(float value) {
    uint32_t bits = as_bits(value), sign = (bits >> 24) & 128, size = bits & 0x7FFFFFFF;
    if (size > 0x7F800000) return sign | 127;
    if (size < (121u << 23)) return sign | (uint8_t)rintf(as_float(size) * 512.0f); // below 2^-6: steps of 2^-9
    size += 0x7FFFF + ((size >> 20) & 1);
    return sign | (uint8_t)((size >> 20) - (120u << 3));
}

INLINE uint8_t to_e2m1(float value) {
    float size = fabsf(value);
    int code = (size > 0.25f) + (size >= 0.75f) + (size > 1.25f) + (size >= 1.75f) + (size > 2.5f) + (size >= 3.5f) +
               (size > 5.0f);
    return (uint8_t)(code | (as_bits(value) >> 31 << 3));
}

// The code as the leading bits of a float32, whose exponent bias is then taken back. No table: compilers vectorise this.
INLINE float e4m3_value(uint32_t code) {
    float value = as_float((code & 127) << 20 | (code & 128) << 24) * 0x1p120f;
    return (code & 127) == 127 ? NAN : value;
}

static float PAIRS[256][2]; // the two E2M1 values of every byte

__attribute__((constructor)) static void fill_pairs(void) {
    static const float LEVELS[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
    for (int byte = 0; byte < 256; byte++) {
        for (int half = 0; half < 2; half++) {
            int code = half ? byte >> 4 : byte & 15;
            PAIRS[byte][half] = code & 8 ? -LEVELS[code & 7] : LEVELS[code & 7];
        }
    }
}

INLINE int group_of(int format) { return format == NVFP4 ? 16 : 32; }

// The scale of one group, and its byte.
INLINE float group_scale(const float *x, int count, int format, uint8_t *byte) {
    float amax = 0;
    int poisoned = 0;
    for (int i = 0; i < count; i++) {
        amax = fabsf(x[i]) > amax ? fabsf(x[i]) : amax;
        poisoned |= x[i] != x[i];
    }
    if (format == NVFP4) {
        if (poisoned) return *byte = 127, NAN; // a NaN makes its whole group NaN
        float floor = 6 * 0x1p-9f;
        float scale = (amax > floor ? amax : floor) / 6.0f;
        *byte = to_e4m3(scale > 448.0f ? 448.0f : scale);
        return e4m3_value(*byte);
    }
    float floor = format == FP8 ? 1e-4f : 6 * 0x1p-126f;
    float quotient = (amax > floor ? amax : floor) * (format == FP8 ? 1.0f / 448.0f : 1.0f / 6.0f);
    uint32_t bits = (as_bits(quotient) + 0x7FFFFF) & 0x7F800000;
    *byte = bits >> 23;
    return as_float(bits);
}

INLINE void encode_row(const float *x, int channels, int format, uint8_t *record) {
    int group = group_of(format), data = format == FP8 ? channels : channels / 2;
    for (int start = 0, g = 0; start < channels; start += group, g++) {
        int count = channels - start < group ? channels - start : group;
        float scale = group_scale(x + start, count, format, record + data + g);
        for (int i = 0; i < count; i += format == FP8 ? 1 : 2) {
            float value = x[start + i] / scale;
            if (format == FP8) {
                value = value > 448.0f ? 448.0f : value < -448.0f ? -448.0f : value;
                record[start + i] = to_e4m3(value);
            } else {
                record[(start + i) / 2] = to_e2m1(value) | (uint8_t)(to_e2m1(x[start + i + 1] / scale) << 4);
            }
        }
    }
}

// Inlined with constant `format` and, for full groups, constant `count`: only then are the loops vectorised.
INLINE void decode_group(const uint8_t *data, int count, int format, float scale, float *out) {
    if (format == FP8) {
        for (int i = 0; i < count; i++) out[i] = e4m3_value(data[i]) * scale;
        return;
    }
    for (int i = 0; i < count / 2; i++) {
        out[2 * i] = PAIRS[data[i]][0] * scale;
        out[2 * i + 1] = PAIRS[data[i]][1] * scale;
    }
}

INLINE void decode_row(const uint8_t *record, int channels, int format, float *out) {
    int group = group_of(format), data = format == FP8 ? channels : channels / 2;
    for (int start = 0, g = 0; start < channels; start += group, g++) {
        uint8_t byte = record[data + g];
        float scale = format == NVFP4 ? e4m3_value(byte) : byte ? as_float((uint32_t)byte << 23) : 0x1p-127f;
        const uint8_t *first = record + (format == FP8 ? start : start / 2);
        if (channels - start >= group) decode_group(first, group, format, scale, out + start);
        else decode_group(first, channels - start, format, scale, out + start);
    }
}

INLINE void gather_rows(
    const uint8_t *pool, const int64_t *slots, int64_t rows, int channels, int format, float *out, int64_t width) {
    for (int64_t row = 0; row < rows; row++) {
        float *target = out + row * channels;
        if (slots[row] < 0) memset(target, 0, channels * sizeof(float));
        else decode_row(pool + slots[row] * width, channels, format, target);
    }
}

// Encode x [rows][channels] to records at `slots` of the pool; -1 writes nothing. slots NULL: row i goes to slot i.
void v41_encode(const float *x, const int64_t *slots, int64_t rows, int channels, int format, uint8_t *pool, int64_t width) {
    for (int64_t row = 0; row < rows; row++) {
        int64_t slot = slots ? slots[row] : row;
        if (slot >= 0) encode_row(x + row * channels, channels, format, pool + slot * width);
    }
}

// Decode the records at `slots`; -1 gives zeros, whatever the pool holds. Row i goes to out + i * channels.
void v41_gather(const uint8_t *pool, const int64_t *slots, int64_t rows, int channels, int format, float *out, int64_t width) {
    if (format == FP8) gather_rows(pool, slots, rows, channels, FP8, out, width);
    else if (format == NVFP4) gather_rows(pool, slots, rows, channels, NVFP4, out, width);
    else gather_rows(pool, slots, rows, channels, MXFP4, out, width);
}

// Softmax over rows plus eps, then alternating column and row normalisation: comb [tokens][s * s], in place.
void v41_sinkhorn(float *comb, int64_t tokens, int s, int iterations, float eps) {
    for (int64_t block = 0; block < tokens; block += LANES) {
        float c[MAX_STREAMS * MAX_STREAMS][LANES], sum[LANES];
        int64_t count = tokens - block < LANES ? tokens - block : LANES;
        for (int e = 0; e < s * s; e++)
            for (int lane = 0; lane < LANES; lane++) c[e][lane] = lane < count ? comb[(block + lane) * s * s + e] : 0;
        for (int row = 0; row < s; row++) {
            for (int lane = 0; lane < count; lane++) {
                float top = c[row * s][lane], whole = 0;
                for (int j = 1; j < s; j++) top = c[row * s + j][lane] > top ? c[row * s + j][lane] : top;
                for (int j = 0; j < s; j++) whole += c[row * s + j][lane] = expf(c[row * s + j][lane] - top);
                for (int j = 0; j < s; j++) c[row * s + j][lane] = c[row * s + j][lane] / whole + eps;
            }
        }
        for (int pass = 0; pass < 2 * iterations - 1; pass++) {
            int step = pass & 1 ? 1 : s, stride = pass & 1 ? s : 1; // odd passes: rows, even passes: columns
            for (int line = 0; line < s; line++) {
                for (int lane = 0; lane < LANES; lane++) sum[lane] = 0;
                for (int j = 0; j < s; j++)
                    for (int lane = 0; lane < LANES; lane++) sum[lane] += c[line * stride + j * step][lane];
                for (int lane = 0; lane < LANES; lane++) sum[lane] = 1.0f / (sum[lane] + eps);
                for (int j = 0; j < s; j++)
                    for (int lane = 0; lane < LANES; lane++) c[line * stride + j * step][lane] *= sum[lane];
            }
        }
        for (int e = 0; e < s * s; e++)
            for (int lane = 0; lane < count; lane++) comb[(block + lane) * s * s + e] = c[e][lane];
    }
}

// Order-preserving integer of a float; -0 equals 0.
INLINE uint32_t sortable(float value) {
    uint32_t bits = as_bits(value + 0.0f);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// Smallest key that is still among the k highest of a row, and how many entries equal to it may be taken.
INLINE uint32_t kth_key(const float *x, int64_t n, int64_t k, int64_t *room) {
    uint32_t prefix = 0, mask = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        int64_t counts[256] = {0};
        for (int64_t i = 0; i < n; i++) {
            uint32_t key = sortable(x[i]);
            if ((key & mask) == prefix) counts[(key >> shift) & 255]++;
        }
        int digit = 255;
        while (counts[digit] < k) k -= counts[digit--];
        prefix |= (uint32_t)digit << shift;
        mask |= 255u << shift;
    }
    *room = k;
    return prefix;
}

// Whether an entry is among the k highest of its row, given the row's `kth_key`.
INLINE int chosen(float value, uint32_t least, int64_t *room) {
    if (value == -INFINITY) return 0;
    uint32_t key = sortable(value);
    return key > least || (key == least && (*room)-- > 0);
}

// Indices of the k highest entries of each row of x [rows][n], ascending, ties to the lowest index, -inf never: out [rows][k].
void v41_topk(const float *x, int64_t rows, int64_t n, int64_t k, int32_t *out) {
    for (int64_t row = 0; row < rows; row++) {
        const float *line = x + row * n;
        int32_t *target = out + row * k;
        int64_t room = k, found = 0;
        uint32_t least = k < n ? kth_key(line, n, k, &room) : 0;
        for (int64_t i = 0; i < n && found < k; i++)
            if (chosen(line[i], least, &room)) target[found++] = (int32_t)i;
        while (found < k) target[found++] = -1;
    }
}

// The same selection as a mask, one byte an entry: out [rows][n].
void v41_topk_mask(const float *x, int64_t rows, int64_t n, int64_t k, uint8_t *out) {
    for (int64_t row = 0; row < rows; row++) {
        const float *line = x + row * n;
        int64_t room = k;
        uint32_t least = k < n ? kth_key(line, n, k, &room) : 0;
        for (int64_t i = 0; i < n; i++) out[row * n + i] = (uint8_t)chosen(line[i], least, &room);
    }
}
