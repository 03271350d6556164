// x @ weightᵀ for any number of rows, on a processor whose bfloat16 is AVX-512's dot product alone.
//
// The weight is packed: blocks of 32 outputs, in each the inputs two by two, [outputs / 32, inputs / 2, 32, 2]. So a
// pair of x's inputs, repeated in every lane, meets that pair of 32 outputs in two instructions and nothing is summed
// across a register; and a block is read from its first byte to its last, which is how memory is fastest.

#include "common.h"

#ifdef HEADRACE_X86
#include <omp.h>

#include <algorithm>

namespace packed {

constexpr std::int64_t kBlock = 32;
// Rows of x at a time: two sums for each fill the registers, with the weight's pair and x's.
constexpr std::int64_t kMaxRows = 12;
// So many rows of x stay in the second-level cache while all blocks pass by.
constexpr std::int64_t kCachedRows = 96;
// How far ahead the weight is fetched into the second-level cache, in elements: with few rows memory is what limits.
constexpr std::int64_t kAhead = 16384;
// More pieces than threads, so that they end together.
constexpr std::int64_t kPiecesPerThread = 4;

// The same as `_Call` in kernels/linear/packed.py.
struct Call {
    const bf16* x;
    const bf16* weight;  // packed as above, aligned to 64 bytes, its outputs padded to a multiple of 32
    const float* bias;   // [outputs padded to 32]
    bf16* output;        // [num_rows, num_outputs], dense
    std::int64_t stride; // of x's rows, in elements
    std::int64_t num_rows, num_outputs;
    std::int64_t depth;  // a multiple of 8
};

// Pairs of inputs that have sums of their own: a sum is not ready for the next product at once, and with few rows there
// are not enough others to wait with.
constexpr int apart(int num_rows) { return num_rows <= 2 ? 4 : num_rows <= 6 ? 2 : 1; }

// The outputs from `column` on, as many as a block has, of `kRows` rows from `row` on.
template <int kRows, bool kFetches>
HEADRACE_AVX512 void multiply(const Call& call, std::int64_t row, std::int64_t column) {
    constexpr int kApart = apart(kRows);
    const bf16* x = call.x + row * call.stride;
    const bf16* weight = call.weight + column * call.depth;
    // All loops over them are unrolled early: else the compiler keeps some in memory.
    __m512 sums[kApart][kRows][2];
#pragma GCC unroll 4
    for (int i = 0; i < kApart; ++i) {
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
            sums[i][r][0] = sums[i][r][1] = _mm512_setzero_ps();
        }
    }
    for (std::int64_t k = 0; k < call.depth; k += 2 * kApart) {
#pragma GCC unroll 4
        for (int i = 0; i < kApart; ++i) {
            const bf16* pairs = weight + (k + 2 * i) * kBlock;
            if (kFetches) {
                _mm_prefetch(pairs + kAhead, _MM_HINT_T1);
                _mm_prefetch(pairs + kAhead + kBlock, _MM_HINT_T1);
            }
            const auto left = reinterpret_cast<__m512bh>(_mm512_load_si512(pairs));
            const auto right = reinterpret_cast<__m512bh>(_mm512_load_si512(pairs + kBlock));
#pragma GCC unroll 16
            for (int r = 0; r < kRows; ++r) {
                std::int32_t pair;
                std::memcpy(&pair, x + r * call.stride + k + 2 * i, sizeof pair);
                const auto everywhere = reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
                sums[i][r][0] = _mm512_dpbf16_ps(sums[i][r][0], left, everywhere);
                sums[i][r][1] = _mm512_dpbf16_ps(sums[i][r][1], right, everywhere);
            }
        }
    }
    const std::int64_t missing = std::max<std::int64_t>(0, column + kBlock - call.num_outputs);
    const __mmask32 mask = ~0u >> missing;
    const __m512 left = _mm512_loadu_ps(call.bias + column), right = _mm512_loadu_ps(call.bias + column + 16);
    bf16* output = call.output + row * call.num_outputs + column;
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
        __m512 low = left, high = right;
#pragma GCC unroll 4
        for (int i = 0; i < kApart; ++i) {
            low = _mm512_add_ps(low, sums[i][r][0]);
            high = _mm512_add_ps(high, sums[i][r][1]);
        }
        const auto narrowed = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
        _mm512_mask_storeu_epi16(output + r * call.num_outputs, mask, narrowed);
    }
}

using Multiply = void (*)(const Call&, std::int64_t, std::int64_t);

// By the number of rows.
template <bool kFetches>
constexpr Multiply kMultiply[kMaxRows + 1] = {
    nullptr,
    multiply<1, kFetches>, multiply<2, kFetches>, multiply<3, kFetches>, multiply<4, kFetches>,
    multiply<5, kFetches>, multiply<6, kFetches>, multiply<7, kFetches>, multiply<8, kFetches>,
    multiply<9, kFetches>, multiply<10, kFetches>, multiply<11, kFetches>, multiply<12, kFetches>,
};

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// The rows from `first` to `last`, in tiles of about equal size: the first one brings the block into the cache.
void multiply_block(const Call& call, std::int64_t first, std::int64_t last, std::int64_t column) {
    const std::int64_t size = last - first, tiles = ceil_div(size, kMaxRows);
    for (std::int64_t tile = 0; tile < tiles; ++tile) {
        const std::int64_t begin = first + size * tile / tiles, end = first + size * (tile + 1) / tiles;
        (tile == 0 ? kMultiply<true> : kMultiply<false>)[end - begin](call, begin, column);
    }
}

}  // namespace packed

// output = x @ weightᵀ + bias.
HEADRACE_API void headrace_packed_product(const packed::Call* given) {
    using namespace packed;
    const Call call = *given;
    const std::int64_t num_rows = call.num_rows;
    const std::int64_t blocks = ceil_div(call.num_outputs, kBlock);
    const std::int64_t wanted = ceil_div(kPiecesPerThread * omp_get_max_threads(), blocks);
    const std::int64_t parts = std::max(ceil_div(num_rows, kCachedRows), std::min(ceil_div(num_rows, kMaxRows), wanted));
#pragma omp parallel for collapse(2) schedule(static)
    for (std::int64_t part = 0; part < parts; ++part) {
        for (std::int64_t block = 0; block < blocks; ++block) {
            multiply_block(call, num_rows * part / parts, num_rows * (part + 1) / parts, block * kBlock);
        }
    }
}
#endif
