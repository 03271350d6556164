// Short convolutions as kernels/causal_conv describes them, in float32.

#include "states_avx2.h"
#include "states_avx512.h"

#ifdef HEADRACE_X86
HEADRACE_API void headrace_float32_causal_conv(const states::ConvCall* call) {
    call->uses_avx512 ? states::avx512::run_conv<float>(*call) : states::avx2::run_conv<float>(*call);
}
#endif
