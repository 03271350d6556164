// What every kernel here uses: bfloat16 in registers, and the compiler's target.
//
// The functions are compiled for AVX-512 with bfloat16 (and AMX where a file says so) whatever the machine that
// compiles them; `headrace_instruction_set` says what the machine that runs them has, and the Python side calls
// nothing that is not there.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__)
#define HEADRACE_X86 1
#include <immintrin.h>
#define HEADRACE_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni,fma")))
#define HEADRACE_INLINE HEADRACE_AVX512 static inline __attribute__((always_inline))
#endif

#define HEADRACE_API extern "C" __attribute__((visibility("default")))

using bf16 = std::uint16_t;

#ifdef HEADRACE_X86

// Sixteen bfloat16 as float32.
HEADRACE_INLINE __m512 widen(__m256i packed) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(packed), 16));
}

HEADRACE_INLINE __m512 load(const bf16* source) {
    return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(source)));
}

HEADRACE_INLINE __m512 load(const bf16* source, __mmask16 mask) {
    return widen(_mm256_maskz_loadu_epi16(mask, source));
}

HEADRACE_INLINE __m512 load(const float* source, __mmask16 mask) {
    return _mm512_maskz_loadu_ps(mask, source);
}

// Rounds to nearest, ties to even, as torch does.
HEADRACE_INLINE __m256i narrow(__m512 wide) {
    return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(wide));
}

HEADRACE_INLINE void store(bf16* destination, __m512 wide) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(destination), narrow(wide));
}

HEADRACE_INLINE void store(bf16* destination, __m512 wide, __mmask16 mask) {
    _mm256_mask_storeu_epi16(destination, mask, narrow(wide));
}

// What a norm's weight is multiplied by: in bfloat16 it is rounded first, as Llama's own code does, in float32 not.
HEADRACE_INLINE __m512 rounded_like(const bf16*, __m512 scaled) {
    return widen(narrow(scaled));
}

HEADRACE_INLINE __m512 rounded_like(const float*, __m512 scaled) {
    return scaled;
}

// The lanes of the last, partly filled vector of `size` elements.
HEADRACE_INLINE __mmask16 tail_mask(std::int64_t size) {
    return static_cast<__mmask16>((1u << (size % 16)) - 1);
}

// The lanes of the vector that begins at element `i` of `size`: all, but at the end.
HEADRACE_INLINE __mmask16 lanes(std::int64_t i, std::int64_t size) {
    return i + 16 <= size ? static_cast<__mmask16>(0xffff) : tail_mask(size - i);
}

#endif
