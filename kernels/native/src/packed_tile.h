// A few rows of x times a block of a packed weight's outputs with AVX-512, in bfloat16 and float32.
//
// The weight is packed: blocks of 32 outputs, in each the inputs one after the other, in bfloat16 two by two,
// [outputs / 32, inputs / 2, 32, 2]. So an input of x or a pair of them, repeated in every lane, meets the same of 32
// outputs in two instructions and nothing is summed across a register; and a block is read from its first byte to its
// last, which is how memory is fastest.
#pragma once

#include "product_tiles.h"

#ifdef HEADRACE_X86
namespace packed {

using product::Call;

constexpr std::int64_t kBlock = 32;
// Rows of x at a time: two sums for each fill the registers, with the weight's pair and x's.
constexpr std::int64_t kMaxRows = 12;
// How far ahead the weight is fetched into the second-level cache, in bytes: with few rows memory is what limits.
constexpr std::int64_t kAheadBytes = 32768;
constexpr std::int64_t kLine = 64;

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
                reinterpret_cast<__m512bh>(_mm512_load_si512(source + kLine))};
    }
    HEADRACE_INLINE void keep(char* target, const Weights& weights) {
        _mm512_store_si512(target, reinterpret_cast<__m512i>(weights.left));
        _mm512_store_si512(target + kLine, reinterpret_cast<__m512i>(weights.right));
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
        return {_mm512_load_ps(source), _mm512_load_ps(source + kLine)};
    }
    HEADRACE_INLINE void keep(char* target, const Weights& weights) {
        _mm512_store_ps(target, weights.left);
        _mm512_store_ps(target + kLine, weights.right);
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

// Of each row and input apart, the sums of a block's outputs.
template <int kRows>
using Sums = __m512[apart(kRows)][kRows][2];

// All loops over them are unrolled early: else the compiler keeps some in memory.
template <int kRows>
HEADRACE_INLINE void clear(Sums<kRows>& sums) {
    constexpr int kApart = apart(kRows);
#pragma GCC unroll 4
    for (int i = 0; i < kApart; ++i) {
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
            sums[i][r][0] = sums[i][r][1] = _mm512_setzero_ps();
        }
    }
}

// Add what an input or a pair gives, x being its first row's.
template <class Kind, int kRows>
HEADRACE_INLINE void add(Sums<kRows>& sums, int i, const typename Kind::Weights& weights,
                         const typename Kind::Element* x, std::int64_t stride) {
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
        const typename Kind::Everywhere everywhere = Kind::repeat(x + r * stride);
        sums[i][r][0] = Kind::add(sums[i][r][0], weights.left, everywhere);
        sums[i][r][1] = Kind::add(sums[i][r][1], weights.right, everywhere);
    }
}

// Write the outputs from `column` on of the rows from `row` on.
template <class Kind, int kRows>
HEADRACE_INLINE void finish(const Call& call, const Sums<kRows>& sums, std::int64_t row, std::int64_t column) {
    constexpr int kApart = apart(kRows);
    const std::int64_t missing = std::max<std::int64_t>(0, column + kBlock - call.num_outputs);
    const __m512 left = _mm512_loadu_ps(call.bias + column), right = _mm512_loadu_ps(call.bias + column + 16);
    auto* output = static_cast<typename Kind::Element*>(call.output) + row * call.num_outputs + column;
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

HEADRACE_INLINE void fetch(const char* source) {
    _mm_prefetch(source + kAheadBytes, _MM_HINT_T1);
}

// The outputs from `column` on, as many as a block has, of `kRows` rows from `row` on. block: the weight of these outputs.
template <class Kind, int kRows, bool kFetches>
HEADRACE_AVX512 void multiply(const Call& call, const char* block, std::int64_t row, std::int64_t column) {
    constexpr int kApart = apart(kRows), kInputs = Kind::kInputs;
    const auto* x = static_cast<const typename Kind::Element*>(call.x) + row * call.stride;
    Sums<kRows> sums;
    clear<kRows>(sums);
    for (std::int64_t k = 0; k < call.depth; k += kInputs * kApart) {
#pragma GCC unroll 4
        for (int i = 0; i < kApart; ++i, block += Kind::kBytes) {
            if (kFetches) {
#pragma GCC unroll 2
                for (std::int64_t line = 0; line < Kind::kBytes; line += kLine) {
                    fetch(block + line);
                }
            }
            add<Kind, kRows>(sums, i, Kind::load(block), x + k + kInputs * i, call.stride);
        }
    }
    finish<Kind, kRows>(call, sums, row, column);
}

using Multiply = void (*)(const Call&, const char*, std::int64_t, std::int64_t);

// By the number of rows.
template <class Kind, bool kFetches>
constexpr Multiply kMultiply[kMaxRows + 1] = {
    nullptr,
    multiply<Kind, 1, kFetches>, multiply<Kind, 2, kFetches>, multiply<Kind, 3, kFetches>,
    multiply<Kind, 4, kFetches>, multiply<Kind, 5, kFetches>, multiply<Kind, 6, kFetches>,
    multiply<Kind, 7, kFetches>, multiply<Kind, 8, kFetches>, multiply<Kind, 9, kFetches>,
    multiply<Kind, 10, kFetches>, multiply<Kind, 11, kFetches>, multiply<Kind, 12, kFetches>,
};

}  // namespace packed
#endif
