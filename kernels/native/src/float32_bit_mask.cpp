// Logits of tokens that a grammar does not allow become minus infinity.

#include "avx2.h"

#ifdef HEADRACE_X86
namespace {

constexpr std::int64_t kWordBits = 32;
constexpr float kLowest = -__builtin_inff();

// What of 32 elements has no bit in `word`. Whole words are the rule: most grammars allow few tokens or nearly all.
HEADRACE_AVX2_INLINE void mask_word(float* elements, std::uint32_t word) {
    const __m256 lowest = _mm256_set1_ps(kLowest);
    const __m256i bit_of_lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    for (int i = 0; i < kWordBits; i += avx2::kLanes) {
        const __m256i bits = _mm256_and_si256(_mm256_set1_epi32(static_cast<int>(word >> i)), bit_of_lane);
        const __m256i is_allowed = _mm256_cmpeq_epi32(bits, bit_of_lane);
        const __m256 before = _mm256_loadu_ps(elements + i);
        _mm256_storeu_ps(elements + i, _mm256_blendv_ps(lowest, before, _mm256_castsi256_ps(is_allowed)));
    }
}

HEADRACE_AVX2_INLINE void forbid_word(float* elements) {
    for (int i = 0; i < kWordBits; i += avx2::kLanes) {
        _mm256_storeu_ps(elements + i, _mm256_set1_ps(kLowest));
    }
}

HEADRACE_AVX2 void mask_row(float* elements, const std::uint32_t* bits, std::int64_t size) {
    const std::int64_t whole = size / kWordBits;
    for (std::int64_t i = 0; i < whole; ++i) {
        if (bits[i] == 0) {
            forbid_word(elements + i * kWordBits);
        } else if (~bits[i] != 0) {
            mask_word(elements + i * kWordBits, bits[i]);
        }
    }
    for (std::int64_t i = whole * kWordBits; i < size; ++i) {
        if ((bits[i / kWordBits] >> (i % kWordBits) & 1) == 0) {
            elements[i] = kLowest;
        }
    }
}

}  // namespace

// Of each row, `stride` elements apart, `size` long: elements whose bit in `bits` is 0, of the row's num_words words.
HEADRACE_API void headrace_float32_apply_bit_mask(float* logits, std::int64_t stride, const std::uint32_t* bits,
                                                  std::int64_t num_words, std::int64_t num_rows, std::int64_t size) {
#pragma omp parallel for schedule(static) if (num_rows > 1)
    for (std::int64_t row = 0; row < num_rows; ++row) {
        mask_row(logits + row * stride, bits + row * num_words, size);
    }
}
#endif
