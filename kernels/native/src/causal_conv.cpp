// Short convolutions as kernels/causal_conv describes them, in bfloat16.

#include "states_avx512.h"

#ifdef HEADRACE_X86
HEADRACE_API void headrace_causal_conv(const states::ConvCall* call) { states::avx512::run_conv<bf16>(*call); }
#endif
