// The largest logit of each row, and the log of the sum of all their exponentials, in one pass.

#include "vector_math.h"

#ifdef HEADRACE_X86
namespace {

// Elements between two looks at a row's maximum so far: they stay in the first-level cache for the sum.
constexpr std::int64_t kChunk = 1024;

HEADRACE_INLINE __m512 load_or(const bf16* source, __mmask16 mask, __m512 other) {
    return _mm512_mask_mov_ps(other, mask, load(source, mask));
}

// The largest element of sixteen columns each, and where it is.
struct Largest {
    __m512 values;
    __m512i places;
    __mmask16 has_nan;
};

HEADRACE_INLINE void look_at(Largest& largest, const bf16* row, std::int64_t begin, std::int64_t end) {
    const __m512 lowest = _mm512_set1_ps(-__builtin_inff());
    const __m512i steps = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (std::int64_t i = begin; i < end; i += 16) {
        const __m512 x = load_or(row + i, lanes(i, end), lowest);
        // Strictly greater: of equal elements of a column the first is kept.
        const __mmask16 greater = _mm512_cmp_ps_mask(x, largest.values, _CMP_GT_OQ);
        largest.values = _mm512_mask_mov_ps(largest.values, greater, x);
        const __m512i here = _mm512_add_epi32(_mm512_set1_epi32(static_cast<int>(i)), steps);
        largest.places = _mm512_mask_mov_epi32(largest.places, greater, here);
        largest.has_nan |= _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    }
}

// Adds e^(row[i] - maximum) to the sums of sixteen columns.
HEADRACE_INLINE __m512 add_exponentials(__m512 sums, const bf16* row, std::int64_t begin, std::int64_t end,
                                        float maximum) {
    const __m512 lowest = _mm512_set1_ps(-__builtin_inff());
    for (std::int64_t i = begin; i < end; i += 16) {
        const __m512 x = load_or(row + i, lanes(i, end), lowest);
        sums = _mm512_add_ps(sums, exponential(_mm512_sub_ps(x, _mm512_set1_ps(maximum))));
    }
    return sums;
}

HEADRACE_AVX512 void reduce_row(const bf16* row, std::int64_t size, std::int64_t* token, float* maximum,
                                float* log_sum_exp) {
    Largest largest{_mm512_set1_ps(-__builtin_inff()), _mm512_setzero_si512(), 0};
    __m512 sums = _mm512_setzero_ps();
    float reference = -__builtin_inff();
    for (std::int64_t begin = 0; begin < size; begin += kChunk) {
        const std::int64_t end = begin + kChunk < size ? begin + kChunk : size;
        look_at(largest, row, begin, end);
        const float so_far = _mm512_reduce_max_ps(largest.values);
        if (log_sum_exp == nullptr || so_far == -__builtin_inff()) {
            continue;
        }
        if (so_far > reference) {
            sums = _mm512_mul_ps(sums, exponential(_mm512_set1_ps(reference - so_far)));
            reference = so_far;
        }
        sums = add_exponentials(sums, row, begin, end, reference);
    }
    const float top = _mm512_reduce_max_ps(largest.values);
    const __mmask16 is_top = _mm512_cmp_ps_mask(largest.values, _mm512_set1_ps(top), _CMP_EQ_OQ);
    *token = _mm512_mask_reduce_min_epi32(is_top, largest.places);
    *maximum = largest.has_nan ? __builtin_nanf("") : top;
    if (log_sum_exp != nullptr) {
        *log_sum_exp = reference + __builtin_logf(_mm512_reduce_add_ps(sums));
    }
}

HEADRACE_AVX512 void reduce_rows(const bf16* logits, std::int64_t stride, std::int64_t* tokens, float* maxima,
                                 float* log_sum_exps, std::int64_t num_rows, std::int64_t size) {
#pragma omp parallel for schedule(static) if (num_rows > 1)
    for (std::int64_t row = 0; row < num_rows; ++row) {
        float* log_sum_exp = log_sum_exps == nullptr ? nullptr : log_sum_exps + row;
        reduce_row(logits + row * stride, size, tokens + row, maxima + row, log_sum_exp);
    }
}

}  // namespace

// Of each row, `stride` elements apart, `size` long: the place of its largest element, the first of equals; that
// element, or NaN where the row has one; and unless log_sum_exps is null the log of the sum of the exponentials.
HEADRACE_API HEADRACE_AVX512 void headrace_argmax(const bf16* logits, std::int64_t stride, std::int64_t* tokens,
                                                  float* maxima, float* log_sum_exps, std::int64_t num_rows,
                                                  std::int64_t size) {
    reduce_rows(logits, stride, tokens, maxima, log_sum_exps, num_rows, size);
}
#endif
