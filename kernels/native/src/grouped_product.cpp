// x @ weightᵀ in float32 with a weight of four or eight bits, on a processor with AVX2 and no AVX-512 (W4A16, W8A16).
//
// A block of 16 outputs is widened to what float32_tile.h reads: with few rows, which memory limits, in registers, with
// more, where memory does not limit, once for all of them. Lanes are [outputs / 16, inputs / inputs of a lane, 16].

#include "float32_tile.h"
#include "grouped_call.h"

#ifdef HEADRACE_X86
#define HEADRACE_F16C __attribute__((target("avx2,fma,f16c")))
#define HEADRACE_F16C_INLINE HEADRACE_F16C static inline __attribute__((always_inline))

namespace grouped {

using avx2::Pair;
using float32::kBlock;
using float32::kMaxRows;

struct Half {
    std::uint16_t bits;
};

// Rows of x up to which a weight is widened for each of them.
constexpr std::int64_t kFewRows = 3;
// Of x so many elements stay in the caches while all blocks pass by: more than of float32_product.cpp, as each part of the
// rows has the weight widened for itself.
constexpr std::int64_t kCachedElements = 262144;
constexpr std::int64_t kWorkWorthThreads = 1 << 16;  // products of two elements

HEADRACE_F16C_INLINE Pair load_pair(const float* source) { return avx2::load_pair(source); }

HEADRACE_F16C_INLINE Pair load_pair(const Half* source) {
    const __m128i* halves = reinterpret_cast<const __m128i*>(source);
    return {_mm256_cvtph_ps(_mm_load_si128(halves)), _mm256_cvtph_ps(_mm_load_si128(halves + 1))};
}

// What a group's values are multiplied by, and what is added then.
struct Factors {
    Pair scale, start;
};

template <class Values, class Scale>
HEADRACE_F16C_INLINE Factors factors_of(const Call& call, std::int64_t at) {
    const Pair scale = load_pair(static_cast<const Scale*>(call.scales) + at);
    const __m256 middle = _mm256_set1_ps(Values::kMiddle), sign = _mm256_set1_ps(-0.0f);
    Pair zero = {middle, middle};
    if (call.zeros != nullptr) {
        zero = load_pair(static_cast<const Scale*>(call.zeros) + at);
    }
    if (!call.has_minima) {
        zero = {_mm256_mul_ps(zero.low, scale.low), _mm256_mul_ps(zero.high, scale.high)};
    }
    return {scale, {_mm256_xor_ps(zero.low, sign), _mm256_xor_ps(zero.high, sign)}};
}

// The i-th weights of lanes of values.
template <class Values>
HEADRACE_F16C_INLINE __m256 widen(__m256i lanes, int i, __m256 scale, __m256 start) {
    constexpr int kBits = Values::kBits;
    const __m256i lowest = _mm256_srli_epi32(lanes, kBits * i);
    if constexpr (std::is_same_v<Values, Floats>) {
        // Of an index three bits count; the fourth is the sign.
        const __m256 sizes = _mm256_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6);
        const __m256 signs = _mm256_castsi256_ps(_mm256_slli_epi32(lanes, 28 - kBits * i));
        const __m256 sign = _mm256_and_ps(signs, _mm256_set1_ps(-0.0f));
        const __m256 value = _mm256_xor_ps(_mm256_permutevar8x32_ps(sizes, lowest), sign);
        return _mm256_fmadd_ps(value, scale, start);
    }
    const __m256i values = _mm256_and_si256(lowest, _mm256_set1_epi32((1 << kBits) - 1));
    return _mm256_fmadd_ps(_mm256_cvtepi32_ps(values), scale, start);
}

// Where the block of outputs from `column` on begins, of the weight and of the groups' factors.
template <class Values, class Scale>
struct Block {
    static constexpr int kTogether = 32 / Values::kBits;

    const Call& call;
    const __m256i* lanes;
    std::int64_t factors;

    Block(const Call& call, std::int64_t column)
        : call(call),
          lanes(static_cast<const __m256i*>(call.product.weight) + column / kBlock * (call.product.depth / kTogether) * 2),
          factors(column * product::ceil_div(call.product.depth, call.group_size)) {}
};

// See float32::multiply.
template <int kRows, class Values, class Scale>
HEADRACE_F16C void multiply(const Call& call, std::int64_t row, std::int64_t column) {
    constexpr int kApart = float32::apart(kRows);
    const Block<Values, Scale> block(call, column);
    const float* x = static_cast<const float*>(call.product.x) + row * call.product.stride;
    const __m256i* lanes = block.lanes;
    std::int64_t at = block.factors;
    float32::Sums<kRows> sums;
    float32::clear<kRows>(sums);
    for (std::int64_t first = 0; first < call.product.depth; first += call.group_size, at += kBlock) {
        const Factors factors = factors_of<Values, Scale>(call, at);
        const std::int64_t end = std::min(first + call.group_size, call.product.depth);
        for (std::int64_t k = first; k < end; k += block.kTogether, lanes += 2) {
            _mm_prefetch(reinterpret_cast<const char*>(lanes) + float32::kAheadBytes, _MM_HINT_T1);
            const __m256i low = _mm256_load_si256(lanes), high = _mm256_load_si256(lanes + 1);
#pragma GCC unroll 8
            for (int i = 0; i < block.kTogether; ++i) {
                const Pair pair = {widen<Values>(low, i, factors.scale.low, factors.start.low),
                                   widen<Values>(high, i, factors.scale.high, factors.start.high)};
                float32::add<kRows>(sums, i % kApart, pair, x + k + i, call.product.stride);
            }
        }
    }
    float32::finish<kRows>(call.product, sums, row, column);
}

// The block of outputs from `column` on as float32::multiply reads it: [inputs, 16].
template <class Values, class Scale>
HEADRACE_F16C void widen_block(const Call& call, std::int64_t column, float* target) {
    const Block<Values, Scale> block(call, column);
    const __m256i* lanes = block.lanes;
    std::int64_t at = block.factors;
    for (std::int64_t first = 0; first < call.product.depth; first += call.group_size, at += kBlock) {
        const Factors factors = factors_of<Values, Scale>(call, at);
        const std::int64_t end = std::min(first + call.group_size, call.product.depth);
        for (std::int64_t k = first; k < end; k += block.kTogether, lanes += 2) {
            _mm_prefetch(reinterpret_cast<const char*>(lanes) + float32::kAheadBytes, _MM_HINT_T1);
            const __m256i low = _mm256_load_si256(lanes), high = _mm256_load_si256(lanes + 1);
#pragma GCC unroll 8
            for (int i = 0; i < block.kTogether; ++i, target += kBlock) {
                _mm256_store_ps(target, widen<Values>(low, i, factors.scale.low, factors.start.low));
                _mm256_store_ps(target + avx2::kLanes, widen<Values>(high, i, factors.scale.high, factors.start.high));
            }
        }
    }
}

template <class Values, class Scale>
void multiply_all(const Call& call) {
    using Few = void (*)(const Call&, std::int64_t, std::int64_t);
    constexpr Few kFew[kFewRows + 1] = {
        nullptr, multiply<1, Values, Scale>, multiply<2, Values, Scale>, multiply<3, Values, Scale>};
    const product::Call& product = call.product;
    const bool is_few = product.num_rows <= kFewRows;
    const std::int64_t cached_rows = std::max(kMaxRows, kCachedElements / product.depth);
    const bool is_worth_threads = product.num_rows * product.num_outputs * product.depth > kWorkWorthThreads;
    product::for_each_tile<kBlock, kMaxRows>(
        product.num_rows, product.num_outputs, cached_rows, is_worth_threads,
        [&](bool is_first, std::int64_t count, std::int64_t row, std::int64_t column) {
            if (is_few) {
                kFew[count](call, row, column);
                return;
            }
            auto* block = reinterpret_cast<float*>(widened(product.depth * kBlock * sizeof(float)));
            if (is_first) {
                widen_block<Values, Scale>(call, column, block);
            }
            float32::kMultiply<false, float>[count](product, block, row, column);
        });
}

template <class Scale>
void multiply_all(const Call& call) {
    if (call.has_floats) {
        multiply_all<Floats, Scale>(call);
    } else {
        call.num_bits == 4 ? multiply_all<Nibbles, Scale>(call) : multiply_all<Bytes, Scale>(call);
    }
}

}  // namespace grouped

// output = x @ weightᵀ + bias.
HEADRACE_API void headrace_grouped_product(const grouped::Call* call) {
    call->has_half_scales ? grouped::multiply_all<grouped::Half>(*call) : grouped::multiply_all<float>(*call);
}
#endif
