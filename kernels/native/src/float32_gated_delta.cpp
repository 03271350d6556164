// Gated DeltaNet's operations as kernels/gated_delta describes them, in float32.

#include "states_avx2.h"
#include "states_avx512.h"

#ifdef HEADRACE_X86
HEADRACE_API void headrace_float32_gated_delta_rule(const states::RuleCall* call) {
    call->uses_avx512 ? states::avx512::run_rule<float>(*call) : states::avx2::run_rule<float>(*call);
}

HEADRACE_API void headrace_float32_gated_rms_norm(const states::NormCall* call) {
    call->uses_avx512 ? states::avx512::run_norm<float>(*call) : states::avx2::run_norm<float>(*call);
}
#endif
