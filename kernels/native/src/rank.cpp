// How many of a row's elements are as large as a bound, with AVX2: on processors with AVX-512 too, as the time goes into
// reading them.

#include "avx2.h"

#ifdef HEADRACE_X86
namespace {

using avx2::kLanes;

template <typename Element>
HEADRACE_AVX2 std::int64_t num_from(const Element* row, std::int64_t size, float bound) {
    const __m256 least = _mm256_set1_ps(bound);
    // A comparison that holds is -1.
    __m256i counts = _mm256_setzero_si256();
    std::int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) {
        const __m256 is_from = _mm256_cmp_ps(avx2::load(row + i), least, _CMP_GE_OQ);
        counts = _mm256_sub_epi32(counts, _mm256_castps_si256(is_from));
    }
    std::int32_t lanes[kLanes];
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(lanes), counts);
    std::int64_t count = 0;
    for (std::int32_t lane : lanes) {
        count += lane;
    }
    for (; i < size; ++i) {
        count += avx2::widened(row[i]) >= bound;
    }
    return count;
}

template <typename Element>
void rank_rows(const Element* rows, std::int64_t stride, const std::int64_t* places, std::int64_t* ranks,
               std::int64_t num_rows, std::int64_t size) {
#pragma omp parallel for schedule(static) if (num_rows > 1)
    for (std::int64_t row = 0; row < num_rows; ++row) {
        const Element* elements = rows + row * stride;
        ranks[row] = num_from(elements, size, avx2::widened(elements[places[row]]));
    }
}

}  // namespace

// Of each row, `stride` elements apart, `size` long: how many of its elements are at least the one at its place.
HEADRACE_API void headrace_float32_rank(const float* rows, std::int64_t stride, const std::int64_t* places,
                                        std::int64_t* ranks, std::int64_t num_rows, std::int64_t size) {
    rank_rows(rows, stride, places, ranks, num_rows, size);
}

HEADRACE_API void headrace_rank(const bf16* rows, std::int64_t stride, const std::int64_t* places,
                                std::int64_t* ranks, std::int64_t num_rows, std::int64_t size) {
    rank_rows(rows, stride, places, ranks, num_rows, size);
}
#endif
