// Logits of tokens that a grammar does not allow become minus infinity.

#include "vector_math.h"

#ifdef HEADRACE_X86
// Of each row, `stride` elements apart, `size` long: elements whose bit in `bits` is 0, of the row's num_words words.
// Only what is not allowed is written.
HEADRACE_API HEADRACE_AVX512 void headrace_apply_bit_mask_float32(float* logits, std::int64_t stride,
                                                                  const std::uint32_t* bits, std::int64_t num_words,
                                                                  std::int64_t num_rows, std::int64_t size) {
    const __m512 lowest = _mm512_set1_ps(-__builtin_inff());
#pragma omp parallel for schedule(static) if (num_rows > 1)
    for (std::int64_t row = 0; row < num_rows; ++row) {
        float* elements = logits + row * stride;
        for (std::int64_t i = 0; i < size; i += 16) {
            const std::uint32_t word = bits[row * num_words + i / 32] >> (i % 32);
            const __mmask16 forbidden = static_cast<__mmask16>(~word) & lanes(i, size);
            _mm512_mask_storeu_ps(elements + i, forbidden, lowest);
        }
    }
}
#endif
