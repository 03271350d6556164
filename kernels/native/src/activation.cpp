// The gated activations of a decoder's MLP over rows of bfloat16.

#include "vector_math.h"

#ifdef HEADRACE_X86
namespace {

enum class Gate { silu, gelu_tanh };

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

// The activation is rounded before the product, as it is where the two are operations of their own.
template <Gate kGate>
HEADRACE_AVX512 void activate_and_mul(const bf16* gate_up, std::int64_t stride, bf16* output, std::int64_t num_rows,
                                      std::int64_t size) {
#pragma omp parallel for schedule(static) if (num_rows * size > 8192)
    for (std::int64_t row = 0; row < num_rows; ++row) {
        const bf16* gate = gate_up + row * stride;
        const bf16* up = gate + size;
        for (std::int64_t i = 0; i < size; i += 16) {
            const __mmask16 mask = lanes(i, size);
            const __m512 activated = widen(narrow(activate<kGate>(load(gate + i, mask))));
            store(output + row * size + i, _mm512_mul_ps(activated, load(up + i, mask)), mask);
        }
    }
}

}  // namespace

// output[r] = silu(gate[r]) * up[r]. Rows of gate, then up, `size` each, `stride` elements apart; output dense.
HEADRACE_API HEADRACE_AVX512 void headrace_silu_and_mul(const bf16* gate_up, std::int64_t stride, bf16* output,
                                                        std::int64_t num_rows, std::int64_t size) {
    activate_and_mul<Gate::silu>(gate_up, stride, output, num_rows, size);
}

// The same with gelu in its approximation by tanh.
HEADRACE_API HEADRACE_AVX512 void headrace_gelu_tanh_and_mul(const bf16* gate_up, std::int64_t stride, bf16* output,
                                                             std::int64_t num_rows, std::int64_t size) {
    activate_and_mul<Gate::gelu_tanh>(gate_up, stride, output, num_rows, size);
}
#endif
