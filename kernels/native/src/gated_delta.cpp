// Gated DeltaNet's operations as kernels/gated_delta describes them, in bfloat16 with states of float32.

#include "states_avx512.h"

#ifdef HEADRACE_X86
HEADRACE_API void headrace_gated_delta_rule(const states::RuleCall* call) { states::avx512::run_rule<bf16>(*call); }

HEADRACE_API void headrace_gated_rms_norm(const states::NormCall* call) { states::avx512::run_norm<bf16>(*call); }
#endif
