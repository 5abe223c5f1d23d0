#include "hopper.cuh"
// Exact top K of rows (K <= 4096), ascending by index, lowest index on ties, -inf never chosen. A cluster shares a row (or a chunk of
// one); its keys stay in registers.
//
// 1. Every thread takes the maxima of its groups of eight keys; a histogram of their top 12 bits gives a bound that K keys
//    reach for certain, and usually few more do.
// 2. The keys that reach it go, in order, to the first block of the cluster, which selects among them digit by digit.
// 3. Where too many reach it (ties), the threshold is found bit by bit by counting over the cluster instead.

// THREADS: 1024, or 256 for short rows. MOST_BLOCKS: of a cluster; registers for the histograms of more of them are spilled.
constexpr int WARPS = THREADS / 32, VECTORS = 8, GROUPS = 4, ITEMS = 4 * VECTORS, COUNTS = VECTORS * WARPS / 32;
constexpr int BINS = 4096, OWN_BINS = BINS / THREADS, CAPACITY = 8192;

struct Shared {
    u32 histogram[BINS];
    u32 key[CAPACITY];
    int index[CAPACITY];
    u32 counts[VECTORS * WARPS];
    u32 totals[2];
    u32 sums[WARPS];
    u32 bin, rest, filled;
};

// Unsigned keys in the order of the floats; 0 for -inf and for nothing. -0.0 equals 0.0.
__device__ __forceinline__ u32 ordered(float value) {
    u32 bits = __float_as_uint(value + 0.0f);
    if (bits == 0xff800000u) return 0;
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float unordered(u32 key) { return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key); }

__device__ __forceinline__ u32 warp_sum(u32 x) { return __reduce_add_sync(~0u, x); }

// Sum over the threads of the block, to every thread. `sums` is free again after the next barrier.
__device__ __forceinline__ u32 block_sum(Shared& s, u32 x) {
    x = warp_sum(x);
    __syncthreads();
    if ((threadIdx.x & 31) == 0) s.sums[threadIdx.x >> 5] = x;
    __syncthreads();
    return warp_sum((threadIdx.x & 31) < WARPS ? s.sums[threadIdx.x & 31] : 0);
}

// The bin in which the `wanted`-th key from the top lies, and how many of that bin are needed (s.bin, s.rest, of s.filled), from
// the counts of each thread's OWN_BINS bins; false where there are fewer keys.
__device__ __forceinline__ bool find_bin(Shared& s, const u32 (&count)[OWN_BINS], u32 wanted) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    u32 own = 0;
#pragma unroll
    for (int i = 0; i < OWN_BINS; ++i) own += count[i];
    u32 above = own;
    for (int d = 1; d < 32; d *= 2) {
        u32 other = __shfl_down_sync(~0u, above, d);
        if (lane + d < 32) above += other;
    }
    __syncthreads();
    if (lane == 0) s.sums[warp] = above;
    __syncthreads();
    const u32 sum = lane < WARPS ? s.sums[lane] : 0, later = warp_sum(lane > warp ? sum : 0), all = warp_sum(sum);
    above += later - own;  // keys in bins over this thread's
#pragma unroll
    for (int i = OWN_BINS - 1; i >= 0; --i) {
        if (above < wanted && above + count[i] >= wanted) {
            s.bin = OWN_BINS * threadIdx.x + i;
            s.rest = wanted - above;
            s.filled = count[i];
        }
        above += count[i];
    }
    __syncthreads();
    return all >= wanted;
}

__device__ __forceinline__ void clear_histogram(Shared& s) {
    for (int i = threadIdx.x; i < BINS; i += THREADS) s.histogram[i] = 0;
    __syncthreads();
}

// A value that at least K keys of the cluster reach, at least 1.
__device__ __forceinline__ u32 lower_bound(Shared& s, const u32 (&key)[ITEMS], u32 k) {
    clear_histogram(s);
#pragma unroll
    for (int i = 0; i < GROUPS; ++i) {
        u32 best = 0;
#pragma unroll
        for (int j = 0; j < ITEMS / GROUPS; ++j) best = max(best, key[i * (ITEMS / GROUPS) + j]);
        if (best) atomicAdd(&s.histogram[best >> 20], 1);
    }
    const int size = cluster_size();
    size > 1 ? cluster_sync() : __syncthreads();
    u32 count[OWN_BINS];
#pragma unroll
    for (int i = 0; i < OWN_BINS; i += 4) {
        uint4 part[MOST_BLOCKS];
#pragma unroll
        for (int rank = 0; rank < MOST_BLOCKS; ++rank)
            if (rank < size) part[rank] = peer_load4(peer_address(shared_address(s.histogram + OWN_BINS * threadIdx.x + i), rank));
        count[i] = count[i + 1] = count[i + 2] = count[i + 3] = 0;
#pragma unroll
        for (int rank = 0; rank < MOST_BLOCKS; ++rank)
            if (rank < size) count[i] += part[rank].x, count[i + 1] += part[rank].y, count[i + 2] += part[rank].z, count[i + 3] += part[rank].w;
    }
    return find_bin(s, count, k) ? max(s.bin << 20, 1u) : 1u;
}

// Bit by bit over the cluster: the K-th largest key, 0 where fewer keys exist.
__device__ __forceinline__ u32 threshold_by_counting(Shared& s, const u32 (&key)[ITEMS], u32 k) {
    u32 found = 0;
    for (int bit = 31; bit >= 0; --bit) {
        const u32 candidate = found | (1u << bit);
        u32 count = 0;
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) count += key[i] >= candidate;
        count = block_sum(s, count);
        if (threadIdx.x == 0) s.totals[bit & 1] = count;
        cluster_sync();
        u32 all = 0;
        for (u32 rank = 0; rank < cluster_size(); ++rank) all += peer_load(peer_address(shared_address(&s.totals[bit & 1]), rank));
        if (all >= k) found = candidate;
    }
    cluster_sync();
    return found;
}

// Keys over `floor` (low half of a count) and equal to it (high half) before each group of 128 keys, and in all.
__device__ __forceinline__ u32 count_keys(Shared& s, const u32 (&key)[ITEMS], u32 floor, bool ties) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        u32 count = 0;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            count += key[4 * v + j] > floor;
            if (ties) count += u32(key[4 * v + j] == floor) << 16;
        }
        count = warp_sum(count);
        if (lane == 0) s.counts[v * WARPS + warp] = count;
    }
    __syncthreads();
    if (warp == 0) {
        u32 own[COUNTS], sum = 0;
#pragma unroll
        for (int i = 0; i < COUNTS; ++i) {
            own[i] = s.counts[COUNTS * lane + i];
            sum += own[i];
        }
        u32 before = sum;
        for (int d = 1; d < 32; d *= 2) {
            u32 other = __shfl_up_sync(~0u, before, d);
            if (lane >= d) before += other;
        }
        if (lane == 31) s.totals[0] = before;
        before -= sum;
#pragma unroll
        for (int i = 0; i < COUNTS; ++i) {
            s.counts[COUNTS * lane + i] = before;
            before += own[i];
        }
    }
    __syncthreads();
    return s.totals[0];
}

struct Row {
    const void* scores;
    const int* source;
    float* out_scores;
    int* out_index;
    int begin;  // first column of this block

    __device__ __forceinline__ int name(int column) const { return source ? source[column] : column; }
    __device__ __forceinline__ void write(int place, u32 key, int column) const {
        out_index[place] = name(column);
        if (out_scores) out_scores[place] = unordered(key);
    }
};

// Hand every key over `floor`, and the first `room` equal to it, to `take(place, key, column)` in order.
// `before` counts what lower ranks of the cluster hold.
template <class Take>
__device__ __forceinline__ void for_chosen(Shared& s, const u32 (&key)[ITEMS], u32 floor, u32 room, u32 above_before, u32 equal_before,
                                  int begin, Take take) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const u32 lower = (1u << lane) - 1;
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        bool any = false;
#pragma unroll
        for (int j = 0; j < 4; ++j) any |= room ? key[4 * v + j] >= floor : key[4 * v + j] > floor;
        if (!__any_sync(~0u, any)) continue;
        u32 base = s.counts[v * WARPS + warp], above = above_before + (base & 0xffff), equal = equal_before + (base >> 16);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            above += __popc(__ballot_sync(~0u, key[4 * v + j] > floor) & lower);
            if (room) equal += __popc(__ballot_sync(~0u, key[4 * v + j] == floor) & lower);
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const u32 x = key[4 * v + j];
            if (x > floor || (x == floor && equal < room))
                take(above + min(equal, room), x, begin + v * 4 * THREADS + 4 * int(threadIdx.x) + j);
            above += x > floor;
            equal += room && x == floor;
        }
    }
}

// The first block selects among `total` listed keys, which are in order of their columns.
__device__ __forceinline__ void select_listed(Shared& s, const Row& row, u32 total, u32 k) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    u32 floor = 0, room = 0;
    if (total > k) {
        u32 wanted = k, mask = 0;
#pragma unroll 1
        for (int pass = 0; pass < 3 && (pass == 0 || s.rest < s.filled); ++pass) {
            const int shift = pass == 0 ? 20 : pass == 1 ? 8 : 0, bins = pass == 2 ? 256 : 4096;
            clear_histogram(s);
            for (u32 i = threadIdx.x; i < total; i += THREADS)
                if ((s.key[i] & mask) == floor) atomicAdd(&s.histogram[(s.key[i] >> shift) & (bins - 1)], 1);
            __syncthreads();
            u32 count[OWN_BINS];
#pragma unroll
            for (int i = 0; i < OWN_BINS; ++i) count[i] = s.histogram[OWN_BINS * threadIdx.x + i];
            find_bin(s, count, wanted);
            floor |= s.bin << shift;
            mask |= u32(bins - 1) << shift;
            wanted = s.rest;
            __syncthreads();
        }
        // All keys of the last bin are wanted, or those with equal keys in order.
        if (s.rest == s.filled) floor -= 1;
        else room = wanted;
    }
    u32 above_before = 0, equal_before = 0;
    for (u32 begin = 0; begin < total; begin += THREADS) {
        const u32 i = begin + threadIdx.x, x = i < total ? s.key[i] : 0;
        const bool above = x > floor, equal = x == floor && i < total;
        const u32 a = __ballot_sync(~0u, above), e = __ballot_sync(~0u, equal);
        if (lane == 0) s.sums[warp] = __popc(a) | (__popc(e) << 16);
        __syncthreads();
        const u32 own = lane < WARPS ? s.sums[lane] : 0, before = warp_sum(lane < warp ? own : 0), all = warp_sum(own), lower = (1u << lane) - 1;
        const u32 rank = above_before + (before & 0xffff) + __popc(a & lower), tie = equal_before + (before >> 16) + __popc(e & lower);
        if (above || (equal && tie < room)) row.write(rank + min(tie, room), x, s.index[i]);
        above_before += all & 0xffff;
        equal_before += all >> 16;
        __syncthreads();
    }
    for (u32 i = min(total, k) + threadIdx.x; i < k; i += THREADS) row.out_index[i] = -1;
}

__device__ __forceinline__ int column_of(int begin, int i) { return begin + (i >> 2) * 4 * THREADS + 4 * int(threadIdx.x) + (i & 3); }

// A thread's values as float bits, -inf from `stop` on. All loads are on their way before any is used.
__device__ __forceinline__ void load_bits(u32 (&key)[ITEMS], const void* scores, i64 start, int begin, int stop, int is_bf16,
                                          int wide_loads) {
    const u32 none = 0xff800000u;
    const u16* halves = static_cast<const u16*>(scores) + start;
    const u32* words = static_cast<const u32*>(scores) + start;
    if (is_bf16) {
        uint2 pair[VECTORS];
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            const int column = column_of(begin, 4 * v);
            pair[v] = make_uint2(0xff80ff80u, 0xff80ff80u);
            if (wide_loads && column + 3 < stop) pair[v] = *reinterpret_cast<const uint2*>(halves + column);
        }
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            key[4 * v] = pair[v].x << 16, key[4 * v + 1] = pair[v].x & 0xffff0000u;
            key[4 * v + 2] = pair[v].y << 16, key[4 * v + 3] = pair[v].y & 0xffff0000u;
        }
    } else {
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            const int column = column_of(begin, 4 * v);
            uint4 four = make_uint4(none, none, none, none);
            if (wide_loads && column + 3 < stop) four = *reinterpret_cast<const uint4*>(words + column);
            key[4 * v] = four.x, key[4 * v + 1] = four.y, key[4 * v + 2] = four.z, key[4 * v + 3] = four.w;
        }
    }
    if (wide_loads && ((stop - begin) & 3) == 0) return;
    asm volatile("" : "+r"(begin));  // columns are computed again: kept, they would be spilled
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        const int column = column_of(begin, 4 * v);
        if (column >= stop || (wide_loads && column + 3 < stop)) continue;
#pragma unroll
        for (int j = 0; j < 4; ++j)
            if (column + j < stop) key[4 * v + j] = is_bf16 ? u32(halves[column + j]) << 16 : words[column + j];
    }
}

// Grid (chunks of a row, times cluster size; rows); `columns` <= 32 * THREADS columns a block, a multiple of 4.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
topk(const void* scores, i64 stride, const int* source, const int* lengths, int width, float* out_scores, int* out_index,
     int chunks, int k, int columns, int is_bf16, int wide_loads) {
    extern __shared__ u8 memory[];
    Shared& s = *reinterpret_cast<Shared*>(memory);
    wait_for_kernels();
    const u32 rank = cluster_rank(), size = cluster_size();
    const int chunk = blockIdx.x / size, begin = blockIdx.x * columns;
    const int limit = lengths ? min(lengths[blockIdx.y], width) : width, stop = min(limit, begin + columns);
    const i64 start = blockIdx.y * stride, target = (i64(blockIdx.y) * chunks + chunk) * k;
    const Row row{scores, source ? source + start : nullptr, out_scores ? out_scores + target : nullptr, out_index + target, begin};

    u32 key[ITEMS];
    load_bits(key, scores, start, begin, stop, is_bf16, wide_loads);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) key[i] = ordered(__uint_as_float(key[i]));
    if (source) {
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            const int column = column_of(begin, i);
            if (column < stop && row.source[column] < 0) key[i] = 0;
        }
    }

    const int held = min(max(limit - chunk * int(size) * columns, 0), int(size) * columns);
    const u32 bound = held > CAPACITY ? lower_bound(s, key, k) : 1u;
    u32 floor = bound - 1, room = 0;
    u32 mine = count_keys(s, key, floor, false), before = 0, total = mine;
    if (size > 1) {
        cluster_sync();
        total = 0;
        for (u32 r = 0; r < size; ++r) {
            u32 other = peer_load(peer_address(shared_address(&s.totals[0]), r));
            if (r < rank) before += other;
            total += other;
        }
    }
    if (total <= CAPACITY) {
        const u32 keys = peer_address(shared_address(s.key), 0), columns = peer_address(shared_address(s.index), 0);
        for_chosen(s, key, floor, 0, before, 0, begin, [&](u32 place, u32 x, int column) {
            peer_store(keys + 4 * place, x);
            peer_store(columns + 4 * place, column);
        });
        size > 1 ? cluster_sync() : __syncthreads();
        if (rank == 0) select_listed(s, row, total, k);
        return;
    }
    cluster_sync();  // everyone has read the totals
    floor = threshold_by_counting(s, key, k);
    mine = count_keys(s, key, floor, true);
    cluster_sync();
    u32 above_before = 0, equal_before = 0, above_all = 0, equal_all = 0;
    for (u32 r = 0; r < size; ++r) {
        u32 other = peer_load(peer_address(shared_address(&s.totals[0]), r));
        if (r < rank) above_before += other & 0xffff, equal_before += other >> 16;
        above_all += other & 0xffff, equal_all += other >> 16;
    }
    room = floor ? k - above_all : 0;  // key 0 stands for nothing
    for_chosen(s, key, floor, room, above_before, equal_before, begin,
               [&](u32 place, u32 x, int column) { row.write(place, x, column); });
    const u32 written = above_all + min(equal_all, room);
    if (rank == 0)
        for (u32 i = written + threadIdx.x; i < u32(k); i += THREADS) row.out_index[i] = -1;
    cluster_sync();  // peers may still read the totals
}
