// What a short convolution is called with.
#pragma once

#include "states_call.h"

#ifdef HEADRACE_X86

namespace states {

// The same as `_ConvCall` in kernels/causal_conv/native.py. Strides are counted in elements.
struct ConvCall {
    const void* x;       // [num_tokens, num_channels]
    const void* weight;  // [num_channels, width]
    const void* bias;    // [num_channels], or null
    void* states;        // [num_slots, width - 1, num_channels], a slot's dense
    void* output;        // [num_tokens, num_channels], dense
    Slots slots;
    std::int64_t num_channels;  // a multiple of 16
    std::int64_t width;         // 2 to kMaxWidth
    std::int64_t x_stride, channel_stride, tap_stride, slot_stride;
    std::int64_t has_silu, uses_avx512;
};

}  // namespace states
#endif
