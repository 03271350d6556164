// Gated DeltaNet's operations as kernels/gated_delta describes them, in float32.

#include "gated_delta_avx2.h"
#include "gated_delta_avx512.h"

#ifdef HEADRACE_X86
HEADRACE_API void headrace_float32_gated_delta_rule(const delta::RuleCall* call) {
    call->uses_avx512 ? delta::avx512::run_rule<float>(*call) : delta::avx2::run_rule<float>(*call);
}

HEADRACE_API void headrace_float32_causal_conv(const delta::ConvCall* call) {
    call->uses_avx512 ? delta::avx512::run_conv<float>(*call) : delta::avx2::run_conv<float>(*call);
}

HEADRACE_API void headrace_float32_gated_rms_norm(const delta::NormCall* call) {
    call->uses_avx512 ? delta::avx512::run_norm<float>(*call) : delta::avx2::run_norm<float>(*call);
}
#endif
