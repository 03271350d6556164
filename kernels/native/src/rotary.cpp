// From a layer's projections to rotated queries, keys and values in the paged cache, in one pass.

#include "common.h"

#ifdef HEADRACE_X86
namespace {

// Slots lie anywhere: a store that waits for its line holds up those behind it.
constexpr std::int64_t kTokensAhead = 4;
constexpr std::int64_t kElementsPerLine = 32;

HEADRACE_INLINE void fetch_for_writing(const bf16* row, std::int64_t size) {
    for (std::int64_t i = 0; i < size; i += kElementsPerLine) {
        __builtin_prefetch(row + i, 1);
    }
}

// What all heads of a call share.
struct Heads {
    std::int64_t head_dim;
    std::int64_t half;  // Dimension i turns against half + i; those from 2 * half on are not turned.
    float eps;
};

// 1 / rms(head).
HEADRACE_AVX512 float inverse_rms(const bf16* head, const Heads& heads) {
    __m512 total = _mm512_setzero_ps();
    for (std::int64_t i = 0; i < heads.head_dim; i += 16) {
        const __m512 x = load(head + i, lanes(i, heads.head_dim));
        total = _mm512_fmadd_ps(x, x, total);
    }
    const float mean = _mm512_reduce_add_ps(total) / static_cast<float>(heads.head_dim);
    return 1.0f / __builtin_sqrtf(mean + heads.eps);
}

// Some of a head's elements, normalised (and rounded, as rms_norm does) where there is a weight.
template <typename Weight>
HEADRACE_INLINE __m512 load_normed(const bf16* head, const Weight* weight, __m512 scale, std::int64_t i, __mmask16 mask) {
    const __m512 x = load(head + i, mask);
    if (weight == nullptr) {
        return x;
    }
    const __m512 scaled = rounded_like(weight, _mm512_mul_ps(x, scale));
    return widen(narrow(_mm512_mul_ps(scaled, load(weight + i, mask))));
}

template <typename Weight>
HEADRACE_AVX512 void rotate(const bf16* head, const Weight* weight, const bf16* cos, const bf16* sin, bf16* output,
                            const Heads& heads) {
    const __m512 scale = _mm512_set1_ps(weight == nullptr ? 1.0f : inverse_rms(head, heads));
    for (std::int64_t i = 0; i < heads.half; i += 16) {
        const __mmask16 mask = lanes(i, heads.half);
        const __m512 first = load_normed(head, weight, scale, i, mask);
        const __m512 second = load_normed(head, weight, scale, heads.half + i, mask);
        const __m512 c = load(cos + i, mask), s = load(sin + i, mask);
        store(output + i, _mm512_fmsub_ps(first, c, _mm512_mul_ps(second, s)), mask);
        store(output + heads.half + i, _mm512_fmadd_ps(second, c, _mm512_mul_ps(first, s)), mask);
    }
    for (std::int64_t i = 2 * heads.half; i < heads.head_dim; i += 16) {
        const __mmask16 mask = lanes(i, heads.head_dim);
        store(output + i, load_normed(head, weight, scale, i, mask), mask);
    }
}

template <typename Weight>
HEADRACE_AVX512 void rotate_and_write(const bf16* qkv, std::int64_t stride, const bf16* cos, const bf16* sin,
                                      bf16* key_cache, bf16* value_cache, const std::int64_t* slots,
                                      const Weight* query_norm, const Weight* key_norm, float eps, bf16* query_output,
                                      std::int64_t num_tokens, std::int64_t num_heads, std::int64_t num_kv_heads,
                                      std::int64_t head_dim, std::int64_t half) {
    const Heads heads{head_dim, half, eps};
    const std::int64_t query_size = num_heads * head_dim, kv_size = num_kv_heads * head_dim;
#pragma omp parallel for schedule(static) if (num_tokens * query_size > 16384)
    for (std::int64_t token = 0; token < num_tokens; ++token) {
        const bf16* query = qkv + token * stride;
        const bf16* key = query + query_size;
        const bf16 *c = cos + token * half, *s = sin + token * half;
        bf16* rotated = query_output + token * query_size;
        if (token + kTokensAhead < num_tokens && slots[token + kTokensAhead] >= 0) {
            fetch_for_writing(key_cache + slots[token + kTokensAhead] * kv_size, kv_size);
            fetch_for_writing(value_cache + slots[token + kTokensAhead] * kv_size, kv_size);
        }
        for (std::int64_t i = 0; i < query_size; i += head_dim) {
            rotate(query + i, query_norm, c, s, rotated + i, heads);
        }
        // A padding token's.
        if (slots[token] < 0) continue;
        bf16* key_slot = key_cache + slots[token] * kv_size;
        for (std::int64_t i = 0; i < kv_size; i += head_dim) {
            rotate(key + i, key_norm, c, s, key_slot + i, heads);
        }
        std::memcpy(value_cache + slots[token] * kv_size, key + kv_size, kv_size * sizeof(bf16));
    }
}

}  // namespace

// Each row of qkv, `stride` elements apart, is its heads' queries, then keys, then values. cos, sin: dense rows of
// `half`. A cache's slot is `num_kv_heads` heads, and nothing is written for a negative one; query_output dense. The
// norms' weights are both null where there are none.
HEADRACE_API void headrace_rotate_and_write(const bf16* qkv, std::int64_t stride, const bf16* cos, const bf16* sin,
                                            bf16* key_cache, bf16* value_cache, const std::int64_t* slots,
                                            const bf16* query_norm, const bf16* key_norm, float eps,
                                            bf16* query_output, std::int64_t num_tokens, std::int64_t num_heads,
                                            std::int64_t num_kv_heads, std::int64_t head_dim, std::int64_t half) {
    rotate_and_write(qkv, stride, cos, sin, key_cache, value_cache, slots, query_norm, key_norm, eps, query_output,
                     num_tokens, num_heads, num_kv_heads, head_dim, half);
}

HEADRACE_API void headrace_wide_rotate_and_write(const bf16* qkv, std::int64_t stride, const bf16* cos, const bf16* sin,
                                                 bf16* key_cache, bf16* value_cache, const std::int64_t* slots,
                                                 const float* query_norm, const float* key_norm, float eps,
                                                 bf16* query_output, std::int64_t num_tokens, std::int64_t num_heads,
                                                 std::int64_t num_kv_heads, std::int64_t head_dim, std::int64_t half) {
    rotate_and_write(qkv, stride, cos, sin, key_cache, value_cache, slots, query_norm, key_norm, eps, query_output,
                     num_tokens, num_heads, num_kv_heads, head_dim, half);
}
#endif
