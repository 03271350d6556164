// What a linear layer in int8 is asked.
#pragma once

#include "activation.h"
#include "int8_rows.h"

#ifdef HEADRACE_X86
namespace int8 {

// The same as `_Call` in kernels/linear/int8.py. Outputs are padded to 32 in what belongs to the weight.
struct Call {
    const void* input;           // rows; of twice the size where there is a gate, as activation.cpp has them
    const std::uint8_t* weight;  // packed as the product reads it
    const float* column_scales;  // [outputs]
    const float* biases;         // [outputs]
    const std::int32_t* starts;  // [outputs], -128 times the sum of each column
    void* output;                // dense
    std::uint8_t* quantized;     // the rows as the product reads them, to work in; with AVX-512 padded to 32
    float* row_scales;           // [rows], to work in
    std::int64_t input_stride;   // in elements
    std::int64_t num_rows;
    std::int64_t num_outputs;
    std::int64_t num_inputs;
    std::int64_t uses_amx;
    Gate gate;                   // only of bfloat16

    std::int64_t num_steps() const { return (num_inputs + kStep - 1) / kStep; }
};

}  // namespace int8
#endif
