// Mamba-2's operations as kernels/mamba2 describes them, in float32.

#include "states_avx2.h"
#include "states_avx512.h"

#ifdef HEADRACE_X86
HEADRACE_API void headrace_float32_selective_scan(const states::ScanCall* call) {
    call->uses_avx512 ? states::avx512::run_scan<float>(*call) : states::avx2::run_scan<float>(*call);
}

HEADRACE_API void headrace_float32_grouped_gated_rms_norm(const states::GroupedNormCall* call) {
    call->uses_avx512 ? states::avx512::run_grouped_norm<float>(*call) : states::avx2::run_grouped_norm<float>(*call);
}
#endif
