// Stands before the compiler's own <immintrin.h>: what the compiled kernels use of AVX-512, in the instructions of a
// processor that has no more than AVX2, so that their tests run there. GCC's vector extensions say most of it.
//
// What each one does is from Intel's Software Developer's Manual, volume 2; but denormal numbers stay what they are in
// products of bfloat16, and `rcp14` is exact. Aborts where the processor would fault.
#pragma once

// Of the compiler's headers those up to AVX2: the names of what comes after are then nobody's.
#define _IMMINTRIN_H_INCLUDED
#include <smmintrin.h>
#include <avxintrin.h>
#include <avx2intrin.h>
#include <fmaintrin.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <type_traits>

// Everything is compiled for what the command line says, whatever a function asks for. (<functional> has one of that name.)
#define target(...) unused

template <class Element, int kCount>
struct VectorOf {
    typedef Element type __attribute__((vector_size(kCount * sizeof(Element)), may_alias));
};

using __m512 = VectorOf<float, 16>::type;
using __m512i = VectorOf<long long, 8>::type;
using __m512bh = VectorOf<short, 32>::type;
using __m256bh = VectorOf<short, 16>::type;
using __mmask16 = std::uint16_t;
using __mmask32 = std::uint32_t;

namespace emulated {

using Ints = VectorOf<std::int32_t, 16>::type;
using Bits = VectorOf<std::uint32_t, 16>::type;
using Words = VectorOf<std::uint16_t, 32>::type;

inline void demand(bool condition) {
    if (!condition) {
        std::abort();
    }
}

inline void demand_aligned(const void* place) { demand(reinterpret_cast<std::uintptr_t>(place) % 64 == 0); }

template <class T>
inline T load(const void* source) {
    T result;
    std::memcpy(&result, source, sizeof result);
    return result;
}

template <class T>
inline void store(void* place, T value) {
    std::memcpy(place, &value, sizeof value);
}

// Copies the elements in `mask`, and does not touch what lies at the others' places.
template <class Element, unsigned kCount>
inline void copy_masked(void* place, std::uint32_t mask, const void* source) {
    for (unsigned i = 0; i < kCount; ++i) {
        if (mask >> i & 1) {
            std::memcpy(static_cast<Element*>(place) + i, static_cast<const Element*>(source) + i, sizeof(Element));
        }
    }
}

template <class Element, class T>
inline T load_masked(T other, std::uint32_t mask, const void* source) {
    copy_masked<Element, sizeof(T) / sizeof(Element)>(&other, mask, source);
    return other;
}

template <class T>
struct Halves {
    T low, high;
};

inline Halves<__m256> halves(__m512 x) { return load<Halves<__m256>>(&x); }

inline Halves<__m256i> halves(__m512i x) { return load<Halves<__m256i>>(&x); }

// What AVX2 has for half of the lanes.
template <class Function, class... Whole>
inline auto by_halves(Function function, Whole... x) {
    using Half = decltype(function(halves(x).low...));
    const Halves<Half> both{function(halves(x).low...), function(halves(x).high...)};
    return load<std::conditional_t<std::is_same_v<Half, __m256>, __m512, __m512i>>(&both);
}

// All ones in the lanes of a mask, zeros in the others.
inline Ints lanes_of(__mmask16 mask) {
    constexpr Ints kBit = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768};
    return ((Ints{} + mask) & kBit) != 0;
}

inline __mmask16 mask_of(Ints lanes) {
    const auto [low, high] = halves((__m512)lanes);
    return static_cast<__mmask16>(_mm256_movemask_ps(low) | _mm256_movemask_ps(high) << 8);
}

template <class T>
inline auto largest(T x) {
    auto result = x[0];
    for (int i = 1; i < 16; ++i) {
        result = result > x[i] ? result : x[i];
    }
    return result;
}

// Of each pair of bfloat16 the first, or the second.
inline __m512 evens(__m512bh x) { return (__m512)((Bits)x << 16); }

inline __m512 odds(__m512bh x) { return (__m512)((Bits)x & 0xffff0000u); }

// sums[i] += the four products of the bytes of a[i] and b[i], which are signed; or a's are not.
inline Ints add_products(Ints sums, Ints a, Ints b, bool is_signed) {
    for (int shift = 24; shift >= 0; shift -= 8) {
        const Ints left = is_signed ? (a << shift) >> 24 : (Ints)((Bits)(a << shift) >> 24);
        sums += left * ((b << shift) >> 24);
    }
    return sums;
}

}  // namespace emulated

// Nothing is taken from it: minus zero plus zero would be zero.
inline __m512 _mm512_set1_ps(float x) { return x - __m512{}; }
#define _mm512_setr_ps(...) (__m512{__VA_ARGS__})
inline __m512i _mm512_set1_epi32(int x) { return (__m512i)(emulated::Ints{} + x); }
inline __m512 _mm512_setzero_ps() { return __m512{}; }
inline __m512i _mm512_setzero_si512() { return __m512i{}; }
#define _mm512_setr_epi32(...) ((__m512i)emulated::Ints{__VA_ARGS__})
#define _mm512_set_epi32(p, o, n, m, l, k, j, i, h, g, f, e, d, c, b, a) \
    _mm512_setr_epi32(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p)
inline __m512 _mm512_castsi512_ps(__m512i x) { return (__m512)x; }
inline __m512i _mm512_castps_si512(__m512 x) { return (__m512i)x; }
inline __m128 _mm512_castps512_ps128(__m512 x) { return emulated::load<__m128>(&x); }
inline float _mm512_cvtss_f32(__m512 x) { return x[0]; }
inline __m512 _mm512_broadcastss_ps(__m128 x) { return _mm512_set1_ps(x[0]); }

inline __m512 _mm512_loadu_ps(const void* source) { return emulated::load<__m512>(source); }
inline __m512i _mm512_loadu_si512(const void* source) { return emulated::load<__m512i>(source); }
inline __m512 _mm512_load_ps(const void* source) { return emulated::demand_aligned(source), _mm512_loadu_ps(source); }
inline __m512i _mm512_load_si512(const void* source) { return (__m512i)_mm512_load_ps(source); }
inline void _mm512_storeu_si512(void* place, __m512i x) { emulated::store(place, x); }
inline void _mm512_store_si512(void* place, __m512i x) { emulated::demand_aligned(place), emulated::store(place, x); }
inline void _mm512_store_ps(void* place, __m512 x) { _mm512_store_si512(place, (__m512i)x); }
inline void _mm512_storeu_ps(void* place, __m512 x) { emulated::store(place, x); }
inline void _mm512_stream_ps(void* place, __m512 x) { _mm512_store_ps(place, x); }

inline __m512 _mm512_mask_loadu_ps(__m512 other, __mmask16 mask, const void* source) {
    return emulated::load_masked<float>(other, mask, source);
}
inline __m512 _mm512_maskz_loadu_ps(__mmask16 mask, const void* source) {
    return emulated::load_masked<float>(__m512{}, mask, source);
}
inline __m512i _mm512_maskz_load_epi32(__mmask16 mask, const void* source) {
    return emulated::demand_aligned(source), emulated::load_masked<std::int32_t>(__m512i{}, mask, source);
}
inline __m512i _mm512_maskz_loadu_epi16(__mmask32 mask, const void* source) {
    return emulated::load_masked<std::int16_t>(__m512i{}, mask, source);
}
inline __m256i _mm256_maskz_loadu_epi16(__mmask16 mask, const void* source) {
    return emulated::load_masked<std::int16_t>(__m256i{}, mask, source);
}
inline void _mm512_mask_storeu_ps(void* place, __mmask16 mask, __m512 x) {
    emulated::copy_masked<float, 16>(place, mask, &x);
}
inline void _mm512_mask_storeu_epi16(void* place, __mmask32 mask, __m512i x) {
    emulated::copy_masked<std::int16_t, 32>(place, mask, &x);
}
inline void _mm256_mask_storeu_epi16(void* place, __mmask16 mask, __m256i x) {
    emulated::copy_masked<std::int16_t, 16>(place, mask, &x);
}

inline __m512 _mm512_add_ps(__m512 a, __m512 b) { return a + b; }
inline __m512 _mm512_sub_ps(__m512 a, __m512 b) { return a - b; }
inline __m512 _mm512_mul_ps(__m512 a, __m512 b) { return a * b; }
inline __m512 _mm512_div_ps(__m512 a, __m512 b) { return a / b; }
inline __m512 _mm512_rcp14_ps(__m512 x) { return 1.0f / x; }
// The second one where either is NaN.
inline __m512 _mm512_max_ps(__m512 a, __m512 b) { return a > b ? a : b; }
inline __m512 _mm512_min_ps(__m512 a, __m512 b) { return a < b ? a : b; }
inline __m512 _mm512_fmadd_ps(__m512 a, __m512 b, __m512 c) {
    return emulated::by_halves([](auto x, auto y, auto z) { return _mm256_fmadd_ps(x, y, z); }, a, b, c);
}
inline __m512 _mm512_fmsub_ps(__m512 a, __m512 b, __m512 c) { return _mm512_fmadd_ps(a, b, -c); }
inline __m512 _mm512_fnmadd_ps(__m512 a, __m512 b, __m512 c) { return _mm512_fmadd_ps(-a, b, c); }

inline __m512i _mm512_and_si512(__m512i a, __m512i b) { return a & b; }
inline __m512 _mm512_and_ps(__m512 a, __m512 b) { return (__m512)((__m512i)a & (__m512i)b); }
inline __m512 _mm512_or_ps(__m512 a, __m512 b) { return (__m512)((__m512i)a | (__m512i)b); }
inline __m512 _mm512_abs_ps(__m512 x) { return (__m512)((emulated::Bits)x & 0x7fffffffu); }
inline __m512i _mm512_add_epi32(__m512i a, __m512i b) { return (__m512i)((emulated::Bits)a + (emulated::Bits)b); }
inline __m512i _mm512_mullo_epi32(__m512i a, __m512i b) { return (__m512i)((emulated::Bits)a * (emulated::Bits)b); }
inline __m512i _mm512_add_epi16(__m512i a, __m512i b) { return (__m512i)((emulated::Words)a + (emulated::Words)b); }
inline __m512i _mm512_slli_epi32(__m512i x, int count) { return (__m512i)((emulated::Bits)x << count); }
inline __m512i _mm512_srli_epi32(__m512i x, int count) { return (__m512i)((emulated::Bits)x >> count); }
inline __m512i _mm512_max_epi32(__m512i a, __m512i b) {
    return (__m512i)((emulated::Ints)a > (emulated::Ints)b ? (emulated::Ints)a : (emulated::Ints)b);
}
inline __m512i _mm512_min_epi32(__m512i a, __m512i b) { return ~_mm512_max_epi32(~a, ~b); }

inline __m512 _mm512_mask_mov_ps(__m512 other, __mmask16 mask, __m512 x) { return emulated::lanes_of(mask) ? x : other; }
inline __m512i _mm512_mask_mov_epi32(__m512i other, __mmask16 mask, __m512i x) {
    return (__m512i)_mm512_mask_mov_ps((__m512)other, mask, (__m512)x);
}
inline __m512 _mm512_mask_mul_ps(__m512 other, __mmask16 mask, __m512 a, __m512 b) {
    return _mm512_mask_mov_ps(other, mask, a * b);
}
inline __m512 _mm512_mask_max_ps(__m512 other, __mmask16 mask, __m512 a, __m512 b) {
    return _mm512_mask_mov_ps(other, mask, _mm512_max_ps(a, b));
}
inline __m512i _mm512_mask_blend_epi16(__mmask32 mask, __m512i a, __m512i b) {
    return emulated::load_masked<std::int16_t>(a, mask, &b);
}

inline __mmask16 _mm512_cmp_ps_mask(__m512 a, __m512 b, int how) {
    switch (how) {
        case _CMP_EQ_OQ: return emulated::mask_of(a == b);
        case _CMP_NEQ_UQ: return emulated::mask_of(a != b);
        case _CMP_LT_OQ: return emulated::mask_of(a < b);
        case _CMP_GT_OQ: return emulated::mask_of(a > b);
        case _CMP_NLE_UQ: return emulated::mask_of(~(a <= b));
        case _CMP_UNORD_Q: return emulated::mask_of((a != a) | (b != b));
        default: std::abort();
    }
}
inline __mmask16 _mm512_mask_cmp_ps_mask(__mmask16 mask, __m512 a, __m512 b, int how) {
    return mask & _mm512_cmp_ps_mask(a, b, how);
}
inline __mmask16 _mm512_mask_cmple_epi32_mask(__mmask16 mask, __m512i a, __m512i b) {
    return mask & emulated::mask_of((emulated::Ints)a <= (emulated::Ints)b);
}
inline __mmask16 _mm512_mask_cmplt_epi32_mask(__mmask16 mask, __m512i a, __m512i b) {
    return mask & emulated::mask_of((emulated::Ints)a < (emulated::Ints)b);
}

// In the order in which compilers add them up.
inline float _mm512_reduce_add_ps(__m512 x) {
    const __m256 eight = emulated::halves(x).low + emulated::halves(x).high;
    return ((eight[0] + eight[4]) + (eight[2] + eight[6])) + ((eight[1] + eight[5]) + (eight[3] + eight[7]));
}
inline float _mm512_reduce_max_ps(__m512 x) { return emulated::largest(x); }
inline int _mm512_reduce_max_epi32(__m512i x) { return emulated::largest((emulated::Ints)x); }
inline int _mm512_mask_reduce_max_epi32(__mmask16 mask, __m512i x) {
    return _mm512_reduce_max_epi32(_mm512_mask_mov_epi32(_mm512_set1_epi32(INT32_MIN), mask, x));
}
inline int _mm512_mask_reduce_min_epi32(__mmask16 mask, __m512i x) { return ~_mm512_mask_reduce_max_epi32(mask, ~x); }

inline __m512 _mm512_roundscale_ps(__m512 x, int how) {
    emulated::demand(how == (_MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    return emulated::by_halves([](auto half) { return _mm256_round_ps(half, _MM_FROUND_TO_NEAREST_INT); }, x);
}
// What is left of x above the next lower whole number; of infinity nothing.
inline __m512 _mm512_reduce_ps(__m512 x, int how) {
    emulated::demand(how == (_MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC));
    const __m512 whole = emulated::by_halves([](auto half) { return _mm256_floor_ps(half); }, x);
    return _mm512_abs_ps(x) == __builtin_inff() ? __m512{} : x - whole;
}
// x * 2^floor(power). Doubles hold it exactly, so that it is rounded once.
inline __m512 _mm512_scalef_ps(__m512 x, __m512 power) {
    for (int i = 0; i < 16; ++i) {
        const float whole = std::fmin(std::fmax(std::floor(power[i]), -400.0f), 400.0f);
        const std::int64_t bits = (static_cast<std::int64_t>(whole) + 1023) << 52;
        x[i] = power[i] != power[i] ? power[i] : static_cast<float>(x[i] * emulated::load<double>(&bits));
    }
    return x;
}

inline __m512i _mm512_cvtps_epi32(__m512 x) {
    return emulated::by_halves([](auto half) { return _mm256_cvtps_epi32(half); }, x);
}
inline __m512 _mm512_cvtepi32_ps(__m512i x) { return __builtin_convertvector((emulated::Ints)x, __m512); }
inline __m512i _mm512_cvtepu16_epi32(__m256i x) {
    return (__m512i)__builtin_convertvector((VectorOf<std::uint16_t, 16>::type)x, emulated::Bits);
}
// Of finite numbers.
inline __m512 _mm512_cvtph_ps(__m256i x) {
    const emulated::Bits bits = (emulated::Bits)_mm512_cvtepu16_epi32(x);
    return (__m512)(((bits & 0x8000u) << 16) | ((bits & 0x7fffu) << 13)) * 0x1p112f;
}
inline __m256i _mm512_cvtepi32_epi16(__m512i x) {
    return (__m256i)__builtin_convertvector((emulated::Ints)x, VectorOf<std::int16_t, 16>::type);
}
inline __m128i _mm512_cvtsepi32_epi8(__m512i x) {
    const __m512i capped = _mm512_max_epi32(_mm512_set1_epi32(-128), _mm512_min_epi32(_mm512_set1_epi32(127), x));
    return (__m128i)__builtin_convertvector((emulated::Ints)capped, VectorOf<std::int8_t, 16>::type);
}
// To nearest, ties to even; NaN stays NaN.
inline __m256bh _mm512_cvtneps_pbh(__m512 x) {
    const emulated::Bits bits = (emulated::Bits)x, rounded = bits + 0x7fffu + (bits >> 16 & 1u);
    const emulated::Bits result = x != x ? bits >> 16 | 0x40u : rounded >> 16;
    return (__m256bh)__builtin_convertvector(result, VectorOf<std::uint16_t, 16>::type);
}
inline __m512bh _mm512_cvtne2ps_pbh(__m512 high, __m512 low) {
    const emulated::Halves<__m256bh> both{_mm512_cvtneps_pbh(low), _mm512_cvtneps_pbh(high)};
    return emulated::load<__m512bh>(&both);
}

inline __m512 _mm512_dpbf16_ps(__m512 sums, __m512bh a, __m512bh b) {
    sums = _mm512_fmadd_ps(emulated::odds(a), emulated::odds(b), sums);
    return _mm512_fmadd_ps(emulated::evens(a), emulated::evens(b), sums);
}
inline __m512i _mm512_dpbusd_epi32(__m512i sums, __m512i a, __m512i b) {
    return (__m512i)emulated::add_products((emulated::Ints)sums, (emulated::Ints)a, (emulated::Ints)b, false);
}

inline __m512i _mm512_permutex2var_epi16(__m512i a, __m512i which, __m512i b) {
    return (__m512i)__builtin_shuffle((emulated::Words)a, (emulated::Words)b, (emulated::Words)which);
}
inline __m512i _mm512_permutexvar_epi16(__m512i which, __m512i x) {
    return (__m512i)__builtin_shuffle((emulated::Words)x, (emulated::Words)which);
}
inline __m512 _mm512_permutexvar_ps(__m512i which, __m512 x) { return __builtin_shuffle(x, (emulated::Ints)which); }
inline __m512i _mm512_shuffle_i32x4(__m512i a, __m512i b, int which) {
    const long long p = which & 3, q = which >> 2 & 3, r = which >> 4 & 3, s = which >> 6 & 3;
    return __builtin_shuffle(a, b, __m512i{2 * p, 2 * p + 1, 2 * q, 2 * q + 1, 8 + 2 * r, 9 + 2 * r, 8 + 2 * s, 9 + 2 * s});
}
// Within each 128 bits.
#define EMULATE_UNPACK(name)                                                                         \
    inline __m512i _mm512_##name(__m512i a, __m512i b) {                                             \
        return emulated::by_halves([](auto x, auto y) { return _mm256_##name(x, y); }, a, b);        \
    }
EMULATE_UNPACK(unpacklo_epi16)
EMULATE_UNPACK(unpackhi_epi16)
EMULATE_UNPACK(unpacklo_epi32)
EMULATE_UNPACK(unpackhi_epi32)
EMULATE_UNPACK(unpacklo_epi64)
EMULATE_UNPACK(unpackhi_epi64)
#undef EMULATE_UNPACK

#include "tiles.h"
