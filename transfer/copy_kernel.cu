// Copies tiles of lanes; transfer/copy_cupy.py has the picture. Compiled once per vector width.

#if VECTOR == 16
typedef uint4 vec;
#elif VECTOR == 8
typedef uint2 vec;
#elif VECTOR == 4
typedef unsigned int vec;
#else
typedef unsigned char vec;
#endif

struct Lane {
    long long src, dst;                    // first byte of the lane in slot 0
    long long src_slot, dst_slot;          // strides in bytes, all of them
    long long src_sub, dst_sub;
    long long src_outer, dst_outer;
    long long src_inner, dst_inner;
    long long inner, outer;                // rows
    long long part_vectors, parts;         // a run is `parts` parts of `part_vectors` vectors
    long long unused0, unused1;
};

constexpr int THREADS = 256;
constexpr int STEPS = 4;

// Where row number `row` of a lane begins on both sides: pages outermost, parts of a run innermost.
__device__ __forceinline__ void locate(const Lane& lane, const int* pages, int count, unsigned row, const char** src,
                                       char** dst) {
    const unsigned parts = (unsigned)lane.parts, inner = (unsigned)lane.inner, outer = (unsigned)lane.outer;
    unsigned part = 0, j = 0, i = 0;
    if (parts > 1) { part = row % parts; row /= parts; }
    if (inner > 1) { j = row % inner; row /= inner; }
    if (outer > 1) { i = row % outer; row /= outer; }
    const long long along = part * lane.part_vectors * VECTOR;
    *src = (const char*)(lane.src + pages[row] * lane.src_slot + pages[count + row] * lane.src_sub +
                         i * lane.src_outer + j * lane.src_inner + along);
    *dst = (char*)(lane.dst + pages[2 * count + row] * lane.dst_slot + pages[3 * count + row] * lane.dst_sub +
                   i * lane.dst_outer + j * lane.dst_inner + along);
}

extern "C" __global__ void __launch_bounds__(THREADS)
copy_pages(const Lane* __restrict__ lanes, int num_lanes, const long long* __restrict__ first_block,
           const int* __restrict__ pages, int count, int group, int rows_per_block) {
    // The last lane that begins at or before this block. There are at least one and at most a few hundred.
    int low = 0, high = num_lanes - 1;
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (first_block[middle] <= blockIdx.x) low = middle; else high = middle - 1;
    }
    const Lane lane = lanes[low];
    const unsigned rows_of_page = (unsigned)(lane.outer * lane.inner * lane.parts);
    const unsigned long long rows = (unsigned long long)count * rows_of_page;
    const unsigned long long first = (blockIdx.x - first_block[low]) * (unsigned long long)rows_per_block;
    const int lanes_of_row = threadIdx.x & (group - 1), row_of_block = threadIdx.x / group;
    const int vectors = (int)lane.part_vectors;

    if (vectors > THREADS) {  // one row per block, several steps along it
        if (first >= rows) return;
        const char* src; char* dst;
        locate(lane, pages, count, (unsigned)first, &src, &dst);
        for (int at = lanes_of_row; at < vectors; at += THREADS * STEPS) {
            vec held[STEPS];
#pragma unroll
            for (int step = 0; step < STEPS; ++step)
                if (at + step * THREADS < vectors) held[step] = __ldcs((const vec*)src + at + step * THREADS);
#pragma unroll
            for (int step = 0; step < STEPS; ++step)
                if (at + step * THREADS < vectors) __stcs((vec*)dst + at + step * THREADS, held[step]);
        }
        return;
    }
    const int rows_per_step = THREADS / group;
    vec held[STEPS]; char* to[STEPS];
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        const unsigned long long row = first + step * rows_per_step + row_of_block;
        to[step] = 0;
        if (row < rows && lanes_of_row < vectors) {
            const char* src;
            locate(lane, pages, count, (unsigned)row, &src, &to[step]);
            held[step] = __ldcs((const vec*)src + lanes_of_row);
        }
    }
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
        if (to[step]) __stcs((vec*)to[step] + lanes_of_row, held[step]);
}
