// How products with a packed weight share their work: blocks of outputs, and parts of the rows in tiles of a few.
#pragma once

#include "common.h"
#include "pieces.h"

#ifdef HEADRACE_X86
#include <algorithm>

namespace product {

// The same as `_Call` in kernels/linear/blocked.py.
struct Call {
    const void* x;
    const void* weight;   // packed, aligned to 64 bytes, its outputs padded to whole blocks
    const float* bias;    // [outputs, padded as well]
    void* output;         // [num_rows, num_outputs], dense
    std::int64_t stride;  // of x's rows, in elements
    std::int64_t num_rows, num_outputs;
    std::int64_t depth;      // a multiple of 8
    std::int64_t is_narrow;  // where x is of float32: the weight is of bfloat16
};

// More pieces than threads, so that they end together.
constexpr std::int64_t kPiecesPerThread = 4;

inline std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// multiply(is_first, count, row, column) for the outputs of each block from `column` on and `count` rows from `row` on,
// in tiles of about equal size: the first one brings the block into the cache. `cached_rows`: so many rows of x stay in
// the second-level cache while all blocks pass by.
template <std::int64_t kBlock, std::int64_t kMaxRows, class Multiply>
void for_each_tile(std::int64_t num_rows, std::int64_t num_outputs, std::int64_t cached_rows, bool is_worth_threads,
                   const Multiply& multiply) {
    const std::int64_t blocks = ceil_div(num_outputs, kBlock);
    const std::int64_t wanted = ceil_div(kPiecesPerThread * omp_get_max_threads(), blocks);
    const std::int64_t parts = std::max(ceil_div(num_rows, cached_rows), std::min(ceil_div(num_rows, kMaxRows), wanted));
    pieces::share(parts * blocks, is_worth_threads, [&](std::int64_t piece) {
        const std::int64_t part = piece / blocks, block = piece % blocks;
        const std::int64_t first = num_rows * part / parts, size = num_rows * (part + 1) / parts - first;
        const std::int64_t tiles = ceil_div(size, kMaxRows);
        for (std::int64_t tile = 0; tile < tiles; ++tile) {
            const std::int64_t begin = size * tile / tiles, end = size * (tile + 1) / tiles;
            multiply(tile == 0, end - begin, first + begin, block * kBlock);
        }
    });
}

}  // namespace product
#endif
