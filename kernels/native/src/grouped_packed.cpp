// x @ weightᵀ in bfloat16 or float32 with a weight of four or eight bits, on a processor with AVX-512 (W4A16, W8A16).
//
// A block of 32 outputs is widened to what packed_tile.h reads: for one tile of rows in registers, for more once for all
// of them. Lanes are [outputs / 32, inputs / inputs of a lane, 32] in float32; in bfloat16 two lanes
// have the inputs of an output in turns, [outputs / 32, inputs / inputs of two lanes, 32, 2], so that what is rounded
// lies in pairs without being shuffled.

#include "grouped_call.h"
#include "packed_tile.h"

#ifdef HEADRACE_X86
namespace packed_grouped {

using grouped::Call;
using packed::kBlock;

// Of x so many elements stay in the caches while all blocks pass by: more than of packed_linear.cpp, as each part of the
// rows has the weight widened for itself.
constexpr std::int64_t kCachedElements = 131072;

// Of lanes and of factors, for a block's outputs.
template <class Kind>
constexpr int kRegisters = 2 * Kind::kInputs;

// What a group's values are multiplied by, and what is added then, in the order of the lanes.
template <class Kind>
struct Factors {
    __m512 scales[kRegisters<Kind>], starts[kRegisters<Kind>];
};

HEADRACE_INLINE __m512 load_factors(const Call& call, const void* factors, std::int64_t at) {
    if (call.has_half_scales) {
        const auto* halves = static_cast<const std::uint16_t*>(factors) + at;
        return _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(halves)));
    }
    return _mm512_load_ps(static_cast<const float*>(factors) + at);
}

template <class Kind, class Values>
HEADRACE_INLINE Factors<Kind> factors_of(const Call& call, std::int64_t at) {
    Factors<Kind> factors;
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
        const __m512 scale = load_factors(call, call.scales, at + 16 * half);
        __m512 zero = _mm512_set1_ps(Values::kMiddle);
        if (call.zeros != nullptr) {
            zero = load_factors(call, call.zeros, at + 16 * half);
        }
        const __m512 minimum = call.has_minima ? zero : _mm512_mul_ps(zero, scale);
        const __m512 start = _mm512_sub_ps(_mm512_setzero_ps(), minimum);
        if constexpr (Kind::kInputs == 1) {
            factors.scales[half] = scale;
            factors.starts[half] = start;
        } else {
            const __m512i low = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
            const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
            factors.scales[2 * half] = _mm512_permutexvar_ps(low, scale);
            factors.scales[2 * half + 1] = _mm512_permutexvar_ps(high, scale);
            factors.starts[2 * half] = _mm512_permutexvar_ps(low, start);
            factors.starts[2 * half + 1] = _mm512_permutexvar_ps(high, start);
        }
    }
    return factors;
}

// The i-th values of lanes as they are.
template <class Values>
HEADRACE_INLINE __m512 values_of(__m512i lanes, int i) {
    constexpr int kBits = Values::kBits;
    const __m512i lowest = _mm512_srli_epi32(lanes, kBits * i);
    // Of an index four bits count.
    if constexpr (std::is_same_v<Values, grouped::Floats>) {
        const __m512 values = _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, 0, -0.5f, -1, -1.5f, -2, -3, -4, -6);
        return _mm512_permutexvar_ps(lowest, values);
    } else if constexpr (kBits == 4) {
        const __m512 values = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        return _mm512_permutexvar_ps(lowest, values);
    }
    return _mm512_cvtepi32_ps(_mm512_and_si512(lowest, _mm512_set1_epi32((1 << kBits) - 1)));
}

// The i-th weights of lanes, as `Kind` multiplies them.
template <class Kind, class Values>
HEADRACE_INLINE typename Kind::Weights widen(const __m512i* lanes, int i, const Factors<Kind>& factors) {
    __m512 wide[kRegisters<Kind>];
#pragma GCC unroll 4
    for (int j = 0; j < kRegisters<Kind>; ++j) {
        wide[j] = _mm512_fmadd_ps(values_of<Values>(lanes[j], i), factors.scales[j], factors.starts[j]);
    }
    if constexpr (Kind::kInputs == 1) {
        return {wide[0], wide[1]};
    } else {
        return {_mm512_cvtne2ps_pbh(wide[1], wide[0]), _mm512_cvtne2ps_pbh(wide[3], wide[2])};
    }
}

// use(i, k, weights) for each input or pair of them, k, of the block of outputs from `column` on; i counts within lanes.
template <class Kind, class Values, class Use>
HEADRACE_INLINE void for_each_input(const Call& call, std::int64_t column, const Use& use) {
    constexpr int kTogether = 32 / Values::kBits, kInputs = Kind::kInputs, kCount = kRegisters<Kind>;
    const std::int64_t depth = call.product.depth;
    const std::int64_t first_lane = column / kBlock * (depth / (kTogether * kInputs)) * kCount;
    const __m512i* source = static_cast<const __m512i*>(call.product.weight) + first_lane;
    std::int64_t at = column * product::ceil_div(depth, call.group_size);
    for (std::int64_t first = 0; first < depth; first += call.group_size, at += kBlock) {
        const Factors<Kind> factors = factors_of<Kind, Values>(call, at);
        const std::int64_t end = std::min(first + call.group_size, depth);
        for (std::int64_t k = first; k < end; k += kTogether * kInputs, source += kCount) {
            __m512i lanes[kCount];
#pragma GCC unroll 4
            for (int j = 0; j < kCount; ++j) {
                packed::fetch(reinterpret_cast<const char*>(source + j));
                lanes[j] = _mm512_load_si512(source + j);
            }
#pragma GCC unroll 8
            for (int i = 0; i < kTogether; ++i) {
                use(i, k + kInputs * i, widen<Kind, Values>(lanes, i, factors));
            }
        }
    }
}

// See packed::multiply.
template <class Kind, class Values, int kRows>
HEADRACE_AVX512 void multiply(const Call& call, std::int64_t row, std::int64_t column) {
    const auto* x = static_cast<const typename Kind::Element*>(call.product.x) + row * call.product.stride;
    packed::Sums<kRows> sums;
    packed::clear<kRows>(sums);
    for_each_input<Kind, Values>(
        call, column,
        [&](int i, std::int64_t k, const typename Kind::Weights& weights) HEADRACE_AVX512 __attribute__((always_inline)) {
            packed::add<Kind, kRows>(sums, i % packed::apart(kRows), weights, x + k, call.product.stride);
        });
    packed::finish<Kind, kRows>(call.product, sums, row, column);
}

// The block of outputs from `column` on as packed::multiply reads it.
template <class Kind, class Values>
HEADRACE_AVX512 void widen_block(const Call& call, std::int64_t column, char* target) {
    for_each_input<Kind, Values>(
        call, column,
        [&](int, std::int64_t, const typename Kind::Weights& weights) HEADRACE_AVX512 __attribute__((always_inline)) {
            Kind::keep(target, weights);
            target += Kind::kBytes;
        });
}

template <class Kind, class Values>
void multiply_all(const Call& call) {
    using Few = void (*)(const Call&, std::int64_t, std::int64_t);
    constexpr Few kFew[packed::kMaxRows + 1] = {
        nullptr,
        multiply<Kind, Values, 1>, multiply<Kind, Values, 2>, multiply<Kind, Values, 3>,
        multiply<Kind, Values, 4>, multiply<Kind, Values, 5>, multiply<Kind, Values, 6>,
        multiply<Kind, Values, 7>, multiply<Kind, Values, 8>, multiply<Kind, Values, 9>,
        multiply<Kind, Values, 10>, multiply<Kind, Values, 11>, multiply<Kind, Values, 12>,
    };
    const product::Call& product = call.product;
    const bool is_few = product.num_rows <= packed::kMaxRows;
    const std::int64_t cached_rows = std::max(packed::kMaxRows, kCachedElements / product.depth);
    const bool is_worth_threads = product.num_rows * product.num_outputs * product.depth > 1 << 16;
    product::for_each_tile<kBlock, packed::kMaxRows>(
        product.num_rows, product.num_outputs, cached_rows, is_worth_threads,
        [&](bool is_first, std::int64_t count, std::int64_t row, std::int64_t column) {
            if (is_few) {
                kFew[count](call, row, column);
                return;
            }
            char* block = grouped::widened(product.depth / Kind::kInputs * Kind::kBytes);
            if (is_first) {
                widen_block<Kind, Values>(call, column, block);
            }
            packed::kMultiply<Kind, false>[count](product, block, row, column);
        });
}

template <class Kind>
void multiply_all(const Call& call) {
    if (call.has_floats) {
        multiply_all<Kind, grouped::Floats>(call);
    } else {
        call.num_bits == 4 ? multiply_all<Kind, grouped::Nibbles>(call) : multiply_all<Kind, grouped::Bytes>(call);
    }
}

}  // namespace packed_grouped

// output = x @ weightᵀ + bias.
HEADRACE_API void headrace_packed_grouped_product(const grouped::Call* call) {
    packed_grouped::multiply_all<packed::Bfloat16>(*call);
}

// The same in float32.
HEADRACE_API void headrace_packed_float32_grouped_product(const grouped::Call* call) {
    packed_grouped::multiply_all<packed::Float32>(*call);
}
#endif
