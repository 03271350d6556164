// The gated activations of a decoder's MLP, a row of bfloat16 at a time.
#pragma once

#include "vector_math.h"

#ifdef HEADRACE_X86

// As `Gate` in kernels/linear/gates.py numbers them.
enum class Gate : std::int64_t { none, silu, gelu_tanh };

template <Gate kGate>
HEADRACE_INLINE __m512 activate(__m512 x) {
    if constexpr (kGate == Gate::silu) {
        return _mm512_mul_ps(x, sigmoid(x));
    }
    // (1 + tanh(u)) / 2 is sigmoid(2u), with u = sqrt(2 / pi) (x + 0.044715 x³).
    const __m512 square = _mm512_mul_ps(x, x);
    const __m512 slope = _mm512_fmadd_ps(square, _mm512_set1_ps(0.07135481283f), _mm512_set1_ps(1.59576912161f));
    return _mm512_mul_ps(x, sigmoid(_mm512_mul_ps(x, slope)));
}

// output = activation(gate) * up; the activation is rounded before the product, as it is where the two are operations of
// their own.
template <Gate kGate>
HEADRACE_AVX512 void activate_row(const bf16* gate, const bf16* up, std::int64_t size, bf16* output) {
    for (std::int64_t i = 0; i < size; i += 16) {
        const __mmask16 mask = lanes(i, size);
        const __m512 activated = widen(narrow(activate<kGate>(load(gate + i, mask))));
        store(output + i, _mm512_mul_ps(activated, load(up + i, mask)), mask);
    }
}

#endif
