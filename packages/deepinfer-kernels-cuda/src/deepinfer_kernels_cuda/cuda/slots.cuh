#pragma once
// Records by slot.
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
        return pool + u64(u32(number)) * u32(stride_page) + u64(u32(slot - number * page)) * u32(stride_row);
    }
};
