#pragma once
// Records' codes to bfloat16 in shared memory, and reductions over a row of logits: for the kernels of sparse MLA with wgmma.
//
// Channel order: within eight channels 0 4 1 5 2 6 3 7, so that a word of codes becomes pairs by shifts and masks. Queries are
// permuted when they are read, outputs when they are written.
//
// Scale: a code's bits, shifted into place, are the value times 2^-126 (e2m1) or 2^-120 (e4m3). One multiplication by the
// group's scale times 2^66 or 2^60 gives the value times 2^-60, exactly; the softmax scale and the output carry the 2^60.

// Two chunks at once: registers of one are not reused before the other is stored.
__device__ __forceinline__ void store_chunks(u32 first, u32 second, const u32 (&x)[8]) {
    asm volatile("st.shared.v4.u32 [%0], {%2, %3, %4, %5};\nst.shared.v4.u32 [%1], {%6, %7, %8, %9};" ::"r"(first), "r"(second),
                 "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(x[4]), "r"(x[5]), "r"(x[6]), "r"(x[7])
                 : "memory");
}

// Sixteen e2m1 codes to two chunks of 16 bytes. A code in the low four bits of each half, times 2^12 + 2^6, has its sign in the
// half's highest bit and the rest where bfloat16 has its lowest exponent bits and its highest mantissa bit.
__device__ __forceinline__ void decode_e2m1(u32 w, u32 v, u32 factor, u32 first, u32 second) {
    u32 x[8];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const u32 low = i ? v : w, high = low >> 8;
        x[4 * i] = (low & 0x000f000fu) * 0x1040u;
        x[4 * i + 1] = (low & 0x00f000f0u) * 0x0104u;
        x[4 * i + 2] = (high & 0x000f000fu) * 0x1040u;
        x[4 * i + 3] = (high & 0x00f000f0u) * 0x0104u;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = multiply_bf16(x[i] & 0x81c081c0u, factor);
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

__device__ __forceinline__ uint4 load_codes(const u8* p) { return __ldg(reinterpret_cast<const uint4*>(p)); }

__device__ __forceinline__ float finite(float x) { return x == NEG_INF ? 0.0f : x; }
__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}
