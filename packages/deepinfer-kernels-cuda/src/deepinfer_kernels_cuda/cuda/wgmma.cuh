#pragma once
#include "hopper.cuh"
// d (+)= a * b, 64 rows by twice as many columns as d has values. `a` lies in shared memory or, where it is four registers, in
// each thread's fragment; `b` in shared memory, with the contraction along its rows, or, in _across, across them.
// add = 0 forgets d.

// The values of d by number and as operands, four more a line.
#define WGMMA_D4 "%0, %1, %2, %3"
#define WGMMA_D8 WGMMA_D4 ", %4, %5, %6, %7"
#define WGMMA_D12 WGMMA_D8 ", %8, %9, %10, %11"
#define WGMMA_D16 WGMMA_D12 ", %12, %13, %14, %15"
#define WGMMA_D20 WGMMA_D16 ", %16, %17, %18, %19"
#define WGMMA_D24 WGMMA_D20 ", %20, %21, %22, %23"
#define WGMMA_D28 WGMMA_D24 ", %24, %25, %26, %27"
#define WGMMA_D32 WGMMA_D28 ", %28, %29, %30, %31"
#define WGMMA_D36 WGMMA_D32 ", %32, %33, %34, %35"
#define WGMMA_D40 WGMMA_D36 ", %36, %37, %38, %39"
#define WGMMA_D44 WGMMA_D40 ", %40, %41, %42, %43"
#define WGMMA_D48 WGMMA_D44 ", %44, %45, %46, %47"
#define WGMMA_D52 WGMMA_D48 ", %48, %49, %50, %51"
#define WGMMA_D56 WGMMA_D52 ", %52, %53, %54, %55"
#define WGMMA_D60 WGMMA_D56 ", %56, %57, %58, %59"
#define WGMMA_D64 WGMMA_D60 ", %60, %61, %62, %63"
#define WGMMA_OUT(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define WGMMA_OUT4 WGMMA_OUT(0)
#define WGMMA_OUT8 WGMMA_OUT4, WGMMA_OUT(4)
#define WGMMA_OUT12 WGMMA_OUT8, WGMMA_OUT(8)
#define WGMMA_OUT16 WGMMA_OUT12, WGMMA_OUT(12)
#define WGMMA_OUT20 WGMMA_OUT16, WGMMA_OUT(16)
#define WGMMA_OUT24 WGMMA_OUT20, WGMMA_OUT(20)
#define WGMMA_OUT28 WGMMA_OUT24, WGMMA_OUT(24)
#define WGMMA_OUT32 WGMMA_OUT28, WGMMA_OUT(28)
#define WGMMA_OUT36 WGMMA_OUT32, WGMMA_OUT(32)
#define WGMMA_OUT40 WGMMA_OUT36, WGMMA_OUT(36)
#define WGMMA_OUT44 WGMMA_OUT40, WGMMA_OUT(40)
#define WGMMA_OUT48 WGMMA_OUT44, WGMMA_OUT(44)
#define WGMMA_OUT52 WGMMA_OUT48, WGMMA_OUT(48)
#define WGMMA_OUT56 WGMMA_OUT52, WGMMA_OUT(52)
#define WGMMA_OUT60 WGMMA_OUT56, WGMMA_OUT(56)
#define WGMMA_OUT64 WGMMA_OUT60, WGMMA_OUT(60)

// COUNT values of d; the numbers of the operands behind them; ACROSS 1: b is transposed.
#define WGMMA(NAME, TYPE, COUNT, COLUMNS, A0, A1, A2, A3, B, ADD, ACROSS)                                                     \
    __device__ __forceinline__ void NAME(float (&d)[COUNT], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, int add) {                 \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #ADD ", 0;\n"                                                      \
                     "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32." #TYPE "." #TYPE " {" WGMMA_D##COUNT              \
                     "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B ", p, 1, 1, " #ACROSS ";\n}"                        \
                     : WGMMA_OUT##COUNT                                                                                      \
                     : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(add));                                                \
    }
WGMMA(wgmma_f16, f16, 16, 32, 16, 17, 18, 19, 20, 21, 0)
WGMMA(wgmma_bf16, bf16, 16, 32, 16, 17, 18, 19, 20, 21, 0)
WGMMA(wgmma_bf16, bf16, 20, 40, 20, 21, 22, 23, 24, 25, 0)
WGMMA(wgmma_bf16, bf16, 24, 48, 24, 25, 26, 27, 28, 29, 0)
WGMMA(wgmma_bf16, bf16, 28, 56, 28, 29, 30, 31, 32, 33, 0)
WGMMA(wgmma_bf16, bf16, 32, 64, 32, 33, 34, 35, 36, 37, 0)
WGMMA(wgmma_bf16, bf16, 36, 72, 36, 37, 38, 39, 40, 41, 0)
WGMMA(wgmma_bf16, bf16, 40, 80, 40, 41, 42, 43, 44, 45, 0)
WGMMA(wgmma_bf16, bf16, 48, 96, 48, 49, 50, 51, 52, 53, 0)
WGMMA(wgmma_bf16, bf16, 52, 104, 52, 53, 54, 55, 56, 57, 0)
WGMMA(wgmma_bf16, bf16, 56, 112, 56, 57, 58, 59, 60, 61, 0)
WGMMA(wgmma_bf16, bf16, 60, 120, 60, 61, 62, 63, 64, 65, 0)
WGMMA(wgmma_bf16, bf16, 64, 128, 64, 65, 66, 67, 68, 69, 0)
WGMMA(wgmma_across, bf16, 64, 128, 64, 65, 66, 67, 68, 69, 1)

// Likewise with both operands in shared memory.
#define WGMMA_SHARED(NAME, COUNT, COLUMNS, A, B, ADD, ACROSS)                                                                    \
    __device__ __forceinline__ void NAME(float (&d)[COUNT], u64 a, u64 b, int add) {                                          \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #ADD ", 0;\n"                                                      \
                     "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32.bf16.bf16 {" WGMMA_D##COUNT                        \
                     "}, %" #A ", %" #B ", p, 1, 1, 0, " #ACROSS ";\n}"                                                     \
                     : WGMMA_OUT##COUNT                                                                                      \
                     : "l"(a), "l"(b), "r"(add));                                                                            \
    }
WGMMA_SHARED(wgmma_shared, 32, 64, 32, 33, 34, 0)
WGMMA_SHARED(wgmma_across, 64, 128, 64, 65, 66, 1)
