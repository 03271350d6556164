// x @ weightᵀ in float32 for any number of rows, on a processor with AVX2 and no AVX-512.
//
// The weight is packed: blocks of 16 outputs, in each one input after the other, [outputs / 16, inputs, 16]. An input of
// x, repeated in every lane, meets that input of 16 outputs in two instructions, and a block is read from its first byte
// to its last. A weight whose values all fit bfloat16 is kept in it and widened on the way, which is exact: with few rows
// reading it is what takes the time.

#include "avx2.h"
#include "product_tiles.h"

#ifdef HEADRACE_X86
namespace float32 {

using avx2::Pair;
using product::Call;

constexpr std::int64_t kBlock = 16;
// Rows of x at a time: two sums for each fill the registers, with the weight's pair and x's element.
constexpr std::int64_t kMaxRows = 6;
// Of x so many elements stay in the second-level cache while all blocks pass by.
constexpr std::int64_t kCachedElements = 65536;
// How far ahead the weight is fetched into the second-level cache, in bytes: with few rows memory is what limits.
constexpr std::int64_t kAheadBytes = 8192;
constexpr std::int64_t kWorkWorthThreads = 1 << 17;  // products of two elements

// Inputs that have sums of their own: a sum is not ready for the next product at once, and with few rows there are not
// enough others to wait with.
constexpr int apart(int num_rows) { return num_rows == 1 ? 4 : num_rows <= 3 ? 2 : 1; }

// The outputs from `column` on, as many as a block has, of `kRows` rows from `row` on.
template <int kRows, bool kFetches, class Element>
HEADRACE_AVX2 void multiply(const Call& call, std::int64_t row, std::int64_t column) {
    constexpr int kApart = apart(kRows);
    const float* x = static_cast<const float*>(call.x) + row * call.stride;
    const Element* weight = static_cast<const Element*>(call.weight) + column * call.depth;
    // All loops over them are unrolled early: else the compiler keeps some in memory.
    __m256 sums[kApart][kRows][2];
#pragma GCC unroll 4
    for (int i = 0; i < kApart; ++i) {
#pragma GCC unroll 6
        for (int r = 0; r < kRows; ++r) {
            sums[i][r][0] = sums[i][r][1] = _mm256_setzero_ps();
        }
    }
    for (std::int64_t k = 0; k < call.depth; k += kApart) {
#pragma GCC unroll 4
        for (int i = 0; i < kApart; ++i) {
            const Element* here = weight + (k + i) * kBlock;
            if (kFetches) {
                _mm_prefetch(reinterpret_cast<const char*>(here) + kAheadBytes, _MM_HINT_T1);
            }
            const Pair pair = avx2::load_pair(here);
#pragma GCC unroll 6
            for (int r = 0; r < kRows; ++r) {
                const __m256 everywhere = _mm256_broadcast_ss(x + r * call.stride + k + i);
                sums[i][r][0] = _mm256_fmadd_ps(pair.low, everywhere, sums[i][r][0]);
                sums[i][r][1] = _mm256_fmadd_ps(pair.high, everywhere, sums[i][r][1]);
            }
        }
    }
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

using Multiply = void (*)(const Call&, std::int64_t, std::int64_t);

// By the number of rows.
template <bool kFetches, class Element>
constexpr Multiply kMultiply[kMaxRows + 1] = {
    nullptr,
    multiply<1, kFetches, Element>, multiply<2, kFetches, Element>, multiply<3, kFetches, Element>,
    multiply<4, kFetches, Element>, multiply<5, kFetches, Element>, multiply<6, kFetches, Element>,
};

template <class Element>
void multiply_all(const Call& call) {
    const std::int64_t cached_rows = std::max(kMaxRows, kCachedElements / call.depth);
    const bool is_worth_threads = call.num_rows * call.num_outputs * call.depth > kWorkWorthThreads;
    product::for_each_tile<kBlock, kMaxRows>(
        call.num_rows, call.num_outputs, cached_rows, is_worth_threads,
        [&](bool is_first, std::int64_t count, std::int64_t row, std::int64_t column) {
            (is_first ? kMultiply<true, Element> : kMultiply<false, Element>)[count](call, row, column);
        });
}

}  // namespace float32

// output = x @ weightᵀ + bias.
HEADRACE_API void headrace_float32_product(const product::Call* call) {
    call->is_narrow ? float32::multiply_all<bf16>(*call) : float32::multiply_all<float>(*call);
}
#endif
