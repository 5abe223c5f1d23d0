#pragma once
#include "hopper.cuh"
// Records by slot, and warp-level products.
constexpr float TWO_60 = 1152921504606846976.0f, TWO_66 = 73786976294838206464.0f, LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;

struct Records {
    const u8* pool;
    const void* slots;
    i64 stride_page, stride_row, slots_stride;
    int keys, rows, page, page_shift, slots_are_long;  // page_shift < 0: the page is no power of two

    // A slot as it is stored, in two words of which the second is zero where it fits one; not waited for. -1 without `there` or key.
    __device__ __forceinline__ int2 slot(i64 query, int key, bool there) const {
        there = there && key < keys;
        const u8* at = static_cast<const u8*>(slots) + ((query * slots_stride + (there ? key : 0)) << (2 + slots_are_long));
        int2 raw{-1, 0};
        if (there) raw.x = *reinterpret_cast<const int*>(at);
        if (there && slots_are_long) raw.y = *reinterpret_cast<const int*>(at + 4);
        return raw;
    }
    __device__ __forceinline__ const u8* record(int slot) const {
        const int number = page_shift < 0 ? slot / page : slot >> page_shift;
        return pool + number * stride_page + (slot - number * page) * stride_row;
    }
};

// d += a * b: 16 rows, 8 columns, a contraction over 16; bf16.
__device__ __forceinline__ void multiply_16816(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// Four 8 x 8 matrices of 16-bit values; lane i gives the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void load_matrices(u32 (&d)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(address)
                 : "memory");
}
__device__ __forceinline__ void load_matrices_across(u32 (&d)[4], u32 address) {  // transposed
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(address)
                 : "memory");
}
