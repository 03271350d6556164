// What the operations of layers with states are made of with AVX2, in float32; and these operations.
#pragma once

#include "avx2.h"
#include "causal_conv_call.h"
#include "gated_delta_call.h"
#include "gated_norms_call.h"
#include "selective_scan_call.h"

#ifdef HEADRACE_X86
#define HEADRACE_TARGET HEADRACE_AVX2
#define HEADRACE_TARGET_INLINE HEADRACE_AVX2_INLINE

namespace states::avx2 {

using Vector = __m256;
using ::avx2::kLanes;
using ::avx2::load;
using ::avx2::sum_of;
constexpr int kVectors = 1;      // the registers that four tokens leave room for
constexpr int kWideVectors = 4;  // of a lone token
constexpr int kScanVectors = 4;  // of a lone token's scan

HEADRACE_AVX2_INLINE Vector zero() { return _mm256_setzero_ps(); }
HEADRACE_AVX2_INLINE Vector set(float x) { return _mm256_set1_ps(x); }
HEADRACE_AVX2_INLINE void store(float* place, Vector x) { _mm256_storeu_ps(place, x); }
HEADRACE_AVX2_INLINE void stream(float* place, Vector x) { _mm256_stream_ps(place, x); }
HEADRACE_AVX2_INLINE Vector multiply(Vector a, Vector b) { return _mm256_mul_ps(a, b); }
HEADRACE_AVX2_INLINE Vector multiply_add(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
HEADRACE_AVX2_INLINE Vector negated_multiply_add(Vector a, Vector b, Vector c) { return _mm256_fnmadd_ps(a, b, c); }

template <class Element>
HEADRACE_AVX2_INLINE Vector rounded(Vector x) {
    return x;
}

template <class Element>
HEADRACE_AVX2_INLINE Vector sigmoid(Vector x) {
    return ::avx2::sigmoid(x);
}

template <class Element>
HEADRACE_AVX2_INLINE Vector silu(Vector x) {
    return multiply(x, sigmoid<Element>(x));
}

#include "causal_conv.h"
#include "gated_delta_rule.h"
#include "gated_norms.h"
#include "selective_scan.h"

}  // namespace states::avx2

#undef HEADRACE_TARGET
#undef HEADRACE_TARGET_INLINE
#endif
