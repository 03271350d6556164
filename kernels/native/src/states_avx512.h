// What the operations of layers with states are made of with AVX-512, in bfloat16 with its instructions for that; and these
// operations.
#pragma once

#include "causal_conv_call.h"
#include "gated_delta_call.h"
#include "gated_norms_call.h"
#include "selective_scan_call.h"
#include "vector_math.h"

#ifdef HEADRACE_X86
#define HEADRACE_TARGET HEADRACE_AVX512
#define HEADRACE_TARGET_INLINE HEADRACE_INLINE

namespace states::avx512 {

using Vector = __m512;
constexpr int kLanes = 16;
constexpr int kVectors = 2;      // the registers that four tokens leave room for
constexpr int kWideVectors = 8;  // of a lone token
constexpr int kScanVectors = 4;  // of a lone token's scan

HEADRACE_INLINE Vector zero() { return _mm512_setzero_ps(); }
HEADRACE_INLINE Vector set(float x) { return _mm512_set1_ps(x); }
HEADRACE_INLINE Vector load(const float* source) { return _mm512_loadu_ps(source); }
HEADRACE_INLINE Vector load(const bf16* source) { return ::load(source); }
HEADRACE_INLINE void store(float* place, Vector x) { _mm512_storeu_ps(place, x); }
HEADRACE_INLINE void store(bf16* place, Vector x) { ::store(place, x); }
HEADRACE_INLINE void stream(float* place, Vector x) { _mm512_stream_ps(place, x); }
HEADRACE_INLINE Vector multiply(Vector a, Vector b) { return _mm512_mul_ps(a, b); }
HEADRACE_INLINE Vector multiply_add(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
HEADRACE_INLINE Vector negated_multiply_add(Vector a, Vector b, Vector c) { return _mm512_fnmadd_ps(a, b, c); }
HEADRACE_INLINE float sum_of(Vector x) { return _mm512_reduce_add_ps(x); }

template <class Element>
HEADRACE_INLINE Vector rounded(Vector x) {
    if constexpr (std::is_same_v<Element, bf16>) {
        return widen(narrow(x));
    }
    return x;
}

template <class Element>
HEADRACE_INLINE Vector sigmoid(Vector x) {
    if constexpr (std::is_same_v<Element, bf16>) {
        return ::sigmoid(x);
    }
    const Vector one = _mm512_set1_ps(1.0f);
    return _mm512_div_ps(one, _mm512_add_ps(one, exponential(_mm512_sub_ps(_mm512_setzero_ps(), x))));
}

template <class Element>
HEADRACE_INLINE Vector silu(Vector x) {
    return multiply(x, sigmoid<Element>(x));
}

#include "causal_conv.h"
#include "gated_delta_rule.h"
#include "gated_norms.h"
#include "selective_scan.h"

}  // namespace states::avx512

#undef HEADRACE_TARGET
#undef HEADRACE_TARGET_INLINE
#endif
