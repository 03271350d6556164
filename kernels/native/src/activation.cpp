// The gated activations of a decoder's MLP over rows of bfloat16.

#include "activation.h"

#ifdef HEADRACE_X86
namespace {

template <Gate kGate>
HEADRACE_AVX512 void activate_and_mul(const bf16* gate_up, std::int64_t stride, bf16* output, std::int64_t num_rows,
                                      std::int64_t size) {
#pragma omp parallel for schedule(static) if (num_rows * size > 8192)
    for (std::int64_t row = 0; row < num_rows; ++row) {
        const bf16* gate = gate_up + row * stride;
        activate_row<kGate>(gate, gate + size, size, output + row * size);
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
