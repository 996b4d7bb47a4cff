// Copies tiles; transfer/copy_tiles.py has the picture and makes them. Compiled once per vector width.
//
//     grid     x: tiles of the program, y: pages                one block copies one tile of one page
//     block    THREADS threads, STEPS vectors in flight each    a tile has at most THREADS * STEPS vectors

#if VECTOR == 16
typedef uint4 vec;
#elif VECTOR == 8
typedef uint2 vec;
#elif VECTOR == 4
typedef unsigned int vec;
#else
typedef unsigned char vec;
#endif

struct __align__(16) Tile {
    long long src, dst;            // first byte of the tile in slot 0
    long long src_slot, dst_slot;  // distances in bytes, all of them
    int src_sub, dst_sub;
    int src_row, dst_row;
    int vectors, row_vectors;      // of the whole tile, and of one row
    unsigned magic;                // k / row_vectors is the upper half of k * magic; 0: it is k
    int unused;
};

// What is copied is not needed again soon, so it need not stay in any cache.
__device__ __forceinline__ vec load(const char* at) {
#if CACHE == 0
    return *(const vec*)at;
#else
    return __ldcs((const vec*)at);
#endif
}

__device__ __forceinline__ void store(char* at, vec value) {
#if CACHE == 2 || CACHE == 0
    *(vec*)at = value;
#else
    __stcs((vec*)at, value);
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS)
copy_tiles(const Tile* __restrict__ tiles, const int4* __restrict__ pages, long long src_shift, long long dst_shift) {
    const Tile tile = tiles[blockIdx.x];
    const int4 page = pages[blockIdx.y];  // source slot and sub-page, destination slot and sub-page
    const char* const src = (const char*)(tile.src + src_shift + page.x * tile.src_slot + (long long)page.y * tile.src_sub);
    char* const dst = (char*)(tile.dst + dst_shift + page.z * tile.dst_slot + (long long)page.w * tile.dst_sub);
    vec held[STEPS];
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        const int k = threadIdx.x + step * THREADS;
        const int row = tile.magic ? (int)__umulhi((unsigned)k, tile.magic) : k;
        const int column = k - row * tile.row_vectors;
        if (k < tile.vectors) held[step] = load(src + (long long)row * tile.src_row + column * VECTOR);
    }
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        const int k = threadIdx.x + step * THREADS;
        const int row = tile.magic ? (int)__umulhi((unsigned)k, tile.magic) : k;
        const int column = k - row * tile.row_vectors;
        if (k < tile.vectors) store(dst + (long long)row * tile.dst_row + column * VECTOR, held[step]);
    }
}
