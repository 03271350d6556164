// A linear layer in int8 on a processor with AVX2 and no AVX-512: rows of float32 are quantised as they come, multiplied
// by int8 weights, and scaled back.
//
// The weight is packed: blocks of 16 outputs, in each two inputs after the other two, [outputs / 16, inputs / 2, 16, 2].
// Both sides are widened to 16 bits, the rows once and the weight in registers: then one instruction multiplies two inputs
// of x, repeated in every lane, by those of eight outputs, and adds the two products. Nothing is rounded and nothing
// saturates, and it is twice as much as float32 has in an instruction.

#include "avx2.h"
#include "int8_call.h"
#include "product_tiles.h"

#ifdef HEADRACE_X86
namespace int8_avx2 {

using avx2::kLanes;
using int8::Call;

constexpr std::int64_t kBlock = 16;
// Rows of x at a time: two sums for each fill the registers, with the weight's two, x's pair and a product.
constexpr std::int64_t kMaxRows = 6;
// Of x so many elements stay in the second-level cache while all blocks pass by.
constexpr std::int64_t kCachedElements = 131072;
// How far ahead the weight is fetched into the second-level cache, in bytes: with few rows memory is what limits.
constexpr std::int64_t kAheadBytes = 8192;
constexpr std::int64_t kWorkWorthThreads = 1 << 18;  // products of two elements
constexpr std::int64_t kRowsWorthThreads = 1 << 14;  // elements to be quantised

// As both sides have them, zeros behind those that there are.
std::int64_t padded_inputs(const Call& call) { return call.num_steps() * int8::kStep; }

std::int16_t* quantized_row(const Call& call, std::int64_t row) {
    return reinterpret_cast<std::int16_t*>(call.quantized) + row * padded_inputs(call);
}

// The largest magnitude of a row: NaN where there is one, else infinity where there is one. Without their sign, the
// bits of floats are in the order of what they say, those of infinity above all numbers and those of NaN above them.
HEADRACE_AVX2 float largest_magnitude(const float* row, std::int64_t size) {
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
    __m256i largest = _mm256_setzero_si256();
    for (std::int64_t i = 0; i < size; i += kLanes) {
        const __m256i x = _mm256_castps_si256(_mm256_maskload_ps(row + i, avx2::lanes(i, size)));
        largest = _mm256_max_epi32(largest, _mm256_and_si256(magnitude, x));
    }
    std::int32_t bits[kLanes];
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(bits), largest);
    float result;
    std::memcpy(&result, std::max_element(bits, bits + kLanes), sizeof result);
    return result;
}

// round(x * factor) of sixteen elements from `i` on, zeros behind `size`.
HEADRACE_AVX2_INLINE __m256i whole_numbers(const float* row, std::int64_t i, std::int64_t size, __m256 factor) {
    const __m256 first = _mm256_maskload_ps(row + i, avx2::lanes(i, size));
    const __m256 second = _mm256_maskload_ps(row + i + kLanes, avx2::lanes(i + kLanes, size));
    const __m256i packed = _mm256_packs_epi32(_mm256_cvtps_epi32(_mm256_mul_ps(first, factor)),
                                              _mm256_cvtps_epi32(_mm256_mul_ps(second, factor)));
    return _mm256_permute4x64_epi64(packed, 0xd8);
}

// A row of x becomes round(row * 127 / largest magnitude), and zeros behind it. Returns the scale that undoes it; it is
// not finite where something in the row is not.
HEADRACE_AVX2 float quantize_row(const Call& call, std::int64_t row) {
    const float* x = static_cast<const float*>(call.input) + row * call.input_stride;
    std::int16_t* quantized = quantized_row(call, row);
    const float largest = largest_magnitude(x, call.num_inputs);
    // Finite for a row of zeros, too: they stay zeros.
    const __m256 factor = _mm256_set1_ps(127.0f / largest < __FLT_MAX__ ? 127.0f / largest : __FLT_MAX__);
    for (std::int64_t i = 0; i < padded_inputs(call); i += 2 * kLanes) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(quantized + i), whole_numbers(x, i, call.num_inputs, factor));
    }
    return largest / 127.0f;
}

// The outputs from `column` on, as many as a block has, of `kRows` rows from `row` on.
template <int kRows, bool kFetches>
HEADRACE_AVX2 void multiply(const Call& call, std::int64_t row, std::int64_t column) {
    const std::int64_t depth = padded_inputs(call);
    const std::int16_t* x = quantized_row(call, row);
    const std::uint8_t* weight = call.weight + column * depth;
    // All loops over them are unrolled early: else the compiler keeps some in memory.
    __m256i sums[kRows][2];
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
        sums[r][0] = sums[r][1] = _mm256_setzero_si256();
    }
    // A line of the weight's cache at a time.
    for (std::int64_t k = 0; k < depth; k += 4) {
        if (kFetches) {
            _mm_prefetch(weight + k * kBlock + kAheadBytes, _MM_HINT_T1);
        }
#pragma GCC unroll 2
        for (int i = 0; i < 4; i += 2) {
            const __m128i* here = reinterpret_cast<const __m128i*>(weight + (k + i) * kBlock);
            const __m256i low = _mm256_cvtepi8_epi16(here[0]), high = _mm256_cvtepi8_epi16(here[1]);
#pragma GCC unroll 6
            for (int r = 0; r < kRows; ++r) {
                std::int32_t pair;
                std::memcpy(&pair, x + r * depth + k + i, sizeof pair);
                const __m256i everywhere = _mm256_set1_epi32(pair);
                sums[r][0] = _mm256_add_epi32(sums[r][0], _mm256_madd_epi16(low, everywhere));
                sums[r][1] = _mm256_add_epi32(sums[r][1], _mm256_madd_epi16(high, everywhere));
                // Else the compiler multiplies for all rows before it adds, and keeps the sums in memory.
                __asm__ volatile("" : "+x"(sums[r][0]), "+x"(sums[r][1]));
            }
        }
    }
    const std::int64_t count = std::min(kBlock, call.num_outputs - column);
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
        float* output = static_cast<float*>(call.output) + (row + r) * call.num_outputs + column;
        alignas(32) float last[kBlock];
        float* target = count == kBlock ? output : last;
        const __m256 row_scale = _mm256_set1_ps(call.row_scales[row + r]);
        for (int half = 0; half < 2; ++half) {
            const std::int64_t at = column + half * kLanes;
            const __m256 product = _mm256_mul_ps(_mm256_cvtepi32_ps(sums[r][half]), row_scale);
            const __m256 scale = _mm256_loadu_ps(call.column_scales + at), bias = _mm256_loadu_ps(call.biases + at);
            _mm256_storeu_ps(target + half * kLanes, _mm256_fmadd_ps(product, scale, bias));
        }
        if (count < kBlock) {
            std::memcpy(output, last, count * sizeof(float));
        }
    }
}

using Multiply = void (*)(const Call&, std::int64_t, std::int64_t);

// By the number of rows.
template <bool kFetches>
constexpr Multiply kMultiply[kMaxRows + 1] = {
    nullptr, multiply<1, kFetches>, multiply<2, kFetches>, multiply<3, kFetches>,
    multiply<4, kFetches>, multiply<5, kFetches>, multiply<6, kFetches>,
};

}  // namespace int8_avx2

// output = input . weight' + bias, where each row of the input and each row of the weight is int8 times a scale.
HEADRACE_API void headrace_int8_linear_avx2(const int8::Call* call) {
    using namespace int8_avx2;
    const std::int64_t num_rows = call->num_rows, depth = std::max<std::int64_t>(1, padded_inputs(*call));
#pragma omp parallel for schedule(static) if (num_rows * call->num_inputs > kRowsWorthThreads)
    for (std::int64_t row = 0; row < num_rows; ++row) {
        call->row_scales[row] = quantize_row(*call, row);
    }
    product::for_each_tile<kBlock, kMaxRows>(
        num_rows, call->num_outputs, std::max(kMaxRows, kCachedElements / depth),
        num_rows * call->num_outputs * call->num_inputs > kWorkWorthThreads,
        [=](bool is_first, std::int64_t count, std::int64_t row, std::int64_t column) {
            (is_first ? kMultiply<true> : kMultiply<false>)[count](*call, row, column);
        });
}
#endif
