// A few rows of x times a block of a weight's outputs, in float32 with AVX2: what products of any weight come to.
#pragma once

#include "avx2.h"
#include "product_tiles.h"

#ifdef HEADRACE_X86
namespace float32 {

using avx2::Pair;
using product::Call;

constexpr std::int64_t kBlock = 16;
// Rows of x at a time: two sums for each fill the registers, with the weight's pair and x's element.
constexpr std::int64_t kMaxRows = 6;
// How far ahead the weight is fetched into the second-level cache, in bytes: with few rows memory is what limits.
constexpr std::int64_t kAheadBytes = 8192;

// Inputs that have sums of their own: a sum is not ready for the next product at once, and with few rows there are not
// enough others to wait with.
constexpr int apart(int num_rows) { return num_rows == 1 ? 4 : num_rows <= 3 ? 2 : 1; }

// Of each row and input apart, the sums of a block's outputs.
template <int kRows>
using Sums = __m256[apart(kRows)][kRows][2];

// All loops over them are unrolled early: else the compiler keeps some in memory.
template <int kRows>
HEADRACE_AVX2_INLINE void clear(Sums<kRows>& sums) {
    constexpr int kApart = apart(kRows);
#pragma GCC unroll 4
    for (int i = 0; i < kApart; ++i) {
#pragma GCC unroll 6
        for (int r = 0; r < kRows; ++r) {
            sums[i][r][0] = sums[i][r][1] = _mm256_setzero_ps();
        }
    }
}

// Add what an input gives, `pair` being its weights and x its first row's element.
template <int kRows>
HEADRACE_AVX2_INLINE void add(Sums<kRows>& sums, int i, const Pair& pair, const float* x, std::int64_t stride) {
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
        const __m256 everywhere = _mm256_broadcast_ss(x + r * stride);
        sums[i][r][0] = _mm256_fmadd_ps(pair.low, everywhere, sums[i][r][0]);
        sums[i][r][1] = _mm256_fmadd_ps(pair.high, everywhere, sums[i][r][1]);
    }
}

// Write the outputs from `column` on of the rows from `row` on.
template <int kRows>
HEADRACE_AVX2_INLINE void finish(const Call& call, const Sums<kRows>& sums, std::int64_t row, std::int64_t column) {
    constexpr int kApart = apart(kRows);
    const Pair bias = {_mm256_loadu_ps(call.bias + column), _mm256_loadu_ps(call.bias + column + avx2::kLanes)};
    const std::int64_t count = std::min(kBlock, call.num_outputs - column);
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
        Pair sum = bias;
#pragma GCC unroll 4
        for (int i = 0; i < kApart; ++i) {
            sum.low = _mm256_add_ps(sum.low, sums[i][r][0]);
            sum.high = _mm256_add_ps(sum.high, sums[i][r][1]);
        }
        float* output = static_cast<float*>(call.output) + (row + r) * call.num_outputs + column;
        alignas(32) float last[kBlock];
        float* target = count == kBlock ? output : last;
        _mm256_storeu_ps(target, sum.low);
        _mm256_storeu_ps(target + avx2::kLanes, sum.high);
        if (count < kBlock) {
            std::memcpy(output, last, count * sizeof(float));
        }
    }
}

// The outputs from `column` on, as many as a block has, of `kRows` rows from `row` on. block: the weight of these outputs.
template <int kRows, bool kFetches, class Element>
HEADRACE_AVX2 void multiply(const Call& call, const Element* block, std::int64_t row, std::int64_t column) {
    constexpr int kApart = apart(kRows);
    const float* x = static_cast<const float*>(call.x) + row * call.stride;
    Sums<kRows> sums;
    clear<kRows>(sums);
    for (std::int64_t k = 0; k < call.depth; k += kApart) {
#pragma GCC unroll 4
        for (int i = 0; i < kApart; ++i) {
            const Element* here = block + (k + i) * kBlock;
            if (kFetches) {
                _mm_prefetch(reinterpret_cast<const char*>(here) + kAheadBytes, _MM_HINT_T1);
            }
            add<kRows>(sums, i, avx2::load_pair(here), x + k + i, call.stride);
        }
    }
    finish<kRows>(call, sums, row, column);
}

template <class Element>
using Multiply = void (*)(const Call&, const Element*, std::int64_t, std::int64_t);

// By the number of rows.
template <bool kFetches, class Element>
constexpr Multiply<Element> kMultiply[kMaxRows + 1] = {
    nullptr,
    multiply<1, kFetches, Element>, multiply<2, kFetches, Element>, multiply<3, kFetches, Element>,
    multiply<4, kFetches, Element>, multiply<5, kFetches, Element>, multiply<6, kFetches, Element>,
};

}  // namespace float32
#endif
