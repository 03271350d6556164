// Gated DeltaNet's operations as kernels/gated_delta describes them, in bfloat16 with states of float32.

#include "gated_delta_avx512.h"

#ifdef HEADRACE_X86
HEADRACE_API void headrace_gated_delta_rule(const delta::RuleCall* call) { delta::avx512::run_rule<bf16>(*call); }

HEADRACE_API void headrace_causal_conv(const delta::ConvCall* call) { delta::avx512::run_conv<bf16>(*call); }

HEADRACE_API void headrace_gated_rms_norm(const delta::NormCall* call) { delta::avx512::run_norm<bf16>(*call); }
#endif
