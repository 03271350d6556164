// x @ weightᵀ for any number of rows, on a processor whose bfloat16 is AVX-512's dot product alone.
//
// The weight is packed: blocks of 32 outputs, in each the inputs two by two, [outputs / 32, inputs / 2, 32, 2]. So a
// pair of x's inputs, repeated in every lane, meets that pair of 32 outputs in two instructions and nothing is summed
// across a register; and a block is read from its first byte to its last, which is how memory is fastest.

#include "product_tiles.h"

#ifdef HEADRACE_X86
namespace packed {

using product::Call;

constexpr std::int64_t kBlock = 32;
// Rows of x at a time: two sums for each fill the registers, with the weight's pair and x's.
constexpr std::int64_t kMaxRows = 12;
// So many rows of x stay in the second-level cache while all blocks pass by.
constexpr std::int64_t kCachedRows = 96;
// How far ahead the weight is fetched into the second-level cache, in elements: with few rows memory is what limits.
constexpr std::int64_t kAhead = 16384;

// Pairs of inputs that have sums of their own: a sum is not ready for the next product at once, and with few rows there
// are not enough others to wait with.
constexpr int apart(int num_rows) { return num_rows <= 2 ? 4 : num_rows <= 6 ? 2 : 1; }

// The outputs from `column` on, as many as a block has, of `kRows` rows from `row` on.
template <int kRows, bool kFetches>
HEADRACE_AVX512 void multiply(const Call& call, std::int64_t row, std::int64_t column) {
    constexpr int kApart = apart(kRows);
    const bf16* x = static_cast<const bf16*>(call.x) + row * call.stride;
    const bf16* weight = static_cast<const bf16*>(call.weight) + column * call.depth;
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
    bf16* output = static_cast<bf16*>(call.output) + row * call.num_outputs + column;
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

}  // namespace packed

// output = x @ weightᵀ + bias.
HEADRACE_API void headrace_packed_product(const product::Call* call) {
    using namespace packed;
    product::for_each_tile<kBlock, kMaxRows>(
        call->num_rows, call->num_outputs, kCachedRows, true,
        [=](bool is_first, std::int64_t count, std::int64_t row, std::int64_t column) {
            (is_first ? kMultiply<true> : kMultiply<false>)[count](*call, row, column);
        });
}
#endif
