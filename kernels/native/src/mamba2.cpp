// Mamba-2's operations as kernels/mamba2 describes them, in bfloat16 with states of float32.

#include "states_avx512.h"

#ifdef HEADRACE_X86
HEADRACE_API void headrace_selective_scan(const states::ScanCall* call) { states::avx512::run_scan<bf16>(*call); }

HEADRACE_API void headrace_grouped_gated_rms_norm(const states::GroupedNormCall* call) { states::avx512::run_grouped_norm<bf16>(*call); }
#endif
