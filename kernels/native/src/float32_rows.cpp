// What a decoder layer does row by row between its products, in float32 with AVX2: norms, rotary positions with the
// write to the KV cache, and gated activations. Arguments as those of the functions for bfloat16 in norm.cpp,
// rotary.cpp and activation.cpp.

#include "avx2.h"

#ifdef HEADRACE_X86
namespace {

using avx2::kLanes;
using avx2::lanes;

constexpr std::int64_t kWorkWorthThreads = 8192;  // elements

HEADRACE_AVX2 float sum_of_squares(const float* row, std::int64_t size) {
    __m256 total = _mm256_setzero_ps();
    for (std::int64_t i = 0; i < size; i += kLanes) {
        const __m256 x = _mm256_maskload_ps(row + i, lanes(i, size));
        total = _mm256_fmadd_ps(x, x, total);
    }
    return avx2::sum_of(total);
}

HEADRACE_AVX2 float inverse_rms(const float* row, std::int64_t size, float eps) {
    return 1.0f / __builtin_sqrtf(sum_of_squares(row, size) / static_cast<float>(size) + eps);
}

HEADRACE_AVX2 void scale_row(const float* row, const float* weight, float scale, float* output, std::int64_t size) {
    const __m256 factor = _mm256_set1_ps(scale);
    for (std::int64_t i = 0; i < size; i += kLanes) {
        const __m256i mask = lanes(i, size);
        const __m256 scaled = _mm256_mul_ps(_mm256_maskload_ps(row + i, mask), factor);
        avx2::store(output + i, size - i, _mm256_mul_ps(scaled, _mm256_maskload_ps(weight + i, mask)));
    }
}

HEADRACE_AVX2 void add_row(float* residual, const float* x, std::int64_t size) {
    for (std::int64_t i = 0; i < size; i += kLanes) {
        const __m256i mask = lanes(i, size);
        const __m256 sum = _mm256_add_ps(_mm256_maskload_ps(residual + i, mask), _mm256_maskload_ps(x + i, mask));
        avx2::store(residual + i, size - i, sum);
    }
}

// One head: dimension i turns against half + i, those from 2 * half on are not turned.
HEADRACE_AVX2 void rotate(const float* head, const float* cos, const float* sin, std::int64_t half,
                          std::int64_t head_dim, float* output) {
    for (std::int64_t i = 0; i < half; i += kLanes) {
        const __m256i mask = lanes(i, half);
        const __m256 first = _mm256_maskload_ps(head + i, mask), second = _mm256_maskload_ps(head + half + i, mask);
        const __m256 c = _mm256_maskload_ps(cos + i, mask), s = _mm256_maskload_ps(sin + i, mask);
        avx2::store(output + i, half - i, _mm256_fmsub_ps(first, c, _mm256_mul_ps(second, s)));
        avx2::store(output + half + i, half - i, _mm256_fmadd_ps(second, c, _mm256_mul_ps(first, s)));
    }
    std::memmove(output + 2 * half, head + 2 * half, (head_dim - 2 * half) * sizeof(float));
}

enum class Gate { silu, gelu_tanh };

template <Gate kGate>
HEADRACE_AVX2_INLINE __m256 activate(__m256 x) {
    if constexpr (kGate == Gate::silu) {
        return _mm256_mul_ps(x, avx2::sigmoid(x));
    }
    // (1 + tanh(u)) / 2 is sigmoid(2u), with u = sqrt(2 / pi) (x + 0.044715 x³).
    const __m256 square = _mm256_mul_ps(x, x);
    const __m256 slope = _mm256_fmadd_ps(square, _mm256_set1_ps(0.07135481283f), _mm256_set1_ps(1.59576912161f));
    return _mm256_mul_ps(x, avx2::sigmoid(_mm256_mul_ps(x, slope)));
}

template <Gate kGate>
HEADRACE_AVX2 void activate_row(const float* gate, const float* up, std::int64_t size, float* output) {
    for (std::int64_t i = 0; i < size; i += kLanes) {
        const __m256i mask = lanes(i, size);
        const __m256 activated = activate<kGate>(_mm256_maskload_ps(gate + i, mask));
        avx2::store(output + i, size - i, _mm256_mul_ps(activated, _mm256_maskload_ps(up + i, mask)));
    }
}

template <Gate kGate>
void activate_and_mul(const float* gate_up, std::int64_t stride, float* output, std::int64_t num_rows,
                      std::int64_t size) {
#pragma omp parallel for schedule(static) if (num_rows * size > kWorkWorthThreads)
    for (std::int64_t row = 0; row < num_rows; ++row) {
        const float* gate = gate_up + row * stride;
        activate_row<kGate>(gate, gate + size, size, output + row * size);
    }
}

}  // namespace

HEADRACE_API void headrace_float32_rms_norm(const float* x, std::int64_t x_stride, const float* weight, float* output,
                                            std::int64_t num_rows, std::int64_t size, float eps) {
#pragma omp parallel for schedule(static) if (num_rows * size > kWorkWorthThreads)
    for (std::int64_t row = 0; row < num_rows; ++row) {
        const float* source = x + row * x_stride;
        scale_row(source, weight, inverse_rms(source, size, eps), output + row * size, size);
    }
}

HEADRACE_API void headrace_float32_add_rms_norm(const float* x, float* residual, const float* weight, float* output,
                                                std::int64_t num_rows, std::int64_t size, float eps) {
#pragma omp parallel for schedule(static) if (num_rows * size > kWorkWorthThreads)
    for (std::int64_t row = 0; row < num_rows; ++row) {
        float* kept = residual + row * size;
        add_row(kept, x + row * size, size);
        scale_row(kept, weight, inverse_rms(kept, size, eps), output + row * size, size);
    }
}

HEADRACE_API void headrace_float32_rotate_and_write(const float* qkv, std::int64_t stride, const float* cos,
                                                    const float* sin, float* key_cache, float* value_cache,
                                                    const std::int64_t* slots, const float* query_norm,
                                                    const float* key_norm, float eps, float* query_output,
                                                    std::int64_t num_tokens, std::int64_t num_heads,
                                                    std::int64_t num_kv_heads, std::int64_t head_dim,
                                                    std::int64_t half) {
    const std::int64_t query_size = num_heads * head_dim, kv_size = num_kv_heads * head_dim;
#pragma omp parallel for schedule(static) if (num_tokens * query_size > kWorkWorthThreads)
    for (std::int64_t token = 0; token < num_tokens; ++token) {
        const float* query = qkv + token * stride;
        const float* key = query + query_size;
        const float *c = cos + token * half, *s = sin + token * half;
        const auto turn = [&](const float* heads, std::int64_t size, const float* norm, float* output) {
            for (std::int64_t i = 0; i < size; i += head_dim) {
                const float* head = heads + i;
                // Turned in its place then: each pair of elements is read before it is written.
                if (norm != nullptr) {
                    scale_row(head, norm, inverse_rms(head, head_dim, eps), output + i, head_dim);
                    head = output + i;
                }
                rotate(head, c, s, half, head_dim, output + i);
            }
        };
        turn(query, query_size, query_norm, query_output + token * query_size);
        // A padding token's.
        if (slots[token] < 0) continue;
        turn(key, kv_size, key_norm, key_cache + slots[token] * kv_size);
        std::memcpy(value_cache + slots[token] * kv_size, key + kv_size, kv_size * sizeof(float));
    }
}

HEADRACE_API void headrace_float32_silu_and_mul(const float* gate_up, std::int64_t stride, float* output,
                                                std::int64_t num_rows, std::int64_t size) {
    activate_and_mul<Gate::silu>(gate_up, stride, output, num_rows, size);
}

HEADRACE_API void headrace_float32_gelu_tanh_and_mul(const float* gate_up, std::int64_t stride, float* output,
                                                     std::int64_t num_rows, std::int64_t size) {
    activate_and_mul<Gate::gelu_tanh>(gate_up, stride, output, num_rows, size);
}
#endif
