// What the norms of layers with states are called with.
#pragma once

#include "states_call.h"

#ifdef HEADRACE_X86

namespace states {

// The same as `_NormCall` in kernels/gated_delta/native.py. Strides are counted in elements.
struct NormCall {
    const void* x;       // [num_rows, num_heads, size], dense
    const void* gate;    // [num_rows, num_heads * size]
    const void* weight;  // [size]
    void* output;        // as x
    std::int64_t num_rows, num_heads;
    std::int64_t size;  // a multiple of 16
    std::int64_t gate_stride;
    std::int64_t uses_avx512;
    float eps;
};

// The same as `_NormCall` in kernels/mamba2/native.py.
struct GroupedNormCall {
    const void* x;       // [num_rows, num_groups * size], dense
    const void* gate;    // the same, its rows apart
    const void* weight;  // [num_groups * size]
    void* output;        // as x
    std::int64_t num_rows, num_groups;
    std::int64_t size;  // a multiple of 16
    std::int64_t gate_stride;
    std::int64_t uses_avx512;
    float eps;
};

}  // namespace states
#endif
