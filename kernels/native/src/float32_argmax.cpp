// The largest logit of each row, and the log of the sum of all their exponentials, in float32 with AVX2. Arguments as
// those of the function for bfloat16 in argmax.cpp.

#include "avx2.h"

#ifdef HEADRACE_X86
namespace {

using avx2::kLanes;

// Elements between two looks at a row's maximum so far: they stay in the first-level cache for the sum.
constexpr std::int64_t kChunk = 1024;
constexpr float kLowest = -__builtin_inff(), kLog2E = 1.44269504088896f;

// The largest element of eight columns each, and where it is.
struct Largest {
    __m256 values;
    __m256i places;
    __m256 nans;
};

// What is beyond the row's end counts as the lowest.
HEADRACE_AVX2_INLINE __m256 load_or_lowest(const float* row, std::int64_t i, std::int64_t end) {
    if (i + kLanes <= end) {
        return _mm256_loadu_ps(row + i);
    }
    const __m256i mask = avx2::lanes(i, end);
    return _mm256_blendv_ps(_mm256_set1_ps(kLowest), _mm256_maskload_ps(row + i, mask), _mm256_castsi256_ps(mask));
}

HEADRACE_AVX2_INLINE void look_at(Largest& largest, const float* row, std::int64_t begin, std::int64_t end) {
    const __m256i steps = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    for (std::int64_t i = begin; i < end; i += kLanes) {
        const __m256 x = load_or_lowest(row, i, end);
        // Strictly greater: of equal elements of a column the first is kept.
        const __m256 greater = _mm256_cmp_ps(x, largest.values, _CMP_GT_OQ);
        const __m256 here = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_set1_epi32(static_cast<int>(i)), steps));
        largest.values = _mm256_blendv_ps(largest.values, x, greater);
        largest.places = _mm256_castps_si256(_mm256_blendv_ps(_mm256_castsi256_ps(largest.places), here, greater));
        largest.nans = _mm256_or_ps(largest.nans, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    }
}

// The sum of e^(row[i] - reference).
HEADRACE_AVX2_INLINE double sum_of_exponentials(const float* row, std::int64_t begin, std::int64_t end,
                                                float reference) {
    const __m256 top = _mm256_set1_ps(reference), log2_e = _mm256_set1_ps(kLog2E);
    __m256 sums = _mm256_setzero_ps();
    for (std::int64_t i = begin; i < end; i += kLanes) {
        const __m256 below = _mm256_sub_ps(load_or_lowest(row, i, end), top);
        sums = _mm256_add_ps(sums, avx2::exp2(_mm256_mul_ps(below, log2_e)));
    }
    return avx2::sum_of(sums);
}

struct Top {
    float value;
    std::int64_t place;
};

// The largest of all columns, of equal ones the first.
HEADRACE_AVX2_INLINE Top top_of(const Largest& largest) {
    float values[kLanes];
    std::int32_t places[kLanes];
    _mm256_storeu_ps(values, largest.values);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(places), largest.places);
    Top top{values[0], places[0]};
    for (int lane = 1; lane < kLanes; ++lane) {
        if (values[lane] > top.value || (values[lane] == top.value && places[lane] < top.place)) {
            top = {values[lane], places[lane]};
        }
    }
    return top;
}

HEADRACE_AVX2 void reduce_row(const float* row, std::int64_t size, std::int64_t* token, float* maximum,
                              float* log_sum_exp) {
    Largest largest{_mm256_set1_ps(kLowest), _mm256_setzero_si256(), _mm256_setzero_ps()};
    double sum = 0;
    float reference = kLowest;
    for (std::int64_t begin = 0; begin < size; begin += kChunk) {
        const std::int64_t end = begin + kChunk < size ? begin + kChunk : size;
        look_at(largest, row, begin, end);
        if (log_sum_exp == nullptr) {
            continue;
        }
        const float so_far = top_of(largest).value;
        if (so_far == kLowest) {
            continue;
        }
        if (so_far > reference) {
            sum *= __builtin_exp(static_cast<double>(reference) - so_far);
            reference = so_far;
        }
        sum += sum_of_exponentials(row, begin, end, reference);
    }
    const Top top = top_of(largest);
    *token = top.place;
    *maximum = _mm256_movemask_ps(largest.nans) != 0 ? __builtin_nanf("") : top.value;
    if (log_sum_exp != nullptr) {
        *log_sum_exp = static_cast<float>(reference + __builtin_log(sum));
    }
}

}  // namespace

HEADRACE_API void headrace_float32_argmax(const float* logits, std::int64_t stride, std::int64_t* tokens,
                                          float* maxima, float* log_sum_exps, std::int64_t num_rows,
                                          std::int64_t size) {
#pragma omp parallel for schedule(static) if (num_rows > 1)
    for (std::int64_t row = 0; row < num_rows; ++row) {
        float* log_sum_exp = log_sum_exps == nullptr ? nullptr : log_sum_exps + row;
        reduce_row(logits + row * stride, size, tokens + row, maxima + row, log_sum_exp);
    }
}
#endif
