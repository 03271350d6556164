// What products with weights of a few bits in groups are called with, whatever the processor has.
#pragma once

#include <cstdlib>
#include <memory>
#include <type_traits>

#include "product_tiles.h"

#ifdef HEADRACE_X86
namespace grouped {

// The same as `_Call` in kernels/linear/grouped.py. The weight is packed in blocks of outputs, and lanes of 32 bits of it
// hold several inputs of an output, the first in the lowest bits. A weight is value * scale - minimum in float32, rounded
// once, with a scale and a minimum for each group of inputs and each output.
struct Call {
    product::Call product;
    const void* scales;     // [blocks, groups, outputs of a block] of float16 or float32, aligned to 64 bytes
    const void* zeros;      // the same, of values or of weights; null: every zero is half of what the values' bits hold
    std::int64_t group_size;  // a multiple of the inputs that lie together
    std::int64_t num_bits;
    std::int64_t has_minima;  // zeros are minima: else a weight is (value - zero) * scale
    std::int64_t has_half_scales;
    std::int64_t has_floats;  // values of four bits are E2M1, without zeros
};

// What values are.
struct Nibbles {
    static constexpr int kBits = 4, kMiddle = 8;
};
struct Bytes {
    static constexpr int kBits = 8, kMiddle = 128;
};
struct Floats {
    static constexpr int kBits = 4, kMiddle = 0;
};

// Room for the widened weights of a block, of a thread, kept for its next product: aligned to 64 bytes.
inline char* widened(std::int64_t num_bytes) {
    struct Aligned {
        void operator()(char* memory) const { std::free(memory); }
    };
    thread_local std::unique_ptr<char, Aligned> memory;
    thread_local std::int64_t size = 0;
    if (size < num_bytes) {
        memory.reset(static_cast<char*>(std::aligned_alloc(64, num_bytes)));
        size = num_bytes;
    }
    return memory.get();
}

}  // namespace grouped
#endif
