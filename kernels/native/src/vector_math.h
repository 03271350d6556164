// Sixteen exponentials and sigmoids at a time, as exact as what becomes bfloat16 needs them.
#pragma once

#include "common.h"

#ifdef HEADRACE_X86

// e^x, relative error below 3e-7. Overflows to infinity and underflows to zero as `expf` does; NaN stays NaN.
HEADRACE_INLINE __m512 exponential(__m512 x) {
    // Beyond these the result is zero or infinite anyway, and 2^n below stays representable.
    // The operand order makes min and max hand on a NaN.
    x = _mm512_max_ps(_mm512_set1_ps(-110.0f), _mm512_min_ps(_mm512_set1_ps(110.0f), x));
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504089f)),
                                          _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    // ln 2 in two parts, so that x - n ln 2 keeps its digits.
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693145751953125f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(1.42860682030941723212e-6f), r);
    __m512 p = _mm512_set1_ps(1.0f / 720);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 120));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 24));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 6));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.5f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, n);
}

// 2^x, relative error below 3e-6. Overflows to infinity and underflows to zero; NaN stays NaN.
HEADRACE_INLINE __m512 power_of_two(__m512 x) {
    const __m512 f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    __m512 p = _mm512_set1_ps(1.353416801e-2f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.201146120e-2f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.414427559e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.930038349e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.000002593f));
    return _mm512_scalef_ps(p, x);
}

// 1 / (1 + e^-x), relative error below 2^-13: a sixteenth of a bfloat16's last digit.
HEADRACE_INLINE __m512 sigmoid(__m512 x) {
    const __m512 e = power_of_two(_mm512_mul_ps(x, _mm512_set1_ps(-1.44269504089f)));
    return _mm512_rcp14_ps(_mm512_add_ps(_mm512_set1_ps(1.0f), e));
}

#endif
