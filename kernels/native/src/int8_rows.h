// Rows of bfloat16 or float32 to int8, each with a scale of its own, in the layout that the products read.
#pragma once

#include "common.h"

#ifdef HEADRACE_X86
namespace int8 {

constexpr int kRows = 16;       // of a tile
constexpr int kStep = 64;       // inputs of a tile, a byte each
constexpr int kTile = kRows * kStep;
constexpr int kBlock = 32;      // rows, and columns, of a block: two tiles

HEADRACE_INLINE __m512 load(const bf16* source, __mmask16 mask) { return ::load(source, mask); }

HEADRACE_INLINE __m512 load(const float* source, __mmask16 mask) { return _mm512_maskz_loadu_ps(mask, source); }

// The largest magnitude of a row: NaN where there is one, else infinity where there is one. Without their sign, the
// bits of floats are in the order of what they say, those of infinity above all numbers and those of NaN above them.
template <typename Element>
HEADRACE_AVX512 float largest_magnitude(const Element* row, std::int64_t size) {
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    __m512i largest = _mm512_setzero_si512();
    for (std::int64_t i = 0; i < size; i += 16) {
        const __m512i x = _mm512_castps_si512(load(row + i, lanes(i, size)));
        largest = _mm512_max_epi32(largest, _mm512_and_si512(magnitude, x));
    }
    const int bits = _mm512_reduce_max_epi32(largest);
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
}

// quantized = round(row * 127 / largest magnitude), up to `num_steps` steps with zeros behind the row; every step's
// bytes go `kTile` apart. Returns the scale that undoes it; it is not finite where something in the row is not.
// `flipped`: 0x80 gives unsigned bytes, 128 greater.
template <typename Element>
HEADRACE_AVX512 float quantize_row(const Element* row, std::int64_t size, std::int64_t num_steps, int flipped,
                                   std::uint8_t* quantized) {
    const float largest = largest_magnitude(row, size);
    // Finite for a row of zeros, too: they stay zeros.
    const float inverse = 127.0f / largest < __FLT_MAX__ ? 127.0f / largest : __FLT_MAX__;
    const __m512 factor = _mm512_set1_ps(inverse);
    const __m128i flip = _mm_set1_epi8(static_cast<char>(flipped));
    for (std::int64_t i = 0; i < num_steps * kStep; i += 16) {
        const __mmask16 mask = i < size ? lanes(i, size) : 0;
        const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(load(row + i, mask), factor));
        const __m128i bytes = _mm_xor_si128(_mm512_cvtsepi32_epi8(whole), flip);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(quantized + i / kStep * kTile + i % kStep), bytes);
    }
    return largest / 127.0f;
}

}  // namespace int8
#endif
