// What the kernels for float32 use: registers of eight, and the compiler's target. They run on all that have AVX2.
#pragma once

#include "common.h"

#ifdef HEADRACE_X86
#define HEADRACE_AVX2 __attribute__((target("avx2,fma")))
#define HEADRACE_AVX2_INLINE HEADRACE_AVX2 static inline __attribute__((always_inline))

namespace avx2 {

constexpr int kLanes = 8;

// Elements of a row as float32.
HEADRACE_AVX2_INLINE __m256 load(const float* source) {
    return _mm256_loadu_ps(source);
}

HEADRACE_AVX2_INLINE __m256 load(const bf16* source) {
    const __m128i packed = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(packed), 16));
}

inline float widened(float x) {
    return x;
}

inline float widened(bf16 x) {
    const std::uint32_t bits = static_cast<std::uint32_t>(x) << 16;
    float wide;
    std::memcpy(&wide, &bits, sizeof wide);
    return wide;
}

// Sixteen elements of a packed weight as float32.
struct Pair {
    __m256 low, high;
};

HEADRACE_AVX2_INLINE Pair load_pair(const float* source) {
    return {_mm256_load_ps(source), _mm256_load_ps(source + kLanes)};
}

// Of bfloat16 that lie two by two, one of the first eight and one of the second: so widening moves nothing across lanes.
HEADRACE_AVX2_INLINE Pair load_pair(const bf16* source) {
    const __m256i both = _mm256_load_si256(reinterpret_cast<const __m256i*>(source));
    const __m256i upper = _mm256_and_si256(both, _mm256_set1_epi32(static_cast<int>(0xffff0000)));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(both, 16)), _mm256_castsi256_ps(upper)};
}

// 2^x, correct to 1e-7 of itself and exact for whole numbers; 0 for x below -126, minus infinity included; NaN stays NaN. x: at
// most 127.
HEADRACE_AVX2_INLINE __m256 exp2(__m256 x) {
    const __m256 whole = _mm256_floor_ps(x), f = _mm256_sub_ps(x, whole);
    __m256 p = _mm256_set1_ps(2.16129149e-4f);
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(1.2467847e-3f));
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(9.67545155e-3f));
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(5.54852821e-2f));
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(2.40229309e-1f));
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(6.93147063e-1f));
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(1.0f));
    const __m256i exponent = _mm256_slli_epi32(_mm256_cvtps_epi32(whole), 23);
    const __m256 power = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), exponent));
    return _mm256_andnot_ps(_mm256_cmp_ps(x, _mm256_set1_ps(-126.0f), _CMP_LT_OQ), power);
}

// 1 / (1 + e^-x); NaN stays NaN.
HEADRACE_AVX2_INLINE __m256 sigmoid(__m256 x) {
    const __m256 one = _mm256_set1_ps(1.0f), power = _mm256_mul_ps(x, _mm256_set1_ps(-1.44269504088896f));
    return _mm256_div_ps(one, _mm256_add_ps(one, exp2(_mm256_min_ps(_mm256_set1_ps(127.0f), power))));
}

// The lanes of the vector that begins at element `i` of `size`: all, but at the end.
HEADRACE_AVX2_INLINE __m256i lanes(std::int64_t i, std::int64_t size) {
    const __m256i left = _mm256_set1_epi32(static_cast<int>(size - i < kLanes ? size - i : kLanes));
    return _mm256_cmpgt_epi32(left, _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

// Writes a vector's lanes, of the last one as many as are `left`: a masked store takes several times as long.
HEADRACE_AVX2_INLINE void store(float* target, std::int64_t left, __m256 x) {
    if (left >= kLanes) {
        _mm256_storeu_ps(target, x);
    } else {
        _mm256_maskstore_ps(target, lanes(0, left), x);
    }
}

HEADRACE_AVX2_INLINE float sum_of(__m256 x) {
    const __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    const __m128 pair = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(pair, _mm_shuffle_ps(pair, pair, 1)));
}

}  // namespace avx2
#endif
