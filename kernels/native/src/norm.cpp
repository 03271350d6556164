// RMSNorm over rows of bfloat16, with or without the residual added first. Weights may be float32.

#include "common.h"

#ifdef HEADRACE_X86
namespace {

HEADRACE_AVX512 float sum_of_squares(const bf16* row, std::int64_t size) {
    __m512 total = _mm512_setzero_ps();
    std::int64_t i = 0;
    for (; i + 16 <= size; i += 16) {
        const __m512 x = load(row + i);
        total = _mm512_fmadd_ps(x, x, total);
    }
    if (i < size) {
        const __m512 x = load(row + i, tail_mask(size));
        total = _mm512_fmadd_ps(x, x, total);
    }
    return _mm512_reduce_add_ps(total);
}

// residual += x; returns the sum of squares of what was stored.
HEADRACE_AVX512 float add_and_sum_of_squares(bf16* residual, const bf16* x, std::int64_t size) {
    __m512 total = _mm512_setzero_ps();
    for (std::int64_t i = 0; i < size; i += 16) {
        const __mmask16 mask = lanes(i, size);
        const __m512 sum = _mm512_add_ps(load(residual + i, mask), load(x + i, mask));
        const __m256i stored = narrow(sum);
        _mm256_mask_storeu_epi16(residual + i, mask, stored);
        const __m512 kept = widen(stored);
        total = _mm512_fmadd_ps(kept, kept, total);
    }
    return _mm512_reduce_add_ps(total);
}

template <typename Weight>
HEADRACE_AVX512 void scale_row(const bf16* row, const Weight* weight, float scale, bf16* output, std::int64_t size) {
    const __m512 factor = _mm512_set1_ps(scale);
    for (std::int64_t i = 0; i < size; i += 16) {
        const __mmask16 mask = lanes(i, size);
        const __m512 scaled = rounded_like(weight, _mm512_mul_ps(load(row + i, mask), factor));
        store(output + i, _mm512_mul_ps(scaled, load(weight + i, mask)), mask);
    }
}

template <typename Weight>
HEADRACE_AVX512 void rms_norm(const bf16* x, std::int64_t x_stride, const Weight* weight, bf16* output,
                              std::int64_t num_rows, std::int64_t size, float eps) {
#pragma omp parallel for schedule(static) if (num_rows * size > 16384)
    for (std::int64_t row = 0; row < num_rows; ++row) {
        const bf16* source = x + row * x_stride;
        const float mean = sum_of_squares(source, size) / static_cast<float>(size);
        scale_row(source, weight, 1.0f / __builtin_sqrtf(mean + eps), output + row * size, size);
    }
}

template <typename Weight>
HEADRACE_AVX512 void add_rms_norm(const bf16* x, bf16* residual, const Weight* weight, bf16* output,
                                  std::int64_t num_rows, std::int64_t size, float eps) {
#pragma omp parallel for schedule(static) if (num_rows * size > 16384)
    for (std::int64_t row = 0; row < num_rows; ++row) {
        bf16* kept = residual + row * size;
        const float mean = add_and_sum_of_squares(kept, x + row * size, size) / static_cast<float>(size);
        scale_row(kept, weight, 1.0f / __builtin_sqrtf(mean + eps), output + row * size, size);
    }
}

}  // namespace

// output[r] = weight * x[r] / rms(x[r]). Rows of `size`, `x_stride` elements apart in x, dense in output.
HEADRACE_API void headrace_rms_norm(const bf16* x, std::int64_t x_stride, const bf16* weight, bf16* output,
                                    std::int64_t num_rows, std::int64_t size, float eps) {
    rms_norm(x, x_stride, weight, output, num_rows, size, eps);
}

HEADRACE_API void headrace_wide_rms_norm(const bf16* x, std::int64_t x_stride, const float* weight, bf16* output,
                                         std::int64_t num_rows, std::int64_t size, float eps) {
    rms_norm(x, x_stride, weight, output, num_rows, size, eps);
}

// residual += x, then output = weight * residual / rms(residual). Dense rows of `size`.
HEADRACE_API void headrace_add_rms_norm(const bf16* x, bf16* residual, const bf16* weight, bf16* output,
                                        std::int64_t num_rows, std::int64_t size, float eps) {
    add_rms_norm(x, residual, weight, output, num_rows, size, eps);
}

HEADRACE_API void headrace_wide_add_rms_norm(const bf16* x, bf16* residual, const float* weight, bf16* output,
                                             std::int64_t num_rows, std::int64_t size, float eps) {
    add_rms_norm(x, residual, weight, output, num_rows, size, eps);
}
#endif
