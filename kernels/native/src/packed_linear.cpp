// x @ weightᵀ for any number of rows, on a processor with AVX-512: in bfloat16 whose products are AVX-512's dot product
// alone, and in float32.
//
// The weight is packed: blocks of 32 outputs, in each the inputs one after the other, in bfloat16 two by two,
// [outputs / 32, inputs / 2, 32, 2]. So an input of x or a pair of them, repeated in every lane, meets the same of 32
// outputs in two instructions and nothing is summed across a register; and a block is read from its first byte to its
// last, which is how memory is fastest.

#include "product_tiles.h"

#ifdef HEADRACE_X86
namespace packed {

using product::Call;

constexpr std::int64_t kBlock = 32;
// Rows of x at a time: two sums for each fill the registers, with the weight's pair and x's.
constexpr std::int64_t kMaxRows = 12;
// How far ahead the weight is fetched into the second-level cache, in bytes: with few rows memory is what limits.
constexpr std::int64_t kAheadBytes = 32768;

HEADRACE_INLINE void store_floats(float* output, __m512 low, __m512 high, std::int64_t missing) {
    const __mmask32 mask = ~0u >> missing;
    _mm512_mask_storeu_ps(output, mask & 0xffff, low);
    _mm512_mask_storeu_ps(output + 16, mask >> 16, high);
}

// What x, the weight and the outputs are made of: `kInputs` of a row meet `kBytes` of a block's weights at once.
struct Bfloat16 {
    using Element = bf16;
    using Everywhere = __m512bh;
    struct Weights {
        __m512bh left, right;
    };
    static constexpr int kInputs = 2;
    static constexpr std::int64_t kBytes = 128;

    HEADRACE_INLINE Weights load(const char* source) {
        return {reinterpret_cast<__m512bh>(_mm512_load_si512(source)),
                reinterpret_cast<__m512bh>(_mm512_load_si512(source + 64))};
    }
    HEADRACE_INLINE Everywhere repeat(const bf16* x) {
        std::int32_t pair;
        std::memcpy(&pair, x, sizeof pair);
        return reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
    }
    HEADRACE_INLINE __m512 add(__m512 sum, __m512bh weights, __m512bh everywhere) {
        return _mm512_dpbf16_ps(sum, weights, everywhere);
    }
    HEADRACE_INLINE void store(bf16* output, __m512 low, __m512 high, std::int64_t missing) {
        const auto narrowed = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
        _mm512_mask_storeu_epi16(output, ~0u >> missing, narrowed);
    }
};

struct Float32 {
    using Element = float;
    using Everywhere = __m512;
    struct Weights {
        __m512 left, right;
    };
    static constexpr int kInputs = 1;
    static constexpr std::int64_t kBytes = 128;

    HEADRACE_INLINE Weights load(const char* source) {
        return {_mm512_load_ps(source), _mm512_load_ps(source + 64)};
    }
    HEADRACE_INLINE Everywhere repeat(const float* x) { return _mm512_set1_ps(*x); }
    HEADRACE_INLINE __m512 add(__m512 sum, __m512 weights, __m512 everywhere) {
        return _mm512_fmadd_ps(weights, everywhere, sum);
    }
    HEADRACE_INLINE void store(float* output, __m512 low, __m512 high, std::int64_t missing) {
        store_floats(output, low, high, missing);
    }
};

// A weight whose values bfloat16 holds as they are, in it: each of a block's first 16 outputs beside one of the others.
struct NarrowFloat32 : Float32 {
    static constexpr std::int64_t kBytes = 64;

    HEADRACE_INLINE Weights load(const char* source) {
        const __m512i pairs = _mm512_load_si512(source);
        return {_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)),
                _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(~0xffff)))};
    }
};

// Inputs that have sums of their own: a sum is not ready for the next product at once, and with few rows there are not
// enough others to wait with.
constexpr int apart(int num_rows) { return num_rows <= 2 ? 4 : num_rows <= 6 ? 2 : 1; }

// The outputs from `column` on, as many as a block has, of `kRows` rows from `row` on.
template <class Kind, int kRows, bool kFetches>
HEADRACE_AVX512 void multiply(const Call& call, std::int64_t row, std::int64_t column) {
    constexpr int kApart = apart(kRows), kInputs = Kind::kInputs;
    using Element = typename Kind::Element;
    const Element* x = static_cast<const Element*>(call.x) + row * call.stride;
    const char* weight = static_cast<const char*>(call.weight) + column / kBlock * (call.depth / kInputs) * Kind::kBytes;
    // All loops over them are unrolled early: else the compiler keeps some in memory.
    __m512 sums[kApart][kRows][2];
#pragma GCC unroll 4
    for (int i = 0; i < kApart; ++i) {
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
            sums[i][r][0] = sums[i][r][1] = _mm512_setzero_ps();
        }
    }
    for (std::int64_t k = 0; k < call.depth; k += kInputs * kApart) {
#pragma GCC unroll 4
        for (int i = 0; i < kApart; ++i, weight += Kind::kBytes) {
            if (kFetches) {
#pragma GCC unroll 2
                for (std::int64_t line = 0; line < Kind::kBytes; line += 64) {
                    _mm_prefetch(weight + kAheadBytes + line, _MM_HINT_T1);
                }
            }
            const typename Kind::Weights weights = Kind::load(weight);
#pragma GCC unroll 16
            for (int r = 0; r < kRows; ++r) {
                const typename Kind::Everywhere everywhere = Kind::repeat(x + r * call.stride + k + kInputs * i);
                sums[i][r][0] = Kind::add(sums[i][r][0], weights.left, everywhere);
                sums[i][r][1] = Kind::add(sums[i][r][1], weights.right, everywhere);
            }
        }
    }
    const std::int64_t missing = std::max<std::int64_t>(0, column + kBlock - call.num_outputs);
    const __m512 left = _mm512_loadu_ps(call.bias + column), right = _mm512_loadu_ps(call.bias + column + 16);
    Element* output = static_cast<Element*>(call.output) + row * call.num_outputs + column;
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
        __m512 low = left, high = right;
#pragma GCC unroll 4
        for (int i = 0; i < kApart; ++i) {
            low = _mm512_add_ps(low, sums[i][r][0]);
            high = _mm512_add_ps(high, sums[i][r][1]);
        }
        Kind::store(output + r * call.num_outputs, low, high, missing);
    }
}

using Multiply = void (*)(const Call&, std::int64_t, std::int64_t);

// By the number of rows.
template <class Kind, bool kFetches>
constexpr Multiply kMultiply[kMaxRows + 1] = {
    nullptr,
    multiply<Kind, 1, kFetches>, multiply<Kind, 2, kFetches>, multiply<Kind, 3, kFetches>,
    multiply<Kind, 4, kFetches>, multiply<Kind, 5, kFetches>, multiply<Kind, 6, kFetches>,
    multiply<Kind, 7, kFetches>, multiply<Kind, 8, kFetches>, multiply<Kind, 9, kFetches>,
    multiply<Kind, 10, kFetches>, multiply<Kind, 11, kFetches>, multiply<Kind, 12, kFetches>,
};

// So many rows of x stay in the second-level cache while all blocks pass by: `cached_rows`.
template <class Kind>
void multiply_all(const Call& call, std::int64_t cached_rows, bool is_worth_threads) {
    product::for_each_tile<kBlock, kMaxRows>(
        call.num_rows, call.num_outputs, cached_rows, is_worth_threads,
        [&](bool is_first, std::int64_t count, std::int64_t row, std::int64_t column) {
            (is_first ? kMultiply<Kind, true> : kMultiply<Kind, false>)[count](call, row, column);
        });
}

}  // namespace packed

// output = x @ weightᵀ + bias.
HEADRACE_API void headrace_packed_product(const product::Call* call) {
    packed::multiply_all<packed::Bfloat16>(*call, 96, true);
}

// The same in float32.
HEADRACE_API void headrace_packed_float32_product(const product::Call* call) {
    const std::int64_t cached_rows = std::max<std::int64_t>(packed::kMaxRows, 65536 / call->depth);
    const bool is_worth_threads = call->num_rows * call->num_outputs * call->depth > 1 << 17;
    const auto multiply_all = call->is_narrow ? packed::multiply_all<packed::NarrowFloat32> : packed::multiply_all<packed::Float32>;
    multiply_all(*call, cached_rows, is_worth_threads);
}
#endif
